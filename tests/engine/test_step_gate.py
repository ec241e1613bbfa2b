"""Transfer threads wait for a step's KV."""

import threading

import pytest
import torch

from graftline.engine import step_gate
from graftline.engine.step_gate import StepGate


def test_target_and_drafter_are_ready_separately() -> None:
    gate = StepGate()
    assert gate.wait(-1, drafter=True, timeout_s=0), "what was cached waits for nothing"
    assert not gate.wait(0, drafter=False, timeout_s=0)
    gate.mark(3, drafter=False)
    assert gate.wait(3, drafter=False, timeout_s=0)
    assert gate.wait(1, drafter=False, timeout_s=0)
    assert not gate.wait(3, drafter=True, timeout_s=0.01)
    gate.mark(2, drafter=False)
    assert gate.wait(3, drafter=False, timeout_s=0), "marks never go back"


def test_a_waiter_wakes_with_the_step_or_the_end() -> None:
    gate = StepGate()
    answers: list[bool] = []
    waiters = [
        threading.Thread(target=lambda step=step: answers.append(gate.wait(step, drafter=False, timeout_s=30)))
        for step in (0, 9)
    ]
    for waiter in waiters:
        waiter.start()
    gate.mark(0, drafter=False)
    waiters[0].join(10)
    assert answers == [True]
    gate.close()
    waiters[1].join(10)
    assert answers == [True, False]
    assert gate.wait(0, drafter=False, timeout_s=30), "what is there is there"


class StubEvent:
    """A CUDA event that fires when told."""

    def __init__(self) -> None:
        self.fired = False

    def query(self) -> bool:
        return self.fired


def test_on_a_gpu_a_step_is_there_when_the_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mark only means that the step was launched: transfers wait for the stream, within their time."""
    events: list[StubEvent] = []

    def mark_stream(device: torch.device) -> StubEvent:
        events.append(StubEvent())
        return events[-1]

    monkeypatch.setattr(step_gate, "mark_stream", mark_stream)
    gate = StepGate(torch.device("cuda:1"))
    gate.mark(0, drafter=False)
    gate.mark(1, drafter=False)
    assert not gate.wait(0, drafter=False, timeout_s=0.01)
    answers: list[bool] = []
    waiter = threading.Thread(target=lambda: answers.append(gate.wait(1, drafter=False, timeout_s=30)))
    waiter.start()
    events[0].fired = True
    assert gate.wait(0, drafter=False, timeout_s=0)
    assert not gate.wait(1, drafter=False, timeout_s=0)
    assert not gate.wait(1, drafter=True, timeout_s=0.01), "the drafter's rows have marks of their own"
    events[1].fired = True
    waiter.join(10)
    assert answers == [True]
    for step in range(2, 200):
        gate.mark(step, drafter=False)
    assert not gate.wait(2, drafter=False, timeout_s=0), "forgotten marks are waited for through later ones"
    events[-1].fired = True
    assert gate.wait(199, drafter=False, timeout_s=0)
    assert gate.wait(2, drafter=False, timeout_s=0)
