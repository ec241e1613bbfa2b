"""Triton kernels of `graftline.kernels.growth_levels`: one program a tree, ranks by counting."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from graftline.kernels.growth_levels import Beam, Candidates, GrowthPlace
from graftline.kernels.round_open_triton import flat_slot

_CHUNK = 32  # scores compared with at a time
_BLOCK_WORDS = 1024


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


@triton.jit(do_not_specialize=("base", "level", "limit", "max_pages", "beam", "width", "num_candidates"))
def _grow_level_kernel(
    cum_ptr, child_ptr, child_ids_ptr, to_target_ptr, beam_ptr, seen_ptr, starts_ptr, page_tables_ptr, scores_ptr,
    tokens_ptr, parents_ptr, next_scores_ptr, next_tokens_ptr, next_beam_ptr, next_seen_ptr, parent_rows_ptr,
    positions_ptr, row_slots_ptr, beam, width, num_candidates, base, level, limit, max_pages,
    FIRST: tl.constexpr, MAPPED: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    tree = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    count = beam * width
    inside = index < count
    parent = index // width
    scores = tl.load(child_ptr + tree * count + index, mask=inside, other=0.0)
    number = tl.full((BLOCK,), -1, tl.int64)
    seen = tl.zeros((BLOCK,), tl.int64)
    if not FIRST:
        scores += tl.load(cum_ptr + tree * beam + parent, mask=inside, other=0.0)
        number = tl.load(beam_ptr + tree * beam + parent, mask=inside, other=0)
        seen = tl.load(seen_ptr + tree * beam + parent, mask=inside, other=0)
    scores = ordered(scores)
    token = tl.load(child_ids_ptr + tree * count + index, mask=inside, other=0)
    if MAPPED:
        token = tl.load(to_target_ptr + token, mask=inside, other=0)
    at = tree * num_candidates + base + index
    tl.store(scores_ptr + at, scores, mask=inside)
    tl.store(tokens_ptr + at, token, mask=inside)
    tl.store(parents_ptr + at, number, mask=inside)
    tl.debug_barrier()  # the ranks read what other threads stored
    rank = ranks(scores, index, scores_ptr + tree * num_candidates + base, count, CHUNK)
    chosen = inside & (rank < width)
    to = tree * width + rank
    own = level * width + rank
    start = tl.load(starts_ptr + tree)
    table = page_tables_ptr + tree * max_pages
    tl.store(next_scores_ptr + to, scores, mask=chosen)
    tl.store(next_tokens_ptr + to, token, mask=chosen)
    tl.store(next_beam_ptr + to, (base + index).to(tl.int64), mask=chosen)
    bit = tl.full((BLOCK,), 1, tl.int64) << tl.minimum(own, 63).to(tl.int64)
    tl.store(next_seen_ptr + to, seen | bit, mask=chosen)
    tl.store(parent_rows_ptr + to, tree * beam + parent, mask=chosen)
    tl.store(positions_ptr + to, tl.zeros((BLOCK,), tl.int32) + tl.minimum(start + level, limit - 1), mask=chosen)
    tl.store(row_slots_ptr + to, flat_slot(start + own, table, max_pages, chosen, PAGE_SIZE), mask=chosen)


@triton.jit(do_not_specialize=("num_candidates", "num_drafts", "nodes", "reach"))
def _finish_trees_kernel(
    scores_ptr, tokens_ptr, parents_ptr, roots_ptr, starts_ptr, tree_tokens_ptr, tree_parents_ptr, num_nodes_ptr,
    num_candidates, num_drafts, nodes, reach, BLOCK: tl.constexpr, BLOCK_NODES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    tree = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    inside = index < num_candidates
    own = tree * num_candidates
    scores = ordered(tl.load(scores_ptr + own + index, mask=inside, other=0.0))
    node = 1 + ranks(scores, index, scores_ptr + own, num_candidates, CHUNK)  # of a selected candidate
    selected = inside & (node <= num_drafts)
    parent = tl.load(parents_ptr + own + index, mask=inside, other=-1).to(tl.int32)
    parent_node = tl.where(parent >= 0, tl.gather(node, tl.maximum(parent, 0), 0), 0)
    token = tl.load(tokens_ptr + own + index, mask=inside, other=0)
    to = tree * nodes
    tl.store(tree_tokens_ptr + to + node, token, mask=selected)
    tl.store(tree_parents_ptr + to + node, parent_node.to(tl.int64), mask=selected)
    tl.store(tree_tokens_ptr + to, tl.load(roots_ptr + tree))
    tl.store(tree_parents_ptr + to, tl.full((), -1, tl.int64))
    filler = tl.arange(0, BLOCK_NODES)
    is_filler = (filler > num_drafts) & (filler < nodes)
    tl.store(tree_tokens_ptr + to + filler, tl.zeros((BLOCK_NODES,), tl.int64), mask=is_filler)
    tl.store(tree_parents_ptr + to + filler, tl.zeros((BLOCK_NODES,), tl.int64), mask=is_filler)
    grown = tl.where(tl.load(starts_ptr + tree) < reach, 1 + num_drafts, 1)
    tl.store(num_nodes_ptr + tree, grown.to(tl.int64))


@triton.jit(do_not_specialize=("columns", "pages_a_tree", "first_scratch"))
def _scratch_tables_kernel(
    words_ptr, starts_ptr, page_tables_ptr, tables_ptr, columns, pages_a_tree, first_scratch, page_words,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tree = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    full = tl.load(starts_ptr + tree) // PAGE_SIZE
    first = first_scratch + tree * pages_a_tree
    page = tl.load(page_tables_ptr + tree * columns + at, mask=at < tl.minimum(full, columns), other=0)
    scratch = first + tl.minimum(tl.maximum(at - full, 0), pages_a_tree - 1)
    table = tl.where(at < full, page, scratch.to(tl.int32))
    tl.store(tables_ptr + tree * (columns + pages_a_tree) + at, table, mask=at < columns + pages_a_tree)
    source = tl.load(page_tables_ptr + tree * columns + tl.minimum(full, columns - 1)).to(tl.int64)
    words = tl.load(words_ptr + source * page_words + at, mask=at < page_words, other=0)
    tl.store(words_ptr + first * page_words + at, words, mask=at < page_words)


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
    """See `graftline.kernels.growth_levels.grow_level`."""
    trees, width, device = place.starts.shape[0], child_scores.shape[1], child_scores.device
    each = 1 if beam is None else beam.scores.shape[1]

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    chosen = Beam(
        scores=empty(torch.float32, trees, width),
        tokens=empty(torch.int64, trees * width),
        candidates=empty(torch.int64, trees, width),
        visible=empty(torch.int64, trees * width),
        parent_rows=empty(torch.int64, trees * width),
        positions=empty(torch.int32, trees * width),
        row_slots=empty(torch.int64, trees * width),
    )
    before = chosen if beam is None else beam
    if trees:
        _grow_level_kernel[(trees,)](
            before.scores, child_scores.contiguous(), child_ids.contiguous(),
            child_ids if to_target is None else to_target, before.candidates, before.visible, place.starts,
            place.page_tables, candidates.scores, candidates.tokens, candidates.parents, chosen.scores, chosen.tokens,
            chosen.candidates, chosen.visible, chosen.parent_rows, chosen.positions, chosen.row_slots, each, width,
            candidates.scores.shape[1], base, level, place.position_limit, place.page_tables.shape[1],
            FIRST=beam is None, MAPPED=to_target is not None, PAGE_SIZE=place.page_size,
            BLOCK=triton.next_power_of_2(each * width), CHUNK=_CHUNK, num_warps=1 if each * width <= 64 else 4,
        )  # fmt: skip
    return chosen


def finish_trees(
    candidates: Candidates, roots: Tensor, num_drafts: int, nodes: int, reaches: Tensor, reach: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `graftline.kernels.growth_levels.finish_trees`."""
    trees, count = candidates.scores.shape
    tokens = torch.empty((trees, nodes), dtype=torch.int64, device=roots.device)
    parents, num_nodes = torch.empty_like(tokens), torch.empty_like(tokens[:, 0])
    if trees:
        _finish_trees_kernel[(trees,)](
            candidates.scores, candidates.tokens, candidates.parents, roots, reaches, tokens, parents, num_nodes,
            count, num_drafts, nodes, reach, BLOCK=triton.next_power_of_2(count),
            BLOCK_NODES=triton.next_power_of_2(nodes), CHUNK=_CHUNK,
        )  # fmt: skip
    return tokens, parents, num_nodes


def scratch_tables(
    pool: Tensor, first_scratch: int, pages_a_tree: int, starts: Tensor, page_tables: Tensor, page_size: int
) -> Tensor:
    """See `graftline.kernels.growth_levels.scratch_tables`."""
    trees, columns = page_tables.shape
    tables = torch.empty((trees, columns + pages_a_tree), dtype=torch.int32, device=pool.device)
    words = pool.view(torch.int32).view(pool.shape[0], -1)  # K and V: a page is a multiple of 4 bytes
    if trees:
        blocks = triton.cdiv(max(words.shape[1], columns + pages_a_tree), _BLOCK_WORDS)
        _scratch_tables_kernel[(trees, blocks)](
            words, starts, page_tables, tables, columns, pages_a_tree, first_scratch, words.shape[1],
            PAGE_SIZE=page_size, BLOCK=_BLOCK_WORDS,
        )  # fmt: skip
    return tables
