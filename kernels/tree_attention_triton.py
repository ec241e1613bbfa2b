"""Triton kernels of attention over `TreeBatch`: rounds of fixed shape, where only the device knows the lengths.

The grid follows from shapes alone. A program takes up to a tile of the (row, head) pairs that share one KV head and one
split of the sequence's slots; how long a split is, and which splits have work at all, it reads from `starts`. The
committed slots need no mask. A second kernel combines the splits that had work.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from graftline.kernels.tree_batch import TreeBatch

_MAX_SPLITS = 64
_LONG_SPLIT = 4096  # slots: a sequence longer than this is worth a second program on a busy device
_COMBINED_ELEMENTS = 8192  # that the registers of a program hold
_BUSY_PROGRAMS = 1024
_LOG2_E = 1.4426950408889634
# They differ from level to level and round to round; one compiled kernel must serve them all.
_SHAPES = ("rows_each", "num_tail", "max_pages", "num_splits", "min_span", "pairs_each")


@triton.jit
def _join(scores, v, largest, total, acc):
    """One block of the online softmax, in powers of two; a row may have seen nothing yet."""
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    finite = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    keep = tl.exp2(largest - finite)
    weights = tl.exp2(scores - finite[:, None])
    total = total * keep + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
    return new_largest, total, acc


@triton.jit
def _places(page, slot, kv_head, page_stride, PAGE_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Elements of the pages where a KV head's vectors of these slots begin."""
    return page.to(tl.int64) * page_stride + (slot % PAGE_SIZE * KV_HEADS + kv_head) * HEAD_DIM


@triton.jit
def _span(start, num_tail, num_splits, min_span, BLOCK_N: tl.constexpr):
    """Slots a split takes: whole blocks."""
    even = tl.cdiv(start + num_tail, num_splits)
    return tl.cdiv(tl.maximum(even, min_span), BLOCK_N) * BLOCK_N


