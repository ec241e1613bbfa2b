"""RMSNorm, alone or fused with the residual addition before it (Zhang & Sennrich 2019)."""

import torch
from torch import Tensor

from graftline.kernels.checks import check_rows
from graftline.kernels.native_library import native_library, num_threads


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension.

    Args:
        x: [..., dim] float32 on CPU; rows may be strided, the last dimension must be contiguous. A per-head norm
            (qk-norm) is the same call on [rows, heads, head_dim].
        weight: [dim], same type as x.
        eps: added to the mean square.

    Returns:
        [..., dim] contiguous, type of x.

    Raises:
        ValueError: shapes, strides or types that do not fit.
    """
    _check(x, weight)
    if x.is_cuda:
        from graftline.kernels.norm_triton import rms_norm as kernel

        return kernel(x, weight, eps)
    library = native_library()
    if library is None:
        return rms_norm_reference(x, weight, eps)
    rows, heads, dim = x.shape[0], x.numel() // max(1, x.shape[0] * x.shape[-1]), x.shape[-1]
    out = torch.empty(x.shape)
    threads = num_threads(x.numel() // 16384)
    library.gl_rms_norm(x.data_ptr(), x.stride(0), rows, heads, dim, weight.data_ptr(), eps, out.data_ptr(), threads)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`(rms_norm(x + residual), x + residual)`.

    Args:
        x: [rows, dim].
        residual: [rows, dim].
        weight: [dim].
        eps: added to the mean square.

    Raises:
        ValueError: shapes, strides or types that do not fit.
    """
    _check(x, weight)
    if x.dim() != 2 or x.shape != residual.shape or not x.is_contiguous() or not residual.is_contiguous():
        raise ValueError(f"x {tuple(x.shape)} and residual {tuple(residual.shape)} must be equal, contiguous matrices")
    if x.is_cuda:
        from graftline.kernels.norm_triton import add_rms_norm as kernel

        return kernel(x, residual, weight, eps)
    library = native_library()
    if library is None:
        total = x + residual
        return rms_norm_reference(total, weight, eps), total
    out, total = torch.empty(x.shape), torch.empty(x.shape)
    library.gl_add_rms_norm(
        x.data_ptr(),
        residual.data_ptr(),
        *x.shape,
        weight.data_ptr(),
        eps,
        out.data_ptr(),
        total.data_ptr(),
        num_threads(x.numel() // 16384),
    )
    return out, total


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The specification: arithmetic in float32, one rounding to the type of x at the end."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def _check(x: Tensor, weight: Tensor) -> None:
    if weight.shape != x.shape[-1:] or weight.dtype != x.dtype or not weight.is_contiguous():
        raise ValueError(f"weight: {weight.dtype} {tuple(weight.shape)} for x {x.dtype} {tuple(x.shape)}")
    if x.dim() < 2:
        raise ValueError(f"x: shape {tuple(x.shape)} has no rows")
    check_rows("x", x)
