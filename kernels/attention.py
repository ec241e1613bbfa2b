"""Attention of a batch's rows over paged KV; every row is reduced on its own, in order of position."""

from ctypes import byref

import torch
from torch import Tensor

from graftline.kernels.attention_batch import AttentionBatch
from graftline.kernels.checks import check_rows
from graftline.kernels.kv_write import check_pages
from graftline.kernels.native_library import native_library, num_threads
from graftline.kernels.native_structs import native_batch, native_pages
from graftline.kernels.tree_batch import TreeBatch, check_tree_batch

MAX_HEAD_DIM = 256
_MAX_GROUP = 64
_MAX_KV_HEADS = 64


def paged_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: AttentionBatch | TreeBatch, scale: float
) -> Tensor:
    """Softmax(q K^T * scale) V with grouped KV heads; KV of the rows themselves must be in the pages already.

    Args:
        q: [rows, heads, head_dim]; float32 on CPU, the pages' type on CUDA; rows may be strided.
        k_pages: [num_pages, page_size, kv_heads, head_dim], see `write_kv`. Query head h reads KV head
            h // (heads / kv_heads).
        v_pages: likewise.
        batch: who attends to what. A `TreeBatch` is read on the device alone, so that the call may be captured in a
            CUDA graph; its rows that see nothing get zeros.
        scale: usually head_dim ** -0.5.

    Returns:
        [rows, heads, head_dim] contiguous, type of q.

    Raises:
        ValueError: shapes that do not fit.
    """
    check_pages(k_pages, v_pages, batch.page_size)
    rows, heads, head_dim = q.shape
    if rows != batch.num_rows or head_dim != k_pages.shape[3] or heads % k_pages.shape[2]:
        raise ValueError(f"q {tuple(q.shape)} for {batch.num_rows} rows and pages {tuple(k_pages.shape)}")
    check_rows("q", q)
    kv_heads = k_pages.shape[2]
    if head_dim % 8 or head_dim > MAX_HEAD_DIM or kv_heads > _MAX_KV_HEADS or heads // kv_heads > _MAX_GROUP:
        raise ValueError(
            f"q {tuple(q.shape)}: head_dim must be a multiple of 8 up to {MAX_HEAD_DIM}, KV heads and groups up to 64"
        )
    if isinstance(batch, TreeBatch):
        check_tree_batch(batch)
        if not q.is_cuda:
            return tree_attention_reference(q, k_pages, v_pages, batch, scale)
        from graftline.kernels.tree_attention_triton import tree_attention

        return tree_attention(q, k_pages, v_pages, batch, scale)
    if q.is_cuda:
        from graftline.kernels.attention_triton import paged_attention as kernel

        return kernel(q, k_pages, v_pages, batch, scale)
    library = native_library()
    if library is None:
        return paged_attention_reference(q, k_pages, v_pages, batch, scale)
    out = torch.empty(q.shape)
    library.gl_paged_attention(
        byref(native_batch(batch)),
        byref(native_pages(k_pages, v_pages)),
        q.data_ptr(),
        q.stride(0),
        out.data_ptr(),
        out.stride(0),
        heads,
        scale,
        num_threads(rows * heads),
    )
    return out


def visible_slots(batch: AttentionBatch, row: int) -> list[int]:
    """Sequence slots that a row attends to, in visiting order (committed, ancestors by depth, itself)."""
    segment = int(batch.row_segment[row])
    first = int(batch.segment_rows[segment])
    start = int(batch.segment_start[segment])
    path: list[int] = []
    local = row - first
    while local >= 0:
        path.append(start + local)
        local = int(batch.parents[first + local])
    return list(range(start)) + path[::-1]


def paged_attention_reference(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: AttentionBatch, scale: float
) -> Tensor:
    """The specification: row by row, in float32."""
    group = q.shape[1] // k_pages.shape[2]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for row in range(batch.num_rows):
        slots = torch.tensor(visible_slots(batch, row), device=q.device)
        pages = batch.page_tables[int(batch.row_segment[row])].long()[slots // batch.page_size]
        keys = k_pages[pages, slots % batch.page_size].float().repeat_interleave(group, dim=1)  # [n, heads, dim]
        values = v_pages[pages, slots % batch.page_size].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,nhd->hn", q[row].float(), keys) * scale
        out[row] = torch.einsum("hn,nhd->hd", scores.softmax(-1), values).to(q.dtype)
    return out


def tree_attention_reference(q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: TreeBatch, scale: float) -> Tensor:
    """The specification for rounds of fixed shape, and their way on CPU: sequence by sequence, in float32."""
    group = q.shape[1] // k_pages.shape[2]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    tail = torch.arange(batch.num_tail, device=q.device)
    for index, start in enumerate(batch.starts.tolist()):
        rows = slice(index * batch.rows_each, (index + 1) * batch.rows_each)
        own = (batch.visible[rows, None] >> tail) & 1  # [rows_each, num_tail]
        visible = torch.cat((own.new_ones(batch.rows_each, start), own), dim=1) != 0
        slots = visible.any(dim=0).nonzero().squeeze(1)  # what no row sees may hold anything
        visible = visible[:, slots]
        pages = batch.page_tables[index].long()[slots // batch.page_size]
        keys = k_pages[pages, slots % batch.page_size].float().repeat_interleave(group, dim=1)  # [n, heads, dim]
        values = v_pages[pages, slots % batch.page_size].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("rhd,nhd->rhn", q[rows].float(), keys) * scale
        weights = scores.masked_fill(~visible.unsqueeze(1), -torch.inf).softmax(-1)
        weights = torch.where(visible.any(dim=1)[:, None, None], weights, 0.0)
        out[rows] = torch.einsum("rhn,nhd->rhd", weights, values).to(q.dtype)
    return out
