"""Runs transfers beside the compute loop: a bounded queue and one thread for every peer session.

It does not know requests or pages; an owner is any hashable. A slow peer holds up its own queue only.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from graftline.errors import (
    CancelledRequestError,
    GraftlineError,
    InternalError,
    OutOfCapacityError,
    PeerUnavailableError,
    TransferFailedError,
)
from graftline.kv_transfer.transfer_job import TransferJob, TransferOutcome
from graftline.kv_transfer.transport import Transport

_LOG = logging.getLogger(__name__)
_READY_SLICE_S = 0.05  # how soon a job that waits for its data notices a cancel


@dataclass(slots=True, eq=False)
class _Lane:
    """One session's queue. Guarded by the worker's lock."""

    session_id: str
    work: threading.Condition
    jobs: deque[TransferJob] = field(default_factory=deque)
    running: TransferJob | None = None
    stop_running: bool = False  # the running job should not start to write
    retired: bool = False  # taken out of the worker: the thread ends

    @property
    def idle(self) -> bool:
        return self.running is None and not self.jobs


@dataclass(slots=True, eq=False)
class _Watch:
    """Somebody waits for an owner's last job to end."""

    ended: Callable[[bool], None]
    drained: bool = True


class TransferWorker:
    """Queues and runs jobs; all methods are thread-safe and none but `close` and `wait_idle` blocks.

    Args:
        transport: what carries the bytes.
        max_queued_jobs: jobs that may wait for one session.
        max_peers: sessions that may have a thread at a time.
        idle_s: a session without jobs for this long gives its thread back.
        enter_thread: called first in every thread: GPUs have a current one for each thread.
    """

    def __init__(
        self,
        transport: Transport,
        max_queued_jobs: int = 256,
        max_peers: int = 64,
        idle_s: float = 30.0,
        enter_thread: Callable[[], object] = lambda: None,
    ) -> None:
        self._transport = transport
        self._max_queued_jobs = max_queued_jobs
        self._max_peers = max_peers
        self._idle_s = idle_s
        self._enter_thread = enter_thread
        self._lock = threading.Lock()
        self._quiet = threading.Condition(self._lock)  # signalled when a job or a lane ends
        self._lanes: dict[str, _Lane] = {}
        self._open: Counter[Hashable] = Counter()  # jobs of an owner whose end was not reported yet
        self._watches: dict[Hashable, list[_Watch]] = {}
        self._closed = False

    @property
    def num_queued(self) -> int:
        """Jobs that wait for their turn."""
        with self._lock:
            return sum(len(lane.jobs) for lane in self._lanes.values())

    @property
    def num_running(self) -> int:
        """Jobs that write or wait for their data."""
        with self._lock:
            return sum(lane.running is not None for lane in self._lanes.values())

    @property
    def num_peers(self) -> int:
        """Sessions that hold a thread."""
        with self._lock:
            return len(self._lanes)

    def submit(self, *jobs: TransferJob) -> None:
        """Queues jobs for different sessions: all of them, or none. They run beside each other.

        Raises:
            OutOfCapacityError: a session's queue is full, or too many sessions are in use; no `done` is called.
            PeerUnavailableError: the worker is closed; no `done` is called.
        """
        with self._lock:
            if self._closed:
                raise PeerUnavailableError("the transfer worker is closed")
            lanes = self._enqueue(jobs)
            for job, lane in zip(jobs, lanes, strict=True):
                self._open[job.owner] += 1
                lane.work.notify()

    def cancel(self, owner: Hashable, ended: Callable[[bool], None]) -> None:
        """Drops the owner's queued jobs; one that writes goes on to its end, since a write cannot be taken back.

        Args:
            owner: jobs that it submits later are not affected.
            ended: called exactly once, when no job of the owner is left, with whether all of these ended drained.
        """
        with self._lock:
            dropped = self._take(lambda job: job.owner == owner)
            for lane in self._lanes.values():
                lane.stop_running |= lane.running is not None and lane.running.owner == owner
            self._watches.setdefault(owner, []).append(_Watch(ended))
            idle = not self._open[owner]
            watches = self._watches.pop(owner) if idle else []
            if idle:
                del self._open[owner]
        for watch in watches:
            watch.ended(watch.drained)
        self._drop(dropped, CancelledRequestError("the transfer was cancelled"))

    def forget_peer(self, session_id: str) -> None:
        """The peer is gone: its queued jobs fail, and the transport lets go of what it remembers."""
        with self._lock:
            dropped = self._take(lambda job: job.session_id == session_id)
        self._drop(dropped, PeerUnavailableError(f"{session_id} is gone"))
        self._transport.forget(session_id)

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until nothing is queued or runs; whether that came true in time."""
        with self._lock:
            return self._quiet.wait_for(lambda: not self._open, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Fails what is queued, waits for what is being written; whether everything ended in time.

        The transport stays open: it is the owner's to close.
        """
        with self._lock:
            self._closed = True
            dropped = self._take(lambda job: True)
            for lane in self._lanes.values():
                lane.stop_running = True
                lane.work.notify()
        self._drop(dropped, PeerUnavailableError("the transfer worker is closing"))
        with self._lock:
            return self._quiet.wait_for(lambda: not self._open and not self._lanes, timeout_s)

    # --- queues --------------------------------------------------------------------------------------------------

    def _enqueue(self, jobs: Sequence[TransferJob]) -> list[_Lane]:
        """Puts each job into its lane; on a refusal takes back what it has put."""
        lanes: list[_Lane] = []
        try:
            for job in jobs:
                lanes.append(self._lane_for(job))
                lanes[-1].jobs.append(job)
        except OutOfCapacityError:
            for lane in lanes:
                lane.jobs.pop()
            raise
        return lanes

    def _lane_for(self, job: TransferJob) -> _Lane:
        lane = self._lanes.get(job.session_id)
        if lane is None:
            return self._new_lane(job.session_id)
        if len(lane.jobs) >= self._max_queued_jobs:
            raise OutOfCapacityError(f"{len(lane.jobs)} transfers wait for {job.session_id}")
        return lane

    def _new_lane(self, session_id: str) -> _Lane:
        if len(self._lanes) >= self._max_peers:
            self._retire_an_idle_lane()
        lane = self._lanes[session_id] = _Lane(session_id, threading.Condition(self._lock))
        name = f"transfer {session_id}"
        threading.Thread(target=self._run_lane, args=(lane,), daemon=True, name=name).start()
        return lane

    def _retire_an_idle_lane(self) -> None:
        for lane in self._lanes.values():
            if lane.idle:
                self._retire(lane)
                lane.work.notify()
                return
        raise OutOfCapacityError(f"transfers to {len(self._lanes)} peers are under way")

    def _retire(self, lane: _Lane) -> None:
        lane.retired = True
        del self._lanes[lane.session_id]
        self._quiet.notify_all()

    def _take(self, wanted: Callable[[TransferJob], bool]) -> list[TransferJob]:
        """Takes queued jobs out of all lanes."""
        taken: list[TransferJob] = []
        for lane in self._lanes.values():
            taken += [job for job in lane.jobs if wanted(job)]
            lane.jobs = deque(job for job in lane.jobs if not wanted(job))
        return taken

    def _drop(self, jobs: list[TransferJob], error: GraftlineError) -> None:
        for job in jobs:
            self._finish(job, TransferOutcome(error, drained=True))

    def _finish(self, job: TransferJob, outcome: TransferOutcome) -> None:
        """Reports a job, then whoever waited for its owner's last one."""
        try:
            job.done(outcome)
        except Exception:
            _LOG.exception("a transfer's done callback failed")
        with self._lock:
            watches = self._watches.get(job.owner, [])
            for watch in watches:
                watch.drained &= outcome.drained
            self._open[job.owner] -= 1
            if self._open[job.owner]:
                return
            del self._open[job.owner]
            self._watches.pop(job.owner, None)
            self._quiet.notify_all()
        for watch in watches:
            watch.ended(watch.drained)

    # --- a lane's thread -----------------------------------------------------------------------------------------

    def _run_lane(self, lane: _Lane) -> None:
        self._enter_thread()
        while (job := self._next_job(lane)) is not None:
            outcome = self._run(lane, job)
            with self._lock:
                lane.running = None
            self._finish(job, outcome)

    def _next_job(self, lane: _Lane) -> TransferJob | None:
        """The next job; None when the lane has been idle for long or the worker closes, and the lane is gone."""
        with self._lock:
            lane.work.wait_for(lambda: bool(lane.jobs) or self._closed or lane.retired, self._idle_s)
            if not lane.jobs:
                if not lane.retired:
                    self._retire(lane)
                return None
            lane.running = lane.jobs.popleft()
            lane.stop_running = False
            return lane.running

    def _run(self, lane: _Lane, job: TransferJob) -> TransferOutcome:
        try:
            self._await_data(lane, job)
            copies = job.build_copies()
        except GraftlineError as error:
            return TransferOutcome(error, drained=True)
        except Exception as error:
            _LOG.exception("a transfer could not be planned")
            return TransferOutcome(InternalError(f"planning a transfer: {error!r}"), drained=True)
        start_s = time.monotonic()
        try:
            self._transport.write(job.session_id, copies, job.deadline_s)
        except TransferFailedError as error:
            return TransferOutcome(error, error.drained, seconds=time.monotonic() - start_s)
        except GraftlineError as error:
            return TransferOutcome(error, drained=True, seconds=time.monotonic() - start_s)
        except Exception as error:
            _LOG.exception("a transport broke")
            return TransferOutcome(InternalError(f"writing: {error!r}"), drained=False)
        num_bytes = sum(copy.num_bytes for copy in copies)
        return TransferOutcome(None, drained=True, num_bytes=num_bytes, seconds=time.monotonic() - start_s)

    def _await_data(self, lane: _Lane, job: TransferJob) -> None:
        """Waits until the data is computed.

        Raises:
            CancelledRequestError: the owner was cancelled or the worker closes.
            TransferFailedError: the deadline passed; nothing was written.
        """
        ready = job.ready is None
        while not lane.stop_running:
            left_s = job.deadline_s - time.monotonic()
            if left_s <= 0:
                raise TransferFailedError("the deadline passed before the write began", drained=True)
            if ready:
                return
            assert job.ready is not None
            ready = job.ready(min(_READY_SLICE_S, left_s))
        raise CancelledRequestError("the transfer was cancelled")
