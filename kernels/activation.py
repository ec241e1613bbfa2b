"""Gated activation of the feed-forward block (SwiGLU, Shazeer 2020)."""

from torch import Tensor
from torch.nn.functional import silu


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up.

    Args:
        gate_up: [rows, 2 * inter]: gate, then up; contiguous.

    Returns:
        [rows, inter], type of gate_up.

    Raises:
        ValueError: an odd last dimension.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up: shape {tuple(gate_up.shape)} is not [rows, 2 * inter]")
    return silu_mul_reference(gate_up)


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """The specification: float32 arithmetic, one rounding at the end."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (silu(gate) * up).to(gate_up.dtype)
