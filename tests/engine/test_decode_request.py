"""The arithmetic of one request's rounds."""

import pytest

from graftline.engine.decode_request import DecodeRequest, Ending, Phase
from graftline.engine.plan import SampledToken, SegmentOutcome, SlotOpening
from graftline.engine.request import (
    DraftTree,
    FinishReason,
    PageId,
    Request,
    RequestId,
    RequestKey,
    Sampling,
    SlotId,
    Stopping,
    Token,
)
from graftline.engine.service_api import SpeculationCounts, Tokens

EOS = 7
CHAIN = DraftTree((20, 21, 22, 23), (-1, 0, 1, 2))


def started(
    stopping: Stopping, *, prompt_len: int = 5, earlier: int = 0, limit: int = 64, tree: DraftTree = CHAIN
) -> DecodeRequest:
    ids = tuple(range(30, 30 + prompt_len + earlier))
    request = Request(RequestKey(RequestId("r"), 0), ids, prompt_len, Sampling(), stopping)
    state = DecodeRequest(request, lambda event: None, limit)
    state.start(Token(tree.tokens[0]), tree)
    return state


def outcome(tokens: list[int], tree: DraftTree | None = None) -> SegmentOutcome:
    """Every draft on the way to these tokens held."""
    return SegmentOutcome(
        slot=0,
        accepted=list(range(len(tokens))),
        tokens=[SampledToken(token) for token in tokens],
        tree_tokens=list(tree.tokens) if tree else [],
        tree_parents=list(tree.parents) if tree else [],
    )


def land(state: DecodeRequest, outcome: SegmentOutcome) -> tuple[Tokens, Ending | None]:
    """A round comes home."""
    if not state.in_flight:
        state.segment(state.next_tree().num_nodes, grow=True)
    state.landed(4)
    return state.apply(outcome)


def test_rounds_under_way_emit_as_much_as_their_trees_are_deep() -> None:
    """Pages for a round launched ahead: the first tree may be deeper than those of rounds, or no tree at all."""
    for tree, max_tokens, most in ((CHAIN, 100, 4), (DraftTree.root_only(20), 100, 1), (CHAIN, 3, 2)):
        state = started(Stopping(max_tokens), tree=tree)
        assert state.most_under_way(3) == 0
        state.segment(state.next_tree().num_nodes, grow=True)
        assert state.most_under_way(3) == most
        state.carried_segment(grow=True)
        assert state.most_under_way(3) == most + 3


@pytest.mark.parametrize("offset", range(4))
def test_eos_anywhere_in_an_accepted_run_ends_it_there(offset: int) -> None:
    """CASES S03, S38: nothing behind the end is emitted or counted as accepted."""
    run = [21, 22, 23, 24]
    run[offset] = EOS
    state = started(Stopping(100, eos_token_ids=frozenset({EOS})))
    state.segment(4, grow=True)
    tokens, ending = land(state, outcome(run))
    assert tokens == Tokens(tuple(run[: offset + 1]))
    assert ending == Ending(FinishReason.STOP, EOS)
    assert state.counts == SpeculationCounts(1, 3, offset, 3, offset)


@pytest.mark.parametrize("stop_ids", [frozenset({21}), frozenset({24, 21})])
def test_stop_ids_end_as_eos_does(stop_ids: frozenset[int]) -> None:
    state = started(Stopping(100, stop_token_ids=stop_ids, eos_token_ids=frozenset({EOS})))
    assert land(state, outcome([21, 22]))[1] == Ending(FinishReason.STOP, 21)


def test_ids_that_do_not_end_the_request_are_like_any_other() -> None:
    """CASES S04: with the end ignored, EOS is one more token."""
    state = started(Stopping(100))
    tokens, ending = land(state, outcome([EOS, EOS, 24]))
    assert (len(tokens.ids), ending) == (3, None)


