"""Matrix products with packed weights: one fixed-order chain of fused multiply-adds per output element.

On CPU a weight is packed once into panels of 16 output features, so that vector lanes run over outputs and every
output sums k = 0, 1, 2, … in order. Bits of a row therefore depend on neither the number of rows nor of threads.
"""

from ctypes import byref
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from graftline.kernels.activation import silu_mul
from graftline.kernels.checks import check_rows
from graftline.kernels.native_library import native_library, num_threads
from graftline.kernels.native_structs import NativeWeight, native_type, native_weight
from graftline.kernels.skinny_linear import MAX_ROWS, skinny_gate_up, skinny_linear
from graftline.kernels.weight_arena import WeightArena

PANEL = 16  # output features a panel


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A weight matrix [out_features, in_features] in the layout the kernels like, and its bias.

    Attributes:
        data: storage; its layout is private to this module. Use `unpack_rows` to read it.
        in_features: length of an input row.
        out_features: length of an output row.
        bias: [out_features] float32 (type of data on CUDA) or None.
        scale: [out_features] float32 factors of an int8 weight, or None.
        native: what the C library sees; None when `data` is the plain matrix.
    """

    data: Tensor
    in_features: int
    out_features: int
    bias: Tensor | None
    scale: Tensor | None = None
    native: NativeWeight | None = field(default=None, repr=False, compare=False)

    @property
    def dtype(self) -> torch.dtype:
        """Type the weight is stored in."""
        return self.data.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and bias."""
        return sum(part.nbytes for part in (self.data, self.bias, self.scale) if part is not None)


