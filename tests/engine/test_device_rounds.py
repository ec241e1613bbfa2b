"""Rounds of fixed shape give what the plain model gives, launched ahead of the host or not (contract 4)."""

from itertools import product

import pytest
from local_pair import Ask, Call, End, local_pair
from tiny_world import EOS, TinyWorld, prompt

from graftline.engine.decode_engine import DecodeScheduler
from graftline.engine.device_rounds import round_size, round_sizes
from graftline.engine.request import FinishReason, Sampling
from graftline.engine.service_api import Tokens
from graftline.engine.tree_shape import NO_SPECULATION, TreeShape

SHAPES = (TreeShape(1, 1, 2), TreeShape(3, 1, 4), TreeShape(4, 2, 8), TreeShape(3, 3, 12), NO_SPECULATION)
SEEDED = Sampling(temperature=0.8, top_p=0.95, seed=20)
LENGTHS = (1, 15, 16, 17, 33, 7)


def rounds(*, overlap: bool = True, **others: object) -> dict[str, object]:
    return {"device_rounds": True, "overlap": overlap, **others}


def name_of(shape: object) -> str:
    return f"{shape.depth}-{shape.branching}-{shape.nodes}" if isinstance(shape, TreeShape) else str(shape)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "in-turn"])
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
@pytest.mark.parametrize("decode_split", [(4,), (3, 1), (1, 2, 1)], ids=len)
def test_output_is_that_of_the_plain_model(
    world: TinyWorld, decode_split: tuple[int, ...], shape: TreeShape, overlap: bool
) -> None:
    head = world.eagle3 if shape.branching > 1 else world.eagle
    with local_pair(
        world.plain.path,
        head if shape.speculates else None,
        tree=shape,
        decode_split=decode_split,
        num_pages=128,
        decode=rounds(overlap=overlap),
    ) as pair:
        samplings = (Sampling(), SEEDED)
        asks = [
            Ask(token_ids=prompt(length), max_tokens=6 + index, sampling=samplings[index % 2])
            for index, length in enumerate(LENGTHS)
        ]
        answers = [*pair.run(asks[:1]), *pair.run(asks)]
    for ask, answer in zip([asks[0], *asks], answers, strict=True):
        assert answer.ids == world.plain.answer(ask.token_ids, ask.max_tokens, ask.sampling)
        assert (answer.end, answer.reason) == (End.FINISHED, FinishReason.LENGTH)


