"""Levels of growing draft trees (EAGLE-2, Li et al. 2024) in fixed shapes: what lies between two runs of a draft head.

Candidates of a tree are numbered in the order they come up: K children of the root, then K * K of every further level.
The beam of a level is its K best, whose rows the head runs next; ties go to the earlier candidate.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from graftline.kernels.round_open import flat_slots
from graftline.kernels.tree_growth import select_children, select_tree


@dataclass(frozen=True, slots=True)
class Candidates:
    """All candidates of some trees, [trees, candidates] each; levels fill them from the left.

    Attributes:
        scores: float32 cumulative log-probabilities.
        tokens: int64 of the target's vocabulary.
        parents: int64 number of the parent candidate, -1 for children of the root.
    """

    scores: Tensor
    tokens: Tensor
    parents: Tensor

    @classmethod
    def empty(cls, trees: int, count: int, device: torch.device) -> "Candidates":
        """Room for `count` a tree."""
        return cls(
            torch.empty((trees, count), dtype=torch.float32, device=device),
            torch.empty((trees, count), dtype=torch.int64, device=device),
            torch.empty((trees, count), dtype=torch.int64, device=device),
        )


@dataclass(frozen=True, slots=True)
class Beam:
    """The rows that a draft head runs next: K a tree, best first.

    Attributes:
        scores: [trees, K] float32 cumulative log-probabilities.
        tokens: [trees * K] int64.
        candidates: [trees, K] int64 numbers.
        visible: [trees * K] int64 bit masks over the growth's rows: a row's ancestors and itself.
        parent_rows: [trees * K] int64 row of the head's last outputs that each comes from.
        positions: [trees * K] int32.
        row_slots: [trees * K] int64 flat slots of the rows' KV.
    """

    scores: Tensor
    tokens: Tensor
    candidates: Tensor
    visible: Tensor
    parent_rows: Tensor
    positions: Tensor
    row_slots: Tensor


@dataclass(frozen=True, slots=True)
class GrowthPlace:
    """Where trees grow.

    Attributes:
        starts: [trees] int32 committed length L; level l stands at position L + l.
        page_tables: [trees, max_pages] int32; row j of a growth has slot L + j.
        page_size: token positions a page.
        position_limit: rows at this position or behind it are given the last one before it.
    """

    starts: Tensor
    page_tables: Tensor
    page_size: int
    position_limit: int


def grow_level(
    beam: Beam | None,
    child_scores: Tensor,
    child_ids: Tensor,
    to_target: Tensor | None,
    candidates: Candidates,
    base: int,
    level: int,
    place: GrowthPlace,
) -> Beam:
    """Takes in the children of a beam, or of the roots, and chooses the next beam: one launch on CUDA.

    Args:
        beam: of the level before; None for children of the roots.
        child_scores: [trees * beam, K] float32 log-probabilities of every node's K likeliest children.
        child_ids: [trees * beam, K] int64 of the draft vocabulary.
        to_target: [draft vocabulary] int64 ids of the target, None where they are the same.
        candidates: the children are written to columns [base, base + beam * K).
        level: of the next beam, 0 for the children of the roots: its rows are level * K … of the growth.

    Raises:
        ValueError: shapes that do not fit.
    """
    trees, width = place.starts.shape[0], child_scores.shape[1]
    each = 1 if beam is None else beam.scores.shape[1]
    if child_scores.shape != (trees * each, width) or child_ids.shape != child_scores.shape:
        raise ValueError(
            f"child_scores {tuple(child_scores.shape)}, child_ids {tuple(child_ids.shape)} for {trees} trees of {each}"
        )
    if not 0 <= base <= candidates.scores.shape[1] - each * width:
        raise ValueError(f"base: {base} leaves no {each * width} of {candidates.scores.shape[1]} candidates")
    if child_scores.is_cuda:
        from graftline.kernels.growth_levels_triton import grow_level as kernel

        return kernel(beam, child_scores, child_ids, to_target, candidates, base, level, place)
    return grow_level_reference(beam, child_scores, child_ids, to_target, candidates, base, level, place)


def grow_level_reference(
    beam: Beam | None,
    child_scores: Tensor,
    child_ids: Tensor,
    to_target: Tensor | None,
    candidates: Candidates,
    base: int,
    level: int,
    place: GrowthPlace,
) -> Beam:
    """The specification."""
    trees, width, device = place.starts.shape[0], child_scores.shape[1], child_scores.device
    each = 1 if beam is None else beam.scores.shape[1]
    scores = child_scores.new_zeros(trees, 1) if beam is None else beam.scores
    numbers = torch.full((trees, 1), -1, device=device) if beam is None else beam.candidates
    seen = torch.zeros((trees, 1), dtype=torch.int64, device=device) if beam is None else beam.visible.view(trees, -1)
    tokens = (child_ids if to_target is None else to_target[child_ids]).view(trees, each, width)
    best, best_tokens, best_scores, all_scores = select_children(scores, child_scores.view(trees, each, width), tokens)
    filled = slice(base, base + each * width)
    candidates.scores[:, filled] = all_scores
    candidates.tokens[:, filled] = tokens.flatten(1)
    candidates.parents[:, filled] = numbers.repeat_interleave(width, dim=1)
    parent = best // width
    own = torch.arange(level * width, (level + 1) * width, device=device)
    positions = (place.starts + level).clamp(max=place.position_limit - 1)
    return Beam(
        scores=best_scores,
        tokens=best_tokens.flatten(),
        candidates=base + best,
        visible=(seen.gather(1, parent) | (torch.ones_like(own) << own)).flatten(),
        parent_rows=(torch.arange(trees, device=device).unsqueeze(1) * each + parent).flatten(),
        positions=positions.repeat_interleave(width),
        row_slots=flat_slots(
            place.starts, own, torch.ones_like(best, dtype=torch.bool), place.page_tables, place.page_size
        ),
    )


def finish_trees(
    candidates: Candidates, roots: Tensor, num_drafts: int, nodes: int, reaches: Tensor, reach: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The best candidates of all levels as trees: one launch on CUDA.

    Args:
        candidates: complete.
        roots: [trees] int64 tokens.
        num_drafts: V - 1, or fewer where there are not as many candidates.
        nodes: V.
        reaches: [trees] int32 committed length L.
        reach: trees whose L is this or more are their root alone.

    Returns:
        ([trees, V] int64 tokens, [trees, V] int64 parents, [trees] int64 nodes).

    Raises:
        ValueError: fewer candidates than wanted, or more drafts than nodes.
    """
    if not 1 <= num_drafts <= candidates.scores.shape[1] or num_drafts >= nodes:
        raise ValueError(f"num_drafts: {num_drafts} of {candidates.scores.shape[1]} candidates, for {nodes} nodes")
    if candidates.scores.is_cuda:
        from graftline.kernels.growth_levels_triton import finish_trees as kernel

        return kernel(candidates, roots, num_drafts, nodes, reaches, reach)
    return finish_trees_reference(candidates, roots, num_drafts, nodes, reaches, reach)


