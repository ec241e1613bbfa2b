"""Whose silence ends a pipeline, and whose does not; what a stage answers while its threads are held up."""

import queue
import threading
from typing import Any

import pytest
import torch

from graftline.engine.config import EngineConfig, Role
from graftline.engine.links import LocalLink, StageLinks
from graftline.engine.pipeline import Pipeline, StageCommand
from graftline.engine.plan import CancelSends, Heartbeat, Report, StageAlive, StageFailed, StageReady, StepPlan, Stop
from graftline.engine.stage_stream import StageStream
from graftline.engine.stage_worker import StageWorker
from graftline.engine.step_gate import StepGate
from graftline.engine.transfer_port import NoTransfer
from graftline.engine.tree_shape import NO_SPECULATION
from graftline.errors import PeerUnavailableError

WAIT_S = 10
BEATS = 8  # that fit into the silence which is allowed


class Controls:
    """Stands for the control link of a stage."""

    def __init__(self) -> None:
        self.last = 0

    def send(self, message: Any, payload: Any = None) -> None:
        assert isinstance(message, Heartbeat)
        self.last = message.sequence


class Silence:
    """A pipeline of two stages, neither of which runs: answers are put in by hand."""

    def __init__(self) -> None:
        config = EngineConfig(
            model="none",
            role=Role.DECODE,
            layer_split=(1, 1),
            tree=NO_SPECULATION,
            heartbeat_s=0.25,
            stage_timeout_s=0.25 * BEATS,
        )
        self.reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self.controls = Controls()
        self.pipeline = Pipeline(config, lambda stage: NoTransfer(), StageCommand("none", {}), self.reports)
        self.pipeline._controls = [self.controls, Controls()]
        for stage in (0, 1):
            self.pipeline.put(StageReady(stage, b""))

    def beat(self, *answering: int, order_beats: int = 0) -> None:
        self.pipeline.beat()
        for stage in answering:
            self.pipeline.put(StageAlive(stage, self.controls.last, 0.0, 0, order_beats=order_beats))

    def failure(self) -> StageFailed | None:
        report = None if self.reports.empty() else self.reports.get()
        assert report is None or isinstance(report, StageFailed)
        return report


@pytest.mark.parametrize("pause", [1, 4, BEATS - 1])
def test_a_stage_that_is_late_again_and_again_is_alive(pause: int) -> None:
    world = Silence()
    for _ in range(5):
        for _ in range(pause):
            world.beat(0)
        world.beat(0, 1)
    assert world.failure() is None


def test_a_stage_may_speak_for_the_first_time_during_a_beat() -> None:
    """Reports come from threads of their own."""
    world = Silence()

    class Beats(int):
        def __mul__(self, other: object) -> Any:
            world.pipeline.put(StageAlive(1, 1, 0.0, 0))
            return 0.0

    world.pipeline.put(StageAlive(0, 0, 0.0, 0, order_beats=Beats()))
    world.pipeline.beat()
    assert [alive.stage for alive in world.pipeline.stage_load()] == [0, 1]


def test_every_stage_that_is_left_is_told_to_stop() -> None:
    class Gone:
        def send(self, message: Any, payload: Any = None) -> None:
            raise PeerUnavailableError("stage 0 is gone")

    class Left:
        def __init__(self) -> None:
            self.told: list[Any] = []

        def send(self, message: Any, payload: Any = None) -> None:
            self.told.append(message)

    world, left = Silence(), Left()
    world.pipeline._controls = [Gone(), left]
    world.pipeline.stop(0.1)
    assert left.told == [Stop()]


def test_a_silent_stage_is_named_once_its_time_is_up() -> None:
    world = Silence()
    for _ in range(3):
        world.beat(0, 1)
    for _ in range(BEATS):
        world.beat(0)
        assert world.failure() is None
    world.beat(0)
    assert world.failure() == StageFailed(1, "silent for 2.0 s")


def test_an_order_that_is_never_done_is_noticed() -> None:
    """The thread that answers heartbeats is not the one that obeys: it tells how long that one has been at it."""
    world = Silence()
    world.beat(0, 1, order_beats=40)
    world.beat(0, 1)
    assert world.failure() is None, "ten seconds are allowed"
    world.beat(0, 1, order_beats=41)
    world.beat(0, 1)
    failed = world.failure()
    assert failed is not None
    assert failed.reason == "a control message is being obeyed for 10.2 s"


class HeldUp:
    """A stage whose threads stop where a test wants them to; as its transfer port, and as what computes."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.entered = threading.Semaphore(0)

    def cancel(self, owner: str) -> None:
        self.entered.release()
        assert self.let_go.wait(WAIT_S)

    def await_returns(self, plan: StepPlan) -> None:
        """Nothing comes back to it."""

    def execute(self, plan: StepPlan, payload: Any, emit: Any) -> None:
        self.cancel("")

    def close(self) -> None:
        """Ends with its threads."""


def test_a_stage_answers_whatever_its_other_threads_do() -> None:
    plans, control, reports = LocalLink(), LocalLink(), LocalLink()
    held: Any = HeldUp()
    links = StageLinks(plans, None, control, reports, reports)
    worker = StageWorker(0, held, links, held, StepGate(), 1, StageStream(torch.device("cpu")), lambda reason: None)
    worker.start()

    def answer(sequence: int) -> StageAlive:
        control.send(Heartbeat(sequence))
        message, _ = reports.receive()
        assert isinstance(message, StageAlive)
        assert message.sequence == sequence
        return message

    idle = answer(1)
    assert (idle.working, idle.order_beats, idle.steps) == (False, 0, 0)
    plans.send(StepPlan(0, 0, [], [], [], False))
    control.send(CancelSends("request"))
    for _ in range(2):
        assert held.entered.acquire(timeout=WAIT_S)
    busy = [answer(sequence) for sequence in (2, 3, 4)]
    assert [alive.order_beats for alive in busy] == [0, 1, 2]
    assert all(alive.working for alive in busy)
    held.let_go.set()
    plans.send(Stop())
    control.send(Stop())
    assert worker.join(WAIT_S)
