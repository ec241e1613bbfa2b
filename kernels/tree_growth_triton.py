"""Triton kernels of `graftline.kernels.tree_growth`: one program a request, ranks by counting."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 32  # scores compared with at a time


@triton.jit
def ordered(scores):
    """NaN counts as least: without an order every candidate would be the best, and be stored past the end."""
    return tl.where(scores == scores, scores, float("-inf"))


@triton.jit
def ranks(scores, index, scores_ptr, count, CHUNK: tl.constexpr):
    """Rank of every score in [n] among the `count` stored ones: larger first, ties by index."""
    rank = tl.zeros(index.shape, tl.int32)
    for first in range(0, count, CHUNK):
        other_index = first + tl.arange(0, CHUNK)
        inside = other_index < count
        other = ordered(tl.load(scores_ptr + other_index, mask=inside, other=0.0))[None, :]
        earlier = (other == scores[:, None]) & (other_index[None, :] < index[:, None])
        rank += tl.sum((((other > scores[:, None]) | earlier) & inside[None, :]).to(tl.int32), 1)
    return rank


@triton.jit
def _select_children_kernel(
    cum_ptr, child_ptr, child_ids_ptr, scores_ptr, best_ptr, ids_ptr, best_scores_ptr, beam, width,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    count = beam * width
    inside = index < count
    cum = tl.load(cum_ptr + request * beam + index // width, mask=inside, other=0.0)
    scores = ordered(cum + tl.load(child_ptr + request * count + index, mask=inside, other=0.0))
    tl.store(scores_ptr + request * count + index, scores, mask=inside)
    tl.debug_barrier()  # the ranks read what other threads stored
    rank = ranks(scores, index, scores_ptr + request * count, count, CHUNK)
    chosen = inside & (rank < width)
    token = tl.load(child_ids_ptr + request * count + index, mask=inside, other=0)
    tl.store(best_ptr + request * width + rank, index.to(tl.int64), mask=chosen)
    tl.store(ids_ptr + request * width + rank, token, mask=chosen)
    tl.store(best_scores_ptr + request * width + rank, scores, mask=chosen)


@triton.jit
def _select_tree_kernel(
    scores_ptr, parents_ptr, selected_ptr, tree_parents_ptr, count, num_drafts, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    inside = index < count
    scores = ordered(tl.load(scores_ptr + request * count + index, mask=inside, other=0.0))
    node = 1 + ranks(scores, index, scores_ptr + request * count, count, CHUNK)  # of a selected candidate
    selected = inside & (node <= num_drafts)
    parent = tl.load(parents_ptr + request * count + index, mask=inside, other=-1).to(tl.int32)
    parent_node = tl.where(parent >= 0, tl.gather(node, tl.maximum(parent, 0), 0), 0)
    at = request * num_drafts + node - 1
    tl.store(selected_ptr + at, index.to(tl.int64), mask=selected)
    tl.store(tree_parents_ptr + at, parent_node.to(tl.int64), mask=selected)


def select_children(
    cum_logprobs: Tensor, child_logprobs: Tensor, child_ids: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `graftline.kernels.tree_growth.select_children`."""
    requests, beam, width = child_logprobs.shape
    device = child_logprobs.device
    best = torch.empty((requests, width), dtype=torch.int64, device=device)
    ids = torch.empty((requests, width), dtype=torch.int64, device=device)
    best_scores = torch.empty((requests, width), dtype=torch.float32, device=device)
    scores = torch.empty((requests, beam * width), dtype=torch.float32, device=device)
    if requests:
        _select_children_kernel[(requests,)](
            cum_logprobs.contiguous(), child_logprobs.contiguous(), child_ids.contiguous(), scores, best, ids,
            best_scores, beam, width, BLOCK=triton.next_power_of_2(beam * width), CHUNK=_CHUNK,
        )  # fmt: skip
    return best, ids, best_scores, scores


def select_tree(scores: Tensor, parents: Tensor, num_drafts: int) -> tuple[Tensor, Tensor]:
    """See `graftline.kernels.tree_growth.select_tree`."""
    requests, count = scores.shape
    selected = torch.empty((requests, num_drafts), dtype=torch.int64, device=scores.device)
    tree_parents = torch.empty((requests, num_drafts), dtype=torch.int64, device=scores.device)
    if requests:
        _select_tree_kernel[(requests,)](
            scores.contiguous(), parents.contiguous(), selected, tree_parents, count, num_drafts,
            BLOCK=triton.next_power_of_2(count), CHUNK=_CHUNK,
        )  # fmt: skip
    return selected, tree_parents
