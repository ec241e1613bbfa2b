"""Runs transfers beside the compute loop: a bounded queue and one thread for every peer session.

It does not know requests or pages; an owner is any hashable. A slow peer holds up its own queue only. Jobs that are
ready together make one group of the transport. Changing threads takes longer than copying some megabytes from GPU to
GPU, so whoever submits to an idle session begins the group, and sees it through if that takes no more than a moment.
"""

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

from graftline.errors import (
    CancelledRequestError,
    GraftlineError,
    InternalError,
    OutOfCapacityError,
    PeerUnavailableError,
    TransferFailedError,
)
from graftline.kv_transfer.copy_plan import Copy, size_of
from graftline.kv_transfer.transfer_job import TransferJob, TransferOutcome
from graftline.kv_transfer.transport import Transport, WriteGroup

_LOG = logging.getLogger(__name__)
_READY_SLICE_S = 0.05  # how soon a job that waits for its data notices that it was dropped
_MOMENT_S = 0.002  # how long `submit` may go on with what it began
MAX_GROUP_JOBS = 16
"""Jobs that make a group at most: a session's turn is held for all of them."""


class _Run:
    """A job whose turn has come; its transport's `GroupedWrite`."""

    __slots__ = ("_worker", "copies", "deadline_s", "dropped", "job", "lane", "started")

    def __init__(self, worker: "TransferWorker", lane: "_Lane", job: TransferJob) -> None:
        self._worker = worker
        self.lane = lane
        self.job = job
        self.deadline_s = job.deadline_s
        self.copies: Sequence[Copy] = ()
        self.started = False
        self.dropped = False

    def start(self) -> Sequence[Copy] | None:
        """See `GroupedWrite`: None when the job was dropped, or has failed."""
        with self._worker._lock:
            if self.dropped:
                return None
            self.started = True
        copies = self.job.copies
        error: GraftlineError
        try:
            if time.monotonic() >= self.deadline_s:
                raise _too_late()
            self.copies = copies() if callable(copies) else copies
            return self.copies
        except GraftlineError as refusal:
            error = refusal
        except Exception as fault:
            _LOG.exception("a transfer could not be planned")
            error = InternalError(f"planning a transfer: {fault!r}")
        self.end_with(TransferOutcome(error, drained=True))
        return None

    def end(self, error: GraftlineError | None, seconds: float) -> None:
        """See `GroupedWrite`."""
        if error is None:
            self._worker._finish(self.job, TransferOutcome(None, True, size_of(self.copies), seconds), self)
        else:
            drained = not isinstance(error, TransferFailedError) or error.drained
            self.end_with(TransferOutcome(error, drained, seconds=seconds))

    def end_with(self, outcome: TransferOutcome) -> None:
        """Reports the job, unless it was dropped: that is reported by who did it."""
        if not self.started:
            with self._worker._lock:
                if self.dropped:
                    return
                self.started = True
        self._worker._finish(self.job, outcome, self)


@dataclass(slots=True, eq=False)
class _Lane:
    """One session's queue. Guarded by the worker's lock.

    Attributes:
        running: jobs whose turn has come, in order: one waits for its data, or all of a group are being written.
        driven: a thread sees to `running`; nobody else may.
        handed: a group that a submitter began, for the lane's thread to finish.
        retired: taken out of the worker: the thread ends.
    """

    session_id: str
    work: threading.Condition
    jobs: deque[TransferJob] = field(default_factory=deque)
    running: list[_Run] = field(default_factory=list)
    driven: bool = False
    handed: WriteGroup | None = None
    retired: bool = False

    @property
    def idle(self) -> bool:
        return not (self.driven or self.running or self.jobs)


@dataclass(slots=True, eq=False)
class _Watch:
    """Somebody waits for an owner's last job to end."""

    ended: Callable[[bool], None]
    drained: bool = True


