"""First rounds may verify deeper trees than later ones: a prefill's S is a setting of its own."""

from pathlib import Path

import pytest
from local_pair import Ask, End, local_pair
from tiny_world import TinyWorld, prompt

from graftline.engine.draft_head.random import write_tiny_head
from graftline.engine.request import DraftTree, FinishReason, Sampling
from graftline.engine.tree_shape import TreeShape

DEEPER, SHALLOWER = TreeShape(2, 2, 7, initial_depth=5), TreeShape(4, 2, 7, initial_depth=2)
SHAPES = (DEEPER, SHALLOWER, TreeShape(2, 3, 12, initial_depth=8))
ROUNDS = {
    "host": {"device_rounds": False},
    "fixed": {"device_rounds": True, "overlap": False},
    "fixed-ahead": {"device_rounds": True, "overlap": True},
}
SEEDED = Sampling(temperature=0.8, top_p=0.95, seed=20)
LENGTHS = (1, 15, 16, 17, 33, 7)


def right_chain(answer: list[int], depth: int) -> DraftTree:
    """The first `depth` tokens behind the first one of an answer."""
    return DraftTree(tuple(answer[: depth + 1]), tuple(range(-1, depth)))


def knowing(world: TinyWorld, token_ids: list[int], max_tokens: int, depth: int, **others: object) -> Ask:
    """A request whose first tree is right as deep as that."""
    answer = world.plain.answer(token_ids, depth + 1)
    return Ask(token_ids=token_ids, max_tokens=max_tokens, edit_tree=lambda _: right_chain(answer, depth), **others)  # type: ignore[arg-type]


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("decode_split", [(4,), (3, 1)], ids=len)
@pytest.mark.parametrize("page_size", [1, 4])
def test_output_is_that_of_the_plain_model(
    world: TinyWorld, decode_split: tuple[int, ...], shape: TreeShape, rounds: str, page_size: int
) -> None:
    """CASES S36: alone and six at once, greedy and seeded, whichever of the two depths is larger."""
    depths: list[int] = []

    def keep(tree: DraftTree) -> DraftTree:
        depths.append(tree.depth)
        return tree

    with local_pair(
        world.plain.path,
        world.eagle3,
        tree=shape,
        prefill_split=(1, 3) if page_size == 1 else (4,),
        decode_split=decode_split,
        page_size=page_size,
        num_pages=512 // page_size,
        decode=ROUNDS[rounds],
    ) as pair:
        asks = [
            Ask(
                token_ids=prompt(length),
                max_tokens=6 + index,
                sampling=SEEDED if index % 2 else Sampling(),
                edit_tree=keep,
            )
            for index, length in enumerate(LENGTHS)
        ]
        answers = [*pair.run(asks[:1]), *pair.run(asks)]
    for ask, answer in zip([asks[0], *asks], answers, strict=True):
        assert answer.ids == world.plain.answer(ask.token_ids, ask.max_tokens, ask.sampling)
        assert (answer.end, answer.reason) == (End.FINISHED, FinishReason.LENGTH)
    assert max(depths) <= shape.initial.depth
    assert (max(depths) > shape.depth) is (shape is not SHALLOWER)


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("decode_split", [(4,), (2, 2)], ids=len)
def test_a_deep_first_tree_is_accepted_whole(world: TinyWorld, decode_split: tuple[int, ...], rounds: str) -> None:
    """Six right drafts where rounds take five: the sixth is cut off; whatever ends the request within them does."""
    with local_pair(
        world.plain.path, world.eagle3, tree=DEEPER, decode_split=decode_split, num_pages=128, decode=ROUNDS[rounds]
    ) as pair:
        counts = range(2, 14)
        asks = [knowing(world, prompt(4 + count), count, 6) for count in counts]
        answers = [*pair.run(asks, concurrency=1), *pair.run(asks, concurrency=4)]
    for ask, answer in zip(asks * 2, answers, strict=True):
        assert answer.ids == world.plain.answer(ask.token_ids, ask.max_tokens)
        assert answer.reason is FinishReason.LENGTH
        accepted = answer.speculation[0].first_round_accepted
        assert accepted == min(5, ask.max_tokens - 2)


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("offset", range(1, 8))
def test_an_end_at_every_offset_of_the_first_run(world: TinyWorld, offset: int, rounds: str) -> None:
    expected = world.plain.answer(prompt(6), 20)
    cut = expected[: expected.index(expected[offset]) + 1]
    ask = knowing(world, prompt(6), 20, 6, eos_ids=frozenset({expected[offset]}))
    with local_pair(world.plain.path, world.eagle3, tree=DEEPER, decode=ROUNDS[rounds]) as pair:
        (answer,) = pair.run([ask])
    assert (answer.ids, answer.reason) == (cut, FinishReason.STOP)


