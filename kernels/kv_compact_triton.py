"""Triton kernel of `graftline.kernels.kv_compact`: one program a (sequence, plane)."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=("max_pages", "max_accepted"))
def _compact_kv_kernel(
    pool_ptr, page_tables_ptr, starts_ptr, accepted_ptr, planes, page_size, token_words, max_pages, max_accepted,
    BLOCK: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    plane = tl.program_id(1).to(tl.int64)
    start = tl.load(starts_ptr + sequence).to(tl.int64)
    words = tl.arange(0, BLOCK)
    # In order: a token moves to its own slot or an earlier one, which nobody reads any more.
    for index in range(max_accepted):
        node = tl.load(accepted_ptr + sequence * max_accepted + index).to(tl.int64)
        if node > index:
            source = start + node
            target = start + index
            table = page_tables_ptr + sequence * max_pages
            source_page = tl.load(table + source // page_size).to(tl.int64)
            target_page = tl.load(table + target // page_size).to(tl.int64)
            from_ptr = pool_ptr + ((source_page * planes + plane) * page_size + source % page_size) * token_words
            to_ptr = pool_ptr + ((target_page * planes + plane) * page_size + target % page_size) * token_words
            for first in range(0, token_words, BLOCK):
                inside = first + words < token_words
                moved = tl.load(from_ptr + first + words, mask=inside, other=0)
                tl.store(to_ptr + first + words, moved, mask=inside)


def compact_kv(pool: Tensor, page_tables: Tensor, starts: Tensor, accepted: Tensor) -> None:
    """See `graftline.kernels.kv_compact.compact_kv`."""
    _, planes, page_size, token_bytes = pool.shape
    word = next(
        dtype for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8) if token_bytes % dtype.itemsize == 0
    )
    token_words = token_bytes // word.itemsize
    sequences, max_accepted = accepted.shape
    if sequences and max_accepted:
        _compact_kv_kernel[(sequences, planes)](
            pool.view(word), page_tables, starts, accepted, planes, page_size, token_words, page_tables.shape[1],
            max_accepted, BLOCK=min(1024, triton.next_power_of_2(token_words)),
        )  # fmt: skip