def pack_linear(
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    storage: torch.dtype | None = None,
    arena: WeightArena | None = None,
) -> LinearWeight:
    """Packs a weight for `linear`. The original is not kept.

    Args:
        weight: [out, in] float32 or bfloat16.
        bias: [out] or None.
        storage: type to keep the weight in; its own by default. `torch.int8` (CPU) rounds every output's weights to
            multiples of their largest magnitude / 127: for drafters, whose outputs need not be exact.
        arena: where to put it (CPU); the weights of one model read faster when they share one.

    Raises:
        ValueError: an unsupported type or shape.
    """
    if weight.dim() != 2 or weight.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"weight: {weight.dtype} {tuple(weight.shape)} is not a float32 or bfloat16 matrix")
    if bias is not None and bias.shape != (weight.shape[0],):
        raise ValueError(f"bias: shape {tuple(bias.shape)} for {weight.shape[0]} outputs")
    storage = storage or weight.dtype
    if storage not in (torch.float32, torch.bfloat16) and (storage != torch.int8 or weight.is_cuda):
        raise ValueError(f"storage: {storage} on {weight.device}")
    if bias is not None:
        bias = bias.to(storage if weight.is_cuda else torch.float32).contiguous()
    scale = None
    if storage == torch.int8:
        weight, scale = _quantise(weight)
    weight = weight.to(storage).contiguous()
    out_features, in_features = weight.shape
    library = native_library() if weight.device.type == "cpu" else None
    if library is None:
        return LinearWeight(weight, in_features, out_features, bias, scale)
    depth = (in_features + 1) // 2 * 2 if storage == torch.bfloat16 else in_features
    shape = ((out_features + PANEL - 1) // PANEL, depth, PANEL)
    data = torch.empty(shape, dtype=storage) if arena is None else arena.empty(shape, storage)
    data[-1] = 0
    if depth != in_features:
        data.zero_()
    library.gl_pack_panels(weight.data_ptr(), out_features, in_features, native_type(storage), data.data_ptr())
    native = native_weight(data, scale, bias, in_features, out_features)
    return LinearWeight(data, in_features, out_features, bias, scale, native)


def linear(x: Tensor, w: LinearWeight) -> Tensor:
    """x @ weight.T + bias.

    Args:
        x: [rows, in]; float32 on CPU, the weight's type on CUDA; rows may be strided.
        w: from `pack_linear`.

    Returns:
        [rows, out], type of x.

    Raises:
        ValueError: x does not fit the weight.
    """
    if x.dim() != 2 or x.shape[1] != w.in_features:
        raise ValueError(f"x: shape {tuple(x.shape)} for a weight with {w.in_features} inputs")
    if x.is_cuda:
        if streams(x, w, is_gated=False):
            return skinny_linear(x, w.data, w.bias)
        return torch_linear(x, w.data, w.bias)
    check_rows("x", x)
    library = native_library()
    if library is None or w.native is None:
        return linear_reference(x, w)
    out = torch.empty((x.shape[0], w.out_features))
    threads = num_threads(w.data.numel() // 32768)
    library.gl_linear(byref(w.native), x.data_ptr(), x.stride(0), out.data_ptr(), w.out_features, x.shape[0], threads)
    return out


def linear_wide(x: Tensor, w: LinearWeight) -> Tensor:
    """`linear` whose sums are not rounded to the type of x: logits, whose near ties a choice must not fall for.

    Returns:
        [rows, out] float32.

    Raises:
        ValueError: x does not fit the weight.
    """
    if not x.is_cuda or x.dtype == torch.float32 or w.bias is not None or x.shape[-1:] != (w.in_features,):
        return linear(x, w).float()
    if streams(x, w, is_gated=False):
        return skinny_linear(x, w.data, out_dtype=torch.float32)
    return torch.mm(x, w.data.t(), out_dtype=torch.float32)


def linear_gate_up(x: Tensor, w: LinearWeight) -> Tensor:
    """`silu_mul(linear(x, w))`, in one launch on CUDA where that is faster; it rounds once instead of twice there.

    Args:
        x: see `linear`.
        w: [2 * inter, in]: gate, then up.

    Returns:
        [rows, inter], type of x.

    Raises:
        ValueError: x does not fit the weight, or the weight has an odd number of outputs.
    """
    if x.is_cuda and x.dim() == 2 and x.shape[1] == w.in_features and streams(x, w, is_gated=True):
        return skinny_gate_up(x, w.data)
    return silu_mul(linear(x, w))


def streams(x: Tensor, w: LinearWeight, *, is_gated: bool) -> bool:
    """Whether the kernel for few rows multiplies these on CUDA."""
    if x.dtype != torch.bfloat16 or x.shape[0] > MAX_ROWS or not x.is_contiguous() or w.dtype != x.dtype:
        return False
    if is_gated and (w.bias is not None or w.out_features % 2):
        return False
    from graftline.kernels.skinny_linear_triton import is_ahead

    return is_ahead(x.shape[0], w.in_features, w.out_features // (1 + is_gated), is_gated)


def unpack_rows(w: LinearWeight, row_ids: Tensor) -> Tensor:
    """Rows of the weight, as an embedding gather with tied weights needs them.

    Args:
        w: from `pack_linear`.
        row_ids: [n] int64 in [0, out_features).

    Returns:
        [n, in] float32 on CPU, the weight's type on CUDA.

    Raises:
        ValueError: an id outside the matrix (CPU only).
    """
    library = native_library()
    if library is None or w.native is None:
        rows = w.data[row_ids]
        if rows.is_cuda:
            return rows
        return rows.float() if w.scale is None else rows.float() * w.scale[row_ids].unsqueeze(1)
    row_ids = row_ids.contiguous()
    if row_ids.dtype != torch.int64 or row_ids.dim() != 1:
        raise ValueError(f"row_ids: {row_ids.dtype} {tuple(row_ids.shape)}, a vector of int64 is wanted")
    out = torch.empty((row_ids.shape[0], w.in_features))
    num_bad = library.gl_unpack_rows(byref(w.native), row_ids.data_ptr(), row_ids.shape[0], out.data_ptr())
    if num_bad:
        raise ValueError(f"row_ids: {num_bad} of {row_ids.shape[0]} ids lie outside [0, {w.out_features})")
    return out


def linear_reference(x: Tensor, w: LinearWeight) -> Tensor:
    """The specification, in float32."""
    weight = unpack_rows(w, torch.arange(w.out_features, device=x.device)).float()
    return torch_linear(x.float(), weight, None if w.bias is None else w.bias.float()).to(x.dtype)


def _quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Integers in [-127, 127] and the factor of every output."""
    wide = weight.float()
    scale = wide.abs().amax(dim=1).clamp(min=1e-30) / 127.0
    return (wide / scale.unsqueeze(1)).round(), scale
