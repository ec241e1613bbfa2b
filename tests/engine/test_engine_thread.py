"""The thread that owns a scheduler."""

import queue
import threading
from typing import Any

from graftline.engine.engine_thread import EngineThread
from graftline.engine.plan import Report, StageFailed, StepResult, StepTokens

WAIT_S = 10


class Owner:
    """A scheduler that writes down what it is asked; "boom" makes it raise."""

    def __init__(self, beat_s: float = 60.0) -> None:
        self.handled: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.failures: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.beats = 0
        self.beaten = threading.Semaphore(0)
        self.scheduled = threading.Semaphore(0)
        self.raise_in_schedule = False
        self.raise_in_beat = False
        self.thread: EngineThread[str] = EngineThread(
            "owner",
            handle=self.handle,
            schedule=self.schedule,
            beat=self.beat,
            fail=self.failures.put,
            beat_s=beat_s,
        )
        self.thread.start()

    def handle(self, item: str | Report) -> None:
        if item == "boom":
            raise ValueError("boom")
        self.handled.put(item)

    def schedule(self) -> None:
        self.scheduled.release()
        if self.raise_in_schedule:
            raise ValueError("cannot schedule")

    def beat(self) -> None:
        self.beats += 1
        self.beaten.release()
        if self.raise_in_beat:
            raise ValueError("no beat")

    def next(self) -> Any:
        return self.handled.get(timeout=WAIT_S)


def test_commands_and_reports_are_handled_in_order() -> None:
    owner = Owner()
    items: list[str | Report] = ["a", StepTokens(1, []), "b", StepResult(1, 0, []), *map(str, range(600))]
    for item in items:
        owner.thread.put(item)
    assert [owner.next() for _ in items] == items
    assert owner.scheduled.acquire(timeout=WAIT_S)
    assert owner.thread.stop(WAIT_S)
    assert owner.beats == 1


def test_it_beats_without_any_work() -> None:
    owner = Owner(beat_s=0.01)
    for _ in range(3):
        assert owner.beaten.acquire(timeout=WAIT_S)
    assert owner.thread.stop(WAIT_S)


def test_a_raising_handler_fails_the_engine_once() -> None:
    """Commands are still answered afterwards, so that nobody waits in vain; late reports count no more."""
    owner = Owner(beat_s=0.01)
    owner.thread.put("boom")
    assert owner.failures.get(timeout=WAIT_S) == "ValueError: boom"
    late: list[str | Report] = ["boom", StepTokens(2, []), StageFailed(1, "late"), StepResult(2, 0, []), "answered"]
    for item in late:
        owner.thread.put(item)
    assert owner.next() == "answered"
    assert owner.thread.stop(WAIT_S)
    assert owner.failures.empty()
    assert owner.handled.empty()


def test_a_failed_stage_fails_the_engine() -> None:
    owner = Owner()
    owner.thread.put(StageFailed(2, "out of memory"))
    owner.thread.put("after")
    assert owner.failures.get(timeout=WAIT_S) == "stage 2: out of memory"
    assert owner.next() == "after"
    assert owner.thread.stop(WAIT_S)


def test_a_failing_schedule_or_beat_fails_the_engine_and_is_not_tried_again() -> None:
    for attribute, reason in (("raise_in_schedule", "cannot schedule"), ("raise_in_beat", "no beat")):
        owner = Owner(beat_s=0.01)
        owner.beaten.acquire(timeout=WAIT_S)
        setattr(owner, attribute, True)
        owner.thread.put("go")
        assert owner.failures.get(timeout=WAIT_S) == f"ValueError: {reason}"
        beats = owner.beats
        owner.thread.put("after")
        assert [owner.next(), owner.next()] == ["go", "after"]
        assert owner.thread.stop(WAIT_S)
        assert owner.failures.empty()
        assert owner.beats == beats, "a failed engine does not beat"


def test_a_stopped_engine_says_so_to_who_is_left() -> None:
    """Contract 9: what was accepted ends, also when the engine goes away under it."""
    owner = Owner()
    owner.thread.put("a")
    assert owner.thread.stop(WAIT_S)
    assert owner.next() == "a"
    assert owner.failures.get(timeout=WAIT_S) == "it was stopped"
