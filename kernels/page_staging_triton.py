"""Triton kernels of `graftline.kernels.page_staging`: one program a (page, piece)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_PIECE_WORDS = 2048


@triton.jit
def _gather_kernel(pool_ptr, page_ids_ptr, staging_ptr, page_words, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    words = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = words < page_words
    page = tl.load(page_ids_ptr + index)
    moved = tl.load(pool_ptr + page * page_words + words, mask=inside, other=0)
    tl.store(staging_ptr + index * page_words + words, moved, mask=inside)


@triton.jit
def _scatter_kernel(staging_ptr, page_ids_ptr, pool_ptr, page_words, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    words = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = words < page_words
    page = tl.load(page_ids_ptr + index)
    moved = tl.load(staging_ptr + index * page_words + words, mask=inside, other=0)
    tl.store(pool_ptr + page * page_words + words, moved, mask=inside)


def gather_pages(pool: Tensor, page_ids: Tensor, staging: Tensor) -> None:
    """See `graftline.kernels.page_staging.gather_pages`."""
    word = _word(pool.shape[1])
    page_words = pool.shape[1] // word.itemsize
    if page_ids.shape[0]:
        block = min(_PIECE_WORDS, triton.next_power_of_2(page_words))
        grid = (page_ids.shape[0], triton.cdiv(page_words, block))
        _gather_kernel[grid](pool.view(word), page_ids, staging.view(word), page_words, BLOCK=block)


def scatter_pages(staging: Tensor, page_ids: Tensor, pool: Tensor) -> None:
    """See `graftline.kernels.page_staging.scatter_pages`."""
    word = _word(pool.shape[1])
    page_words = pool.shape[1] // word.itemsize
    if page_ids.shape[0]:
        block = min(_PIECE_WORDS, triton.next_power_of_2(page_words))
        grid = (page_ids.shape[0], triton.cdiv(page_words, block))
        _scatter_kernel[grid](staging.view(word), page_ids, pool.view(word), page_words, BLOCK=block)


def _word(num_bytes: int) -> torch.dtype:
    """The widest integer that divides a page."""
    words = (torch.int64, torch.int32, torch.int16, torch.uint8)
    return next(dtype for dtype in words if num_bytes % dtype.itemsize == 0)
