"""Triton kernel of `graftline.kernels.gating`: one program a (row, block of columns)."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _sigmoid_mul_kernel(
    x_ptr, gate_ptr, out_ptr, x_stride, gate_stride, columns, ONE_GATE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < columns
    x = tl.load(x_ptr + row * x_stride + c, mask=inside, other=0.0)
    at = c * 0 if ONE_GATE else c
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    out = x.to(tl.float32) / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + row * columns + c, out.to(x.dtype), mask=inside)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """See `graftline.kernels.gating.sigmoid_mul`."""
    rows, columns = x.shape
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(columns))
    if rows:
        _sigmoid_mul_kernel[(rows, triton.cdiv(columns, block))](
            x, gate, out, x.stride(0), gate.stride(0), columns, ONE_GATE=gate.shape[1] == 1, BLOCK=block
        )
    return out
