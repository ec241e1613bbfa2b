"""Triton kernels between the products of a round, against their references: shapes small, values adversarial."""

import random
from dataclasses import fields

import pytest
import torch
from kernel_cases import normal, poisoned_allocations, random_parents
from torch import Tensor

from graftline.kernels.growth_levels import (
    Beam,
    Candidates,
    GrowthPlace,
    finish_trees,
    finish_trees_reference,
    grow_level,
    grow_level_reference,
    scratch_tables,
    scratch_tables_reference,
)
from graftline.kernels.round_open import OpenRounds, RoundLayout, open_rounds, open_rounds_reference
from graftline.kernels.round_walk import WalkedRounds, close_rounds, close_rounds_reference, walk_rounds_reference

pytest.importorskip("triton")

from graftline.kernels import draft_inputs_triton, growth_levels_triton, round_open_triton, round_walk_triton
from graftline.kernels.draft_inputs import (
    draft_inputs,
    draft_inputs_reference,
    gather_columns,
    gather_columns_reference,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE_SIZE, MAX_PAGES, PADDING = 4, 30, 6


def same(ours: object, theirs: object) -> None:
    for field in fields(theirs):  # type: ignore[arg-type]
        mine, expected = getattr(ours, field.name), getattr(theirs, field.name)
        assert mine.dtype == expected.dtype, field.name
        assert torch.equal(mine.cpu(), expected.cpu()), f"{field.name}: {mine} is not {expected}"


def there(value: OpenRounds | WalkedRounds | Beam) -> dict[str, Tensor]:
    return {field.name: getattr(value, field.name).to(DEVICE) for field in fields(value)}


def tables(layout: RoundLayout, seed: int) -> tuple[Tensor, Tensor]:
    """A table of rounds with trees of every size, and page tables; row `PADDING` is that of padding."""
    draw = random.Random(seed)
    table = torch.full((PADDING + 1, layout.width), 99, dtype=torch.int64)
    for slot in range(PADDING):
        count = draw.randint(1, layout.nodes)
        path = sorted(draw.sample(range(1, layout.nodes), draw.randint(0, min(layout.path_len, layout.nodes) - 1)))
        accepted = [0, *path] if draw.random() < 0.8 else []
        table[slot, 0] = draw.randint(len(accepted), PAGE_SIZE * MAX_PAGES - layout.nodes)
        table[slot, 1] = count
        table[slot, layout.accepted_at : layout.tokens_at] = -1
        table[slot, layout.accepted_at : layout.accepted_at + len(accepted)] = torch.tensor(accepted).long()
        table[slot, layout.tokens_at : layout.parents_at] = torch.tensor(
            [draw.randint(0, 2) for _ in range(layout.nodes)]
        )
        table[slot, layout.parents_at : layout.parents_at + count] = torch.tensor(random_parents(count, seed + slot))
    table[PADDING] = 0
    table[PADDING, layout.accepted_at : layout.tokens_at] = -1
    generator = torch.Generator().manual_seed(seed)
    pages = torch.randperm((PADDING + 1) * MAX_PAGES, generator=generator).view(PADDING + 1, MAX_PAGES).int()
    return table, pages


@pytest.mark.parametrize(
    ("path_len", "nodes", "verified"),
    [(1, 1, 1), (2, 2, 2), (4, 4, 4), (6, 16, 16), (8, 16, 16), (8, 16, 6), (6, 16, 1), (5, 64, 64), (64, 64, 64)],
)
def test_a_round_opens_walks_and_closes(path_len: int, nodes: int, verified: int) -> None:
    layout = RoundLayout(path_len, nodes)
    table, pages = tables(layout, nodes)
    slots = torch.tensor([3, 0, 5, PADDING, 1, PADDING])
    opened = open_rounds_reference(table, pages, slots, layout, PAGE_SIZE, verified)
    with poisoned_allocations():
        ours = round_open_triton.open_rounds(
            *(x.to(DEVICE) for x in (table, pages, slots)), layout, PAGE_SIZE, verified
        )
    same(ours, opened)
    generator = torch.Generator().manual_seed(nodes)
    sampled = torch.randint(-1, 3, opened.tokens.shape, generator=generator)
    for limit in (7, 10_000):
        walked = walk_rounds_reference(opened, sampled, PAGE_SIZE, limit)
        with poisoned_allocations():
            found = round_walk_triton.walk_rounds(OpenRounds(**there(opened)), sampled.to(DEVICE), PAGE_SIZE, limit)
        same(found, walked)
    assert walked.bonus[3] == 0, "padding"
    tokens, parents = torch.randint(0, 9, (2, slots.shape[0], nodes), generator=generator)
    counts = torch.randint(1, nodes + 1, slots.shape, generator=generator)
    theirs, mine = table.clone(), table.to(DEVICE, copy=True)
    expected = close_rounds_reference(theirs, slots, PADDING, walked, tokens, parents, counts)
    with poisoned_allocations():
        result = round_walk_triton.close_rounds(
            mine, slots.to(DEVICE), PADDING, layout, WalkedRounds(**there(walked)), tokens.to(DEVICE),
            parents.to(DEVICE), counts.to(DEVICE),
        )  # fmt: skip
    assert torch.equal(result.cpu(), expected)
    kept = list(range(PADDING))
    assert torch.equal(mine.cpu()[kept], theirs[kept])
    assert mine.cpu()[PADDING, :2].tolist() == [0, 0], "padding has nothing to verify"


def test_walks_meet_what_the_tables_say() -> None:
    """One sequence by hand: the tree 0 - 1 - 2 with a brother 3, of which 0 and 1 are right."""
    layout = RoundLayout(3, 4)
    table = torch.tensor([[6, 4, 0, 1, -1, 50, 51, 52, 53, -1, 0, 1, 0]])
    pages = torch.tensor([[9, 4, 7]], dtype=torch.int32)
    opened = open_rounds(table, pages, torch.tensor([0]), layout, PAGE_SIZE, 4)
    assert opened.accepted_start.tolist() == [4]
    assert opened.positions.tolist() == [6, 7, 8, 7]
    assert opened.row_slots.tolist() == [4 * 4 + 2, 4 * 4 + 3, 7 * 4, 7 * 4 + 1]
    assert opened.visible.tolist() == [0b0001, 0b0011, 0b0111, 0b1001]
    walked = walk_rounds_reference(opened, torch.tensor([[51, 99, 1, 1]]), PAGE_SIZE, 8)
    assert walked.emitted.tolist() == [[51, 99, -1]]
    assert (walked.bonus.tolist(), walked.start.tolist(), walked.last.tolist()) == ([99], [8], [1])
    assert walked.positions.tolist() == [6, 7, 7], "no position at or behind the limit"
    assert walked.row_slots.tolist() == [18, 19, -1]
    assert walked.visible.tolist() == [0b1, 0b11, 0]
    result = close_rounds(
        table, torch.tensor([0]), 1, layout, walked, opened.tokens + 1, opened.parents, torch.tensor([2])
    )
    row = [8, 2, 0, 1, -1, 51, 52, 53, 54, -1, 0, 1, 0]
    assert result.tolist() == [[51, 99, -1, *row]]
    assert table.tolist() == [row]


def test_a_round_of_fewer_nodes_verifies_the_first_ones() -> None:
    layout = RoundLayout(3, 4)
    table = torch.tensor([[6, 4, 0, 1, -1, 50, 51, 52, 53, -1, 0, 1, 0], [6, 1, 0, -1, -1, 60, 0, 0, 0, -1, 0, 0, 0]])
    pages = torch.tensor([[9, 4, 7], [1, 2, 3]], dtype=torch.int32)
    opened = open_rounds(table, pages, torch.tensor([0, 1]), layout, PAGE_SIZE, 2)
    assert opened.num_nodes.tolist() == [2, 1]
    assert opened.tokens.tolist() == [[50, 51], [60, 0]]
    assert opened.parents.tolist() == [[-1, 0], [-1, 0]]
    assert opened.positions.tolist()[:3] == [6, 7, 6]
    assert opened.row_slots.tolist() == [4 * 4 + 2, 4 * 4 + 3, 2 * 4 + 2, -1]
    assert opened.visible.tolist() == [0b1, 0b11, 0b1, 0]
    assert opened.accepted.tolist() == [[0, 1, -1], [0, -1, -1]], "what the round before accepted is all there"


def level_inputs(trees: int, each: int, width: int, draft_vocab: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = -torch.randint(0, 5, (trees * each, width), generator=generator) / 2  # coarse, so that ties occur
    ids = torch.randint(0, draft_vocab, (trees * each, width), generator=generator)
    return scores, ids, torch.randperm(100, generator=generator)[:draft_vocab]


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(("width", "depth", "nodes"), [(1, 3, 4), (1, 1, 2), (4, 5, 16), (3, 2, 13), (8, 3, 32)])
def test_trees_grow_level_by_level(width: int, depth: int, nodes: int, mapped: bool) -> None:
    trees, limit = 5, 60
    starts = torch.tensor([0, 7, 40, 59, 63], dtype=torch.int32)
    page_tables = torch.randperm(trees * MAX_PAGES).view(trees, MAX_PAGES).int()
    count = width + (depth - 1) * width * width
    theirs, ours = (Candidates.empty(trees, count, where) for where in (torch.device("cpu"), DEVICE))
    place = GrowthPlace(starts, page_tables, PAGE_SIZE, limit)
    here = GrowthPlace(starts.to(DEVICE), page_tables.to(DEVICE), PAGE_SIZE, limit)
    beam: Beam | None = None
    base = 0
    for level in range(depth):
        each = 1 if beam is None else width
        scores, ids, to_target = level_inputs(trees, each, width, 50, level)
        mine = None if beam is None else Beam(**there(beam))
        with poisoned_allocations():
            chosen = growth_levels_triton.grow_level(
                mine, scores.to(DEVICE), ids.to(DEVICE), to_target.to(DEVICE) if mapped else None, ours, base, level,
                here,
            )  # fmt: skip
        beam = grow_level_reference(beam, scores, ids, to_target if mapped else None, theirs, base, level, place)
        same(chosen, beam)
        base += each * width
    same(ours, theirs)
    num_drafts, roots = min(nodes - 1, count), torch.arange(trees) + 500
    expected = finish_trees_reference(theirs, roots, num_drafts, nodes, starts, limit - depth)
    with poisoned_allocations():
        found = growth_levels_triton.finish_trees(
            ours, roots.to(DEVICE), num_drafts, nodes, starts.to(DEVICE), limit - depth
        )
    for mine, wanted in zip(found, expected, strict=True):
        assert torch.equal(mine.cpu(), wanted)
    assert expected[2].tolist() == [1 + num_drafts] * 3 + [1, 1], "roots at the head's end are alone"


def test_nan_scores_stay_inside_the_beam() -> None:
    """A head that breaks down must not make a kernel write past its buffers."""
    candidates = Candidates.empty(1, 4, DEVICE)
    place = GrowthPlace(
        torch.zeros(1, dtype=torch.int32, device=DEVICE), torch.zeros(1, 3, dtype=torch.int32, device=DEVICE), 4, 60
    )
    scores = torch.full((1, 4), float("nan"), device=DEVICE)
    beam = growth_levels_triton.grow_level(
        None, scores, torch.arange(4, device=DEVICE).view(1, 4), None, candidates, 0, 0, place
    )
    assert beam.tokens.tolist() == [0, 1, 2, 3]


def test_a_tree_of_nan_scores_has_nodes_that_there_are() -> None:
    """One tree's NaN must neither leave its row nor touch a neighbour's."""
    scores = torch.full((2, 6), torch.nan)
    scores[1] = torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0, -6.0])
    parents = torch.tensor([[-1, -1, 0, 0, 1, 1]]).expand(2, 6).contiguous()
    candidates = Candidates(*(values.to(DEVICE) for values in (scores, torch.arange(12).view(2, 6), parents)))
    roots, starts = torch.tensor([50, 60], device=DEVICE), torch.zeros(2, dtype=torch.int32, device=DEVICE)
    with poisoned_allocations():
        tokens, links, nodes = growth_levels_triton.finish_trees(candidates, roots, 3, 5, starts, 9)
    assert tokens.tolist() == [[50, 0, 1, 2, 0], [60, 6, 7, 8, 0]]
    assert links.tolist() == [[-1, 0, 0, 1, 0], [-1, 0, 0, 1, 0]]
    assert nodes.tolist() == [4, 4]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_scratch_takes_over_at_the_last_partial_page(page_size: int) -> None:
    trees, columns, pages_a_tree = 3, 5, 2
    pool = normal(20 + trees * pages_a_tree, 1, 2, page_size, 2, 3)
    page_tables = torch.randperm(20)[: trees * columns].view(trees, columns).int()
    starts = torch.tensor([0, page_size + 1, columns * page_size], dtype=torch.int32)
    ours = pool.to(DEVICE, copy=True)
    expected = scratch_tables_reference(pool, 20, pages_a_tree, starts, page_tables, page_size)
    with poisoned_allocations():
        found = growth_levels_triton.scratch_tables(
            ours, 20, pages_a_tree, starts.to(DEVICE), page_tables.to(DEVICE), page_size
        )
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(ours.cpu(), pool)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_columns_are_gathered(count: int) -> None:
    wide = normal(7, 3 * 20)
    sources = [wide[:, :20], *(normal(7, 20, seed=index) for index in range(1, count))]
    rows = torch.tensor([6, 0, 0, 3])
    with poisoned_allocations():
        ours = draft_inputs_triton.gather_columns([source.to(DEVICE) for source in sources], rows.to(DEVICE))
    assert torch.equal(ours.cpu(), gather_columns_reference(sources, rows))
    assert torch.equal(gather_columns(sources, rows), ours.cpu())


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("hidden", [1, 24, 100])
def test_draft_inputs(hidden: int, gathers: bool) -> None:
    embedding, feature = normal(30, hidden), normal(4, hidden, seed=1)
    norms = normal(hidden, seed=2), normal(hidden, seed=3)
    rows = torch.tensor([3, 3, 0, 1, 2]) if gathers else None
    ids = torch.randint(0, 30, (5 if gathers else 4,))
    arguments = (embedding, ids, norms[0], feature, rows, norms[1])
    with poisoned_allocations():
        ours = draft_inputs_triton.draft_inputs(*(None if x is None else x.to(DEVICE) for x in arguments), 1e-5)
    for mine, wanted in zip(ours, draft_inputs_reference(*arguments, 1e-5), strict=True):
        torch.testing.assert_close(mine.cpu(), wanted)
    for mine, wanted in zip(draft_inputs(*arguments, 1e-5), draft_inputs_reference(*arguments, 1e-5), strict=True):
        assert torch.equal(mine, wanted)


