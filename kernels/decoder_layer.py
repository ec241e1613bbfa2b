"""A range of dense decoder layers at once: one native call on CPU, one resident kernel for a decode round of few rows
on a Hopper GPU, otherwise the composition of the single ops.

The native call runs the same parts as the ops do, in one parallel region, so that both give the same bits; what it
saves is the cost of a dozen Python calls a layer. The resident kernel sums in another order (`resident_layers`).
"""

import ctypes
import logging
from collections.abc import Collection, Sequence
from ctypes import byref
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from graftline.kernels.attention import paged_attention
from graftline.kernels.attention_backend import Attention
from graftline.kernels.checks import check_rows
from graftline.kernels.cuda_driver import CudaProgramError
from graftline.kernels.kv_write import check_pages
from graftline.kernels.layer_weights import DecoderLayerShape, DecoderLayerWeights
from graftline.kernels.linear import linear, linear_gate_up
from graftline.kernels.native_library import native_library, num_threads
from graftline.kernels.native_structs import NativeLayer, NativeLayers, NativePages, native_batch, native_pages
from graftline.kernels.norm import add_rms_norm, rms_norm
from graftline.kernels.qkv_placing import place_qkv
from graftline.kernels.resident_layers import (
    ResidentLayers,
    ResidentSizes,
    layer_table,
    reason_against_device,
)
from graftline.kernels.tree_batch import RowBatch, TreeBatch

_LOG = logging.getLogger(__name__)


class LayerPages:
    """The KV pages of a range of layers, checked and described once; build it when the pool is built.

    Args:
        layers: (k_pages, v_pages) of every layer, see `write_kv`.

    Raises:
        ValueError: views that do not fit.
    """

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        for k_pages, v_pages in layers:
            check_pages(k_pages, v_pages, k_pages.shape[1])
        self.layers = tuple(layers)
        self.native = (NativePages * len(layers))(*(native_pages(k, v) for k, v in layers))

    @property
    def page_size(self) -> int:
        """Token positions a page."""
        return self.layers[0][0].shape[1]