@pytest.mark.parametrize("max_tokens", [2, 3, 4, 5])
def test_max_tokens_cuts_a_run(max_tokens: int) -> None:
    """CASES A03: the first token counts once; a run is cut at exactly the last allowed one."""
    state = started(Stopping(max_tokens))
    assert state.max_depth() == max_tokens - 2, "a round emits at most depth + 1 tokens"
    assert state.next_tree().num_nodes == min(4, max_tokens - 1)
    tokens, ending = land(state, outcome([21, 22, 23, 24][:max_tokens]))
    assert len(tokens.ids) == min(4, max_tokens - 1)
    assert (ending == Ending(FinishReason.LENGTH)) is (max_tokens <= 5)


def test_an_end_beats_the_limit_on_the_same_token() -> None:
    state = started(Stopping(2, eos_token_ids=frozenset({EOS})))
    assert land(state, outcome([EOS]))[1] == Ending(FinishReason.STOP, EOS)


@pytest.mark.parametrize(("limit", "new_tokens"), [(6, 0), (7, 1), (8, 2), (10, 4), (12, 4)])
def test_the_context_ends_a_request_at_exactly_its_last_position(limit: int, new_tokens: int) -> None:
    """CASES S28: prompt 5 and the first token make 6; drafts that could not be emitted are not even verified."""
    state = started(Stopping(1000), limit=limit)
    assert state.left == limit - 6
    if new_tokens == 0:
        assert state.ending_before_start() == Ending(FinishReason.LENGTH)
        return
    assert state.ending_before_start() is None
    tokens, ending = land(state, outcome([21, 22, 23, 24]))
    assert len(tokens.ids) == new_tokens
    assert ending == (Ending(FinishReason.LENGTH) if limit <= 10 else None)


def test_a_first_token_may_be_the_last() -> None:
    """CASES A01."""
    ends = frozenset({20})
    assert started(Stopping(9, eos_token_ids=ends)).ending_before_start() == Ending(FinishReason.STOP, 20)
    assert started(Stopping(1)).ending_before_start() == Ending(FinishReason.LENGTH)
    assert started(Stopping(2)).ending_before_start() is None


def test_earlier_attempts_count() -> None:
    """CASES R03: after a preemption the same limits hold over all tokens."""
    state = started(Stopping(8), earlier=4)
    assert (state.committed, state.output_len, state.left) == (9, 5, 3)
    opening = SlotOpening.of(state.request, 3)
    assert opening.min_ending_position == 5
    later = Request(state.request.key, state.request.token_ids, 5, Sampling(seed=3), Stopping(8, min_tokens=6))
    assert SlotOpening.of(later, 3).min_ending_position == 11, "the position of output token 6, whatever the attempt"


def test_a_round_commits_what_it_accepted() -> None:
    state = started(Stopping(100))
    segment = state.segment(4, grow=True)
    assert (segment.start, segment.tokens, segment.parents, segment.accepted) == (
        5,
        [20, 21, 22, 23],
        [-1, 0, 1, 2],
        [],
    )
    grown = DraftTree((40, 41, 42), (-1, 0, 0))
    accepted = SegmentOutcome(0, [0, 2], [SampledToken(21), SampledToken(40)], [40, 41, 42], [-1, 0, 0])
    land(state, accepted)
    assert (state.committed, state.output_len, state.tree) == (7, 3, grown)
    following = state.segment(2, grow=False)
    assert (following.start, following.tokens, following.parents, following.grow) == (7, [40, 41], [-1, 0], False)
    assert following.accepted == [0, 2]
    assert state.segment(2, grow=False).accepted == [], "told once"


def test_without_a_grown_tree_the_bonus_token_stands_alone() -> None:
    state = started(Stopping(100), tree=DraftTree.root_only(20))
    land(state, outcome([33]))
    assert state.tree == DraftTree.root_only(33)


def test_stages_hear_of_every_page_once() -> None:
    state = started(Stopping(100))
    state.slot, state.pages = SlotId(2), [PageId(4), PageId(9)]
    change = state.page_change()
    assert change is not None
    assert (change.slot, change.first_index, change.page_ids) == (2, 0, [4, 9])
    assert state.page_change() is None
    state.pages.append(PageId(1))
    grown = state.page_change()
    assert grown is not None
    assert (grown.first_index, grown.page_ids) == (2, [1])
    assert state.phase is Phase.RUNNING