def test_misfits_are_named() -> None:
    layout = RoundLayout(2, 2)
    table, pages = tables(layout, 0)
    slots = torch.tensor([0])
    opened = open_rounds(table, pages, slots, layout, PAGE_SIZE, layout.nodes)
    walked = walk_rounds_reference(opened, opened.tokens, PAGE_SIZE, 9)
    place = GrowthPlace(torch.zeros(1, dtype=torch.int32), pages[:1], PAGE_SIZE, 9)
    room, ids = Candidates.empty(1, 3, torch.device("cpu")), torch.zeros(1, 2, dtype=torch.int64)
    for call, message in (
        (lambda: open_rounds(table[:, :-1], pages, slots, layout, PAGE_SIZE, 1), "table"),
        (lambda: open_rounds(table, pages.long(), slots, layout, PAGE_SIZE, 1), "pages"),
        (lambda: open_rounds(table, pages, slots.int(), layout, PAGE_SIZE, 1), "slots"),
        (lambda: open_rounds(table, pages, slots, layout, PAGE_SIZE, 0), "nodes: 0"),
        (lambda: open_rounds(table, pages, slots, layout, PAGE_SIZE, layout.nodes + 1), "nodes"),
        (lambda: close_rounds(table, slots, 6, layout, walked, ids[:, :1], ids, slots), "tokens"),
        (lambda: grow_level(None, ids.float(), ids[:, :1], None, room, 0, 0, place), "child_ids"),
        (lambda: grow_level(None, ids.float(), ids, None, room, 2, 0, place), "base"),
        (lambda: finish_trees(room, slots, 4, 5, slots.int(), 9), "num_drafts"),
        (lambda: scratch_tables(normal(4, 2), 3, 2, slots.int(), pages[:1], 4), "first_scratch"),
        (lambda: gather_columns([normal(2, 3), normal(2, 4)], slots), "not alike"),
        (lambda: draft_inputs(normal(3, 4), ids[0], normal(4), normal(2, 5), None, normal(4), 1e-5), "feature"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
