"""Triton kernels of `graftline.kernels.round_walk`: one program a sequence."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from graftline.kernels.round_open import OpenRounds, RoundLayout
from graftline.kernels.round_open_triton import flat_slot
from graftline.kernels.round_walk import WalkedRounds


@triton.jit(do_not_specialize=("max_pages", "path_len", "nodes", "limit"))
def _walk_rounds_kernel(
    tokens_ptr, parents_ptr, num_nodes_ptr, sampled_ptr, starts_ptr, page_tables_ptr, path_ptr, emitted_ptr, bonus_ptr,
    new_starts_ptr, path_rows_ptr, next_tokens_ptr, positions_ptr, row_slots_ptr, visible_ptr, last_ptr, nodes,
    path_len, max_pages, limit, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_PATH: tl.constexpr,
):  # fmt: skip
    tree = tl.program_id(0).to(tl.int64)
    count = tl.minimum(tl.load(num_nodes_ptr + tree), nodes).to(tl.int32)
    node = tl.arange(0, BLOCK)
    drafted = (node > 0) & (node < count)
    tokens = tl.load(tokens_ptr + tree * nodes + node, mask=drafted, other=-1)
    parents = tl.load(parents_ptr + tree * nodes + node, mask=drafted, other=-1).to(tl.int32)
    place = tl.arange(0, BLOCK_PATH)
    path = tl.full((BLOCK_PATH,), -1, tl.int32)
    length = 0
    at = tl.where(count > 0, 0, BLOCK)
    while (at < BLOCK) & (length < path_len):
        path = tl.where(place == length, at, path)
        length += 1
        sample = tl.load(sampled_ptr + tree * nodes + at)
        fits = drafted & (parents == at) & (tokens == sample) & (sample >= 0)
        at = tl.min(tl.where(fits, node, BLOCK))
    inside = place < path_len
    real = place < length
    step = tl.maximum(path, 0)
    emitted = tl.load(sampled_ptr + tree * nodes + step, mask=real, other=-1)
    start = tl.load(starts_ptr + tree)
    to = tree * path_len + place
    tl.store(path_ptr + to, path, mask=inside)
    tl.store(emitted_ptr + to, emitted, mask=inside)
    last = tl.maximum(length - 1, 0)
    bonus = tl.sum(tl.where(place == last, emitted, 0))
    tl.store(bonus_ptr + tree, tl.maximum(bonus, 0))
    tl.store(new_starts_ptr + tree, start + length)
    tl.store(last_ptr + tree, tree * path_len + last)
    tl.store(path_rows_ptr + to, tree * nodes + step, mask=inside)
    tl.store(next_tokens_ptr + to, tl.maximum(emitted, 0), mask=inside)
    tl.store(positions_ptr + to, tl.minimum(start + place, limit - 1), mask=inside)
    table = page_tables_ptr + tree * max_pages
    tl.store(row_slots_ptr + to, flat_slot(start + place, table, max_pages, real, PAGE_SIZE), mask=inside)
    seen = (tl.full((BLOCK_PATH,), 2, tl.int64) << place.to(tl.int64)) - 1
    tl.store(visible_ptr + to, tl.where(real, seen, 0), mask=inside)


@triton.jit(do_not_specialize=("padding_slot", "path_len", "nodes"))
def _close_rounds_kernel(
    table_ptr, round_slots_ptr, starts_ptr, num_nodes_ptr, path_ptr, emitted_ptr, tokens_ptr, parents_ptr, result_ptr,
    padding_slot, path_len, nodes, BLOCK: tl.constexpr, BLOCK_PATH: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    slot = tl.load(round_slots_ptr + sequence)
    is_real = slot != padding_slot
    width = 2 + path_len + 2 * nodes
    row = table_ptr + slot * width
    result = result_ptr + sequence * (path_len + width)
    place = tl.arange(0, BLOCK_PATH)
    in_path = place < path_len
    tl.store(result + place, tl.load(emitted_ptr + sequence * path_len + place, mask=in_path, other=-1), mask=in_path)
    kept = result + path_len
    start = tl.where(is_real, tl.load(starts_ptr + sequence).to(tl.int64), 0)
    count = tl.where(is_real, tl.load(num_nodes_ptr + sequence), 0)
    accepted = tl.load(path_ptr + sequence * path_len + place, mask=in_path, other=-1).to(tl.int64)
    accepted = tl.where(is_real, accepted, -1)
    node = tl.arange(0, BLOCK)
    in_tree = node < nodes
    token = tl.load(tokens_ptr + sequence * nodes + node, mask=in_tree, other=0)
    parent = tl.load(parents_ptr + sequence * nodes + node, mask=in_tree, other=0)
    tl.store(row, start)
    tl.store(kept, start)
    tl.store(row + 1, count)
    tl.store(kept + 1, count)
    tl.store(row + 2 + place, accepted, mask=in_path)
    tl.store(kept + 2 + place, accepted, mask=in_path)
    tl.store(row + 2 + path_len + node, token, mask=in_tree)
    tl.store(kept + 2 + path_len + node, token, mask=in_tree)
    tl.store(row + 2 + path_len + nodes + node, parent, mask=in_tree)
    tl.store(kept + 2 + path_len + nodes + node, parent, mask=in_tree)


def walk_rounds(opened: OpenRounds, sampled: Tensor, page_size: int, position_limit: int) -> WalkedRounds:
    """See `graftline.kernels.round_walk.walk_rounds`."""
    count, nodes = sampled.shape
    path_len, device = opened.accepted.shape[1], sampled.device

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    walked = WalkedRounds(
        accepted=empty(torch.int32, count, path_len),
        emitted=empty(torch.int64, count, path_len),
        bonus=empty(torch.int64, count),
        start=empty(torch.int32, count),
        nodes=empty(torch.int64, count * path_len),
        next_tokens=empty(torch.int64, count * path_len),
        positions=empty(torch.int32, count * path_len),
        row_slots=empty(torch.int64, count * path_len),
        visible=empty(torch.int64, count * path_len),
        last=empty(torch.int64, count),
    )
    if count:
        _walk_rounds_kernel[(count,)](
            opened.tokens, opened.parents, opened.num_nodes, sampled, opened.start, opened.page_tables,
            walked.accepted, walked.emitted, walked.bonus, walked.start, walked.nodes, walked.next_tokens,
            walked.positions, walked.row_slots, walked.visible, walked.last, nodes, path_len,
            opened.page_tables.shape[1], position_limit, PAGE_SIZE=page_size, BLOCK=triton.next_power_of_2(nodes),
            BLOCK_PATH=triton.next_power_of_2(path_len), num_warps=1,
        )  # fmt: skip
    return walked


def close_rounds(
    table: Tensor,
    slots: Tensor,
    padding_slot: int,
    layout: RoundLayout,
    walked: WalkedRounds,
    tokens: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
) -> Tensor:
    """See `graftline.kernels.round_walk.close_rounds`."""
    count = slots.shape[0]
    result = torch.empty((count, layout.path_len + layout.width), dtype=torch.int64, device=table.device)
    if count:
        _close_rounds_kernel[(count,)](
            table, slots, walked.start, num_nodes.contiguous(), walked.accepted, walked.emitted, tokens.contiguous(),
            parents.contiguous(), result, padding_slot, layout.path_len, layout.nodes,
            BLOCK=triton.next_power_of_2(layout.nodes), BLOCK_PATH=triton.next_power_of_2(layout.path_len),
            num_warps=1,
        )  # fmt: skip
    return result
