"""Triton kernel of `graftline.kernels.activation`."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, inter, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < inter
    at = gate_up_ptr + row * 2 * inter + columns
    gate = tl.load(at, mask=inside, other=0.0)
    up = tl.load(at + inter, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    tl.store(out_ptr + row * inter + columns, (wide / (1.0 + tl.exp(-wide)) * up).to(gate.dtype), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `graftline.kernels.activation.silu_mul`."""
    rows, inter = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, inter), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        block = min(1024, triton.next_power_of_2(inter))
        _silu_mul_kernel[(rows, triton.cdiv(inter, block))](gate_up, out, inter, BLOCK=block)
    return out
