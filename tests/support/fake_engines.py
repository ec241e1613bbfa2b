"""Scripted engines: they hold requests at named points, fail on demand, and compute nothing.

The token at absolute position p is always `token_at(p)`, so that any worker continues any request exactly. Events
come from a thread of the engine's own, as with a real one.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from graftline.engine.models.card import ModelCardData
from graftline.engine.plan import StageAlive
from graftline.engine.request import DraftTree, FinishReason, PageId, Request, RequestKey, SlotId, Token, TreeOrigin
from graftline.engine.service_api import (
    DecodeCancelled,
    DecodeEvent,
    DecodeFailed,
    DecodeFinished,
    Destination,
    Drained,
    EngineLoad,
    FirstToken,
    HandoffCounts,
    PoolGauges,
    Preempted,
    PrefillEvent,
    PrefillFailed,
    PrefillFailure,
    PrefillFinished,
    Reserved,
    Scheduled,
    SpeculationCounts,
    Tokens,
)
from graftline.engine.worker_engine import WorkerFacts
from graftline.errors import GraftlineError
from graftline.proto.v1 import common_pb2

VOCAB_SIZE = 512
WAIT_S = 10.0


def token_at(position: int) -> int:
    """What every fake samples for an absolute position; never an end-of-sequence token."""
    return 100 + (position * 7) % 300


class Points:
    """Named places at which requests are held until let go; tests await arrivals."""

    def __init__(self, *held: str) -> None:
        self._held = set(held)
        self._arrived: Counter[str] = Counter()
        self._changed = threading.Condition()

    def holds(self, point: str) -> bool:
        with self._changed:
            self._arrived[point] += 1
            self._changed.notify_all()
            return point in self._held

    def drop(self, point: str) -> None:
        with self._changed:
            self._held.discard(point)

    def _wait(self, point: str, times: int) -> None:
        with self._changed:
            arrived = self._changed.wait_for(lambda: self._arrived[point] >= times, WAIT_S)
        assert arrived, f"{self._arrived[point]} of {times} arrived at {point}"

    async def reached(self, point: str, times: int = 1) -> None:
        await asyncio.to_thread(self._wait, point, times)


@dataclass
class PrefillJob:
    request: Request
    deliver: Callable[[PrefillEvent], None]
    stage: str = "queued"
    destination: Destination | None = None
    cancelled: bool = False


class FakePrefillEngine:
    """Points: queued (before Scheduled), computing (before FirstToken), writing (before Finished), draining (after a
    cancel, before Drained). At "destination" nothing is held, arrivals are seen."""

    def __init__(self, *held: str) -> None:
        self.points = Points(*held)
        self.refusal: Exception | None = None
        self.fail_at: dict[str, PrefillFailed] = {}
        self.first_token: Callable[[Request], int] = lambda request: token_at(len(request.token_ids))
        self.cached_tokens: Callable[[Request], int] = lambda _: 1
        self.jobs: dict[RequestKey, PrefillJob] = {}
        self.submitted: list[Request] = []
        self.destinations: list[Destination] = []
        self.cancels: list[RequestKey] = []
        self.finished = 0
        self.failed: str | None = None
        self.paired: dict[str, bytes] = {}
        self._thread = ThreadPoolExecutor(1)

    def submit(
        self, request: Request, decode_incarnation: str, real_tree: bool, deliver: Callable[[PrefillEvent], None]
    ) -> None:
        if self.refusal is not None:
            raise self.refusal
        assert request.key not in self.jobs, "submitted twice"
        self.submitted.append(request)
        self.jobs[request.key] = PrefillJob(request, deliver)
        self._do(lambda: self._advance(self.jobs[request.key]))

    def set_destination(self, key: RequestKey, destination: Destination) -> None:
        self.destinations.append(destination)
        self._do(lambda: self._set_destination(key, destination))

    def cancel(self, key: RequestKey) -> None:
        self.cancels.append(key)
        self._do(lambda: self._cancel(key))

    def let_go(self, point: str) -> None:
        self.points.drop(point)
        self._do(lambda: [self._resume(job) for job in tuple(self.jobs.values())])

    def pair(self, peer: str, layout: bytes) -> None:
        self.paired[peer] = layout

    def forget(self, peer: str) -> None:
        self.paired.pop(peer)

    def inject(self, key: RequestKey, event: PrefillEvent) -> None:
        """Delivers an event that the engine has no business to deliver."""
        job = self.jobs[key]
        self._do(lambda: job.deliver(event))

    def load(self) -> EngineLoad:
        running = sum(job.stage != "queued" for job in self.jobs.values())
        return load_of(queued=len(self.jobs) - running, running=running, free=64, total=64, failed=self.failed)

    def close(self) -> None:
        self._thread.shutdown()

    def _do(self, work: Callable[[], object]) -> None:
        self._thread.submit(work).add_done_callback(lambda done: done.result())

    def _resume(self, job: PrefillJob) -> None:
        if job.cancelled:
            self._drain(job)
        else:
            self._advance(job)

    def _advance(self, job: PrefillJob) -> None:
        while job.request.key in self.jobs and not job.cancelled:
            if job.stage in self.fail_at:
                self._end(job, self.fail_at[job.stage])
            elif self.points.holds(job.stage):
                return
            elif job.stage == "queued":
                job.stage = "computing"
                job.deliver(Scheduled(self.cached_tokens(job.request)))
            elif job.stage == "computing":
                job.stage = "writing"
                job.deliver(FirstToken(Token(self.first_token(job.request))))
            elif job.destination is None:
                return
            else:
                self.finished += 1
                first = self.first_token(job.request)
                tree = DraftTree((first, first + 1), (-1, 0))
                self._end(job, PrefillFinished(tree, TreeOrigin.REAL, HandoffCounts(1000, 0.5, 0.25, 0.125, 2)))

    def _set_destination(self, key: RequestKey, destination: Destination) -> None:
        job = self.jobs.get(key)
        if job is not None:
            job.destination = destination
            self.points.holds("destination")
            if job.stage == "writing":
                self._resume(job)

    def _cancel(self, key: RequestKey) -> None:
        job = self.jobs.get(key)
        if job is not None and not job.cancelled:
            job.cancelled = True
            self._drain(job)

    def _drain(self, job: PrefillJob) -> None:
        if not self.points.holds("draining"):
            self._end(job, Drained())

    def _end(self, job: PrefillJob, event: PrefillEvent) -> None:
        self.jobs.pop(job.request.key, None)
        job.deliver(event)


@dataclass
class DecodeJob:
    request: Request
    deliver: Callable[[DecodeEvent], None]
    pages: tuple[PageId, ...] = ()
    running: bool = False
    output: int = 0
    emitted_here: int = 0
    rounds: int = 0


@dataclass
class FakeDecodeEngine:
    """Points: line (before Reserved), running (before each round); at "reserve" and "cancelled" arrivals are seen.

    Attributes:
        preempt_after: rounds of one attempt after which its pages are taken.
    """

    num_pages: int = 4
    tokens_per_round: int = 2
    preempt_after: int | None = None
    refusal: GraftlineError | None = None
    points: Points = field(default_factory=Points)
    jobs: dict[RequestKey, DecodeJob] = field(default_factory=dict)
    quarantined: dict[str, list[PageId]] = field(default_factory=dict)
    forgotten: list[str] = field(default_factory=list)
    trees: list[DraftTree] = field(default_factory=list)
    failed: str | None = None

    def __post_init__(self) -> None:
        self.free = [PageId(page) for page in range(self.num_pages)]
        self.line: list[DecodeJob] = []
        self.progress = 0
        self._thread = ThreadPoolExecutor(1)

    def reserve(self, request: Request, deliver: Callable[[DecodeEvent], None]) -> None:
        if self.refusal is not None:
            raise self.refusal
        self._do(lambda: self._reserve(DecodeJob(request, deliver)))

    def release(self, key: RequestKey) -> None:
        self._do(lambda: self._release(key))

    def quarantine(self, key: RequestKey, peer_incarnation: str) -> None:
        self._do(lambda: self._quarantine(key, peer_incarnation))

    def forget_peer(self, peer_incarnation: str) -> None:
        self.forgotten.append(peer_incarnation)
        self._do(lambda: self._free(tuple(self.quarantined.pop(peer_incarnation, []))))

    def start(self, key: RequestKey, first_token: Token, tree: DraftTree, kv_digest: bytes = b"") -> None:
        self.trees.append(tree)
        self._do(lambda: self._start(key))

    def cancel(self, key: RequestKey) -> None:
        self._do(lambda: self._cancel(key))

    def let_go(self, point: str) -> None:
        self.points.drop(point)
        self._do(self._admit if point == "line" else self._resume_all)

    def fail(self, reason: str) -> None:
        """The loop died: everything ends."""
        self.failed = reason
        self._do(lambda: [self._end(job, DecodeFailed(reason)) for job in tuple(self.jobs.values())])

    def load(self) -> EngineLoad:
        running = sum(job.running for job in self.jobs.values())
        return load_of(
            queued=len(self.line),
            running=running,
            free=len(self.free),
            total=self.num_pages,
            quarantined=sum(map(len, self.quarantined.values())),
            progress=self.progress,
            failed=self.failed,
        )

    def close(self) -> None:
        self._thread.shutdown()

    def settle(self) -> None:
        """Waits for everything asked so far."""
        self._thread.submit(lambda: None).result(WAIT_S)

    def check_quiescent(self, *, quarantined: int = 0) -> None:
        self.settle()
        assert not self.jobs
        assert not self.line
        held = [page for pages in self.quarantined.values() for page in pages]
        assert sorted(self.free + held) == list(range(self.num_pages))
        assert len(held) == quarantined

    def _do(self, work: Callable[[], object]) -> None:
        self._thread.submit(work).add_done_callback(lambda done: done.result())

    def _reserve(self, job: DecodeJob) -> None:
        assert job.request.key not in self.jobs, "reserved twice"
        self.jobs[job.request.key] = job
        self.line.append(job)
        self.points.holds("reserve")
        self._admit()

    def _admit(self) -> None:
        while self.line and self.free and not self.points.holds("line"):
            job = self.line.pop(0)
            job.pages = (self.free.pop(),)
            job.deliver(Reserved(Destination(job.pages, SlotId(job.pages[0]))))

    def _free(self, pages: tuple[PageId, ...]) -> None:
        self.free.extend(pages)
        self._admit()

    def _release(self, key: RequestKey) -> None:
        job = self.jobs[key]
        assert not job.running, "released while running"
        self._drop(job)
        self._free(job.pages)

    def _quarantine(self, key: RequestKey, incarnation: str) -> None:
        job = self.jobs[key]
        self._drop(job)
        self.quarantined.setdefault(incarnation, []).extend(job.pages)

    def _drop(self, job: DecodeJob) -> None:
        del self.jobs[job.request.key]
        if job in self.line:
            self.line.remove(job)

    def _start(self, key: RequestKey) -> None:
        job = self.jobs[key]
        job.running = True
        job.output = job.request.num_earlier_tokens + 1
        self._round(job)

    def _resume_all(self) -> None:
        for job in tuple(self.jobs.values()):
            if job.running:
                self._round(job)

    def _round(self, job: DecodeJob) -> None:
        """One round, and the next one after whatever waits in line for the thread."""
        if job.request.key not in self.jobs or self.points.holds("running"):
            return
        if self.preempt_after is not None and job.rounds >= self.preempt_after:
            self._end(job, Preempted(self._counts(job)))
            return
        left = job.request.stopping.max_tokens - job.output
        count = min(self.tokens_per_round, left)
        start = job.request.num_prompt_tokens + job.output
        job.output += count
        job.rounds += 1
        self.progress += 1
        job.deliver(Tokens(tuple(map(token_at, range(start, start + count)))))
        if job.output >= job.request.stopping.max_tokens:
            self._end(job, DecodeFinished(FinishReason.LENGTH, None, self._counts(job)))
        else:
            self._do(lambda: self._round(job))

    def _counts(self, job: DecodeJob) -> SpeculationCounts:
        return SpeculationCounts(job.rounds, 3 * job.rounds, job.rounds, min(3, 3 * job.rounds), min(1, job.rounds))

    def _cancel(self, key: RequestKey) -> None:
        job = self.jobs.get(key)
        self.points.holds("cancelled")
        if job is not None and job.running:
            self._end(job, DecodeCancelled())

    def _end(self, job: DecodeJob, event: DecodeEvent) -> None:
        self._drop(job)
        self._free(job.pages)
        job.deliver(event)


def load_of(
    *,
    queued: int,
    running: int,
    free: int,
    total: int,
    quarantined: int = 0,
    progress: int = 0,
    failed: str | None = None,
) -> EngineLoad:
    pages = PoolGauges(total, free, total - free - quarantined, 0, quarantined)
    return EngineLoad(queued, queued, running, pages, total, free, progress, 0.0, 0.0, failed)


def failure(code: PrefillFailure, *, drained: bool, reason: str = "injected") -> PrefillFailed:
    return PrefillFailed(code, reason, drained)


@dataclass
class FakeTotals:
    """Both roles' counters."""

    steps: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    sent_bytes: int = 0
    send_s: float = 0.0
    sends: int = 0
    failed_sends: int = 0
    rounds: int = 0
    request_rounds: int = 0
    output_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    first_rounds: int = 0
    first_round_drafted: int = 0
    first_round_accepted: int = 0
    preemptions: int = 0