def test_a_round_is_launched_before_the_one_before_is_read(world: TinyWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when overlap does nothing: most rounds of a long answer carry their values on the device."""
    carried: list[bool] = []
    apply = DecodeScheduler._apply

    def spy(self: DecodeScheduler, result: object) -> None:
        carried.append(any(len(batch.steps) > 1 for batch in self._batches._batches))
        apply(self, result)  # type: ignore[arg-type]

    monkeypatch.setattr(DecodeScheduler, "_apply", spy)
    with local_pair(world.plain.path, world.eagle, decode=rounds()) as pair:
        answer = pair.generate(prompt(9), 40)
    assert answer.ids == world.plain.answer(prompt(9), 40)
    assert sum(carried) > len(carried) * 0.7


def test_microbatches_are_evened_out_although_rounds_run_ahead(
    world: TinyWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASES P21: whoever always has a round under way could never move, and a stage would idle until the end."""
    sizes: list[list[int]] = []
    apply = DecodeScheduler._apply

    def spy(self: DecodeScheduler, result: object) -> None:
        apply(self, result)  # type: ignore[arg-type]
        sizes.append(sorted(len(batch.members) for batch in self._batches._batches))

    monkeypatch.setattr(DecodeScheduler, "_apply", spy)
    asks = [Ask(token_ids=prompt(5 + index, index), max_tokens=4 if index % 2 else 70) for index in range(4)]
    with local_pair(world.plain.path, world.eagle, num_pages=160, decode_split=(2, 2), decode=rounds()) as pair:
        answers = pair.run(asks)
    for ask, answer in zip(asks, answers, strict=True):
        assert answer.ids == world.plain.answer(ask.token_ids, ask.max_tokens)
    assert sizes.count([1, 1]) > sizes.count([0, 2])


@pytest.mark.parametrize(("head", "accepted"), [("agrees", 3), ("disagrees", 0)])
def test_accept_lengths(world: TinyWorld, head: str, accepted: int) -> None:
    """S + 1 tokens a round from a drafter that always agrees, one from one that never does; CASES S38."""
    with local_pair(world.markov.path, getattr(world, head), tree=TreeShape(3, 1, 4), decode=rounds()) as pair:
        answer = pair.generate(prompt(5), 1 + 8 * (accepted + 1))
    assert answer.ids == world.markov.answer(prompt(5), 1 + 8 * (accepted + 1))
    assert (answer.total.rounds, answer.total.accepted) == (8, 8 * accepted)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("decode_split", [(4,), (2, 2)], ids=len)
def test_many_rows_cut_trees_to_their_likeliest_nodes(
    world: TinyWorld, decode_split: tuple[int, ...], count: int
) -> None:
    """12 nodes for one request, 6 for two, a chain's 4 for four: the drafts that hold are among them."""
    shape = TreeShape(3, 3, 12)
    decode = rounds(max_verify_rows=12, max_running=count)
    with local_pair(world.markov.path, world.agrees, tree=shape, decode_split=decode_split, decode=decode) as pair:
        answers = pair.run([Ask(token_ids=prompt(5 + index), max_tokens=1 + 24 * 4) for index in range(count)])
    for index, answer in enumerate(answers):
        assert answer.ids == world.markov.answer(prompt(5 + index), 1 + 24 * 4)
    most = shape.nodes_among(-(-count // len(decode_split)), 12)
    num_rounds, accepted = (sum(getattr(answer.total, name) for answer in answers) for name in ("rounds", "accepted"))
    assert accepted > 1.1 * num_rounds, "of a tree that is cut to its first level one draft holds at most"
    drafted = sum(answer.total.drafted for answer in answers) / num_rounds
    assert most - 1.7 <= drafted <= (most + 11) / 2, "there are fewer requests in the first and the last rounds"


@pytest.mark.parametrize("max_rows", [1, 7, 12, 30])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.speculates], ids=name_of)
def test_output_is_that_of_the_plain_model_whatever_is_cut(world: TinyWorld, shape: TreeShape, max_rows: int) -> None:
    head = world.eagle3 if shape.branching > 1 else world.eagle
    decode = rounds(max_verify_rows=max_rows)
    with local_pair(world.plain.path, head, tree=shape, num_pages=128, decode=decode) as pair:
        asks = [
            Ask(token_ids=prompt(length), max_tokens=6 + 5 * index, sampling=(Sampling(), SEEDED)[index % 2])
            for index, length in enumerate(LENGTHS)
        ]
        answers = pair.run(asks)
    for ask, answer in zip(asks, answers, strict=True):
        assert answer.ids == world.plain.answer(ask.token_ids, ask.max_tokens, ask.sampling)


def test_nodes_of_a_round() -> None:
    shape = TreeShape(5, 4, 16, 7)
    assert [shape.nodes_among(count, 128) for count in (1, 8, 9, 16, 21, 32, 64)] == [16, 16, 14, 8, 6, 6, 6]
    assert shape.nodes_among(64, 0) == 16
    assert TreeShape(3, 1, 4).nodes_among(64, 8) == 4
    assert NO_SPECULATION.nodes_among(64, 8) == 1


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 6, 7, 8])
def test_exactly_max_tokens(world: TinyWorld, max_tokens: int) -> None:
    """Nothing that a round launched ahead emits behind the end is heard of."""
    with local_pair(world.markov.path, world.agrees, decode=rounds()) as pair:
        answers = pair.run([Ask(token_ids=prompt(3), max_tokens=max_tokens), Ask(token_ids=prompt(4), max_tokens=20)])
    assert answers[0].ids == world.markov.answer(prompt(3), max_tokens)
    assert answers[1].ids == world.markov.answer(prompt(4), 20)


