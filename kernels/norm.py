"""RMSNorm, alone or fused with the residual addition before it (Zhang & Sennrich 2019)."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension.

    Args:
        x: [..., dim] float32 on CPU; rows may be strided, the last dimension must be contiguous. A per-head norm
            (qk-norm) is the same call on [rows, heads, head_dim].
        weight: [dim], same type as x.
        eps: added to the mean square.

    Returns:
        [..., dim] contiguous, type of x.
    """
    return rms_norm_reference(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`(rms_norm(x + residual), x + residual)`.

    Args:
        x: [rows, dim].
        residual: [rows, dim].
        weight: [dim].
        eps: added to the mean square.
    """
    total = x + residual
    return rms_norm_reference(total, weight, eps), total


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The specification: arithmetic in float32, one rounding to the type of x at the end."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)
