"""Selection steps of growing a draft tree (EAGLE-2, Li et al. 2024): the next beam, and the final nodes.

On a GPU trees grow by `growth_levels`, whose specification these are; only trees too large for its masks come here.
"""

import torch
from torch import Tensor


def select_children(
    cum_logprobs: Tensor, child_logprobs: Tensor, child_ids: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The K best children of a beam by cumulative log-probability; ties go to the earlier one, NaN is least.

    Args:
        cum_logprobs: [requests, beam] float32 of the beam's nodes.
        child_logprobs: [requests, beam, K] float32 of every node's K likeliest children.
        child_ids: [requests, beam, K] int64.

    Returns:
        ([requests, K] int64 index among all children, parent-major: the parent is index // K,
        [requests, K] int64 token ids, [requests, K] float32 cumulative log-probabilities, best first,
        [requests, beam * K] float32 cumulative log-probabilities of all children, parent-major).
    """
    num_requests, beam, width = child_logprobs.shape
    scores = _ordered((cum_logprobs.unsqueeze(-1) + child_logprobs).reshape(num_requests, beam * width))
    ordered, index = torch.sort(scores, dim=-1, descending=True, stable=True)
    best = index[:, :width]
    ids = child_ids.reshape(num_requests, beam * width).gather(1, best)
    return best, ids, ordered[:, :width].contiguous(), scores


def select_tree(scores: Tensor, parents: Tensor, num_drafts: int) -> tuple[Tensor, Tensor]:
    """The best `num_drafts` candidates of all levels, best first, as nodes 1 … num_drafts of a tree.

    A child scores at most as much as its parent and comes later, and ties go to the earlier candidate; so the parent of
    a node is a node before it, and the first n nodes are the best tree of n nodes. NaN counts as least.

    Args:
        scores: [requests, candidates] float32 cumulative log-probabilities, in order of generation.
        parents: [requests, candidates] int64 index of the parent candidate, -1 for children of the root.
        num_drafts: V - 1.

    Returns:
        ([requests, num_drafts] int64 candidate indexes, [requests, num_drafts] int64 parent *nodes*: 0 is the root,
        node j + 1 the j-th selected candidate).

    Raises:
        ValueError: fewer candidates than wanted.
    """
    if not 1 <= num_drafts <= scores.shape[1]:
        raise ValueError(f"num_drafts: {num_drafts} of {scores.shape[1]} candidates")
    _, order = torch.sort(_ordered(scores), dim=-1, descending=True, stable=True)
    selected = order[:, :num_drafts].contiguous()
    nodes = torch.zeros((scores.shape[0], scores.shape[1] + 1), dtype=torch.int64, device=scores.device)
    numbers = torch.arange(1, num_drafts + 1, device=scores.device).expand(scores.shape[0], num_drafts)
    nodes.scatter_(1, selected + 1, numbers)
    return selected, nodes.gather(1, parents.gather(1, selected) + 1)


def _ordered(scores: Tensor) -> Tensor:
    """NaN counts as least; there is no +inf among log-probabilities."""
    return torch.where(scores.isnan(), float("-inf"), scores)
