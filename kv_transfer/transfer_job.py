"""What a transfer worker is given and what it gives back."""

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from graftline.errors import GraftlineError
from graftline.kv_transfer.copy_plan import Copy


class TransferOutcome(NamedTuple):
    """How one job ended.

    Args:
        error: None when every byte is in the peer's memory.
        drained: no byte of this job can land any more; False only after a failed write.
        num_bytes: bytes that were acknowledged; 0 after a failure.
        seconds: time of the write itself, without queueing and without waiting for the data.
    """

    error: GraftlineError | None
    drained: bool
    num_bytes: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every byte is in the peer's memory."""
        return self.error is None


@dataclass(slots=True, eq=False)  # nobody changes one, but frozen ones take four times as long to make
class TransferJob:
    """One write to one peer session. Jobs of a session run one after another, in order of submission.

    Args:
        owner: whose job it is (a request's attempt); what `cancel` goes by.
        session_id: the peer.
        copies: the copies, or what builds them; built in the worker's thread once the data is ready.
        deadline_s: when the job has failed, on the `time.monotonic` clock.
        done: called exactly once, from some thread of the worker or from the thread that cancels or closes.
        ready: waits up to so many seconds for the data to be computed and says whether it is; `threading.Event.wait`
            fits. None: it is ready now.
    """

    owner: Hashable
    session_id: str
    copies: Sequence[Copy] | Callable[[], Sequence[Copy]]
    deadline_s: float
    done: Callable[[TransferOutcome], None]
    ready: Callable[[float], bool] | None = None


class Gather:
    """A `done` for several jobs that belong together: passes one outcome on when the last of them has ended.

    Args:
        count: jobs that will report.
        done: gets the first error, drained only if all were, the sum of the bytes and the longest time.
    """

    def __init__(self, count: int, done: Callable[[TransferOutcome], None]) -> None:
        assert count > 0, "nobody would ever report"
        self._count = count
        self._done = done
        self._outcomes: list[TransferOutcome] = []
        self._lock = threading.Lock()

    def __call__(self, outcome: TransferOutcome) -> None:
        """Takes one job's outcome."""
        with self._lock:
            self._outcomes.append(outcome)
            complete = len(self._outcomes) == self._count
        if complete:
            self._done(_together(self._outcomes))


def _together(outcomes: Sequence[TransferOutcome]) -> TransferOutcome:
    error = next((outcome.error for outcome in outcomes if outcome.error is not None), None)
    return TransferOutcome(
        error,
        drained=all(outcome.drained for outcome in outcomes),
        num_bytes=sum(outcome.num_bytes for outcome in outcomes),
        seconds=max(outcome.seconds for outcome in outcomes),
    )