class DenseLayers:
    """Consecutive layers of one model.

    Args:
        layers: their weights, in order; at least one.
        shape: what they have in common.
        attention: how single ops attend.
        may_reside: whether the resident kernel may serve the batches that it takes. It needs every multiprocessor at
            once: not where kernels that wait for other devices (NCCL's) may hold one.

    Raises:
        ValueError: weights that do not fit the shape.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayerWeights],
        shape: DecoderLayerShape,
        attention: Attention = paged_attention,
        *,
        may_reside: bool = True,
    ) -> None:
        if not layers:
            raise ValueError("layers: none")
        self._layers = tuple(layers)
        self._shape = shape
        self._attention = attention
        self.hidden_size = layers[0].qkv.in_features
        self._inter = layers[0].down.in_features
        for index, weights in enumerate(layers):
            self._check_layer(index, weights)
        half = shape.cos.shape[1]
        if shape.cos.shape != shape.sin.shape or 2 * half > shape.head_dim:
            raise ValueError(
                f"cos {tuple(shape.cos.shape)}, sin {tuple(shape.sin.shape)} for heads of {shape.head_dim}"
            )
        self._native = self._describe()
        self._may_reside = may_reside
        self._residents: dict[int, ResidentLayers | None] = {}  # by page size
        self._tables: WeakKeyDictionary[LayerPages, Tensor] = WeakKeyDictionary()

    @property
    def num_layers(self) -> int:
        """Layers of the range."""
        return len(self._layers)

    def run(
        self, hidden: Tensor, batch: RowBatch, pages: LayerPages, capture: Collection[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Runs all layers and writes the rows' KV.

        Args:
            hidden: [rows, hidden] residual stream before the first layer; not changed.
            batch: who attends to what.
            pages: of these layers.
            capture: features wanted: n is the residual stream after n of these layers, 1 <= n <= num_layers.

        Returns:
            ([rows, hidden] residual stream after the last layer, feature by n, each [rows, hidden]).

        Raises:
            ValueError: shapes or types that do not fit.
        """
        if hidden.shape != (batch.num_rows, self.hidden_size) or len(pages.layers) != self.num_layers:
            raise ValueError(
                f"hidden {tuple(hidden.shape)} and pages of {len(pages.layers)} layers for {batch.num_rows} rows of "
                f"{self.hidden_size} and {self.num_layers} layers"
            )
        if pages.page_size != batch.page_size or pages.layers[0][0].shape[2:] != (
            self._shape.num_kv_heads,
            self._shape.head_dim,
        ):
            raise ValueError(f"pages {tuple(pages.layers[0][0].shape)} for a batch with pages of {batch.page_size}")
        if any(not 1 <= n <= self.num_layers for n in capture):
            raise ValueError(f"capture: {sorted(capture)} of {self.num_layers} layers")
        if isinstance(batch, TreeBatch) and (ran := self._try_resident(hidden, batch, pages, capture)) is not None:
            return ran
        library = native_library() if hidden.device.type == "cpu" else None
        if library is None or self._native is None or isinstance(batch, TreeBatch):
            return self.run_composed(hidden, batch, pages, capture)
        check_rows("hidden", hidden)
        rows = batch.num_rows
        stream = hidden.clone(memory_format=torch.contiguous_format)
        scratch = torch.empty(rows * self._scratch_floats_a_row)
        features = {n: torch.empty((rows, self.hidden_size)) for n in sorted(set(capture))}
        captures = (ctypes.c_void_p * self.num_layers)()
        for n, feature in features.items():
            captures[n - 1] = feature.data_ptr()
        library.gl_decoder_layers(
            byref(self._native),
            pages.native,
            byref(native_batch(batch)),
            stream.data_ptr(),
            scratch.data_ptr(),
            captures,
            num_threads(self._layers[0].gate_up.data.numel() // 32768),
        )
        return stream, features

    def run_composed(
        self, hidden: Tensor, batch: RowBatch, pages: LayerPages, capture: Collection[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The same by single ops: the specification, and the way on CUDA."""
        features: dict[int, Tensor] = {}
        change: Tensor | None = None  # what the layer before adds to the stream: one launch with the norm after it
        for index, (weights, (k_pages, v_pages)) in enumerate(zip(self._layers, pages.layers, strict=True)):
            if change is None:
                normed = rms_norm(hidden, weights.input_norm, self._shape.eps)
            else:
                normed, hidden = add_rms_norm(change, hidden, weights.input_norm, self._shape.eps)
            if index in capture:
                features[index] = hidden
            hidden, change = self._run_layer(normed, hidden, weights, batch, k_pages, v_pages)
        assert change is not None
        hidden = hidden + change
        if self.num_layers in capture:
            features[self.num_layers] = hidden
        return hidden, features

    def run_resident(
        self, hidden: Tensor, batch: TreeBatch, pages: LayerPages, capture: Collection[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The same by the resident kernel, for batches that it takes."""
        resident = self._resident(pages)
        assert resident is not None
        table = self._tables.get(pages)
        if table is None:
            table = self._tables[pages] = layer_table(self._layers, pages.layers, resident.sizes, hidden.device)
        return resident.run(table, hidden, batch, pages.layers[0][0].stride(0), capture)

    def _try_resident(
        self, hidden: Tensor, batch: TreeBatch, pages: LayerPages, capture: Collection[int]
    ) -> tuple[Tensor, dict[int, Tensor]] | None:
        """None for batches that single ops are to run."""
        resident = self._resident(pages)
        if resident is None or not resident.takes(batch, len(capture)):
            return None
        try:
            return self.run_resident(hidden, batch, pages, capture)
        except CudaProgramError as error:  # such as a device that lends only some of its multiprocessors
            _LOG.warning("layers run by single ops, which take longer: %s", error)
            self._residents[pages.page_size] = None
            return None

    def can_reside(self, batch: TreeBatch, pages: LayerPages) -> bool:
        """Whether `run_resident` can run a batch."""
        resident = self._resident(pages)
        return resident is not None and resident.takes(batch, 0)

    @cached_property
    def reason_against_resident(self) -> str | None:
        """Why these layers cannot be run by the resident kernel on their device, or None."""
        shape = self._shape
        weight = self._layers[0].qkv
        if not self._may_reside:
            return "other kernels of this stage wait for other devices"
        if reason := reason_against_device(weight.data.device, weight.data.dtype):
            return reason
        if any(layer.q_norm is not None for layer in self._layers):
            return "q and k have norms"
        if any(layer.output.bias is not None for layer in self._layers):
            return "the output has a bias"
        if 2 * shape.cos.shape[1] != shape.head_dim:
            return f"{2 * shape.cos.shape[1]} of {shape.head_dim} columns are rotated"
        return None if shape.cos.is_contiguous() and shape.sin.is_contiguous() else "cos or sin is not contiguous"

    def _resident(self, pages: LayerPages) -> ResidentLayers | None:
        if self.reason_against_resident is not None:
            return None
        if pages.page_size not in self._residents:
            shape = self._shape
            sizes = ResidentSizes(
                self.hidden_size, self._inter, shape.num_heads, shape.num_kv_heads, shape.head_dim, pages.page_size
            )
            found = ResidentLayers(sizes, shape, shape.cos.device) if sizes.reason_against() is None else None
            self._residents[pages.page_size] = found
        return self._residents[pages.page_size]

    def _run_layer(
        self,
        normed: Tensor,
        hidden: Tensor,
        weights: DecoderLayerWeights,
        batch: RowBatch,
        k_pages: Tensor,
        v_pages: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """One layer behind its first norm: the residual stream after attention, and what the MLP adds to it."""
        shape = self._shape
        q = place_qkv(
            linear(normed, weights.qkv),
            k_pages,
            v_pages,
            batch,
            batch.positions,
            shape.cos,
            shape.sin,
            q_norm=weights.q_norm,
            k_norm=weights.k_norm,
            eps=shape.eps,
        )
        attended = linear(self._attention(q, k_pages, v_pages, batch, shape.scale).flatten(1), weights.output)
        normed, hidden = add_rms_norm(attended, hidden, weights.post_norm, shape.eps)
        return hidden, linear(linear_gate_up(normed, weights.gate_up), weights.down)

    @property
    def _scratch_floats_a_row(self) -> int:
        shape = self._shape
        heads = 2 * shape.num_heads + 2 * shape.num_kv_heads
        return 2 * self.hidden_size + heads * shape.head_dim + 3 * self._inter

    def _check_layer(self, index: int, weights: DecoderLayerWeights) -> None:
        shape, hidden, inter = self._shape, self.hidden_size, self._inter
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        expected = {
            "qkv": (weights.qkv, hidden, q_size + 2 * kv_size),
            "output": (weights.output, q_size, hidden),
            "gate_up": (weights.gate_up, hidden, 2 * inter),
            "down": (weights.down, inter, hidden),
        }
        for name, (weight, num_inputs, num_outputs) in expected.items():
            if (weight.in_features, weight.out_features) != (num_inputs, num_outputs):
                raise ValueError(
                    f"layer {index}: {name} is {weight.in_features} -> {weight.out_features}, "
                    f"not {num_inputs} -> {num_outputs}"
                )
        if (weights.q_norm is None) != (weights.k_norm is None):
            raise ValueError(f"layer {index}: q_norm and k_norm come together")
        norms = {"input_norm": hidden, "post_norm": hidden, "q_norm": shape.head_dim, "k_norm": shape.head_dim}
        for name, size in norms.items():
            norm: Tensor | None = getattr(weights, name)
            if norm is not None and (norm.shape != (size,) or not norm.is_contiguous()):
                raise ValueError(f"layer {index}: {name} is {tuple(norm.shape)}, not ({size},)")

    def _describe(self) -> NativeLayers | None:
        """What the C library sees, or None when some weight is not packed for it."""
        shape = self._shape
        described = []
        for weights in self._layers:
            packed = [matrix.native for matrix in (weights.qkv, weights.output, weights.gate_up, weights.down)]
            norms = (weights.input_norm, weights.q_norm, weights.k_norm, weights.post_norm)
            if any(norm is not None and norm.dtype != torch.float32 for norm in norms):
                return None
            pointers = [None if norm is None else norm.data_ptr() for norm in norms]
            matrices = [ctypes.pointer(matrix) for matrix in packed if matrix is not None]
            if len(matrices) != len(packed):
                return None
            described.append(NativeLayer(*pointers, *matrices))
        if shape.cos.dtype != torch.float32 or not shape.cos.is_contiguous() or not shape.sin.is_contiguous():
            return None
        return NativeLayers(
            (NativeLayer * len(described))(*described),
            shape.cos.data_ptr(),
            shape.sin.data_ptr(),
            len(described),
            self.hidden_size,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            self._inter,
            shape.cos.shape[1],
            shape.eps,
            shape.scale,
        )
