"""Triton kernel of `graftline.kernels.qkv_placing`: one program some heads of a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from graftline.kernels.attention_batch import AttentionBatch
from graftline.kernels.tree_batch import TreeBatch

_HEADS = 4  # a program


@triton.jit
def _slot(
    row, row_slots_ptr, row_segment_ptr, segment_rows_ptr, segment_start_ptr, page_tables_ptr, max_pages,
    PAGE_SIZE: tl.constexpr, HAS_SLOTS: tl.constexpr,
):  # fmt: skip
    """Flat slot of a row's own KV, or less than 0."""
    if HAS_SLOTS:
        flat = tl.load(row_slots_ptr + row)
    else:
        segment = tl.load(row_segment_ptr + row).to(tl.int64)
        is_real = segment >= 0
        start = tl.load(segment_start_ptr + segment, mask=is_real, other=0)
        slot = start + row - tl.load(segment_rows_ptr + segment, mask=is_real, other=0)
        page = tl.load(page_tables_ptr + segment * max_pages + slot // PAGE_SIZE, mask=is_real, other=-1).to(tl.int64)
        flat = page * PAGE_SIZE + slot % PAGE_SIZE
    return flat


@triton.jit
def _part_of_norms(q_norm_ptr, k_norm_ptr, is_q, is_k, columns, inside):
    """Weights of some columns of every head's norm, as float32."""
    q_weight = tl.load(q_norm_ptr + columns, mask=inside & is_q, other=0.0)
    k_weight = tl.load(k_norm_ptr + columns, mask=inside & is_k, other=0.0)
    return tl.where(is_q, q_weight, k_weight).to(tl.float32)


@triton.jit
def _store_part(
    values, q_out_ptr, k_pages_ptr, v_pages_ptr, to_q, to_page, columns, inside, is_q, is_k, is_v, is_written,
):  # fmt: skip
    tl.store(q_out_ptr + to_q + columns, values, mask=inside & is_q)
    in_pages = values.to(k_pages_ptr.dtype.element_ty)
    tl.store(k_pages_ptr + to_page + columns, in_pages, mask=inside & is_k & is_written)
    tl.store(v_pages_ptr + to_page + columns, in_pages, mask=inside & is_v & is_written)


@triton.jit(do_not_specialize=("max_pages",))
def _place_qkv_kernel(
    qkv_ptr, q_rotated_ptr, k_pages_ptr, v_pages_ptr, q_norm_ptr, k_norm_ptr, positions_ptr, cos_ptr, sin_ptr,
    row_slots_ptr, row_segment_ptr, segment_rows_ptr, segment_start_ptr, page_tables_ptr,
    qkv_stride, page_stride, max_pages, heads, kv_heads, eps,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, PAGE_SIZE: tl.constexpr, HAS_SLOTS: tl.constexpr, NORM: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    is_q = head < heads
    is_k = (head >= heads) & (head < heads + kv_heads)
    is_v = (head >= heads + kv_heads) & (head < heads + 2 * kv_heads)
    exists = is_q | is_k | is_v
    is_turned = is_q | is_k
    flat = _slot(
        row, row_slots_ptr, row_segment_ptr, segment_rows_ptr, segment_start_ptr, page_tables_ptr, max_pages,
        PAGE_SIZE, HAS_SLOTS,
    )  # fmt: skip
    is_written = flat >= 0
    kv_head = tl.where(is_k, head - heads, head - heads - kv_heads)
    to_page = flat // PAGE_SIZE * page_stride + (flat % PAGE_SIZE * kv_heads + kv_head) * HEAD_DIM
    to_q = (row * heads + head) * HEAD_DIM
    at = qkv_ptr + row * qkv_stride + head * HEAD_DIM
    columns = tl.arange(0, BLOCK_HALF)[None, :]
    in_half = columns < HALF
    first = tl.load(at + columns, mask=exists & in_half, other=0.0)
    second = tl.load(at + HALF + columns, mask=exists & in_half, other=0.0)
    dtype = first.dtype
    rest_columns = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    in_rest = rest_columns < HEAD_DIM
    if 2 * HALF < HEAD_DIM:
        rest = tl.load(at + rest_columns, mask=exists & in_rest, other=0.0)
    if NORM:
        a, b = first.to(tl.float32), second.to(tl.float32)
        squares = tl.sum(a * a + b * b, 1)
        if 2 * HALF < HEAD_DIM:
            c = rest.to(tl.float32)
            squares += tl.sum(c * c, 1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        weight = _part_of_norms(q_norm_ptr, k_norm_ptr, is_q, is_k, columns, in_half)
        first = tl.where(is_turned, (a * scale * weight).to(dtype), first)
        weight = _part_of_norms(q_norm_ptr, k_norm_ptr, is_q, is_k, HALF + columns, in_half)
        second = tl.where(is_turned, (b * scale * weight).to(dtype), second)
        if 2 * HALF < HEAD_DIM:
            weight = _part_of_norms(q_norm_ptr, k_norm_ptr, is_q, is_k, rest_columns, in_rest)
            rest = tl.where(is_turned, (c * scale * weight).to(dtype), rest)
    position = tl.load(positions_ptr + row).to(tl.int64)
    cos = tl.load(cos_ptr + position * HALF + columns, mask=in_half, other=0.0)
    sin = tl.load(sin_ptr + position * HALF + columns, mask=in_half, other=0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    first = tl.where(is_turned, (a * cos - b * sin).to(dtype), first)
    second = tl.where(is_turned, (b * cos + a * sin).to(dtype), second)
    _store_part(
        first, q_rotated_ptr, k_pages_ptr, v_pages_ptr, to_q, to_page, columns, in_half, is_q, is_k, is_v, is_written
    )
    _store_part(
        second, q_rotated_ptr, k_pages_ptr, v_pages_ptr, to_q, to_page, HALF + columns, in_half, is_q, is_k, is_v,
        is_written,
    )  # fmt: skip
    if 2 * HALF < HEAD_DIM:
        _store_part(
            rest, q_rotated_ptr, k_pages_ptr, v_pages_ptr, to_q, to_page, rest_columns, in_rest, is_q, is_k, is_v,
            is_written,
        )  # fmt: skip


def place_qkv(
    qkv: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: AttentionBatch | TreeBatch,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> Tensor:
    """See `graftline.kernels.qkv_placing.place_qkv`."""
    _, page_size, kv_heads, head_dim = k_pages.shape
    rows = qkv.shape[0]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    q = torch.empty((rows, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if not rows:
        return q
    if isinstance(batch, TreeBatch):
        places = (batch.row_slots, positions, positions, positions, positions)
    else:
        places = (positions, batch.row_segment, batch.segment_rows, batch.segment_start, batch.page_tables)
    half = cos.shape[1]
    _place_qkv_kernel[(rows, triton.cdiv(heads + 2 * kv_heads, _HEADS))](
        qkv, q, k_pages, v_pages, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm,
        positions, cos, sin, *places,
        qkv.stride(0), k_pages.stride(0), batch.page_tables.shape[1], heads, kv_heads, eps,
        HEAD_DIM=head_dim, HALF=half, PAGE_SIZE=page_size, HAS_SLOTS=isinstance(batch, TreeBatch),
        NORM=q_norm is not None, BLOCK_H=_HEADS, BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_REST=triton.next_power_of_2(max(1, head_dim - 2 * half)), num_warps=2,
    )  # fmt: skip
    return q