def finish_trees_reference(
    candidates: Candidates, roots: Tensor, num_drafts: int, nodes: int, reaches: Tensor, reach: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The specification."""
    picks, links = select_tree(candidates.scores, candidates.parents, num_drafts)
    root = roots.unsqueeze(1)
    filler = root.new_zeros(root.shape[0], nodes - 1 - num_drafts)
    tokens = torch.cat((root, candidates.tokens.gather(1, picks), filler), dim=1)
    parents = torch.cat((torch.full_like(root, -1), links, filler), dim=1)
    return tokens, parents, torch.where(reaches < reach, 1 + num_drafts, 1)


def scratch_tables(
    pool: Tensor, first_scratch: int, pages_a_tree: int, starts: Tensor, page_tables: Tensor, page_size: int
) -> Tensor:
    """Page tables whose part from the last partial page on is scratch, that page copied over: one launch on CUDA.

    Args:
        pool: [num_pages, …] contiguous, page-major.
        first_scratch: page id of the first tree's scratch; `pages_a_tree` a tree.
        starts: [trees] int32 committed length.
        page_tables: [trees, max_pages] int32.

    Returns:
        [trees, max_pages + pages_a_tree] int32.

    Raises:
        ValueError: scratch that the pool does not have, or a pool that is not contiguous.
    """
    trees = starts.shape[0]
    if first_scratch + trees * pages_a_tree > pool.shape[0] or not pool.is_contiguous():
        raise ValueError(
            f"first_scratch: {trees} times {pages_a_tree} pages behind {first_scratch} in a pool of {pool.shape[0]}"
        )
    if pool.is_cuda:
        from graftline.kernels.growth_levels_triton import scratch_tables as kernel

        return kernel(pool, first_scratch, pages_a_tree, starts, page_tables, page_size)
    return scratch_tables_reference(pool, first_scratch, pages_a_tree, starts, page_tables, page_size)


def scratch_tables_reference(
    pool: Tensor, first_scratch: int, pages_a_tree: int, starts: Tensor, page_tables: Tensor, page_size: int
) -> Tensor:
    """The specification."""
    trees, columns = page_tables.shape
    device = page_tables.device
    full = (starts // page_size).long().unsqueeze(1)  # [trees, 1]
    first = first_scratch + torch.arange(trees, device=device) * pages_a_tree
    source = page_tables.gather(1, full.clamp(max=columns - 1)).squeeze(1).long()
    pool.index_copy_(0, first, pool.index_select(0, source))
    index = torch.arange(columns + pages_a_tree, device=device).unsqueeze(0)
    scratch = first.unsqueeze(1) + (index - full).clamp(0, pages_a_tree - 1)
    own = torch.cat((page_tables, page_tables.new_zeros(trees, pages_a_tree)), dim=1)
    return torch.where(index < full, own, scratch.int())