@triton.jit(do_not_specialize=_SHAPES)
def _tree_attention_kernel(
    q_ptr, k_pages_ptr, v_pages_ptr, out_ptr, partial_ptr, state_ptr, visible_ptr, starts_ptr, page_tables_ptr,
    q_stride, page_stride, rows_each, num_tail, max_pages, num_splits, min_span, scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr, WIDEN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(rows_each * GROUP, BLOCK_M)
    kv_head = tl.program_id(0) // tiles
    split = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    start = tl.load(starts_ptr + sequence)
    end = start + num_tail
    begin = 0
    if SPLIT:
        span = _span(start, num_tail, num_splits, min_span, BLOCK_N)
        begin = split * span
        end = tl.minimum(end, begin + span)
    if begin < end:
        pair = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
        local = pair // GROUP
        real = local < rows_each
        row = sequence * rows_each + local
        head = kv_head * GROUP + pair % GROUP
        d = tl.arange(0, BLOCK_D)
        in_head = d < HEAD_DIM
        q_at = q_ptr + row[:, None] * q_stride + head[:, None] * HEAD_DIM + d[None, :]
        q = tl.load(q_at, mask=real[:, None] & in_head[None, :], other=0.0)
        if WIDEN:
            q = q.to(tl.float32)
        largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        n = tl.arange(0, BLOCK_N)
        table = page_tables_ptr + sequence * max_pages
        # Blocks of committed slots alone: nothing to mask.
        committed = tl.maximum(begin, tl.minimum(end, start // BLOCK_N * BLOCK_N))
        page = tl.load(table + (begin + n) // PAGE_SIZE, mask=begin + n < committed, other=0)
        for first in tl.range(begin, committed, BLOCK_N, num_stages=STAGES):
            slot = first + n
            at = _places(page, slot, kv_head, page_stride, PAGE_SIZE, KV_HEADS, HEAD_DIM)
            if HEAD_DIM == BLOCK_D:
                k = tl.load(k_pages_ptr + at[:, None] + d[None, :])
                v = tl.load(v_pages_ptr + at[:, None] + d[None, :])
            else:
                k = tl.load(k_pages_ptr + at[:, None] + d[None, :], mask=in_head[None, :], other=0.0)
                v = tl.load(v_pages_ptr + at[:, None] + d[None, :], mask=in_head[None, :], other=0.0)
            if WIDEN:
                k = k.to(tl.float32)
                v = v.to(tl.float32)
            # A step ahead, so that reading ahead waits for no table.
            page = tl.load(table + (slot + BLOCK_N) // PAGE_SIZE, mask=slot + BLOCK_N < committed, other=0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            largest, total, acc = _join(scores, v, largest, total, acc)
        # The last blocks: slots that no row sees may hold anything, also NaN, and are not read.
        bits = tl.load(visible_ptr + row, mask=real, other=0)
        for first in tl.range(committed, end, BLOCK_N, num_stages=1):
            slot = first + n
            bit = slot - start
            own = (bits[:, None] >> tl.minimum(tl.maximum(bit, 0), 63)[None, :].to(tl.int64)) & 1
            visible = ((bit < 0)[None, :] | (own != 0)) & (slot < end)[None, :]
            seen = tl.max(visible.to(tl.int32), 0) > 0
            page = tl.load(table + slot // PAGE_SIZE, mask=seen, other=0)
            at = _places(page, slot, kv_head, page_stride, PAGE_SIZE, KV_HEADS, HEAD_DIM)
            kv_mask = seen[:, None] & in_head[None, :]
            k = tl.load(k_pages_ptr + at[:, None] + d[None, :], mask=kv_mask, other=0.0)
            v = tl.load(v_pages_ptr + at[:, None] + d[None, :], mask=kv_mask, other=0.0)
            if WIDEN:
                k = k.to(tl.float32)
                v = v.to(tl.float32)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            scores = tl.where(visible, scores, float("-inf"))
            largest, total, acc = _join(scores, v, largest, total, acc)
        out_mask = real[:, None] & in_head[None, :]
        place = row * (KV_HEADS * GROUP) + head
        if SPLIT:
            place = place * num_splits + split
            tl.store(partial_ptr + place[:, None] * HEAD_DIM + d[None, :], acc, mask=out_mask)
            tl.store(state_ptr + place * 2, largest, mask=real)
            tl.store(state_ptr + place * 2 + 1, total, mask=real)
        else:
            result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            at_out = out_ptr + place[:, None] * HEAD_DIM + d[None, :]
            tl.store(at_out, result.to(out_ptr.dtype.element_ty), mask=out_mask)


@triton.jit(do_not_specialize=(*_SHAPES, "num_places"))
def _combine_tree_kernel(
    partial_ptr, state_ptr, out_ptr, starts_ptr, num_places, pairs_each, num_tail, num_splits, min_span,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)  # row * heads + head
    real = place < num_places
    start = tl.load(starts_ptr + place // pairs_each, mask=real, other=0)
    used = tl.cdiv(start + num_tail, _span(start, num_tail, num_splits, min_span, BLOCK_N))
    splits = tl.arange(0, BLOCK_SPLITS)
    d = tl.arange(0, BLOCK_D)
    inside = real[:, None] & (splits[None, :] < used[:, None])
    part = place[:, None] * num_splits + splits[None, :]
    largest = tl.load(state_ptr + part * 2, mask=inside, other=float("-inf"))
    total = tl.load(state_ptr + part * 2 + 1, mask=inside, other=0.0)
    most = tl.max(largest, 1)
    factor = tl.exp2(largest - tl.where(most == float("-inf"), 0.0, most)[:, None])
    in_head = d < HEAD_DIM
    parts = tl.load(
        partial_ptr + part[:, :, None] * HEAD_DIM + d[None, None, :], mask=inside[:, :, None] & in_head[None, None, :],
        other=0.0,
    )  # fmt: skip
    sums = tl.sum(total * factor, 1)
    result = tl.sum(parts * factor[:, :, None], 1) / tl.where(sums == 0.0, 1.0, sums)[:, None]
    at_out = out_ptr + place[:, None] * HEAD_DIM + d[None, :]
    tl.store(at_out, result.to(out_ptr.dtype.element_ty), mask=real[:, None] & in_head[None, :])


class Tiling(NamedTuple):
    """How attention over a tree batch is cut up.

    Attributes:
        block_m: (row, head) pairs of one KV head a program.
        block_n: slots a step.
        num_splits: programs that share a sequence's slots.
        min_span: slots a split takes at least, as long as there are that many.
    """

    block_m: int
    block_n: int
    num_splits: int
    min_span: int
    num_warps: int
    num_stages: int


def choose_tiling(
    sequences: int, kv_heads: int, pairs: int, head_dim: int, itemsize: int, max_slots: int, processors: int
) -> Tiling:
    """A tiling from what the host knows.

    Args:
        pairs: rows of a sequence times query heads of a KV head.
        itemsize: bytes of a K or V element.
        max_slots: what a page table can name; lengths are usually far below.
        processors: multiprocessors of the device.
    """
    block_d = max(16, triton.next_power_of_2(head_dim))
    is_wide = itemsize == 4  # no tensor cores: products are unrolled, and only small ones fit into registers
    largest_m = 16 if is_wide else 128 if block_d <= 128 else 64
    block_m = min(largest_m, max(16, triton.next_power_of_2(pairs)))
    block_n = 16 if is_wide else 64 if block_d <= 128 else 32
    programs = sequences * kv_heads * triton.cdiv(pairs, block_m)
    at_once = processors * (2 if block_d >= 128 else 4)  # their shared memory lets no more run
    wanted = at_once // programs if programs <= at_once else 2 if pairs <= 8 else 1
    # Long programs, two on a multiprocessor, get in each other's way where they make about two rounds: docs/results.md.
    # One that reads further ahead does not.
    for_long = min(8, max_slots // _LONG_SPLIT)
    num_stages = 2 if is_wide else 4 if for_long > wanted and block_m <= 32 else 3
    wanted = max(wanted, for_long)
    min_span = 64 if 4 * programs <= processors else 256 if programs <= processors else 512
    min_span = max(min_span, 2 * pairs)
    num_splits = max(1, min(_MAX_SPLITS, wanted, max_slots // min_span))
    return Tiling(block_m, block_n, num_splits, min_span, 8 if is_wide or block_m == 128 else 4, num_stages)


def tree_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: TreeBatch, scale: float, tiling: Tiling | None = None
) -> Tensor:
    """See `graftline.kernels.attention.paged_attention`; the tiling is chosen from shapes when None."""
    rows, heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not rows:
        return out
    kv_heads = k_pages.shape[2]
    group, pairs = heads // kv_heads, batch.rows_each * (heads // kv_heads)
    if tiling is None:
        max_slots = batch.page_tables.shape[1] * batch.page_size
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
        tiling = choose_tiling(
            batch.num_segments, kv_heads, pairs, head_dim, k_pages.element_size(), max_slots, processors
        )
    is_split = tiling.num_splits > 1
    partial = state = out
    if is_split:
        partial = torch.empty((rows, heads, tiling.num_splits, head_dim), dtype=torch.float32, device=q.device)
        state = torch.empty((rows, heads, tiling.num_splits, 2), dtype=torch.float32, device=q.device)
    block_d = max(16, triton.next_power_of_2(head_dim))
    grid = (kv_heads * triton.cdiv(pairs, tiling.block_m), tiling.num_splits, batch.num_segments)
    _tree_attention_kernel[grid](
        q, k_pages, v_pages, out, partial, state, batch.visible, batch.starts, batch.page_tables,
        q.stride(0), k_pages.stride(0), batch.rows_each, batch.num_tail, batch.page_tables.shape[1],
        tiling.num_splits, tiling.min_span, scale * _LOG2_E,
        GROUP=group, KV_HEADS=kv_heads, HEAD_DIM=head_dim, PAGE_SIZE=batch.page_size,
        BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n, BLOCK_D=block_d, SPLIT=is_split,
        WIDEN=q.dtype == torch.float32 or q.device.type == "cpu", STAGES=tiling.num_stages,
        num_warps=tiling.num_warps,
    )  # fmt: skip
    if is_split:
        places = rows * heads
        block_splits = triton.next_power_of_2(tiling.num_splits)
        block_p = _places_a_program(places, block_splits * block_d)
        _combine_tree_kernel[(triton.cdiv(places, block_p),)](
            partial, state, out, batch.starts, places, batch.rows_each * heads, batch.num_tail, tiling.num_splits,
            tiling.min_span, HEAD_DIM=head_dim, BLOCK_N=tiling.block_n, BLOCK_P=block_p, BLOCK_SPLITS=block_splits,
            BLOCK_D=block_d, num_warps=min(4, max(1, block_p * block_splits * block_d // 1024)),
        )  # fmt: skip
    return out


def _places_a_program(places: int, elements: int) -> int:
    """Rows' heads that a program combines, of so many elements each: few while that keeps the device busy."""
    block = 1
    while block * elements < _COMBINED_ELEMENTS and places // block > _BUSY_PROGRAMS:
        block *= 2
    return block
