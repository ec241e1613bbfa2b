"""Triton kernels of `graftline.kernels.norm`: one program a row (or a row's head)."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, out_ptr, x_stride, heads, dim, eps, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < dim
    x = tl.load(x_ptr + index // heads * x_stride + index % heads * dim + columns, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / dim + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + index * dim + columns, (wide * scale * weight).to(x.dtype), mask=inside)


@triton.jit
def _add_rms_norm_kernel(x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, dim, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < dim
    at = row * dim + columns
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    residual = tl.load(residual_ptr + at, mask=inside, other=0.0)
    total = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    tl.store(total_ptr + at, total, mask=inside)
    wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / dim + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (wide * scale * weight).to(x.dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `graftline.kernels.norm.rms_norm`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dim = x.shape[-1]
    count = x.numel() // dim
    if count:
        heads = count // x.shape[0]
        block, warps = _launch_shape(dim)
        _rms_norm_kernel[(count,)](x, weight, out, x.stride(0), heads, dim, eps, BLOCK=block, num_warps=warps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `graftline.kernels.norm.add_rms_norm`."""
    out, total = torch.empty_like(x), torch.empty_like(x)
    rows, dim = x.shape
    if rows:
        block, warps = _launch_shape(dim)
        _add_rms_norm_kernel[(rows,)](x, residual, weight, out, total, dim, eps, BLOCK=block, num_warps=warps)
    return out, total


def _launch_shape(dim: int) -> tuple[int, int]:
    block = triton.next_power_of_2(dim)
    return block, min(16, max(1, block // 512))
