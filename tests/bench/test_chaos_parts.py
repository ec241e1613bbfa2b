"""The parts of a chaos run: schedules, requests and their answers, checks that can fail, leaks, trends."""

import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from tiny_world import PlainModel

from graftline.bench.chaos import ChaosPlan, ChaosRun
from graftline.bench.chaos_asks import Ask, AskBook, PoolSize, Sampling
from graftline.bench.chaos_faults import FaultKind, Lane, schedule
from graftline.bench.chaos_gauges import Counters, ProcessSample
from graftline.bench.chaos_load import Outcome, WrongAnswerError, _Reading
from graftline.bench.chaos_soak import slope_of, trend_of
from graftline.client import Finish, FinishReason, Handoff, Speculation, TreeOrigin, Usage
from graftline.engine.models.random import write_tiny_model
from graftline.errors import InvalidRequestError

SIZE = PoolSize(num_prompts=6, max_prompt_len=20, max_tokens=8)


def test_a_schedule_repeats_and_shows_every_kind() -> None:
    first = list(islice(schedule(Lane.DECODE, 3, 2, 2, 1.0), 14))
    assert first == list(islice(schedule(Lane.DECODE, 3, 2, 2, 1.0), 14))
    assert {fault.kind for fault in first[:7]} == {fault.kind for fault in first[7:]} == set(FaultKind)
    assert {fault.target for fault in first} == {0, 1}
    alone = islice(schedule(Lane.ROUTER, 3, 2, 1, 1.0), 9)
    assert {fault.kind for fault in alone} == {FaultKind.KILL, FaultKind.FREEZE, FaultKind.TERMINATE}
    kills = islice(schedule(Lane.DECODE, 3, 2, 2, 1.0, (FaultKind.KILL,)), 9)
    assert {fault.kind for fault in kills} == {FaultKind.KILL}
    assert list(schedule(Lane.ROUTER, 3, 2, 1, 1.0, (FaultKind.KILL_LATER,))) == []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("chaos") / "model", context=64)


def book_of(model: Path, seed: int = 0, size: PoolSize = SIZE) -> AskBook:
    return AskBook(model, "float32", seed, size, (4, 16), 0.2, lambda _: None)


def test_requests_repeat_and_expect_what_the_plain_model_says(model: Path) -> None:
    book, again, plain = book_of(model), book_of(model), PlainModel(model)
    asks = [book.ask(number) for number in range(200)]
    assert asks == [again.ask(number) for number in range(200)]
    assert asks != [book_of(model, seed=1).ask(number) for number in range(200)]
    assert {ask.sampling.temperature > 0 for ask in asks} == {True, False}
    assert any(ask.leaves for ask in asks)
    assert any(ask.num_choices == 2 for ask in asks)
    assert any(ask.stop_token_ids for ask in asks)
    for ask in asks:
        if ask.sampling.temperature == 0:
            expected = plain.answer(ask.prompt, ask.max_tokens, eos_ids=ask.stop_token_ids)
            assert list(ask.expected) == expected


def test_a_context_that_is_too_short_is_refused(model: Path) -> None:
    with pytest.raises(InvalidRequestError, match="context of 64"):
        book_of(model, size=PoolSize(1, 60, 8))


ASK = Ask(0, (1, 2, 3), Sampling(), 4, (7, 8, 9, 10))


def finish(completion_tokens: int = 4, reason: FinishReason = FinishReason.LENGTH) -> Finish:
    return Finish(
        reason, None, None, Usage(3, completion_tokens, 0), Speculation(0, 0, 0, 0, 0, TreeOrigin.NONE),
        Handoff(0, 0.0, 0.0, 0.0, 0), 1, "p", "d",
    )  # fmt: skip


def reading(ask: Ask = ASK) -> _Reading:
    return _Reading(ask, Outcome(ask, time.monotonic()))


def test_the_right_answer_passes() -> None:
    good = reading()
    good.take(0, (7, 8), None)
    good.take(0, (9, 10), finish())
    good.check_end()


@pytest.mark.parametrize("ids", [(8,), (7, 7), (7, 8, 9, 10, 11)], ids=str)
def test_a_wrong_token_is_seen_at_once(ids: tuple[int, ...]) -> None:
    with pytest.raises(WrongAnswerError, match="is not"):
        reading().take(0, ids, None)


def test_what_is_wrong_with_an_end_is_seen() -> None:
    short = reading()
    short.take(0, (7, 8), finish(2))
    with pytest.raises(WrongAnswerError, match="2 of 4"):
        short.check_end()
    with pytest.raises(WrongAnswerError, match="no end"):
        reading().check_end()
    miscounted = reading()
    miscounted.take(0, (7, 8, 9, 10), finish(5))
    with pytest.raises(WrongAnswerError, match="expected"):
        miscounted.check_end()
    twice = reading()
    twice.take(0, (7, 8, 9, 10), finish())
    with pytest.raises(WrongAnswerError, match="after its end"):
        twice.take(0, (), None)
    with pytest.raises(WrongAnswerError, match="nobody asked"):
        reading().take(1, (7,), None)


async def test_a_pool_too_small_for_the_requests_is_refused() -> None:
    """Answers that end early because there is no room for more would look wrong."""
    plan = ChaosPlan()
    small = replace(plan, cluster=replace(plan.cluster, pages=56))
    with pytest.raises(InvalidRequestError, match="56 hold no request of 240 tokens"):
        await ChaosRun(small, print).run()


def test_counters_survive_restarts() -> None:
    counters = Counters()
    for process, value in (("a/1", 3.0), ("a/1", 5.0), ("a/2", 1.0), ("b/3", 2.0)):
        counters.take(process, {"resumed_total{model='m'}": value, "other": 9.0}, {"resumed_total": "resumed"})
    assert counters.totals == {"resumed": 8.0}


def samples(grow_mib: float, fds: int = 0) -> list[tuple[float, ProcessSample]]:
    return [
        (10.0 * index, ProcessSample(int((200 + grow_mib * index) * 2**20), 40 + fds * index, 12))
        for index in range(40)
    ]


def test_growth_is_told_from_a_flat_line() -> None:
    flat, growing, leaking = (trend_of("p", samples(*each)) for each in ((0.01,), (1.0,), (0.0, 1)))
    assert flat is not None
    assert flat.flat
    assert growing is not None
    assert not growing.flat
    assert growing.mib_per_hour == pytest.approx(360)
    assert leaking is not None
    assert not leaking.flat
    assert trend_of("p", samples(0.0)[:6]) is None


def test_a_slope_is_that_of_the_line() -> None:
    assert slope_of([0, 1, 2, 3], [5, 7, 9, 11]) == pytest.approx(2)
    assert slope_of([1, 1], [5, 7]) == 0
