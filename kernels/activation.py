"""Gated activation of the feed-forward block (SwiGLU, Shazeer 2020)."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from graftline.kernels.checks import check_rows
from graftline.kernels.native_library import native_library, num_threads


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up.

    Args:
        gate_up: [rows, 2 * inter]: gate, then up; contiguous.

    Returns:
        [rows, inter], type of gate_up.

    Raises:
        ValueError: an odd last dimension.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or not gate_up.is_contiguous():
        raise ValueError(f"gate_up: shape {tuple(gate_up.shape)} is not a contiguous [rows, 2 * inter]")
    check_rows("gate_up", gate_up)
    if gate_up.is_cuda:
        from graftline.kernels.activation_triton import silu_mul as kernel

        return kernel(gate_up)
    library = native_library()
    if library is None:
        return silu_mul_reference(gate_up)
    rows, inter = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, inter))
    library.gl_silu_mul(gate_up.data_ptr(), rows, inter, out.data_ptr(), num_threads(out.numel() // 16384))
    return out


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """The specification: float32 arithmetic, one rounding at the end."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (silu(gate) * up).to(gate_up.dtype)
