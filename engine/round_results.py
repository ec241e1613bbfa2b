"""Brings what rounds left on the device to the host, in order, without holding up who launches them."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from graftline.engine.device_event import send_to_host
from graftline.engine.plan import SampledToken, SegmentOutcome, StepPlan, StepResult
from graftline.engine.round_state import RoundState
from graftline.engine.verify import NO_FINITE_LOGIT

Emit = Callable[[StepResult], None]


def step_result(plan: StepPlan, rows: list[list[int]], state: RoundState) -> StepResult:
    """A round in the words of a plan.

    Args:
        rows: what `DeviceRounds.run` returned on the last stage.
    """
    outcomes = []
    for segment, row in zip(plan.segments, rows, strict=False):  # rows of padding follow
        emitted = row[: state.path_len]
        accepted, tokens, parents = state.unpack(row[state.path_len :])
        ids = emitted[: len(accepted)]
        error = NO_FINITE_LOGIT if min(ids, default=0) < 0 else ""
        sampled = [] if error else [SampledToken(token_id) for token_id in ids]
        grows = segment.grow and not error
        outcomes.append(
            SegmentOutcome(segment.slot, accepted, sampled, tokens if grows else [], parents if grows else [], error)
        )
    return StepResult(plan.step, plan.microbatch, outcomes)


@dataclass(frozen=True, slots=True)
class _Landing:
    plan: StepPlan
    rows: Tensor
    arrived: torch.cuda.Event
    emit: Emit


class RoundReader:
    """Emits results of rounds. On CUDA from a thread of its own, once each result has arrived; on CPU at once."""

    def __init__(self, state: RoundState) -> None:
        self._state = state
        self._landings: queue.SimpleQueue[_Landing | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def read(self, plan: StepPlan, output: Tensor, emit: Emit) -> None:
        """Takes a round that the current stream has been given; `output` may be overwritten by a later one.

        Raises:
            RuntimeError: an earlier round could not be read.
        """
        if output.device.type != "cuda":
            emit(step_result(plan, output.tolist(), self._state))
            return
        if self._failure is not None:
            raise RuntimeError("a round could not be read") from self._failure
        rows, arrived = send_to_host(output)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="round-reader", daemon=True)
            self._thread.start()
        self._landings.put(_Landing(plan, rows, arrived, emit))

    def close(self) -> None:
        """Ends the thread once all is read."""
        self._landings.put(None)

    def _run(self) -> None:
        while (landing := self._landings.get()) is not None:
            try:
                landing.arrived.synchronize()
                landing.emit(step_result(landing.plan, landing.rows.tolist(), self._state))
            except Exception as error:
                self._failure = error
                return
