"""Brings what rounds left on the device to the host, in order, without holding up who launches them."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from graftline.engine.device_event import send_to_host
from graftline.engine.plan import RoundResult, StepPlan
from graftline.engine.request import DraftTree, TokenLogprob
from graftline.engine.verify import NO_FINITE_LOGIT
from graftline.kernels.round_open import RoundLayout

Emit = Callable[[RoundResult], None]


def round_result(plan: StepPlan, output: Tensor) -> RoundResult:
    """A round on its way to the scheduler.

    Args:
        output: what `DeviceRounds.run` returned on the last stage, in the host's memory; rows of padding come last.
    """
    slots = [segment.slot for segment in plan.segments]
    return RoundResult(plan.step, plan.microbatch, slots, output.numpy()[: len(slots)].astype("i4").tobytes())


@dataclass(slots=True)
class RoundOutcome:
    """What a round meant for one request, as `SegmentOutcome` has it. What is seldom asked for is unpacked then.

    Attributes:
        ids: emitted tokens, one per accepted node.
        num_nodes: of the tree that comes next.
        error: why the request must fail, else "".
    """

    slot: int
    ids: list[int]
    num_nodes: int
    error: str
    _row: list[int]  # of `RoundState`
    _layout: RoundLayout

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """A round of fixed shape knows none."""
        return ()

    @property
    def accepted(self) -> list[int]:
        """Verified nodes that hold, the root first."""
        return [node for node in self._row[self._layout.accepted_at : self._layout.tokens_at] if node >= 0]

    def tree(self) -> DraftTree:
        """The tree that comes next."""
        tokens_at, parents_at = self._layout.tokens_at, self._layout.parents_at
        tokens = self._row[tokens_at : tokens_at + self.num_nodes]
        return DraftTree(tuple(tokens), tuple(self._row[parents_at : parents_at + self.num_nodes]))


def round_outcomes(result: RoundResult, layout: RoundLayout) -> list[RoundOutcome]:
    """What a round meant for its requests.

    Args:
        layout: of the last stage's `RoundState`.
    """
    values: list[int] = memoryview(result.rows).cast("i").tolist()
    path_len, accepted_at, tokens_at = layout.path_len, layout.accepted_at, layout.tokens_at
    width = path_len + layout.width
    outcomes = []
    for first, slot in zip(range(0, len(values), width), result.slots, strict=True):
        row = values[first + path_len : first + width]
        ids = values[first : first + path_len - row[accepted_at:tokens_at].count(-1)]
        error = NO_FINITE_LOGIT if -1 in ids else ""
        outcomes.append(RoundOutcome(slot, ids, row[1], error, row, layout))
    return outcomes


@dataclass(frozen=True, slots=True)
class _Landing:
    plan: StepPlan
    rows: Tensor
    arrived: torch.cuda.Event
    emit: Emit


class RoundReader:
    """Emits results of rounds. On CUDA from a thread of its own, once each result has arrived; on CPU at once."""

    def __init__(self) -> None:
        self._landings: queue.SimpleQueue[_Landing | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def read(self, plan: StepPlan, output: Tensor, emit: Emit) -> None:
        """Takes a round that the current stream has been given; `output` may be overwritten by a later one.

        Raises:
            RuntimeError: an earlier round could not be read.
        """
        if output.device.type != "cuda":
            emit(round_result(plan, output))
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
                landing.emit(round_result(landing.plan, landing.rows))
            except Exception as error:
                self._failure = error
                return
