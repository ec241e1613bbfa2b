"""Matrix products with packed weights: one fixed-order chain of fused multiply-adds per output element.

On CPU a weight is packed once into panels of 16 output features, so that vector lanes run over outputs and every
output sums k = 0, 1, 2, … in order. Bits of a row therefore depend on neither the number of rows nor of threads.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A weight matrix [out_features, in_features] in the layout the kernels like, and its bias.

    Attributes:
        data: storage; its layout is private to this module. Use `unpack_rows` to read it.
        in_features: length of an input row.
        out_features: length of an output row.
        bias: [out_features] float32 (type of data on CUDA) or None.
    """

    data: Tensor
    in_features: int
    out_features: int
    bias: Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        """Type the weight is stored in."""
        return self.data.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and bias."""
        bias_bytes = 0 if self.bias is None else self.bias.numel() * self.bias.element_size()
        return self.data.numel() * self.data.element_size() + bias_bytes


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> LinearWeight:
    """Packs a weight for `linear`. The original is not kept.

    Args:
        weight: [out, in] float32 or bfloat16.
        bias: [out] or None.

    Raises:
        ValueError: an unsupported type or shape.
    """
    if weight.dim() != 2 or weight.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"weight: {weight.dtype} {tuple(weight.shape)} is not a float32 or bfloat16 matrix")
    if bias is not None and bias.shape != (weight.shape[0],):
        raise ValueError(f"bias: shape {tuple(bias.shape)} for {weight.shape[0]} outputs")
    if bias is not None:
        bias = bias.to(weight.dtype if weight.is_cuda else torch.float32).contiguous()
    return LinearWeight(weight.contiguous(), weight.shape[1], weight.shape[0], bias)


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
        return torch_linear(x, w.data, w.bias)
    return linear_reference(x, w)


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
    rows = w.data[row_ids]
    return rows if rows.is_cuda else rows.float()


def linear_reference(x: Tensor, w: LinearWeight) -> Tensor:
    """The specification, in float32."""
    return torch_linear(x.float(), w.data.float(), w.bias).to(x.dtype)
