"""A range of dense layers for few rows in one resident kernel (`cuda/decoder_layers.cu`): decode rounds on a Hopper GPU.

Between kernels the memory rests for some microseconds, half a dozen times a layer. Here weights and committed KV stream
through shared memory without a pause while blocks meet between the phases of a layer.
"""

import ctypes
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from graftline.kernels.cuda_program import CudaFunction, can_compile, compile_program
from graftline.kernels.linear import LinearWeight
from graftline.kernels.tree_batch import TreeBatch

MAX_ROWS = 16
MAX_SEQUENCES = 16
MAX_FEATURES = 4
_TILE = 16  # outputs
_GROUP_TILES = 7
_KV_TOKENS = 32  # a ring slot
_WARPS = 8
_PRODUCERS = 4
_THREADS = 384
_MAX_CHUNK = 576  # inputs of a ring slot
_SHARED_BYTES = 232448  # that a block may have on a Hopper GPU
_LOG2_E = 1.4426950408889634
_CAPABILITY = (9, 0)
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


class LayerPointers(ctypes.Structure):
    """`Layer` of the kernel."""

    _fields_ = [
        (name, _POINTER)
        for name in (
            "input_norm", "qkv", "qkv_bias", "output", "post_norm", "gate_up", "down", "k_pages", "v_pages",
        )  # fmt: skip
    ]


class RoundArguments(ctypes.Structure):
    """`Round` of the kernel."""

    _fields_ = [
        *((name, _POINTER) for name in ("layers", "hidden", "q", "attended", "act", "partial", "state", "met")),
        *((name, _POINTER) for name in ("positions", "row_slots", "visible", "starts", "page_tables", "cos", "sin")),
        ("features", _POINTER * MAX_FEATURES),
        ("page_stride", ctypes.c_int64),
        ("feature_after", _INT * MAX_FEATURES),
        *((name, _INT) for name in ("num_layers", "rows", "sequences", "rows_each", "num_tail", "max_pages")),
        ("row_tiles_of_pairs", _INT),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    ]


