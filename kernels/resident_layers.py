"""A range of dense layers for few rows in one resident kernel, `cuda/decoder_layers.cu`: decode rounds on Hopper GPUs.

Between kernels the memory rests for some microseconds, half a dozen times a layer. Here weights and committed KV stream
through shared memory without a pause while blocks meet between the phases of a layer.
"""

import ctypes
import logging
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from graftline.kernels.cuda_driver import CudaProgramError, has_bindings
from graftline.kernels.cuda_program import BoxMap, CudaFunction, compile_program, encode_box_map
from graftline.kernels.layer_weights import DecoderLayerShape, DecoderLayerWeights
from graftline.kernels.linear import LinearWeight
from graftline.kernels.tree_batch import TreeBatch, check_tree_batch

_LOG = logging.getLogger(__name__)
_ENVIRONMENT = "GRAFTLINE_RESIDENT_LAYERS"
MAX_ROWS = 16
MAX_SEQUENCES = 16
MAX_FEATURES = 4
_TILE = 16  # outputs
_MAX_GROUP = 7  # whose sums the registers hold
_KV_TOKENS = 32  # a ring slot
_WARPS = 8
_BATCH = 3
_THREADS = 384
_COLUMNS = 32  # of a block of what products read
_COUNTER_WORDS = 32  # from counter to counter
_LINE = 64  # elements of 128 bytes
_MAX_CHUNK = 576  # inputs of a ring slot
_SHARED_BYTES = 232448  # that a block may have on a Hopper GPU
_LOG2_E = 1.4426950408889634
_CAPABILITY = (9, 0)
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


class LayerPointers(ctypes.Structure):
    """`Layer` of the kernel."""

    _fields_ = [
        *((name, ctypes.c_uint64 * 16) for name in ("qkv", "output", "gate_up", "down", "k", "v")),
        *((name, _POINTER) for name in ("input_norm", "qkv_bias", "post_norm", "k_pages", "v_pages")),
        ("unused", ctypes.c_uint64 * 3),
    ]