@pytest.mark.parametrize("rounds", ROUNDS)
def test_a_decode_of_a_smaller_limit_takes_what_it_can(world: TinyWorld, rounds: str) -> None:
    """Both sides need not agree: a deeper tree is cut to the decode's own depth, and nothing else happens."""
    own = TreeShape(2, 2, 7)
    asks = [knowing(world, prompt(length), 12, 6) for length in LENGTHS]
    with local_pair(
        world.plain.path, world.eagle3, tree=DEEPER, num_pages=128, decode={"tree": own, **ROUNDS[rounds]}
    ) as pair:
        answers = [*pair.run(asks), *pair.run([Ask(token_ids=ask.token_ids, max_tokens=12) for ask in asks])]
    assert [answer.ids for answer in answers] == 2 * [world.plain.answer(ask.token_ids, 12) for ask in asks]
    assert {answer.speculation[0].first_round_accepted for answer in answers[: len(asks)]} == {2}
    assert all(answer.num_attempts == 1 for answer in answers)


@pytest.mark.parametrize(("num_pages", "preempt_every"), [(14, 0), (10, 2), (64, 1)])
@pytest.mark.parametrize("rounds", ROUNDS)
def test_pages_for_a_first_round_that_is_accepted_whole(
    world: TinyWorld, rounds: str, num_pages: int, preempt_every: int
) -> None:
    """A round launched ahead of a deep first one starts behind all of its drafts; pages run out, requests give way."""
    asks = [knowing(world, prompt(5 + index, index), 18, 5) for index in range(6)]
    for page_size, most_pages in ((4, num_pages), (1, 4 * num_pages)):
        with local_pair(
            world.plain.path,
            world.eagle3,
            tree=DEEPER,
            page_size=page_size,
            num_pages=most_pages,
            decode={"preempt_every": preempt_every, **ROUNDS[rounds]},
        ) as pair:
            answers = (
                pair.run(asks)
                if not preempt_every
                else pair.run([Ask(token_ids=ask.token_ids, max_tokens=18) for ask in asks])
            )
        for ask, answer in zip(asks, answers, strict=True):
            assert answer.ids == world.plain.answer(ask.token_ids, 18)


def test_a_deep_first_round_may_be_a_planned_step(world: TinyWorld) -> None:
    """A request with logprobs beside others makes their rounds planned ones; fixed ones take over what they left."""
    with local_pair(world.plain.path, world.eagle3, tree=DEEPER, num_pages=256, decode=ROUNDS["fixed-ahead"]) as pair:
        answers = pair.run(
            [
                knowing(world, prompt(5), 40, 5),
                knowing(world, prompt(6), 8, 5, logprobs=2),
                knowing(world, prompt(7), 40, 5),
            ]
        )
    for answer, (length, max_tokens) in zip(answers, ((5, 40), (6, 8), (7, 40)), strict=True):
        assert answer.ids == world.plain.answer(prompt(length), max_tokens)
        assert answer.speculation[0].first_round_accepted == 5


@pytest.mark.parametrize("rounds", ROUNDS)
def test_near_the_end_of_the_context(world: TinyWorld, tmp_path: Path, rounds: str) -> None:
    """A deep tree needs more positions than a later one: too near the end there is none, and nothing else differs."""
    head = write_tiny_head(tmp_path, world.short.path, context=64)
    lengths = range(52, 63)
    with local_pair(world.short.path, head, tree=DEEPER, num_pages=64, decode=ROUNDS[rounds]) as pair:
        answers = pair.run([Ask(token_ids=prompt(length), max_tokens=30) for length in lengths])
    for length, answer in zip(lengths, answers, strict=True):
        assert answer.ids == world.short.answer(prompt(length), 64 - length)
        assert answer.reason is FinishReason.LENGTH
