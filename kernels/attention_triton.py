"""Triton kernel of `graftline.kernels.attention`: prefill chunks, decode rows and trees over paged KV.

A program takes a tile of rows of one segment with all query heads of one KV head, and walks the segment's slots in
blocks, or, where that leaves the device idle, one of several splits of them, combined by a second kernel.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from graftline.kernels.attention_batch import AttentionBatch

_MAX_SPLITS = 32
_MIN_SPLIT_SLOTS = 128
# What differs from step to step compiles nothing anew: a stall in the middle of serving would be the price.
_SEGMENTS_BLOCK = 16
_BY_STEP = ("num_segments", "num_rows", "max_pages", "num_splits")


@triton.jit(do_not_specialize=_BY_STEP)
def _attention_kernel(
    q_ptr, k_pages_ptr, v_pages_ptr, out_ptr, partial_ptr, state_ptr,
    positions_ptr, parents_ptr, segment_rows_ptr, segment_start_ptr, page_tables_ptr,
    q_stride, page_stride, num_segments, num_rows, max_pages, page_size, heads, kv_heads, head_dim, scale, num_splits,
    GROUP: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr, IS_CHAIN: tl.constexpr, SPLIT: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    # Which segment this tile lies in: tiles are numbered segment by segment.
    lanes = tl.arange(0, BLOCK_S)
    row_ends = tl.load(segment_rows_ptr + 1 + lanes, mask=lanes < num_segments, other=0)
    row_begins = tl.load(segment_rows_ptr + lanes, mask=lanes < num_segments, other=0)
    tile_ends = tl.cumsum((row_ends - row_begins + TILE_ROWS - 1) // TILE_ROWS, 0)
    segment = tl.sum(((tile_ends <= tile) & (lanes < num_segments)).to(tl.int32))
    if segment < num_segments:
        tiles_before = tl.max(tl.where(lanes < segment, tile_ends, 0))
        segment_first = tl.load(segment_rows_ptr + segment)
        rows_of_segment = tl.load(segment_rows_ptr + segment + 1) - segment_first
        start = tl.load(segment_start_ptr + segment)
        m = tl.arange(0, BLOCK_M)
        local = (tile - tiles_before) * TILE_ROWS + m // GROUP
        real = (m < TILE_ROWS * GROUP) & (local < rows_of_segment)
        row = (segment_first + local).to(tl.int64)
        head = kv_head * GROUP + m % GROUP
        d = tl.arange(0, BLOCK_D)
        q_at = q_ptr + row[:, None] * q_stride + head[:, None] * head_dim + d[None, :]
        q = tl.load(q_at, mask=real[:, None] & (d[None, :] < head_dim), other=0.0)
        if WIDEN:
            q = q.to(tl.float32)
        last_local = tl.minimum((tile - tiles_before + 1) * TILE_ROWS, rows_of_segment)
        end = start + last_local
        begin = 0
        if SPLIT:
            span = tl.cdiv(tl.cdiv(end, num_splits), BLOCK_N) * BLOCK_N
            begin = split * span
            end = tl.minimum(end, begin + span)
        depth = tl.load(positions_ptr + row, mask=real, other=0) - start
        max_depth = tl.max(tl.where(real, depth, 0))
        largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        n = tl.arange(0, BLOCK_N)
        table = page_tables_ptr + segment.to(tl.int64) * max_pages
        for first in range(begin, end, BLOCK_N):
            slot = first + n
            inside = slot < end
            page = tl.load(table + slot // page_size, mask=inside, other=0).to(tl.int64)
            at = page * page_stride + ((slot % page_size) * kv_heads + kv_head) * head_dim
            kv_mask = inside[:, None] & (d[None, :] < head_dim)
            k = tl.load(k_pages_ptr + at[:, None] + d[None, :], mask=kv_mask, other=0.0)
            v = tl.load(v_pages_ptr + at[:, None] + d[None, :], mask=kv_mask, other=0.0)
            if WIDEN:
                k = k.to(tl.float32)
                v = v.to(tl.float32)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            if IS_CHAIN:
                visible = slot[None, :] - start <= local[:, None]
            else:
                visible = (slot[None, :] < start) & (local[:, None] >= 0)
                if first + BLOCK_N > start:
                    ancestor = tl.where(real, local, -1)
                    for _ in range(max_depth + 1):
                        visible = visible | ((ancestor[:, None] >= 0) & (slot[None, :] - start == ancestor[:, None]))
                        ancestor = tl.load(parents_ptr + segment_first + ancestor, mask=ancestor >= 0, other=-1)
            scores = tl.where(visible & inside[None, :], scores, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(scores, 1))
            # A tree's row may see nothing of its first blocks of a split.
            finite = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            keep = tl.exp(largest - finite)
            weights = tl.exp(scores - finite[:, None])
            total = total * keep + tl.sum(weights, 1)
            acc = acc * keep[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            largest = new_largest
        out_mask = real[:, None] & (d[None, :] < head_dim)
        if SPLIT:
            place = (row * heads + head) * num_splits + split
            tl.store(partial_ptr + place[:, None] * head_dim + d[None, :], acc, mask=out_mask)
            tl.store(state_ptr + place * 2, largest, mask=real)
            tl.store(state_ptr + place * 2 + 1, total, mask=real)
        else:
            result = acc / tl.where(real, total, 1.0)[:, None]
            at_out = out_ptr + (row[:, None] * heads + head[:, None]) * head_dim + d[None, :]
            tl.store(at_out, result.to(out_ptr.dtype.element_ty), mask=out_mask)


@triton.jit(do_not_specialize=("num_splits",))
def _combine_kernel(
    partial_ptr, state_ptr, out_ptr, head_dim, num_splits, BLOCK_SPLITS: tl.constexpr, BLOCK_D: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64)  # row * heads + head
    splits = tl.arange(0, BLOCK_SPLITS)
    d = tl.arange(0, BLOCK_D)
    inside = splits < num_splits
    state = state_ptr + (place * num_splits + splits) * 2
    largest = tl.load(state, mask=inside, other=float("-inf"))
    total = tl.load(state + 1, mask=inside, other=0.0)
    factor = tl.exp(largest - tl.max(largest))
    mask = inside[:, None] & (d[None, :] < head_dim)
    parts = tl.load(partial_ptr + (place * num_splits + splits[:, None]) * head_dim + d[None, :], mask=mask, other=0.0)
    result = tl.sum(parts * factor[:, None], 0) / tl.sum(total * factor)
    tl.store(out_ptr + place * head_dim + d, result.to(out_ptr.dtype.element_ty), mask=d < head_dim)


def paged_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: AttentionBatch, scale: float, num_splits: int | None = None
) -> Tensor:
    """See `graftline.kernels.attention.paged_attention`.

    Args:
        num_splits: programs that share one tile's past; chosen by the load on the device when None.
    """
    rows, heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not rows:
        return out
    group = heads // k_pages.shape[2]
    # In float32 there are no tensor cores: products are unrolled, and only small ones fit into registers.
    is_wide = q.dtype == torch.float32 and q.is_cuda
    tile_rows, block_m = _tile(rows, batch.num_segments, group, 16 if is_wide else 128)
    num_tiles = triton.cdiv(rows, tile_rows) + batch.num_segments
    if num_splits is None:
        num_splits = _splits(q.device, num_tiles * k_pages.shape[2], batch.page_tables.shape[1] * batch.page_size)
    partial = state = out
    if num_splits > 1:
        partial = torch.empty((rows, heads, num_splits, head_dim), dtype=torch.float32, device=q.device)
        state = torch.empty((rows, heads, num_splits, 2), dtype=torch.float32, device=q.device)
    block_d = max(16, triton.next_power_of_2(head_dim))
    _attention_kernel[(num_tiles, k_pages.shape[2], num_splits)](
        q, k_pages, v_pages, out, partial, state,
        batch.positions, batch.parents, batch.segment_rows, batch.segment_start, batch.page_tables,
        q.stride(0), k_pages.stride(0), batch.num_segments, rows, batch.page_tables.shape[1], batch.page_size, heads,
        k_pages.shape[2], head_dim, scale, num_splits,
        GROUP=group, TILE_ROWS=tile_rows, BLOCK_M=block_m, BLOCK_D=block_d,
        BLOCK_N=16 if is_wide else 64 if block_d <= 128 else 32,
        BLOCK_S=max(_SEGMENTS_BLOCK, triton.next_power_of_2(batch.num_segments)), IS_CHAIN=batch.is_chain,
        SPLIT=num_splits > 1,
        WIDEN=q.dtype == torch.float32 or q.device.type == "cpu",
        num_warps=8 if is_wide or block_m > 64 else 4, num_stages=2,
    )  # fmt: skip
    if num_splits > 1:
        _combine_kernel[(rows * heads,)](
            partial, state, out, head_dim, num_splits,
            BLOCK_SPLITS=max(_MAX_SPLITS, triton.next_power_of_2(num_splits)), BLOCK_D=block_d,
        )  # fmt: skip
    return out


def _tile(rows: int, num_segments: int, group: int, largest: int) -> tuple[int, int]:
    """(rows a tile, block of row-head pairs): small tiles for decode and trees, large ones for chunks."""
    rows_each = -(-rows // num_segments)
    block_m = 16
    while block_m < largest and block_m < rows_each * group:
        block_m *= 2
    while block_m < group:
        block_m *= 2
    return block_m // group, block_m


def _splits(device: torch.device, programs: int, max_slots: int) -> int:
    """Splits that fill the device about twice, as long as each still has some slots to walk."""
    if device.type != "cuda":
        return 1
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(_MAX_SPLITS, 2 * processors // programs, max_slots // _MIN_SPLIT_SLOTS))