def test_eos_in_the_middle(world: TinyWorld) -> None:
    """CASES S03: a request ends where the plain model ends it, whatever the round behind it does."""
    asks = [
        Ask(token_ids=prompt(6, seed), max_tokens=60, eos_ids=frozenset({EOS, *range(40)}), sampling=SEEDED)
        for seed in range(6)
    ]
    with local_pair(world.plain.path, world.eagle, num_pages=256, decode=rounds()) as pair:
        answers = pair.run(asks)
    assert any(answer.reason is FinishReason.STOP for answer in answers)
    for ask, answer in zip(asks, answers, strict=True):
        assert answer.ids == world.plain.answer(ask.token_ids, 60, ask.sampling, sorted(ask.eos_ids))


def test_requests_that_need_more_than_tokens_share_a_batch(world: TinyWorld) -> None:
    """Logprobs and least lengths go the planned way; requests beside them change from one way to the other."""
    with local_pair(world.plain.path, world.eagle, num_pages=256, decode=rounds()) as pair:
        answers = pair.run(
            [
                Ask(token_ids=prompt(5), max_tokens=30),
                Ask(token_ids=prompt(6), max_tokens=8, logprobs=2),
                Ask(token_ids=prompt(7), max_tokens=30, min_tokens=6, eos_ids=frozenset({EOS})),
            ]
        )
    assert answers[0].ids == world.plain.answer(prompt(5), 30)
    assert answers[1].ids == world.plain.answer(prompt(6), 8)
    assert all(token.logprob is not None for token in answers[1].tokens)


@pytest.mark.parametrize(("num_pages", "preempt_every"), [(12, 0), (64, 3), (9, 2)])
def test_pressure_and_preemption(world: TinyWorld, num_pages: int, preempt_every: int) -> None:
    """CASES R01: a pool too small for all, with rounds under way when pages run out."""
    asks = [Ask(token_ids=prompt(5 + index, index), max_tokens=18) for index in range(5)]
    with local_pair(
        world.plain.path, world.eagle, num_pages=num_pages, decode=rounds(preempt_every=preempt_every)
    ) as pair:
        answers = pair.run(asks)
    for ask, answer in zip(asks, answers, strict=True):
        assert answer.ids == world.plain.answer(ask.token_ids, 18)


def test_up_to_the_end_of_the_context(world: TinyWorld) -> None:
    """CASES S36: the last rounds of a full context stay within their pages."""
    with local_pair(world.short.path, None, num_pages=32, decode=rounds()) as pair:
        answer = pair.generate(prompt(40), 100)
    assert answer.ids == world.short.answer(prompt(40), 24)
    assert answer.reason is FinishReason.LENGTH


def test_cancels_while_rounds_are_under_way(world: TinyWorld) -> None:
    """What a round launched ahead writes lands in pages that nobody else has yet (CASES B01)."""

    def hook(call: Call, event: object) -> None:
        if isinstance(event, Tokens):
            call.cancel()

    asks = [
        Ask(token_ids=prompt(5 + index, index), max_tokens=24, on_event=hook if index % 2 else None)
        for index in range(12)
    ]
    with local_pair(world.plain.path, world.eagle, num_pages=40, decode=rounds(max_running=4)) as pair:
        answers = pair.run(asks)
    for index, (ask, answer) in enumerate(zip(asks, answers, strict=True)):
        expected = world.plain.answer(ask.token_ids, 24)
        if index % 2:
            assert answer.end is End.CANCELLED
            assert answer.ids == expected[: len(answer.ids)]
        else:
            assert answer.ids == expected


def test_sizes_hold_every_batch() -> None:
    for most, count in product((1, 2, 3, 16, 17, 64), range(1, 65)):
        if count <= most:
            size = round_size(count, most)
            assert count <= size <= most
            assert size in round_sizes(most)
