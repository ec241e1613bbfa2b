"""Attention over pages by plain torch operations, segment by segment: what to compare the others with on a GPU."""

import torch
from torch import Tensor

from graftline.kernels.attention import paged_attention
from graftline.kernels.attention_batch import AttentionBatch, SegmentRows
from graftline.kernels.tree_batch import TreeBatch


def torch_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: AttentionBatch | TreeBatch, scale: float
) -> Tensor:
    """See `graftline.kernels.attention.paged_attention`; rounds of fixed shape are left to it."""
    if isinstance(batch, TreeBatch):
        return paged_attention(q, k_pages, v_pages, batch, scale)
    group = q.shape[1] // k_pages.shape[2]
    parts = []
    rows_before = 0
    for index, segment in enumerate(batch.segments):
        slots = torch.arange(segment.start + segment.num_rows, device=q.device)
        pages = batch.page_tables[index].long()[slots // batch.page_size]
        keys = k_pages[pages, slots % batch.page_size].float().repeat_interleave(group, dim=1)  # [slots, heads, dim]
        values = v_pages[pages, slots % batch.page_size].float().repeat_interleave(group, dim=1)
        rows = q[rows_before : rows_before + segment.num_rows].float()
        scores = torch.einsum("rhd,nhd->hrn", rows, keys) * scale
        scores = scores.masked_fill(~visible_mask(segment).to(q.device), float("-inf"))
        parts.append(torch.einsum("hrn,nhd->rhd", scores.softmax(-1), values))
        rows_before += segment.num_rows
    return torch.cat(parts).to(q.dtype)


def visible_mask(segment: SegmentRows) -> Tensor:
    """[rows, start + rows] bool on CPU: which slots of its sequence each row attends to."""
    rows = segment.num_rows
    if segment.parents is None:
        tail = torch.ones(rows, rows, dtype=torch.bool).tril()
    else:
        tail = torch.eye(rows, dtype=torch.bool)
        for row, parent in enumerate(segment.parents):
            if parent >= 0:
                tail[row] |= tail[parent]
    return torch.cat((torch.ones(rows, segment.start, dtype=torch.bool), tail), dim=1)