@dataclass(frozen=True, slots=True)
class ResidentSizes:
    """Sizes of the layers that a kernel is compiled for."""

    hidden: int
    inter: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    def reason_against(self) -> str | None:
        """Why the kernel cannot serve these sizes, or None."""
        if self.head_dim % 32 or self.head_dim > 128:
            return f"head_dim {self.head_dim} is not 32, 64, 96 or 128"
        if self.heads % self.kv_heads:
            return f"{self.heads} heads of {self.kv_heads} KV heads"
        for name, inputs in (("hidden", self.hidden), ("inter", self.inter)):
            if inputs % 32:
                return f"{name} {inputs} is not a multiple of 32"
        return None

    def macros(self, row_tiles: int) -> dict[str, int]:
        """What the source wants to be told.

        Args:
            row_tiles: tiles of 8 rows.
        """
        hidden, attended, inter = (_chunk(size) for size in (self.hidden, self.heads * self.head_dim, self.inter))
        slot = max(_TILE * max(map(_stride, (hidden, attended, inter))), 2 * _KV_TOKENS * (2 * self.head_dim + 16))
        slot = -(-slot // 128) * 128
        return {
            "HIDDEN": self.hidden, "INTER": self.inter, "HEADS": self.heads, "KV_HEADS": self.kv_heads,
            "HEAD_DIM": self.head_dim, "PAGE_SIZE": self.page_size, "ROW_TILES": row_tiles,
            "GROUP_TILES": _GROUP_TILES, "CHUNK_HIDDEN": hidden, "CHUNK_ATTENDED": attended, "CHUNK_INTER": inter,
            "SLOT_BYTES": slot, "NUM_SLOTS": (_SHARED_BYTES - _own_bytes(row_tiles)) // slot // _PRODUCERS * _PRODUCERS,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class ResidentShape:
    """What `DenseLayers` tells of the layers: see `DecoderLayerShape`."""

    eps: float
    scale: float
    cos: Tensor
    sin: Tensor


def is_resident_batch(batch: TreeBatch, sizes: ResidentSizes, streams: int) -> bool:
    """Whether the kernel takes a batch, as far as its shape says.

    Args:
        streams: of KV that the device has, `WARPS` a multiprocessor.
    """
    tiles = _pair_tiles(batch.rows_each, sizes.group)
    return (
        0 < batch.num_rows <= MAX_ROWS
        and batch.num_segments <= MAX_SEQUENCES
        and tiles <= _WARPS
        and batch.num_segments * sizes.kv_heads <= streams // tiles
    )


def reason_against_device(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernel cannot run on a device, or None."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return f"{device.type} with {dtype}"
    if torch.cuda.get_device_capability(device) != _CAPABILITY:
        return f"compute capability {torch.cuda.get_device_capability(device)} is not {_CAPABILITY}"
    return None if can_compile() else "no NVIDIA bindings (cuda-bindings)"


def layer_table(
    layers: Sequence[tuple[Tensor, LinearWeight, LinearWeight, Tensor, LinearWeight, LinearWeight]],
    pages: Sequence[tuple[Tensor, Tensor]],
    device: torch.device,
) -> Tensor:
    """The kernel's table of layers on `device`.

    Args:
        layers: input_norm, qkv, output, post_norm, gate_up, down of each.
        pages: (k_pages, v_pages) of each.
    """
    table = (LayerPointers * len(layers))()
    for index, (weights, kv) in enumerate(zip(layers, pages, strict=True)):
        input_norm, qkv, output, post_norm, gate_up, down = weights
        bias = None if qkv.bias is None else qkv.bias.data_ptr()
        norms = (input_norm.data_ptr(), post_norm.data_ptr())
        table[index] = LayerPointers(
            norms[0], qkv.data.data_ptr(), bias, output.data.data_ptr(), norms[1], gate_up.data.data_ptr(),
            down.data.data_ptr(), kv[0].data_ptr(), kv[1].data_ptr(),
        )  # fmt: skip
    return torch.frombuffer(bytearray(table), dtype=torch.int64).to(device)


@dataclass(slots=True)
class ResidentRound:
    """Arguments of one launch, and the tensors that they point to."""

    arguments: RoundArguments
    hidden: Tensor
    features: dict[int, Tensor]
    kept: tuple[Tensor, ...]


def prepare_round(
    table: Tensor,
    hidden: Tensor,
    batch: TreeBatch,
    page_stride: int,
    sizes: ResidentSizes,
    shape: ResidentShape,
    capture: Collection[int],
    blocks: int,
) -> ResidentRound:
    """Scratch memory and arguments of one launch.

    Args:
        table: from `layer_table`.
        hidden: [rows, hidden] residual stream before the layers; not changed.
        page_stride: elements from page to page.
        capture: features wanted, see `DenseLayers.run`.
        blocks: of the launch.
    """
    device, rows = hidden.device, batch.num_rows
    tiles = _pair_tiles(batch.rows_each, sizes.group)
    items = blocks * (_WARPS // tiles) + batch.num_segments * sizes.kv_heads
    stream = hidden.clone(memory_format=torch.contiguous_format)
    features = {after: torch.empty_like(stream) for after in sorted(set(capture))}
    q_size = sizes.heads * sizes.head_dim
    q, attended, act = (hidden.new_empty(rows, size) for size in (q_size, q_size, sizes.inter))
    partial = torch.empty(items * tiles * _TILE * sizes.head_dim, dtype=torch.float32, device=device)
    state = torch.empty(items * tiles * _TILE * 2, dtype=torch.float32, device=device)
    met = torch.zeros(1, dtype=torch.int32, device=device)
    arguments = RoundArguments(
        *(part.data_ptr() for part in (table, stream, q, attended, act, partial, state, met)),
        *(part.data_ptr() for part in (batch.positions, batch.row_slots, batch.visible, batch.starts)),
        batch.page_tables.data_ptr(),
        shape.cos.data_ptr(),
        shape.sin.data_ptr(),
        (_POINTER * MAX_FEATURES)(*(feature.data_ptr() for feature in features.values())),
        page_stride,
        (_INT * MAX_FEATURES)(*features),
        table.numel() * 8 // ctypes.sizeof(LayerPointers),
        rows,
        batch.num_segments,
        batch.rows_each,
        batch.num_tail,
        batch.page_tables.shape[1],
        tiles,
        shape.eps,
        shape.scale * _LOG2_E,
    )
    return ResidentRound(arguments, stream, features, (q, attended, act, partial, state, met))


class ResidentLayers:
    """The kernel on one device, for layers of one size.

    Args:
        device: a Hopper GPU, see `reason_against_device`.

    Raises:
        CudaProgramError: it does not compile or load.
    """

    def __init__(self, sizes: ResidentSizes, shape: ResidentShape, device: torch.device) -> None:
        self.sizes = sizes
        self._shape = shape
        self._device = device
        self._blocks = torch.cuda.get_device_properties(device).multi_processor_count

    def takes(self, batch: TreeBatch, num_features: int) -> bool:
        """Whether a batch may be run."""
        return num_features <= MAX_FEATURES and is_resident_batch(batch, self.sizes, self._blocks * _WARPS)

    def run(
        self, table: Tensor, hidden: Tensor, batch: TreeBatch, page_stride: int, capture: Collection[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """As `DenseLayers.run`, for a batch that `takes` says yes to."""
        prepared = prepare_round(table, hidden, batch, page_stride, self.sizes, self._shape, capture, self._blocks)
        function = _function(self.sizes, -(-batch.num_rows // 8), self._device)
        function.launch_together(self._blocks, _THREADS, prepared.arguments)
        return prepared.hidden, prepared.features


def program_options(sizes: ResidentSizes, row_tiles: int) -> list[str]:
    """NVRTC's, for `_FILES`."""
    macros = [f"-D{name}={value}" for name, value in sizes.macros(row_tiles).items()]
    return ["--gpu-architecture=sm_90a", "--std=c++17", *macros]


FILES = ("hopper.h", "decoder_layers.cu")


@cache
def _function(sizes: ResidentSizes, row_tiles: int, device: torch.device) -> CudaFunction:
    code = compile_program(FILES, program_options(sizes, row_tiles))
    return CudaFunction(code, "decoder_layers", device, _SHARED_BYTES)


def _pair_tiles(rows_each: int, group: int) -> int:
    """Tiles of 16 (row, head) pairs of a sequence and KV head: a power of two, so that warps divide evenly."""
    tiles = 1
    while tiles * _TILE < rows_each * group:
        tiles *= 2
    return tiles


def _chunk(inputs: int) -> int:
    """Inputs of a ring slot: as many as fit and divide."""
    return max(size for size in range(32, min(inputs, _MAX_CHUNK) + 1, 32) if inputs % size == 0)


def _stride(chunk: int) -> int:
    """Bytes from output to output in a ring slot: rows that are read together lie in different banks."""
    return -(-2 * chunk // 128) * 128 + 64


def _own_bytes(row_tiles: int) -> int:
    """Shared memory in front of the ring, at most: signals, plans, and two times the sums of a tile."""
    rows = 8 * row_tiles
    return 2048 + 4 * (_WARPS * rows + 2 * _WARPS * _TILE * (rows + 1))
