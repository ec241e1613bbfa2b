"""Triton kernel of `graftline.kernels.rope`: one program a row, all heads of q and k."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rope_kernel(
    q_ptr, k_ptr, positions_ptr, cos_ptr, sin_ptr, q_stride, k_stride, q_heads, k_heads, head_dim, half,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, BLOCK_HEADS)[:, None]
    columns = tl.arange(0, BLOCK_HALF)[None, :]
    position = tl.load(positions_ptr + row).to(tl.int64)
    cos = tl.load(cos_ptr + position * half + columns, mask=columns < half, other=0.0)
    sin = tl.load(sin_ptr + position * half + columns, mask=columns < half, other=0.0)
    is_k = heads >= q_heads
    inside = (heads < q_heads + k_heads) & (columns < half)
    q_at = q_ptr + row * q_stride + heads * head_dim + columns
    k_at = k_ptr + row * k_stride + (heads - q_heads) * head_dim + columns
    first_at = tl.where(is_k, k_at, q_at)
    first = tl.load(first_at, mask=inside, other=0.0)
    second = tl.load(first_at + half, mask=inside, other=0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    tl.store(first_at, (a * cos - b * sin).to(first.dtype), mask=inside)
    tl.store(first_at + half, (b * cos + a * sin).to(first.dtype), mask=inside)


def rope_(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
    """See `graftline.kernels.rope.rope_`."""
    rows, q_heads, head_dim = q.shape
    if rows:
        _rope_kernel[(rows,)](
            q, k, positions, cos, sin, q.stride(0), k.stride(0), q_heads, k.shape[1], head_dim, cos.shape[1],
            BLOCK_HEADS=triton.next_power_of_2(q_heads + k.shape[1]),
            BLOCK_HALF=triton.next_power_of_2(cos.shape[1]),
        )  # fmt: skip
