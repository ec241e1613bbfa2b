"""Stages as processes of their own: same answers, clean ends, and death or silence of one noticed in time.

One pipeline at a time: stage 0 lives in the test's process, which can be rank 0 of one job only.
"""

import logging
import os
import queue
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
from shared_peer_memory import SharedPeerMemory, share_memory
from stage_main import COMMAND
from tiny_world import TinyWorld, prompt

from graftline.engine.config import EngineConfig, Role, StageChannel
from graftline.engine.decode_engine import DecodeScheduler
from graftline.engine.pipeline import Pipeline, StageCommand
from graftline.engine.plan import (
    PageChange,
    Report,
    Segment,
    SegmentOutcome,
    SlotOpening,
    StepPlan,
    StepResult,
    StepTokens,
)
from graftline.engine.prefill_engine import PrefillScheduler
from graftline.engine.request import DraftTree, Request, RequestId, RequestKey, Sampling, Stopping, Token
from graftline.engine.service_api import (
    DecodeFailed,
    DecodeFinished,
    FirstToken,
    PrefillFailed,
    PrefillFinished,
    Reserved,
    Scheduled,
    Tokens,
)
from graftline.engine.transfer_port import NoTransfer
from graftline.engine.tree_shape import TreeShape
from graftline.engine.worker_engine import WorkerEngine, start_decode_engine, start_prefill_engine
from graftline.errors import InternalError, InvalidRequestError, PeerUnavailableError

pytestmark = pytest.mark.system

WAIT_S = 60.0


def config(world: TinyWorld, role: Role, **changes: Any) -> EngineConfig:
    fields: dict[str, Any] = {
        "model": str(world.plain.path),
        "role": role,
        "draft_head": str(world.eagle3),
        "dtype": "float32",
        "layer_split": (1, 2, 1),
        "page_size": 4,
        "num_pages": 32,
        "chunk_tokens": 8,
        "tree": TreeShape(4, 2, 8),
    }
    return EngineConfig(**(fields | changes))


def children() -> list[psutil.Process]:
    """Stage processes of this one, by their rank."""
    found = {
        int(child.environ()["RANK"]): child
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and "stage_main" in child.cmdline()
    }
    return [found[rank] for rank in sorted(found)]


@contextmanager
def pipeline(
    world: TinyWorld, command: StageCommand = COMMAND, **changes: Any
) -> Iterator[tuple[Pipeline, "queue.SimpleQueue[Report]"]]:
    inbox: queue.SimpleQueue[Report] = queue.SimpleQueue()
    stages = Pipeline(config(world, Role.DECODE, **changes), lambda stage: NoTransfer(), command, inbox)
    stages.start(WAIT_S)
    started = children()
    try:
        yield stages, inbox
    finally:
        stages.stop(10)
    assert [child for child in started if child.is_running() and child.status() != psutil.STATUS_ZOMBIE] == []


def outcome(inbox: "queue.SimpleQueue[Report]", step: int) -> SegmentOutcome:
    while not isinstance(report := inbox.get(timeout=WAIT_S), StepResult):
        assert isinstance(report, StepTokens)
    assert report.step == step
    return report.outcomes[0]