class FakeWorkerEngine:
    """A whole engine around a scripted scheduler, as a worker's server wants it."""

    def __init__(self, scheduler: "FakePrefillEngine | FakeDecodeEngine") -> None:
        self.scheduler: Any = scheduler
        scheduler.totals = FakeTotals()  # type: ignore[union-attr]
        card = ModelCardData("fake", b"{}", "", -1, (2,), 128, VOCAB_SIZE, {"eos_token": "</s>"})
        self.facts = WorkerFacts(card, 128, {"model_hash": "abc"}, 1)
        self.hung = False
        self.frozen_at: int | None = None
        self.stopped = False
        buffer = common_pb2.BufferLayout(
            kind="k", layer=0, dtype="float32", base_address=4096, unit_bytes=64, unit_stride_bytes=64, num_units=8
        )
        layout = common_pb2.StageLayout(stage=0, session_id="fake:1", buffers=[buffer])
        self.layouts = [layout.SerializeToString()]

    def load(self) -> EngineLoad:
        taken_s = 1.0 if self.hung else time.monotonic()
        return replace(self.scheduler.load(), taken_s=taken_s)

    def stage_load(self) -> list[StageAlive]:
        # The heartbeats of a frozen stage stop.
        sequence = self.frozen_at if self.frozen_at is not None else int(100 * time.monotonic())
        return [StageAlive(0, int(100 * time.monotonic()), 2.5, 7), StageAlive(1, sequence, 2.5, 7)]

    def stop(self, timeout_s: float) -> None:
        self.stopped = True
        self.scheduler.close()
