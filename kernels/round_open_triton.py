"""Triton kernel of `graftline.kernels.round_open`: one program a sequence, and others that copy its page table."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from graftline.kernels.round_open import OpenRounds, RoundLayout

_BLOCK_PAGES = 1024


@triton.jit
def flat_slot(position, page_table_ptr, max_pages, inside, PAGE_SIZE: tl.constexpr):
    """Flat slots of some positions of one sequence, -1 where not `inside`."""
    column = tl.minimum(position // PAGE_SIZE, max_pages - 1)
    page = tl.load(page_table_ptr + column, mask=inside, other=0).to(tl.int64)
    return tl.where(inside, page * PAGE_SIZE + position % PAGE_SIZE, -1)


@triton.jit(do_not_specialize=("max_pages", "path_len", "most_nodes", "nodes"))
def _open_rounds_kernel(
    table_ptr, pages_ptr, round_slots_ptr, starts_ptr, path_ptr, accepted_start_ptr, num_nodes_ptr, tokens_ptr,
    parents_ptr, page_tables_ptr, positions_ptr, row_slots_ptr, visible_ptr, max_pages, path_len, most_nodes, nodes,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_PATH: tl.constexpr, BLOCK_PAGES: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    slot = tl.load(round_slots_ptr + sequence)
    own_pages = pages_ptr + slot * max_pages
    if tl.program_id(1) > 0:
        column = (tl.program_id(1) - 1) * BLOCK_PAGES + tl.arange(0, BLOCK_PAGES)
        page = tl.load(own_pages + column, mask=column < max_pages, other=0)
        tl.store(page_tables_ptr + sequence * max_pages + column, page, mask=column < max_pages)
    else:
        row = table_ptr + slot * (2 + path_len + 2 * most_nodes)
        start = tl.load(row).to(tl.int32)
        count = tl.minimum(tl.load(row + 1), nodes)
        place = tl.arange(0, BLOCK_PATH)
        accepted = tl.load(row + 2 + place, mask=place < path_len, other=-1)
        tl.store(starts_ptr + sequence, start)
        tl.store(num_nodes_ptr + sequence, count)
        tl.store(path_ptr + sequence * path_len + place, accepted.to(tl.int32), mask=place < path_len)
        tl.store(accepted_start_ptr + sequence, start - tl.sum((accepted >= 0).to(tl.int32)))
        node = tl.arange(0, BLOCK)
        inside = node < nodes
        token = tl.load(row + 2 + path_len + node, mask=inside, other=0)
        links = row + 2 + path_len + most_nodes
        parent = tl.load(links + node, mask=inside, other=0)
        at = sequence * nodes + node
        tl.store(tokens_ptr + at, token, mask=inside)
        tl.store(parents_ptr + at, parent, mask=inside)
        real = node < count
        ancestor = tl.where(real, node, -1)
        depth = tl.zeros((BLOCK,), tl.int32)
        seen = tl.zeros((BLOCK,), tl.int64)
        # Everyone climbs at once, as far as the deepest must.
        while tl.max(ancestor) >= 0:
            climbing = ancestor >= 0
            bit = tl.full((BLOCK,), 1, tl.int64) << tl.maximum(ancestor, 0).to(tl.int64)
            seen = tl.where(climbing, seen | bit, seen)
            above = tl.load(links + ancestor, mask=climbing, other=-1).to(tl.int32)
            above = tl.minimum(above, ancestor - 1)  # no padding value can make it go round
            depth += (climbing & (above >= 0)).to(tl.int32)
            ancestor = tl.where(climbing, above, -1)
        tl.store(positions_ptr + at, start + depth, mask=inside)
        tl.store(visible_ptr + at, seen, mask=inside)
        tl.store(row_slots_ptr + at, flat_slot(start + node, own_pages, max_pages, real, PAGE_SIZE), mask=inside)


def open_rounds(
    table: Tensor, pages: Tensor, slots: Tensor, layout: RoundLayout, page_size: int, nodes: int
) -> OpenRounds:
    """See `graftline.kernels.round_open.open_rounds`."""
    count, max_pages, device = slots.shape[0], pages.shape[1], table.device

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    opened = OpenRounds(
        start=empty(torch.int32, count),
        accepted=empty(torch.int32, count, layout.path_len),
        accepted_start=empty(torch.int32, count),
        num_nodes=empty(torch.int64, count),
        tokens=empty(torch.int64, count, nodes),
        parents=empty(torch.int64, count, nodes),
        page_tables=empty(torch.int32, count, max_pages),
        positions=empty(torch.int32, count * nodes),
        row_slots=empty(torch.int64, count * nodes),
        visible=empty(torch.int64, count * nodes),
    )
    if count:
        _open_rounds_kernel[(count, 1 + triton.cdiv(max_pages, _BLOCK_PAGES))](
            table, pages, slots, opened.start, opened.accepted, opened.accepted_start, opened.num_nodes,
            opened.tokens, opened.parents, opened.page_tables, opened.positions, opened.row_slots, opened.visible,
            max_pages, layout.path_len, layout.nodes, nodes, PAGE_SIZE=page_size, BLOCK=triton.next_power_of_2(nodes),
            BLOCK_PATH=triton.next_power_of_2(layout.path_len), BLOCK_PAGES=_BLOCK_PAGES, num_warps=1,
        )  # fmt: skip
    return opened
