"""A chaos run: a cluster of real processes on loopback under mixed load, hurt on schedule, every answer checked.

What has to hold: no request lost, no answer wrong, no page leaked, no process in need of a hand.
"""

import asyncio
import socket
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import cast

from graftline.bench.chaos_asks import AskBook, PoolSize
from graftline.bench.chaos_faults import ALL_KINDS, Fault, FaultKind, Lane, schedule
from graftline.bench.chaos_gauges import Counters, leaks, scrape
from graftline.bench.chaos_load import Callers, Fate, Outcome
from graftline.bench.chaos_records import ChaosCounts, ChaosResult, Trouble
from graftline.bench.chaos_soak import SoakSampler
from graftline.bench.chaos_ward import Ward
from graftline.bench.machine import command_line, machine_facts
from graftline.bench.stats import Summary, summarise
from graftline.client import AsyncClient, Delta
from graftline.engine.draft_head.random import write_tiny_head
from graftline.engine.model_fetch import resolve_model
from graftline.engine.models.random import write_tiny_model
from graftline.errors import InvalidRequestError
from graftline.launcher import Cluster, ClusterSpec, local_cluster

TINY = "tiny"
# Below the ports that Linux gives to outgoing connections, above those of the transfer engine.
_PORTS = range(20_000, 30_000, 16)
_LOOK_S = 2.0
_REPORT_S = 5.0
_SOAK_SAMPLES = 240
_COUNTED = {
    "graftline_router_streams_resumed_total": "resumed",
    "graftline_prefill_failed_sends_total": "failed sends",
    "graftline_decode_quarantines_total": "quarantines",
}
_CANCELS = 12
_CANCELLED_TOKENS = 300
_CANCEL_WAIT_S = 10.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """What to run.

    Attributes:
        model: "tiny", a known name, a directory or a GGUF file.
        num_requests: asked in all; None: until `minutes` are over.
        minutes: how long, with `num_requests` None.
        lanes: whose processes are hurt.
        kinds: in which ways.
        transfer_faults: of every prefill's writes; see `FaultPlan.parse`.
        pause_s: mean time between the end of a fault and the next of its lane.
        pace_s: what every caller waits between two requests.
        soak: sample memory, descriptors and threads of all processes, and find their trends.
    """

    model: str = TINY
    num_requests: int | None = 500
    minutes: float = 0.0
    seed: int = 0
    callers: int = 16
    cancel_share: float = 0.15
    lanes: tuple[Lane, ...] = tuple(Lane)
    kinds: tuple[FaultKind, ...] = ALL_KINDS
    transfer_faults: str = "delay:0.3s@/67,fail@/97,late:1s@/131,flip@/151,lose:1s@/211"
    pause_s: float = 2.0
    pace_s: float = 0.0
    soak: bool = False
    pool: PoolSize = field(default_factory=PoolSize)
    cluster: ClusterSpec = field(
        default_factory=lambda: ClusterSpec(
            prefills=2,
            decodes=2,
            routers=2,
            prefill_stages=2,
            decode_stages=2,
            dtype="float32",
            page_size=4,
            pages=256,
            chunk_tokens=16,
            max_running=8,
            threads=1,
            quarantine_s=12.0,
            drain_grace_s=3.0,
        )
    )


# A write that makes no progress for so long has failed; must stay below the quarantine.
_STALL_S, _ORDER_S = 2.0, 6.0


