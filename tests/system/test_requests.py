"""Requests of every size and fate through the whole system; after each test every pool is whole again."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from system import System, SystemSpec, limited, running_system
from tiny_world import VOCAB_SIZE, TinyWorld, prompt

from graftline.client import AsyncClient, FinishReason, TreeOrigin
from graftline.engine.tree_shape import TreeShape
from graftline.errors import GraftlineError, InvalidRequestError

PAGE = 4


@pytest.fixture
async def system(world: TinyWorld) -> AsyncIterator[System]:
    spec = SystemSpec(
        world.plain.path, world.eagle, TreeShape(3, 1, 4), (2, 2), (1, 3), page_size=PAGE, num_tokens=1024
    )
    async with running_system(spec) as running:
        yield running


@pytest.mark.system
async def test_exactly_as_many_tokens_as_asked_for(system: System, world: TinyWorld) -> None:
    """CASES A01, A03, S30: one token needs no decode round; every count is exact, page ends included."""
    counts = [*range(1, 10), 17]
    answers = await limited([system.answer(prompt(6), count) for count in counts], 4)
    for count, choice in zip(counts, answers, strict=True):
        assert list(choice.token_ids) == world.plain.answer(prompt(6), count)
        assert choice.finish.usage.completion_tokens == count
        assert choice.finish.usage.prompt_tokens == 6
        assert choice.finish.reason is FinishReason.LENGTH
    assert answers[0].finish.speculation.rounds == 0


@pytest.mark.system
async def test_requests_that_end_at_a_page_end(system: System, world: TinyWorld) -> None:
    """CASES A18, P20, S23, S32: prompt, output and both together end at, before and behind a page's end."""
    cases = [(length, count) for length in (PAGE - 1, PAGE, PAGE + 1, 3 * PAGE) for count in (PAGE - 1, PAGE, PAGE + 1)]
    answers = await limited([system.answer(prompt(length), count) for length, count in cases], 3)
    for (length, count), choice in zip(cases, answers, strict=True):
        assert list(choice.token_ids) == world.plain.answer(prompt(length), count)


@pytest.mark.system
async def test_the_same_prompt_at_once_and_again(system: System, world: TinyWorld) -> None:
    """CASES A10, A18, S17: eight at once, then again from the cache; cached tokens never exceed the prompt."""
    for length in (3 * PAGE, 3 * PAGE + 1):
        ids = prompt(length, seed=5)
        answers = await limited([system.answer(ids, 6) for _ in range(8)], 8)
        answers += [await system.answer(ids, 6)]
        assert {choice.token_ids for choice in answers} == {tuple(world.plain.answer(ids, 6))}
        cached = [choice.finish.usage.cached_tokens for choice in answers]
        assert max(cached) < length
        assert cached[-1] >= length - 2 * PAGE


@pytest.mark.system
@pytest.mark.parametrize("deltas", [1, 2, 5])
async def test_cancels_leave_nothing_behind(system: System, world: TinyWorld, deltas: int) -> None:
    """CASES B03, G01, P11: callers leave after their first tokens; those who stay are answered right."""
    leaving = [asyncio.ensure_future(system.cancel_after(prompt(20, seed), deltas)) for seed in range(6)]
    staying = await limited([system.answer(prompt(9, seed), 8) for seed in range(4)], 4)
    counts = await asyncio.gather(*leaving)
    assert all(count > 0 for count in counts)
    assert [list(choice.token_ids) for choice in staying] == [
        world.plain.answer(prompt(9, seed), 8) for seed in range(4)
    ]
    await system.assert_quiescent()


@pytest.mark.system
async def test_cancel_before_the_first_token(system: System) -> None:
    """CASES G01, B10: callers that leave while their prompts queue or compute."""

    async def leave_early(seed: int) -> None:
        async with aclosing(
            system.client.generate(prompt(200, seed), max_tokens=50, temperature=0.0, timeout_s=60)
        ) as deltas:
            task = asyncio.ensure_future(anext(deltas))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])

    await asyncio.gather(*(leave_early(seed) for seed in range(8)))
    await system.assert_quiescent()
    assert len((await system.answer(prompt(5), 3)).token_ids) == 3