class TransferWorker:
    """Queues and runs jobs; all methods are thread-safe and none but `close` and `wait_idle` blocks for long.

    Args:
        transport: what carries the bytes.
        max_queued_jobs: jobs that may wait for one session.
        max_peers: sessions that may have a thread at a time.
        idle_s: a session without jobs for this long gives its thread back.
        enter_thread: called first in every thread: GPUs have a current one for each thread. Who submits has done so.
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
        self._open: defaultdict[Hashable, int] = defaultdict(int)  # jobs of an owner whose end was not reported yet
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
            return sum(len(lane.running) for lane in self._lanes.values())

    @property
    def num_peers(self) -> int:
        """Sessions that hold a thread."""
        with self._lock:
            return len(self._lanes)

    def submit(self, *jobs: TransferJob) -> None:
        """Queues jobs: all of them, or none. Those of different sessions run beside each other.

        When all are ready and their sessions have nothing else to do, they are begun here, and what is copied within a
        moment has ended, and its `done` was called, when this returns.

        Raises:
            OutOfCapacityError: a session's queue is full, or too many sessions are in use; no `done` is called.
            PeerUnavailableError: the worker is closed; no `done` is called.
        """
        may_begin = len(jobs) <= MAX_GROUP_JOBS and all(map(_is_ready, jobs))
        with self._lock:
            if self._closed:
                raise PeerUnavailableError("the transfer worker is closed")
            claimed = []
            for lane, count in self._enqueue(jobs).items():
                if may_begin and len(lane.jobs) == count and not (lane.driven or lane.running):
                    self._take_turn(lane, count)
                    claimed.append(lane)
                else:
                    lane.work.notify()
        if claimed:
            self._begin(claimed)

    def cancel(self, owner: Hashable, ended: Callable[[bool], None]) -> None:
        """Drops the owner's jobs of which nothing was written; others go on, since a write cannot be taken back.

        Args:
            owner: jobs that it submits later are not affected.
            ended: called exactly once, when no job of the owner is left, with whether all of these ended drained.
        """
        with self._lock:
            dropped = self._take(lambda job: job.owner == owner)
            self._watches.setdefault(owner, []).append(_Watch(ended))
            watches = [] if owner in self._open else self._watches.pop(owner)
        for watch in watches:
            watch.ended(watch.drained)
        self._drop(dropped, CancelledRequestError("the transfer was cancelled"))

    def forget_peer(self, session_id: str) -> None:
        """The peer is gone: jobs of which nothing was written fail, and the transport forgets what it remembers."""
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
                lane.work.notify()
        self._drop(dropped, PeerUnavailableError("the transfer worker is closing"))
        with self._lock:
            return self._quiet.wait_for(lambda: not self._open and not self._lanes, timeout_s)

    # --- queues --------------------------------------------------------------------------------------------------

    def _enqueue(self, jobs: Sequence[TransferJob]) -> dict[_Lane, int]:
        """Puts each job into its lane, and says how many each got; on a refusal takes back what it has put."""
        counts: dict[_Lane, int] = {}
        try:
            for job in jobs:
                lane = self._lanes.get(job.session_id) or self._new_lane(job.session_id)
                if len(lane.jobs) >= self._max_queued_jobs:
                    raise OutOfCapacityError(f"{len(lane.jobs)} transfers wait for {job.session_id}")
                lane.jobs.append(job)
                counts[lane] = counts.get(lane, 0) + 1
        except OutOfCapacityError:
            for lane, count in counts.items():
                for _ in range(count):
                    lane.jobs.pop()
            raise
        for job in jobs:
            self._open[job.owner] += 1
        return counts

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
        """Takes jobs out of all lanes of which nothing was written."""
        taken: list[TransferJob] = []
        for lane in self._lanes.values():
            for run in [run for run in lane.running if not run.started and wanted(run.job)]:
                run.dropped = True
                lane.running.remove(run)
                taken.append(run.job)
            taken += [job for job in lane.jobs if wanted(job)]
            lane.jobs = deque(job for job in lane.jobs if not wanted(job))
        return taken

    def _drop(self, jobs: list[TransferJob], error: GraftlineError) -> None:
        for job in jobs:
            self._finish(job, TransferOutcome(error, drained=True))

    def _finish(self, job: TransferJob, outcome: TransferOutcome, run: _Run | None = None) -> None:
        """Reports a job, then whoever waited for its owner's last one; with its run, if its turn had come."""
        try:
            job.done(outcome)
        except Exception:
            _LOG.exception("a transfer's done callback failed")
        owner = job.owner
        with self._lock:
            if run is not None:
                run.lane.running.remove(run)
            watches = self._watches.get(owner, ())
            for watch in watches:
                watch.drained &= outcome.drained
            if self._open[owner] > 1:
                self._open[owner] -= 1
                return
            del self._open[owner]
            self._watches.pop(owner, None)
            if not self._open:
                self._quiet.notify_all()
        for watch in watches:
            watch.ended(watch.drained)

    # --- a job's turn --------------------------------------------------------------------------------------------

    def _take_turn(self, lane: _Lane, count: int) -> None:
        """The first queued jobs' turn has come, and the calling thread drives the lane."""
        lane.running += [_Run(self, lane, lane.jobs.popleft()) for _ in range(count)]
        lane.driven = True

    def _break(self, lane: _Lane, error: Exception) -> None:
        """The transport broke: what it had begun has failed, what it had not is written by another group."""
        _LOG.error("a transport broke", exc_info=error)
        with self._lock:
            begun = [run for run in lane.running if run.started] or list(lane.running)
            waiting = [run for run in lane.running if run not in begun]
            for run in waiting:
                run.dropped = True
                lane.running.remove(run)
            lane.jobs.extendleft(run.job for run in reversed(waiting))
        for run in begun:
            run.end_with(TransferOutcome(InternalError(f"writing: {error!r}"), drained=not run.started))

    # --- the submitter's thread ----------------------------------------------------------------------------------

    def _begin(self, lanes: list[_Lane]) -> None:
        """Begins the groups of some lanes, waits a moment for them, and hands on what takes longer."""
        until_s = time.monotonic() + _MOMENT_S
        groups = [(lane, self._begun(lane)) for lane in lanes]
        if len(groups) > 1:  # beside each other: all are submitted before any is waited for
            groups = [(lane, None if self._advance(lane, group, 0.0) else group) for lane, group in groups]
        for lane, group in groups:
            ended = self._advance(lane, group, until_s)
            with self._lock:
                lane.driven = not ended
                lane.handed = None if ended else group
                if lane.handed or lane.jobs or self._closed:
                    lane.work.notify()

    def _begun(self, lane: _Lane) -> WriteGroup | None:
        try:
            return self._transport.begin(lane.session_id, tuple(lane.running))
        except Exception as error:
            self._break(lane, error)
            return None

    def _advance(self, lane: _Lane, group: WriteGroup | None, until_s: float) -> bool:
        """Whether a group is over; one that is None was over before."""
        try:
            return group is None or group.advance(until_s)
        except Exception as error:
            self._break(lane, error)
            return True

    # --- a lane's thread -----------------------------------------------------------------------------------------

    def _run_lane(self, lane: _Lane) -> None:
        self._enter_thread()
        while self._await_work(lane):
            try:
                group = lane.handed or self._form_group(lane)
                if group is not None:
                    group.finish()
            except Exception as error:
                self._break(lane, error)
            with self._lock:
                lane.handed = None
                lane.driven = False

    def _await_work(self, lane: _Lane) -> bool:
        """Waits for a group to finish, or for jobs, and drives the lane then.

        Returns:
            False when the lane has been idle for long or the worker closes, and the lane is gone.
        """
        with self._lock:
            while not lane.handed:
                if lane.jobs and not lane.driven:
                    self._take_turn(lane, 1)
                    return True
                if lane.retired or (self._closed and not lane.driven):
                    break
                if not lane.work.wait(self._idle_s) and lane.idle:
                    break
            else:
                return True
            if not lane.retired:
                self._retire(lane)
            return False

    def _form_group(self, lane: _Lane) -> WriteGroup | None:
        """The lane's next job, once its data is there, and those behind it whose data is there too."""
        head = next(iter(lane.running), None)
        if head is None or not self._await_data(head):
            return None
        with self._lock:
            behind = list(islice(lane.jobs, MAX_GROUP_JOBS - 1))
        if behind:
            ready = set(takewhile(_is_ready, behind))
            with self._lock:
                still = sum(1 for _ in takewhile(ready.__contains__, lane.jobs))
                self._take_turn(lane, still)
        return self._transport.begin(lane.session_id, tuple(lane.running))

    def _await_data(self, run: _Run) -> bool:
        """Waits until the data is computed; whether it is, and the job still wanted."""
        job = run.job
        while not run.dropped:
            left_s = job.deadline_s - time.monotonic()
            if left_s <= 0:
                run.end_with(TransferOutcome(_too_late(), drained=True))
                return False
            try:
                if job.ready is None or job.ready(min(_READY_SLICE_S, left_s)):
                    return True
            except Exception as error:
                _LOG.exception("a transfer could not wait for its data")
                run.end_with(TransferOutcome(InternalError(f"waiting for data: {error!r}"), drained=True))
                return False
        return False


def _is_ready(job: TransferJob) -> bool:
    """Whether a job's data is there now; what asking raises, its own thread meets again."""
    if job.ready is None:
        return True
    try:
        return job.ready(0.0)
    except Exception:
        return False


def _too_late() -> TransferFailedError:
    return TransferFailedError("the deadline passed before the write began", drained=True)
