"""Transfer threads wait for a step's KV."""

import threading

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