class RoundArguments(ctypes.Structure):
    """`Round` of the kernel."""

    _fields_ = [
        *((name, _POINTER) for name in ("layers", "hidden", "out", "q", "attended", "act", "partial", "state", "met")),
        *((name, _POINTER) for name in ("positions", "row_slots", "visible", "starts", "page_tables", "cos", "sin")),
        ("features", _POINTER * MAX_FEATURES),
        ("page_stride", ctypes.c_int64),
        ("feature_after", _INT * MAX_FEATURES),
        *((name, _INT) for name in ("num_layers", "rows", "sequences", "rows_each", "num_tail", "max_pages")),
        ("row_tiles_of_pairs", _INT),
        ("nothing", ctypes.c_uint32),
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
        if self.head_dim not in (64, 128):
            return f"head_dim {self.head_dim} is neither 64 nor 128"
        if self.heads % self.kv_heads:
            return f"{self.heads} heads of {self.kv_heads} KV heads"
        for name, inputs in (("hidden", self.hidden), ("inter", self.inter)):
            if inputs % _LINE:
                return f"{name} {inputs} is not a multiple of {_LINE}"
        box = self.box_tokens
        if _KV_TOKENS % box or self.page_size % box or box * self.head_dim % 512:
            return f"pages of {self.page_size} tokens with heads of {self.head_dim}"
        return None

    @property
    def box_tokens(self) -> int:
        """Tokens that are copied at once."""
        return min(self.page_size, _KV_TOKENS)

    def act_rounds(self, blocks: int) -> int:
        """Rounds of tiles in which blocks compute gate and up, each of which is counted."""
        tiles = 2 * self.inter // _TILE
        most = -(-tiles // blocks)
        return -(-most // _group(tiles, blocks))

    def macros(self, row_tiles: int, blocks: int) -> dict[str, int]:
        """What the source wants to be told.

        Args:
            row_tiles: tiles of 8 rows.
            blocks: of a launch.
        """
        q_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        outputs = {"QKV": q_size + 2 * kv_size, "OUTPUT": self.hidden, "GATE_UP": 2 * self.inter, "DOWN": self.hidden}
        groups = {f"GROUP_{name}": _group(count // _TILE, blocks) for name, count in outputs.items()}
        hidden, attended, inter = (_chunk(size) for size in (self.hidden, self.heads * self.head_dim, self.inter))
        slot = max(2 * _TILE * max(hidden, attended, inter), 4 * _KV_TOKENS * self.head_dim)
        return {
            "HIDDEN": self.hidden, "INTER": self.inter, "HEADS": self.heads, "KV_HEADS": self.kv_heads,
            "HEAD_DIM": self.head_dim, "PAGE_SIZE": self.page_size, "ROW_TILES": row_tiles, "BLOCKS": blocks,
            **groups, "GROUP_TILES": max(groups.values()), "CHUNK_HIDDEN": hidden, "CHUNK_ATTENDED": attended,
            "CHUNK_INTER": inter,
            "SLOT_BYTES": slot, "NUM_SLOTS": (_SHARED_BYTES - _own_bytes(row_tiles)) // slot,
        }  # fmt: skip


def fits_kernel(batch: TreeBatch, sizes: ResidentSizes, streams: int) -> bool:
    """Whether the kernel can run a batch, as far as its shape says.

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
    """Why the kernel cannot run on a device, or None. GRAFTLINE_RESIDENT_LAYERS=off in the environment forbids it."""
    if os.environ.get(_ENVIRONMENT) == "off":
        return f"{_ENVIRONMENT} is off"
    if device.type != "cuda" or dtype != torch.bfloat16:
        return f"{device.type} with {dtype}"
    if torch.cuda.get_device_capability(device) != _CAPABILITY:
        return f"compute capability {torch.cuda.get_device_capability(device)} is not {_CAPABILITY}"
    return None if has_bindings() else "no NVIDIA bindings (cuda-bindings)"


def layer_table(
    layers: Sequence[DecoderLayerWeights],
    pages: Sequence[tuple[Tensor, Tensor]],
    sizes: ResidentSizes,
    device: torch.device,
    encode: Callable[[BoxMap], bytes] = encode_box_map,
) -> Tensor:
    """The kernel's table of layers on `device`.

    Args:
        layers: without norms of q and k, and without biases but that of qkv.
        pages: (k_pages, v_pages) of each.
        encode: makes 128 bytes of a map.
    """
    table = (LayerPointers * len(layers))()
    for index, (weights, kv) in enumerate(zip(layers, pages, strict=True)):
        matrices = (weights.qkv, weights.output, weights.gate_up, weights.down)
        boxes = [_weight_map(weight) for weight in matrices]
        boxes += [_page_map(view, sizes) for view in kv]
        table[index] = LayerPointers(
            *((ctypes.c_uint64 * 16).from_buffer_copy(encode(box)) for box in boxes),
            weights.input_norm.data_ptr(), None if weights.qkv.bias is None else weights.qkv.bias.data_ptr(),
            weights.post_norm.data_ptr(),
            kv[0].data_ptr(), kv[1].data_ptr(),
        )  # fmt: skip
    return torch.frombuffer(bytearray(table), dtype=torch.int64).to(device)


def _weight_map(weight: LinearWeight) -> BoxMap:
    """Boxes of 64 inputs, 8 outputs and the 64-input blocks of a chunk."""
    row = 2 * weight.in_features
    sizes = (_LINE, weight.out_features, weight.in_features // _LINE)
    return BoxMap(weight.data.data_ptr(), sizes, (row, 2 * _LINE), (_LINE, 8, _chunk(weight.in_features) // _LINE))


def _page_map(view: Tensor, sizes: ResidentSizes) -> BoxMap:
    """Boxes of 64 columns, the blocks of a head, a head, tokens of a page, a page."""
    lines = sizes.head_dim // _LINE
    return BoxMap(
        view.data_ptr(),
        (_LINE, lines, sizes.kv_heads, sizes.page_size, view.shape[0]),
        (2 * _LINE, 2 * sizes.head_dim, 2 * sizes.head_dim * sizes.kv_heads, 2 * view.stride(0)),
        (_LINE, lines, 1, sizes.box_tokens, 1),
    )


@dataclass(slots=True)
class ResidentRound:
    """Arguments of one launch, and the tensors that they point to; `hidden` is the result."""

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
    shape: DecoderLayerShape,
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

    Raises:
        ValueError: a batch that is not as described, or hidden states of another shape or type: the kernel would take
            their bytes as they are.
    """
    check_tree_batch(batch)
    if hidden.shape != (batch.num_rows, sizes.hidden) or hidden.dtype != torch.bfloat16:
        raise ValueError(f"hidden: {hidden.dtype} {tuple(hidden.shape)} for {batch.num_rows} rows of {sizes.hidden}")
    device, rows = hidden.device, batch.num_rows
    tiles = _pair_tiles(batch.rows_each, sizes.group)
    items = blocks * (_WARPS // tiles)
    out = torch.empty(hidden.shape, dtype=hidden.dtype, device=device)
    features = {after: torch.empty_like(out) for after in sorted(set(capture))}
    q_size = sizes.heads * sizes.head_dim
    q = hidden.new_empty(rows, q_size)
    # What products read lies in blocks of columns, all rows of each behind one another.
    stream, attended, act = (
        hidden.new_empty(size // _COLUMNS, _row_tiles(rows) * 8, _COLUMNS)
        for size in (sizes.hidden, q_size, sizes.inter)
    )
    stream[:, :rows].copy_(hidden.reshape(rows, -1, _COLUMNS).transpose(0, 1))
    partial = torch.empty(items * tiles * _TILE * sizes.head_dim, dtype=torch.float32, device=device)
    state = torch.empty(items * tiles * _TILE * 2, dtype=torch.float32, device=device)
    met = torch.zeros(_COUNTER_WORDS * (1 + sizes.act_rounds(blocks)), dtype=torch.int32, device=device)
    arguments = RoundArguments(
        *(part.data_ptr() for part in (table, stream, out, q, attended, act, partial, state, met)),
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
        0,
        shape.eps,
        shape.scale * _LOG2_E,
    )
    return ResidentRound(arguments, out, features, (stream, q, attended, act, partial, state, met))


class ResidentLayers:
    """The kernel on one device, for layers of one size.

    Args:
        device: a Hopper GPU, see `reason_against_device`.
    """

    def __init__(self, sizes: ResidentSizes, shape: DecoderLayerShape, device: torch.device) -> None:
        self.sizes = sizes
        self._shape = shape
        self._device = device
        self._blocks = torch.cuda.get_device_properties(device).multi_processor_count

    def takes(self, batch: TreeBatch, num_features: int) -> bool:
        """Whether a batch can be run here, which is faster than single ops then; compiles what it needs at first."""
        return (
            num_features <= MAX_FEATURES
            and fits_kernel(batch, self.sizes, self._blocks * _WARPS)
            and self._function(batch.num_rows) is not None
        )

    def run(
        self, table: Tensor, hidden: Tensor, batch: TreeBatch, page_stride: int, capture: Collection[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """As `DenseLayers.run`, for a batch that `takes` says yes to."""
        prepared = prepare_round(table, hidden, batch, page_stride, self.sizes, self._shape, capture, self._blocks)
        function = self._function(batch.num_rows)
        assert function is not None
        function.launch_together(self._blocks, _THREADS, prepared.arguments)
        return prepared.hidden, prepared.features

    def _function(self, rows: int) -> CudaFunction | None:
        """The kernel for so many rows; None, with a warning, where it does not compile or load."""
        return _function(self.sizes, _row_tiles(rows), self._blocks, self._device)


def program_options(sizes: ResidentSizes, row_tiles: int, blocks: int) -> list[str]:
    """NVRTC's, for `FILES`."""
    macros = [f"-D{name}={value}" for name, value in sizes.macros(row_tiles, blocks).items()]
    return ["--gpu-architecture=sm_90a", "--std=c++17", *macros]


FILES = (
    "hopper.h", "layers_ring.h", "layers_products.h", "layers_attention.h", "layers_combine.h", "decoder_layers.cu",
)  # fmt: skip


@cache
def _function(sizes: ResidentSizes, row_tiles: int, blocks: int, device: torch.device) -> CudaFunction | None:
    try:
        code = compile_program(FILES, program_options(sizes, row_tiles, blocks))
        return CudaFunction(code, "decoder_layers", device, _SHARED_BYTES)
    except CudaProgramError as error:
        _LOG.warning("layers run by single ops, which take longer: %s", error)
        return None


def _row_tiles(rows: int) -> int:
    """Tiles of 8 rows."""
    return -(-rows // 8)


def _pair_tiles(rows_each: int, group: int) -> int:
    """Tiles of 16 (row, head) pairs of a sequence and KV head: a power of two, so that warps divide evenly."""
    tiles = 1
    while tiles * _TILE < rows_each * group:
        tiles *= 2
    return tiles


def _group(tiles: int, blocks: int) -> int:
    """Tiles that a block computes side by side: as few rounds as registers allow, and those alike."""
    most = -(-tiles // blocks)
    return -(-most // -(-most // _MAX_GROUP))


def _chunk(inputs: int) -> int:
    """Inputs of a ring slot: as many as fit and divide."""
    return max(size for size in range(_LINE, min(inputs, _MAX_CHUNK) + 1, _LINE) if inputs % size == 0)


def _own_bytes(row_tiles: int) -> int:
    """Shared memory in front of the ring, at most: signals, plans, and the sums of some tiles."""
    rows = 8 * row_tiles
    return 2048 + 4 * (_WARPS * rows + _BATCH * _WARPS * _TILE * (rows + 1))