@pytest.mark.parametrize("channel", ["host", "direct", "memory"])
def test_three_processes_generate_what_one_does(
    world: TinyWorld, channel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASES P09, P13, P18: two chunks of a prompt, then trees over three processes: the plain model's ids."""
    ids = prompt(13)
    opening = SlotOpening(0, 0.0, 0, 1.0, 0.0, 0, {}, [], 0, -1)
    command, kind = COMMAND, StageChannel.DIRECT if channel == "memory" else StageChannel(channel)
    memory = SharedPeerMemory()
    if channel == "memory":
        command = share_memory(monkeypatch, COMMAND, memory)
    with pipeline(world, command, stage_channel=kind) as (stages, inbox):
        assert stages.layouts == [b"", b"", b""]
        assert [held > 0 for held in stages.ring_bytes] == [channel == "memory"] * 3
        first, final = Segment(0, 0, ids[:8], None, 8, ids[8], [], False), Segment(0, 8, ids[8:], None, 4, -1, [], True)
        # Both chunks are on their way at once.
        stages.submit(StepPlan(0, 0, [opening], [PageChange(0, 0, list(range(31, 11, -1)))], [first], True))
        stages.submit(StepPlan(1, 0, [], [], [final], True))
        assert outcome(inbox, 0).tokens == []
        last = outcome(inbox, 1)
        emitted = [token.token_id for token in last.tokens]
        committed, step, accepted = 13, 1, list[int]()
        while len(emitted) < 20:
            tree = last.tree()
            assert tree is not None
            step += 1
            segment = Segment(0, committed, list(tree.tokens), list(tree.parents), 0, -1, accepted, True)
            stages.submit(StepPlan(step, 0, [], [], [segment], False))
            last = outcome(inbox, step)
            emitted += [token.token_id for token in last.tokens]
            accepted = last.accepted
            committed += len(accepted)
        assert emitted[:20] == world.plain.answer(ids, 20)
        stages.beat()
    assert (memory.copied > 0) is (channel == "memory")
    memory.close()


class Caller:
    """Takes events of one engine."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def next(self, timeout_s: float = WAIT_S) -> Any:
        return self.events.get(timeout=timeout_s)


def request(name: str, max_tokens: int = 1, length: int = 13) -> Request:
    key = RequestKey(RequestId(name), 0)
    return Request(key, tuple(prompt(length)), length, Sampling(), Stopping(max_tokens))


def test_a_prefill_over_two_processes(world: TinyWorld) -> None:
    """Scheduler and pipeline together; eight prompts at once, a token each."""
    started: WorkerEngine[PrefillScheduler] = start_prefill_engine(
        config(world, Role.PREFILL, layer_split=(3, 1)), lambda stage: NoTransfer(), COMMAND, WAIT_S
    )
    try:
        callers = [Caller() for _ in range(8)]
        started.scheduler.pair("decode", b"")
        for index, caller in enumerate(callers):
            started.scheduler.submit(request(str(index), length=1 + 5 * index), "decode", True, caller.events.put)
        for index, caller in enumerate(callers):
            assert isinstance(caller.next(), Scheduled)
            first = caller.next()
            assert first == FirstToken(Token(world.plain.answer(prompt(1 + 5 * index), 1)[0]))
            assert isinstance(caller.next(), PrefillFinished)
        # Stages answer heartbeats; the last sign of life says how much they computed.
        deadline = time.monotonic() + WAIT_S
        while min((alive.steps for alive in started.stage_load()), default=0) < started.scheduler.totals.steps:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        started.scheduler.check_quiescent()
    finally:
        started.stop(20)


@contextmanager
def decode_engine(world: TinyWorld, **changes: Any) -> Iterator[tuple[DecodeScheduler, list[psutil.Process]]]:
    started = start_decode_engine(
        config(world, Role.DECODE, layer_split=(2, 2), **changes), lambda stage: NoTransfer(), COMMAND, WAIT_S
    )
    stages = children()
    try:
        yield started.scheduler, stages
    finally:
        began = time.monotonic()
        started.stop(10)
        assert time.monotonic() - began < 15, "an engine with a dead stage stops in bounded time"
    assert not any(stage.is_running() and stage.status() != psutil.STATUS_ZOMBIE for stage in stages)


def running_and_reserved(decode: DecodeScheduler) -> tuple[Caller, Caller]:
    """A request that decodes (garbage: nobody wrote its prompt) and one that awaits its handoff."""
    running, reserved = Caller(), Caller()
    decode.reserve(request("running", 100), running.events.put)
    assert isinstance(running.next(), Reserved)
    decode.start(request("running").key, Token(3), DraftTree.root_only(3))
    running.next()
    decode.reserve(request("reserved", 100), reserved.events.put)
    assert isinstance(reserved.next(), Reserved)
    return running, reserved


def failure_of(caller: Caller, within_s: float) -> DecodeFailed:
    deadline = time.monotonic() + within_s
    while not isinstance(event := caller.next(max(0.01, deadline - time.monotonic())), DecodeFailed):
        pass
    return event


def check_failed(decode: DecodeScheduler, callers: tuple[Caller, Caller], within_s: float) -> str:
    reasons = {failure_of(caller, within_s).reason for caller in callers}
    assert len(reasons) == 1
    deadline = time.monotonic() + WAIT_S
    while decode.load().failed is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(PeerUnavailableError, match="failed"):
        decode.reserve(request("late", 5), print)
    decode.check_quiescent()
    assert all(caller.events.empty() for caller in callers), "nothing after the terminal event"
    return reasons.pop()


def test_a_killed_stage_fails_every_request_at_once(world: TinyWorld) -> None:
    """CASES H03, contract 9: running or reserved, all are told, nothing is held, new ones are refused."""
    with decode_engine(world, stage_channel=StageChannel.DIRECT) as (decode, stages):
        callers = running_and_reserved(decode)
        stages[0].kill()
        assert "stage 1" in check_failed(decode, callers, within_s=10)


@pytest.mark.parametrize("slow_s", [2.6, pytest.param(5.0, marks=pytest.mark.slow)])
def test_a_slow_step_is_no_hang_and_a_frozen_stage_is(
    world: TinyWorld, monkeypatch: pytest.MonkeyPatch, slow_s: float
) -> None:
    """Contract 10, with default clocks: a step that takes longer than silence may last harms nobody; a stage that
    neither answers nor dies is noticed in less than three seconds, even when idle.
    """
    monkeypatch.setenv("SLOW_STEP", f"3:{slow_s}")
    with decode_engine(world) as (decode, stages):
        running, reserved = running_and_reserved(decode)
        began = time.monotonic()
        while not isinstance(event := running.next(), DecodeFinished):
            assert isinstance(event, Tokens)
        assert time.monotonic() - began > slow_s
        stages[0].send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        reason = failure_of(reserved, within_s=20).reason
        assert reason.startswith("stage 1: silent for")
        assert time.monotonic() - stopped < 3.0
        stages[0].wait(5)  # ended for good, so that a restart need not wait for it


def test_a_stage_that_cannot_start_is_named(world: TinyWorld, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    missing = StageCommand("no_such_module_of_ours", COMMAND.environment)
    inbox: queue.SimpleQueue[Report] = queue.SimpleQueue()
    stages = Pipeline(config(world, Role.DECODE, layer_split=(2, 2)), lambda stage: NoTransfer(), missing, inbox)
    began = time.monotonic()
    with pytest.raises(InternalError, match="a stage did not start: stage 1: its process ended with code 1"):
        stages.start(WAIT_S)
    stages.stop(5)
    assert time.monotonic() - began < WAIT_S / 2, "long before the time for a start is over"
    assert os.environ.get("WORLD_SIZE") is None


def test_threads_stop_although_one_died(world: TinyWorld) -> None:
    """CASES P10: with stages as threads a dead stage fails the engine as well, and nothing keeps running behind it."""
    from local_pair import local_pair

    with local_pair(world.plain.path, world.eagle, decode_split=(1, 2, 1), quiescent=False) as pair:
        # A plan that no scheduler would make: a slot that was never opened.
        stray = Segment(7, 0, [1], [-1], 0, -1, [], False)
        pair.decode_engine._pipeline.submit(StepPlan(0, 0, [], [], [stray], False))
        pair.await_load(lambda: pair.decode.load().failed is not None)
        answer = pair.generate(prompt(5), 4)
        assert answer.end.name == "FAILED"
        began = time.monotonic()
        pair.decode_engine.stop(20)
        assert time.monotonic() - began < 5


def test_a_failed_prefill_says_whether_writes_may_land(world: TinyWorld) -> None:
    from local_pair import Ask, local_pair

    with local_pair(world.plain.path, world.eagle, prefill_split=(2, 2), quiescent=False) as pair:
        pair.network.hold()
        exposed = pair.submit(Ask(token_ids=prompt(9), max_tokens=5))
        pair.pump(lambda: {Reserved, FirstToken} <= {type(event) for event in exposed.answer.events})
        pair.network.await_held()
        pair.prefill_engine._pipeline.submit(
            StepPlan(99, 0, [], [], [Segment(7, 0, [1], None, 0, -1, [], False)], False)
        )
        answer = pair.finish([exposed])[0]
        last = answer.events[-1]
        assert isinstance(last, PrefillFailed)
        assert not last.drained
        pair.await_load(lambda: pair.decode.load().pages.quarantined == 3)
        pair.network.let_go()
        with pytest.raises(PeerUnavailableError, match="the prefill engine failed"):
            pair.submit(Ask(token_ids=prompt(9), max_tokens=5))
        with pytest.raises(InvalidRequestError):
            pair.submit(Ask(token_ids=[], max_tokens=5))
        pair.prefill.check_quiescent()
