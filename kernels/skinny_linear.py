"""Matrix products of few rows, whose time is that of reading the weight once: decode rounds on a GPU.

`graftline.kernels.linear` serves every size; this is the choice for rounds of at most `MAX_ROWS` rows in bfloat16.
"""

from enum import StrEnum

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from graftline.kernels.activation import silu_mul
from graftline.kernels.checks import check_rows

MAX_ROWS = 64


class LinearBackend(StrEnum):
    """Who multiplies: torch (cuBLAS on CUDA), or the Triton kernel of this folder (CUDA only)."""

    TORCH = "torch"
    TRITON = "triton"


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    backend: LinearBackend = LinearBackend.TRITON,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x @ weight.T + bias, summed in float32.

    Args:
        x: [rows, in] bfloat16 with at most `MAX_ROWS` rows on CUDA, contiguous; on CPU float32.
        weight: [out, in], type of x, contiguous.
        bias: [out], type of x, or None.
        backend: ignored on CPU.
        out_dtype: of the result, that of x when None.

    Returns:
        [rows, out].

    Raises:
        ValueError: shapes, strides or types that do not fit.
    """
    _check(x, weight, bias)
    if not x.is_cuda or backend is LinearBackend.TORCH:
        return torch_linear(x, weight, bias).to(out_dtype or x.dtype)
    _check_rows_on_gpu(x)
    from graftline.kernels.skinny_linear_triton import skinny_linear as kernel

    return kernel(x, weight, bias, out_dtype=out_dtype)


def skinny_gate_up(x: Tensor, weight: Tensor, backend: LinearBackend = LinearBackend.TRITON) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T), where `weight` is gate, then up: one launch with Triton.

    Args:
        x: see `skinny_linear`.
        weight: [2 * inter, in].
        backend: likewise. Triton rounds once, torch three times.

    Returns:
        [rows, inter], type of x.

    Raises:
        ValueError: shapes, strides or types that do not fit.
    """
    _check(x, weight, None)
    if weight.shape[0] % 2:
        raise ValueError(f"weight: {weight.shape[0]} outputs are not gate and up")
    if not x.is_cuda or backend is LinearBackend.TORCH:
        return silu_mul(torch_linear(x, weight))
    _check_rows_on_gpu(x)
    from graftline.kernels.skinny_linear_triton import skinny_gate_up as kernel

    return kernel(x, weight)


def skinny_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The specification: float32 arithmetic, one rounding at the end."""
    return torch_linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def skinny_gate_up_reference(x: Tensor, weight: Tensor) -> Tensor:
    """The specification, likewise."""
    gate, up = torch_linear(x.float(), weight.float()).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ValueError(f"x {x.dtype} {tuple(x.shape)} for weight {weight.dtype} {tuple(weight.shape)}")
    if not weight.is_contiguous() or not x.is_contiguous():
        raise ValueError(f"x with strides {x.stride()}, weight with {weight.stride()}: contiguous ones are wanted")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != x.dtype):
        raise ValueError(f"bias: {bias.dtype} {tuple(bias.shape)} for {weight.shape[0]} outputs")
    check_rows("x", x)


def _check_rows_on_gpu(x: Tensor) -> None:
    if x.shape[0] > MAX_ROWS or x.dtype != torch.bfloat16:
        raise ValueError(f"x: {x.dtype} {tuple(x.shape)}, bfloat16 with at most {MAX_ROWS} rows is wanted")
