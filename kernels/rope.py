"""Rotary position embedding, NeoX halves (Su et al. 2021), in place, also over a part of the head only."""

import torch
from torch import Tensor

from graftline.kernels.checks import check_rows
from graftline.kernels.native_library import native_library, num_threads


def rope_(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates q and k in place: dims [0, rot/2) pair with [rot/2, rot), dims from rot on stay.

    Args:
        q: [rows, heads, head_dim]; rows may be strided, [heads, head_dim] is contiguous.
        k: [rows, kv_heads, head_dim], likewise.
        positions: [rows] int32.
        cos: [max_positions, rot / 2] float32, scaling factors included.
        sin: likewise.

    Raises:
        ValueError: shapes that do not fit.
    """
    if q.shape[0] != positions.shape[0] or k.shape[0] != positions.shape[0]:
        raise ValueError(f"{q.shape[0]} q rows and {k.shape[0]} k rows for {positions.shape[0]} positions")
    if cos.shape != sin.shape or 2 * cos.shape[1] > q.shape[2] or q.shape[2] != k.shape[2]:
        raise ValueError(f"cos {tuple(cos.shape)}, sin {tuple(sin.shape)} for heads of {q.shape[2]} and {k.shape[2]}")
    check_rows("q", q)
    check_rows("k", k)
    if (
        positions.dtype != torch.int32
        or cos.dtype != torch.float32
        or not cos.is_contiguous()
        or not sin.is_contiguous()
    ):
        raise ValueError(f"positions {positions.dtype}, cos {cos.dtype}: int32 and contiguous float32 are wanted")
    if q.is_cuda:
        from graftline.kernels.rope_triton import rope_ as kernel

        kernel(q, k, positions, cos, sin)
        return
    library = native_library()
    if library is None:
        rope_reference_(q, positions, cos, sin)
        rope_reference_(k, positions, cos, sin)
        return
    library.gl_rope(
        q.data_ptr(),
        q.stride(0),
        q.shape[1],
        k.data_ptr(),
        k.stride(0),
        k.shape[1],
        q.shape[0],
        q.shape[2],
        positions.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        cos.shape[1],
        num_threads(q.numel() // 16384),
    )


def rope_reference_(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
    """The specification for one tensor [rows, heads, head_dim]."""
    half = cos.shape[1]
    row_cos = cos[positions.long()].unsqueeze(1)  # [rows, 1, half]
    row_sin = sin[positions.long()].unsqueeze(1)
    first = x[..., :half].float()  # of a float32 x this is a view: both results come before the first write
    second = x[..., half : 2 * half].float()
    rotated_first = (first * row_cos - second * row_sin).to(x.dtype)
    x[..., half : 2 * half] = (second * row_cos + first * row_sin).to(x.dtype)
    x[..., :half] = rotated_first