BAD: list[tuple[str, dict[str, object]]] = [
    ("tokens", {"prompt": []}),
    ("text", {"prompt": ""}),
    ("tokens", {"prompt": [VOCAB_SIZE]}),
    ("tokens", {"prompt": [3] * 5000}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": 2**40}),
    ("temperature", {"temperature": math.nan}),
    ("temperature", {"temperature": -1.0}),
    ("temperature", {"temperature": math.inf}),
    ("top_p", {"top_p": 0.0}),
    ("top_p", {"top_p": 1.5}),
    ("min_p", {"min_p": 2.0}),
    ("top_k", {"top_k": -2}),
    ("stop_token_ids", {"stop_token_ids": [VOCAB_SIZE + 100], "min_tokens": 2}),
    ("stop", {"stop": ["x"] * 10_000}),
    ("logit_bias", {"logit_bias": {VOCAB_SIZE + 1: -100.0}}),
    ("n", {"n": 0}),
]


@pytest.mark.system
async def test_bad_input_is_refused_and_the_next_request_served(system: System, world: TinyWorld) -> None:
    """CASES A05, I01, I03, I04, I05, I06, I07: the field is named, within a second, and nobody else notices."""
    neighbour = asyncio.ensure_future(system.answer(prompt(12), 40))
    for field, options in BAD:
        arguments = {"prompt": prompt(4), "max_tokens": 4, **options}
        with pytest.raises(InvalidRequestError) as refusal:
            async with asyncio.timeout(5):
                await system.client.complete(arguments.pop("prompt"), **arguments)  # type: ignore[arg-type]
        assert field in str(refusal.value), f"{options}: {refusal.value}"
    assert list((await neighbour).token_ids) == world.plain.answer(prompt(12), 40)
    assert list((await system.answer(prompt(4), 4)).token_ids) == world.plain.answer(prompt(4), 4)


@pytest.mark.system
async def test_a_label_in_use_is_refused(system: System) -> None:
    """A client's label is only a label, but two open requests of one router may not share it."""
    first = asyncio.ensure_future(
        system.client.complete(prompt(8), max_tokens=200, temperature=0.0, ignore_eos=True, request_id="mine")
    )
    while not system.decode.engine.load().running:
        await asyncio.wait([first], timeout=0.01)
    with pytest.raises(GraftlineError, match="mine"):
        await system.client.complete(prompt(8), max_tokens=2, request_id="mine")
    await first


@pytest.mark.system
async def test_the_first_round_verifies_the_handed_over_tree(world: TinyWorld) -> None:
    """CASES S21, X10: drafts that always agree are all accepted from the first round on; without them none is."""
    spec = SystemSpec(world.markov.path, world.agrees, TreeShape(3, 1, 4), (2, 2), (2, 2))
    async with running_system(spec) as system:
        choice = await system.answer(prompt(9), 13)
    stats = choice.finish.speculation
    assert list(choice.token_ids) == world.markov.answer(prompt(9), 13)
    assert (stats.rounds, stats.accepted, stats.first_round_accepted) == (3, 9, 3)
    assert stats.tree_origin is TreeOrigin.REAL


@pytest.mark.system
async def test_logprobs_are_those_of_plain_decoding(system: System, world: TinyWorld) -> None:
    """CASES S07: the same numbers with drafts, accepted or not, as without speculation."""
    async with running_system(SystemSpec(world.plain.path, None, TreeShape(1, 1, 1))) as plain_system:
        expected = await _with_logprobs(plain_system.client)
    answered = await _with_logprobs(system.client)
    assert answered == expected
    assert all(len(top) == 3 for _, top in answered)


async def _with_logprobs(client: AsyncClient) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    completion = await client.complete(prompt(7), max_tokens=12, temperature=0.0, logprobs=3, ignore_eos=True)
    return [(entry.logprob, entry.top) for entry in completion.choices[0].logprobs]


@pytest.mark.system
@pytest.mark.parametrize("decode_split", [(4,), (1, 3)], ids=len)
async def test_a_byte_that_arrives_changed_is_noticed(world: TinyWorld, decode_split: tuple[int, ...]) -> None:
    """CASES B21: writes say that they went well, the digest tells otherwise, and the request is tried again."""
    spec = SystemSpec(
        world.plain.path,
        world.eagle,
        TreeShape(3, 1, 4),
        (2, 2),
        decode_split,
        page_size=PAGE,
        transfer_faults="flip@1",
        kv_digest=True,
    )
    async with running_system(spec) as system:
        choice = await system.answer(prompt(30), 8)
        assert list(choice.token_ids) == world.plain.answer(prompt(30), 8)
        assert choice.finish.attempts == 2
        again = await system.answer(prompt(9), 8)
        assert list(again.token_ids) == world.plain.answer(prompt(9), 8)
        assert again.finish.attempts == 1
