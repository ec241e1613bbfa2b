"""Runs variants in turn within one invocation (A B C A B C ...) and compares each with the first.

Interleaving makes what the machine does meanwhile (heat, neighbours, caches) fall on every variant alike; ratios are
taken within a round, never across.
"""

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from enum import Enum

import msgspec

from graftline.bench.load import Load, send_all
from graftline.bench.metrics import METRICS, Metric
from graftline.bench.processes import cpu_times_s, cpu_used_s, descendants
from graftline.bench.prompt_set import PromptSet
from graftline.bench.records import Ratio, RequestRecord, Run, SameOutput
from graftline.bench.stats import bootstrap_interval, median
from graftline.bench.target import BenchRequest, Target
from graftline.errors import InternalError

_BOOTSTRAP_DRAWS = 500


class Idle(Enum):
    """What happens to a variant that is not being measured."""

    # Started once; stays up, idle, with its memory.
    KEEP = "keep"
    # Started anew for each of its turns; only one is ever up.
    RESTART = "restart"


@dataclass(frozen=True, slots=True)
class Contestant:
    """A variant that can be started. `open` gives its target once it is ready to serve."""

    name: str
    open: Callable[[], AbstractAsyncContextManager[Target]]


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured.

    Attributes:
        num_requests: measured requests per variant, load and round. Each round goes on in the prompt set where the
            one before stopped, so that no round is answered from a cache that an earlier one filled.
        warmup: requests sent and forgotten before every measured run.
        timeout_s: bound of each request.
    """

    loads: Sequence[Load]
    rounds: int
    num_requests: int
    warmup: int
    max_tokens: int
    temperature: float
    seed: int
    ignore_eos: bool
    timeout_s: float
    idle: Idle = Idle.KEEP

    @property
    def method(self) -> str:
        """One sentence for the result."""
        how = "all started once and idle while others run" if self.idle is Idle.KEEP else "each started anew per turn"
        return (
            f"{self.rounds} rounds, variants in turn within each round, {how}; {self.warmup} warm-up requests before "
            f"each run are left out; latencies on the client's clock from the moment a request was due"
        )


class Watcher:
    """Told how a measurement goes on; this one ignores it."""

    def starting(self, variant: str) -> None:
        """A variant is being started."""

    def running(self, variant: str, load: str, round_number: int, num_requests: int) -> None:
        """A run begins, warm-up first."""

    def done(self, record: RequestRecord) -> None:
        """A measured request ended."""


async def measure(
    contestants: Sequence[Contestant],
    plan: Plan,
    prompts: PromptSet,
    watcher: Watcher | None = None,
    *,
    into: list[Run] | None = None,
) -> list[Run]:
    """All runs, in the order they were made.

    Args:
        into: where they are put as they are made, so that an end before time loses none of them.

    Raises:
        GraftlineError: a variant could not be started. Failed requests are records, not errors.
    """
    watcher = watcher or Watcher()
    runs: list[Run] = [] if into is None else into
    async with AsyncExitStack() as stack:
        opened: dict[str, _Opened] = {}
        if plan.idle is Idle.KEEP:
            for contestant in contestants:
                watcher.starting(contestant.name)
                opened[contestant.name] = await stack.enter_async_context(_open(contestant))
        for round_number in range(plan.rounds):
            for contestant in contestants:
                if plan.idle is Idle.KEEP:
                    runs += await _take_turn(opened[contestant.name], plan, prompts, round_number, watcher)
                    continue
                watcher.starting(contestant.name)
                async with _open(contestant) as fresh:
                    runs += await _take_turn(fresh, plan, prompts, round_number, watcher)
    return runs


@dataclass(frozen=True, slots=True)
class _Opened:
    name: str
    target: Target
    pids: frozenset[int]


@asynccontextmanager
async def _open(contestant: Contestant) -> AsyncIterator[_Opened]:
    before = descendants()
    async with contestant.open() as target:
        yield _Opened(contestant.name, target, frozenset(descendants() - before))


async def _take_turn(opened: _Opened, plan: Plan, prompts: PromptSet, round_number: int, watcher: Watcher) -> list[Run]:
    """One run per load."""
    runs = []
    for load_number, load in enumerate(plan.loads):
        first = (round_number * len(plan.loads) + load_number) * plan.num_requests
        requests = [
            BenchRequest(prompt, plan.max_tokens, plan.temperature, plan.seed + first + index, plan.ignore_eos)
            for index, prompt in enumerate(prompts.slice(first, plan.num_requests))
        ]
        # Warm-up takes prompts that this run will not measure, from the far end of the set.
        warmup = [
            BenchRequest(prompt, plan.max_tokens, plan.temperature, plan.seed, plan.ignore_eos)
            for prompt in prompts.slice(first - plan.warmup, plan.warmup)
        ]
        watcher.running(opened.name, load.label, round_number, len(requests))
        warmed = await send_all(opened.target, warmup, load, timeout_s=plan.timeout_s)
        others = descendants() - opened.pids
        others_before, own_before = cpu_times_s(others), cpu_times_s(opened.pids)
        records = await send_all(opened.target, requests, load, timeout_s=plan.timeout_s, on_done=watcher.done)
        runs.append(
            Run(
                variant=opened.name,
                round=round_number,
                load=load.label,
                wall_s=max(record.due_s + record.end_s for record in records),
                records=tuple(records),
                num_warmup=len(warmed),
                num_warmup_failed=sum(not record.ok for record in warmed),
                own_cpu_s=cpu_used_s(own_before, cpu_times_s(opened.pids)),
                other_cpu_s=cpu_used_s(others_before, cpu_times_s(others)),
            )
        )
        await asyncio.sleep(0)
    return runs


def whole_rounds(runs: Sequence[Run], num_variants: int, num_loads: int) -> list[Run]:
    """The runs of the rounds in which every variant had its turn."""
    counts = Counter(run.round for run in runs)
    return [run for run in runs if counts[run.round] == num_variants * num_loads]


def ratios(runs: Sequence[Run], *, seed: int, draws: int = _BOOTSTRAP_DRAWS) -> list[Ratio]:
    """Every metric of every variant over the first variant's, load by load. Runs in the order `measure` gives."""
    by_load: dict[str, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        by_load[run.load][run.variant].append(run)
    found = []
    for load, by_variant in by_load.items():
        (base, base_runs), *others = by_variant.items()
        for variant, variant_runs in others:
            for name, metric in METRICS.items():
                pairs = list(zip(base_runs, variant_runs, strict=True))
                value = _ratio(pairs, metric)
                if value is None:
                    continue
                interval = _interval(pairs, metric, draws, seed)
                found.append(
                    Ratio(
                        metric=name,
                        variant=variant,
                        base=base,
                        load=load,
                        value=value,
                        low=interval[0] if interval else None,
                        high=interval[1] if interval else None,
                        base_median=median(_values(base_runs, metric)),
                        variant_median=median(_values(variant_runs, metric)),
                    )
                )
    return found


def same_outputs(runs: Sequence[Run]) -> list[SameOutput]:
    """How often each variant's output ids equal the first variant's; requests that failed on a side are left out."""
    by_key = {(run.load, run.round, run.variant): run for run in runs}
    counts: dict[tuple[str, str], list[int]] = {}
    base = runs[0].variant if runs else ""
    for (load, round_number, variant), run in by_key.items():
        if variant == base:
            continue
        pairs = zip(by_key[load, round_number, base].records, run.records, strict=True)
        hashes = [(ours.output_hash, theirs.output_hash) for ours, theirs in pairs if ours.ok and theirs.ok]
        count = counts.setdefault((variant, load), [0, 0])
        count[0] += sum(ours == theirs for ours, theirs in hashes)
        count[1] += len(hashes)
    return [SameOutput(variant, base, load, same, total) for (variant, load), (same, total) in counts.items()]


_Pairs = Sequence[tuple[Run, Run]]


def _values(runs: Sequence[Run], metric: Metric) -> list[float]:
    return [value for run in runs if (value := metric.of(run)) is not None]


def _ratio(pairs: _Pairs, metric: Metric) -> float | None:
    """Median over rounds of variant / base; rounds in which either is undefined are left out."""
    values = [
        theirs / ours
        for base_run, variant_run in pairs
        if (ours := metric.of(base_run)) and (theirs := metric.of(variant_run)) is not None
    ]
    return median(values) if values else None


def _interval(pairs: _Pairs, metric: Metric, draws: int, seed: int) -> tuple[float, float] | None:
    def resample(generator: random.Random) -> float | None:
        drawn = generator.choices(pairs, k=len(pairs))
        return _ratio([_redrawn(pair, generator) for pair in drawn] if metric.by_request else drawn, metric)

    if not metric.by_request and len(pairs) < 2:
        return None
    return bootstrap_interval(resample, draws=draws, seed=seed)


def _redrawn(pair: tuple[Run, Run], generator: random.Random) -> tuple[Run, Run]:
    """The same requests, drawn with replacement, on both sides."""
    base_run, variant_run = pair
    if len(base_run.records) != len(variant_run.records):
        raise InternalError("runs of one round have different numbers of requests")
    indexes = generator.choices(range(len(base_run.records)), k=len(base_run.records))
    drawn = [
        msgspec.structs.replace(run, records=tuple(run.records[index] for index in indexes))
        for run in (base_run, variant_run)
    ]
    return drawn[0], drawn[1]
