"""A stage's threads on its links."""

import threading
import time
from typing import Any

import torch

from graftline.engine.device_figures import DeviceFigures, Figures
from graftline.engine.links import LocalLink, StageLinks
from graftline.engine.plan import Message, StepPlan, StepResult, Stop
from graftline.engine.stage_stream import StageStream
from graftline.engine.stage_worker import StageWorker
from graftline.engine.step_gate import StepGate

CPU = torch.device("cpu")


class OneAtATime:
    """A link whose frames would mix if two threads sent at once."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.mixed = False
        self._busy = False

    def send(self, message: Message, payload: object = None) -> None:
        self.mixed |= self._busy
        self._busy = True
        time.sleep(0.001)
        if isinstance(message, StepResult):
            self.steps.append(message.step)
        self._busy = False


class TwoVoices:
    """A stage that tells results from its reader's thread while it computes, as with rounds on a GPU."""

    def await_returns(self, plan: StepPlan) -> None:
        return

    def execute(self, plan: StepPlan, payload: object, emit: Any) -> None:
        def tell(first: int) -> None:
            for step in range(first, first + 20):
                emit(StepResult(step, 0, []))

        reader = threading.Thread(target=tell, args=(100,))
        reader.start()
        tell(0)
        reader.join()

    def close(self) -> None:
        return


class NoPort:
    def close(self) -> None:
        return


def test_results_of_two_threads_do_not_mix_on_their_link() -> None:
    upstream, control, results = LocalLink(), LocalLink(), OneAtATime()
    links = StageLinks(upstream, None, control, results, OneAtATime())  # type: ignore[arg-type]
    ended: list[str | None] = []
    worker = StageWorker(1, TwoVoices(), links, NoPort(), StepGate(), 1, StageStream(CPU), ended.append)  # type: ignore[arg-type]
    worker.start()
    upstream.send(StepPlan(0, 0, [], [], [], False))
    upstream.send(Stop())
    control.send(Stop())
    assert worker.join(10)
    assert sorted(results.steps) == [*range(20), *range(100, 120)]
    assert not results.mixed
    assert set(ended) == {None}


def test_figures_are_told_although_the_driver_hangs() -> None:
    """A heartbeat must not wait for whoever holds the driver's lock."""
    asked, may_answer = threading.Event(), threading.Event()

    class Driver:
        is_pending = True

        @property
        def seconds(self) -> float:
            asked.set()
            may_answer.wait(10)
            return 2.5

    figures = DeviceFigures(Driver(), "figures")  # type: ignore[arg-type]
    figures.start()
    try:
        assert figures.take() == Figures()
        assert asked.wait(5)
        began = time.monotonic()
        assert figures.take() == Figures()
        assert time.monotonic() - began < 1
        may_answer.set()
        deadline = time.monotonic() + 5
        while figures.take() != Figures(2.5, True, 0):
            assert time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        may_answer.set()
        figures.close()
