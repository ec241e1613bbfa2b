"""Interleaving, pairing, ratios and their intervals."""

import random
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from bench_records import record, run, speculation

from graftline.bench.compare import Contestant, Idle, Plan, Watcher, measure, ratios, same_outputs
from graftline.bench.load import Concurrency, PoissonRate
from graftline.bench.prompt_set import Prompt, PromptSet
from graftline.bench.records import Ratio, RequestRecord, Run
from graftline.bench.target import BenchRequest, Finish, Message, Target
from graftline.errors import PeerUnavailableError

PLAN = Plan(
    loads=[Concurrency(1)],
    rounds=2,
    num_requests=3,
    warmup=1,
    max_tokens=4,
    temperature=0.0,
    seed=10,
    ignore_eos=False,
    timeout_s=5.0,
)
PROMPTS = PromptSet("p.jsonl", "0", ("any",), tuple(Prompt(id=f"p{index}", text="x") for index in range(20)))


class Diary:
    """Contestants that answer at once and write down what happens to them."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def contestant(self, name: str) -> Contestant:
        @asynccontextmanager
        async def start() -> AsyncIterator[Target]:
            self.events.append(f"start {name}")
            try:
                yield _Answering(self.events, name)
            finally:
                self.events.append(f"stop {name}")

        return Contestant(name, start)

    def asked(self, name: str) -> list[str]:
        return [event.removeprefix(f"{name} ") for event in self.events if event.startswith(f"{name} ")]


class _Answering:
    def __init__(self, events: list[str], name: str) -> None:
        self._events = events
        self._name = name

    async def stream(self, request: BenchRequest, timeout_s: float) -> AsyncGenerator[Message, None]:
        self._events.append(f"{self._name} {request.prompt.id}")
        yield Message((1, 2), Finish("length", 5))


async def test_variants_take_turns_within_each_round_and_stay_up() -> None:
    diary = Diary()
    runs = await measure([diary.contestant("a"), diary.contestant("b")], PLAN, PROMPTS)
    assert [(entry.variant, entry.round) for entry in runs] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert [event for event in diary.events if event.startswith("st")] == ["start a", "start b", "stop b", "stop a"]


async def test_restarted_variants_are_never_up_together() -> None:
    diary = Diary()
    plan = replace(PLAN, idle=Idle.RESTART)
    await measure([diary.contestant("a"), diary.contestant("b")], plan, PROMPTS)
    starts = [event for event in diary.events if event.startswith("st")]
    assert starts == ["start a", "stop a", "start b", "stop b"] * 2


async def test_rounds_go_on_in_the_prompts_and_variants_get_the_same_ones() -> None:
    diary = Diary()
    runs = await measure([diary.contestant("a"), diary.contestant("b")], PLAN, PROMPTS)
    assert [[entry.prompt_id for entry in made.records] for made in runs[::2]] == [
        ["p0", "p1", "p2"],
        ["p3", "p4", "p5"],
    ]
    assert diary.asked("a") == diary.asked("b") == ["p19", "p0", "p1", "p2", "p2", "p3", "p4", "p5"]


async def test_warm_up_is_counted_and_not_measured() -> None:
    diary = Diary()
    runs = await measure([diary.contestant("a")], replace(PLAN, warmup=4, rounds=1), PROMPTS)
    assert len(diary.asked("a")) == 7
    assert len(runs[0].records) == 3
    assert (runs[0].num_warmup, runs[0].num_warmup_failed) == (4, 0)


async def test_each_load_is_a_run_of_its_own() -> None:
    plan = replace(PLAN, loads=[Concurrency(1), PoissonRate(1000, 0)], rounds=1)
    runs = await measure([Diary().contestant("a")], plan, PROMPTS)
    assert [made.load for made in runs] == ["concurrency 1", "rate 1000/s"]
    assert [made.records[0].prompt_id for made in runs] == ["p0", "p3"]


async def test_the_watcher_hears_of_every_measured_request() -> None:
    class Counting(Watcher):
        def __init__(self) -> None:
            self.heard: list[str] = []

        def starting(self, variant: str) -> None:
            self.heard.append(f"starting {variant}")

        def running(self, variant: str, load: str, round_number: int, num_requests: int) -> None:
            self.heard.append(f"round {round_number}")

        def done(self, record: RequestRecord) -> None:
            self.heard.append(record.prompt_id)

    watcher = Counting()
    await measure([Diary().contestant("a")], PLAN, PROMPTS, watcher)
    assert watcher.heard == ["starting a", "round 0", "p0", "p1", "p2", "round 1", "p3", "p4", "p5"]


async def test_a_variant_that_cannot_start_ends_the_others() -> None:
    diary = Diary()

    @asynccontextmanager
    async def broken() -> AsyncIterator[Target]:
        raise PeerUnavailableError("no such thing")
        yield

    with pytest.raises(PeerUnavailableError):
        await measure([diary.contestant("a"), Contestant("b", broken)], PLAN, PROMPTS)
    assert diary.events == ["start a", "stop a"]


def ratio_of(found: Sequence[Ratio], metric: str) -> Ratio:
    return next(entry for entry in found if entry.metric == metric)


def noisy(variant: str, round_number: int, tpot_s: float, level: float, count: int = 30) -> Run:
    """`count` requests with the given mean TPOT; prompts differ by much and alike for every variant."""
    own, shared = random.Random(f"{variant}{round_number}"), random.Random(round_number)
    records = []
    for index in range(count):
        gap = tpot_s * level * shared.uniform(0.5, 1.5) * own.uniform(0.97, 1.03)
        records.append(record([(0.1, 1), (0.1 + 10 * gap, 10)], index=index))
    return run(records, variant=variant, round_number=round_number, wall_s=sum(entry.end_s for entry in records))


def test_a_known_speed_up_is_found_although_rounds_differ() -> None:
    levels = [1.0, 2.0, 0.7]
    runs = [
        noisy(variant, number, 0.02 * factor, level)
        for number, level in enumerate(levels)
        for variant, factor in (("a", 1.0), ("b", 0.8))
    ]
    found = ratio_of(ratios(runs, seed=0, draws=200), "tpot_mean_s")
    assert (found.variant, found.base) == ("b", "a")
    assert found.value == pytest.approx(0.8, abs=0.02)
    assert found.low is not None
    assert found.high is not None
    assert 0.78 < found.low <= found.value <= found.high < 0.82
    assert found.base_median == pytest.approx(0.02, rel=0.2)
    throughput = ratio_of(ratios(runs, seed=0, draws=50), "output_tokens_per_s")
    assert throughput.value > 1.1


def test_equal_variants_have_an_interval_around_one() -> None:
    runs = [noisy(variant, number, 0.02, 1.0) for number in range(3) for variant in ("a", "b")]
    found = ratio_of(ratios(runs, seed=1, draws=200), "tpot_mean_s")
    assert found.low is not None
    assert found.high is not None
    assert found.low < 1 < found.high


def test_one_round_gives_no_interval_to_what_only_rounds_can_tell() -> None:
    runs = [noisy("a", 0, 0.02, 1.0), noisy("b", 0, 0.01, 1.0)]
    found = ratios(runs, seed=0, draws=20)
    assert ratio_of(found, "output_tokens_per_s").low is None
    assert ratio_of(found, "tpot_mean_s").low is not None


def test_metrics_a_variant_does_not_have_are_left_out() -> None:
    with_rounds = run([record(speculation=speculation(4, 4, 1))], variant="a")
    found = ratios([with_rounds, run([record()], variant="b")], seed=0, draws=20)
    assert "accept_length" not in {entry.metric for entry in found}
    assert "tpot_mean_s" in {entry.metric for entry in found}


def test_first_round_accept_lengths_are_compared() -> None:
    runs = [
        run([record(speculation=speculation(4, 4, 0))], variant="root-only"),
        run([record(speculation=speculation(4, 4, 2))], variant="real"),
    ]
    assert ratio_of(ratios(runs, seed=0, draws=20), "first_round_accept_length").value == 3


def test_outputs_are_compared_request_by_request() -> None:
    def outputs(variant: str, *hashes: str) -> Run:
        records = [
            record(output_hash=text, index=index, error="INTERNAL" if text == "failed" else "")
            for index, text in enumerate(hashes)
        ]
        return run(records, variant=variant)

    found = same_outputs([outputs("a", "x", "y", "z"), outputs("b", "x", "q", "failed")])
    assert [(entry.variant, entry.base, entry.num_same, entry.num_compared) for entry in found] == [("b", "a", 1, 2)]
    assert same_outputs([]) == []