class ChaosRun:
    """One run of a plan.

    Args:
        say: hears one line at every step.
    """

    def __init__(self, plan: ChaosPlan, say: Say) -> None:
        self._plan = plan
        self._say = say
        self._fates: Counter[Fate] = Counter()
        self._outcomes: list[Outcome] = []
        self._troubles: list[Trouble] = []
        self._counters = Counters()
        self._cancels_s: list[float] = []
        self._tokens = 0

    async def run(self) -> ChaosResult:
        """Runs it to its end.

        Raises:
            GraftlineError: the cluster did not start.
        """
        started_at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        with tempfile.TemporaryDirectory(prefix="graftline-chaos-") as scratch:
            spec = await asyncio.to_thread(_settled, self._plan, Path(scratch))
            book = await asyncio.to_thread(self._book, spec)
            async with AsyncExitStack() as stack:
                cluster = await stack.enter_async_context(local_cluster(spec, self._say))
                ward = Ward(cluster, self._say)
                stack.push_async_callback(ward.close)
                callers = Callers(book, cluster.addresses("router"), ward.was_disturbed, self._on_outcome(ward))
                stack.push_async_callback(callers.close)
                if not await ward.all_usable(30.0):
                    ward.trouble("the cluster is not whole at its start", "a router cannot use every worker")
                await self._measure_cancels(cluster)
                began_s = time.monotonic()
                sampler = SoakSampler(cluster, max(0.5, self._plan.minutes * 60 / _SOAK_SAMPLES))
                await self._run_load(cluster, ward, callers, sampler)
                seconds = time.monotonic() - began_s
                await self._check_rest(cluster, ward)
                self._troubles += ward.troubles
                return self._result(started_at, seconds, ward, sampler)

    def _book(self, spec: ClusterSpec) -> AskBook:
        plan, total = self._plan, self._plan.pool.num_prompts

        def on_answer(count: int) -> None:
            if count in {1, total // 2, total}:
                self._say(f"{count} of {total} plain answers")

        edge = (spec.page_size, spec.chunk_tokens)
        return AskBook(Path(spec.model), spec.dtype, plan.seed, plan.pool, edge, plan.cancel_share, on_answer)

    # --- the load and the faults -------------------------------------------------------------------------------

    async def _run_load(self, cluster: Cluster, ward: Ward, callers: Callers, sampler: SoakSampler) -> None:
        plan = self._plan
        async with asyncio.TaskGroup() as group:
            helpers = [group.create_task(ward.supervise(name)) for name in cluster.children]
            helpers.append(group.create_task(self._look_in(cluster)))
            helpers.append(group.create_task(self._report(callers, ward)))
            if plan.soak:
                helpers.append(group.create_task(sampler.run()))
            lanes = [group.create_task(ward.inflict_all(lane, self._faults(lane))) for lane in plan.lanes]
            load = group.create_task(callers.run(plan.callers, plan.num_requests, plan.pace_s))
            if plan.num_requests is None:
                await asyncio.wait([load], timeout=plan.minutes * 60)
                callers.stopping = True
            await asyncio.wait([load])
            ward.stop()
            if lanes:
                await asyncio.wait(lanes)
            if not await ward.all_usable(60.0):
                ward.trouble("a process needs a hand", "a router cannot use every worker after the last fault")
            for helper in helpers:
                helper.cancel()

    def _faults(self, lane: Lane) -> Iterator[Fault]:
        spec = self._plan.cluster
        targets = {Lane.PREFILL: spec.prefills, Lane.DECODE: spec.decodes, Lane.ROUTER: spec.routers}[lane]
        stages = {Lane.PREFILL: spec.prefill_stages, Lane.DECODE: spec.decode_stages, Lane.ROUTER: 1}[lane]
        return schedule(lane, self._plan.seed, targets, stages, self._plan.pause_s, self._plan.kinds)

    def _on_outcome(self, ward: Ward) -> Callable[[Outcome], None]:
        def take(outcome: Outcome) -> None:
            self._fates[outcome.fate] += 1
            self._tokens += outcome.num_tokens
            self._outcomes.append(outcome)
            ward.heard(outcome)
            if outcome.fate in {Fate.LOST, Fate.WRONG}:
                ward.trouble(f"a request is {outcome.fate.value}", outcome.detail)
            for failure in outcome.failures:
                ward.trouble("a call failed although its router lived", f"request {outcome.ask.number}: {failure}")

        return take

    async def _look_in(self, cluster: Cluster) -> None:
        """Sums counters over the lives of all processes."""
        while True:
            for name, child in list(cluster.children.items()):
                ready = child.ready
                samples = await asyncio.to_thread(scrape, ready.get("metrics") or ready.get("http"))
                self._counters.take(f"{name}/{child.pid}", samples, _COUNTED)
            await asyncio.sleep(_LOOK_S)

    async def _report(self, callers: Callers, ward: Ward) -> None:
        began_s = time.monotonic()
        wanted = self._plan.num_requests
        while True:
            await asyncio.sleep(_REPORT_S)
            done = sum(self._fates.values())
            goal = f" of {wanted}" if wanted is not None else ""
            rate = done / (time.monotonic() - began_s)
            fates = ", ".join(f"{count} {fate.value}" for fate, count in sorted(self._fates.items(), key=str))
            self._say(f"{done}{goal} requests ({rate:.1f}/s): {fates}; {len(ward.records)} faults")

    # --- before and after --------------------------------------------------------------------------------------

    async def _measure_cancels(self, cluster: Cluster) -> None:
        """Callers that leave a quiet system, one at a time."""
        decodes = [(name, child) for name, child in cluster.children.items() if name.startswith("decode-")]
        gauge = 'graftline_worker_open_requests{role="decode"}'
        async with AsyncClient(cluster.router_address) as client:
            for index in range(_CANCELS):
                prompt = [Random(index).randrange(100) for _ in range(8)]
                stream = client.generate(prompt, max_tokens=_CANCELLED_TOKENS, temperature=0, ignore_eos=True)
                async with aclosing(cast(AsyncGenerator[Delta, None], stream)) as deltas:
                    async for _ in deltas:
                        break
                left_s = time.monotonic()
                while time.monotonic() - left_s < _CANCEL_WAIT_S:
                    open_now = [await asyncio.to_thread(scrape, child.ready.get("metrics")) for _, child in decodes]
                    if not any(found.get(gauge, 1.0) for found in open_now):
                        self._cancels_s.append(time.monotonic() - left_s)
                        break
                else:
                    self._troubles.append(Trouble("a cancel did not reach its decode", f"in {_CANCEL_WAIT_S:g} s"))

    async def _check_rest(self, cluster: Cluster, ward: Ward) -> None:
        """An idle cluster has whole pools, and still answers."""
        workers = [(name, child) for name, child in cluster.children.items() if not name.startswith("router-")]
        deadline_s = time.monotonic() + cluster.spec.quarantine_s + _ORDER_S + 15.0
        while True:
            found = [leak for name, child in workers if (leak := await asyncio.to_thread(leaks, name, child))]
            if not found:
                break
            if time.monotonic() > deadline_s:
                for leak in found:
                    ward.trouble("something leaked", leak)
                break
            await asyncio.sleep(0.5)
        self._say("all pools are whole" if not found else "pools are not whole")

    # --- the result --------------------------------------------------------------------------------------------

    def _result(self, started_at: str, seconds: float, ward: Ward, sampler: SoakSampler) -> ChaosResult:
        finished = [outcome for outcome in self._outcomes if outcome.fate is Fate.FINISHED and outcome.finish]
        moved = [outcome for outcome in finished if outcome.finish is not None and outcome.finish.attempts > 1]
        records = ward.records
        trends = sampler.trends() if self._plan.soak else ()
        for trend in trends:
            if not trend.flat:
                growth = f"{trend.growth_mib} MiB, descriptors {trend.fds}, threads {trend.threads}"
                self._troubles.append(Trouble("a process grows", f"{trend.process}: {growth}"))
        return ChaosResult(
            command=command_line(),
            started_at=started_at,
            machine=machine_facts(),
            seed=self._plan.seed,
            seconds=round(seconds, 1),
            cluster=_described(self._plan),
            counts=ChaosCounts(
                requests=len(self._outcomes),
                finished=self._fates[Fate.FINISHED],
                cancelled=self._fates[Fate.CANCELLED],
                lost=self._fates[Fate.LOST],
                wrong=self._fates[Fate.WRONG],
                moved=len(moved),
                attempts=sum(outcome.finish.attempts for outcome in finished if outcome.finish is not None),
                resumed=int(self._counters.totals.get("resumed", 0)),
                caller_retries=sum(outcome.retries for outcome in self._outcomes),
                failed_calls=sum(len(outcome.failures) for outcome in self._outcomes),
                tokens=self._tokens,
            ),
            first_token_s=summarise([_first_s(outcome) for outcome in finished]),
            request_s=summarise([outcome.ended_s - outcome.started_s for outcome in finished]),
            gap_s=summarise([outcome.longest_gap_s for outcome in moved]),
            moved_first_token_s=summarise([_first_s(outcome) for outcome in moved]),
            fault_counts=dict(Counter(_group(record.kind, record.target) for record in records)),
            noticed_s=_by_group([(_group(r.kind, r.target), r.noticed_s) for r in records]),
            usable_s=_by_group([(_group(r.kind, r.target), r.usable_s) for r in records]),
            served_s=_by_group([(_group(r.kind, r.target), r.served_s) for r in records]),
            cancel_s=summarise(self._cancels_s),
            transfer_failures=int(self._counters.totals.get("failed sends", 0)),
            quarantines=int(self._counters.totals.get("quarantines", 0)),
            troubles=tuple(self._troubles),
            faults=records,
            trends=trends,
        )


def _first_s(outcome: Outcome) -> float:
    assert outcome.first_token_s is not None, "finished with a token"
    return outcome.first_token_s - outcome.started_s


def _group(kind: str, target: str) -> str:
    return f"{kind} of a {target.partition('-')[0]}"


def _by_group(values: Sequence[tuple[str, float | None]]) -> dict[str, Summary]:
    groups: dict[str, list[float]] = {}
    for group, value in values:
        if value is not None:
            groups.setdefault(group, []).append(value)
    return {group: summary for group, found in sorted(groups.items()) if (summary := summarise(found)) is not None}


def _described(plan: ChaosPlan) -> dict[str, str]:
    spec = plan.cluster
    names = ("prefills", "decodes", "routers", "prefill_stages", "decode_stages", "pages", "page_size", "chunk_tokens")
    shown = {name: str(getattr(spec, name)) for name in names}
    return {"model": plan.model, **shown, "callers": str(plan.callers), "transfer_faults": plan.transfer_faults}


def _settled(plan: ChaosPlan, scratch: Path) -> ClusterSpec:
    """The cluster to start: its model on disk, ports that are free, clocks that fit each other.

    Raises:
        InvalidRequestError: a pool could not hold the longest answer, so that it would end early for a good reason.
    """
    longest = plan.pool.max_prompt_len + plan.pool.max_tokens
    if plan.cluster.pages and plan.cluster.pages * plan.cluster.page_size < longest:
        raise InvalidRequestError("cluster.pages", f"{plan.cluster.pages} hold no request of {longest} tokens")
    spec = replace(plan.cluster, first_port=free_ports(), log_dir=plan.cluster.log_dir or scratch / "logs")
    if plan.model == TINY:
        model = write_tiny_model(scratch / "model", context=512)
        spec = replace(spec, model=str(model), draft_head=str(write_tiny_head(scratch / "head", model)))
    else:
        spec = replace(spec, model=str(resolve_model(plan.model)))
    clocks = ("--stall-timeout-s", str(_STALL_S), "--order-timeout-s", str(_ORDER_S))
    return replace(
        spec,
        listen=f"127.0.0.1:{spec.first_port + spec.prefills + spec.decodes}",
        prefill_arguments=(*clocks, "--transfer-faults", plan.transfer_faults, "--kv-digest", *spec.prefill_arguments),
        decode_arguments=(*clocks, *spec.decode_arguments),
    )


def free_ports() -> int:
    """The first of sixteen ports in a row that nobody has."""
    for first in _PORTS:
        if all(_is_free(port) for port in range(first, first + _PORTS.step)):
            return first
    raise RuntimeError("no sixteen free ports in a row")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
