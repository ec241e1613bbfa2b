"""The worker over a transport whose writes end when the test says so."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from graftline.errors import (
    CancelledRequestError,
    GraftlineError,
    InternalError,
    InvalidRequestError,
    OutOfCapacityError,
    PeerUnavailableError,
    TransferFailedError,
)
from graftline.kv_transfer.copy_plan import Copy
from graftline.kv_transfer.transfer_job import Gather, TransferJob, TransferOutcome
from graftline.kv_transfer.transfer_worker import TransferWorker
from graftline.kv_transfer.transport import GroupedWrite, OneByOne, Refused, WriteGroup

PATIENCE_S = 10.0
COPIES = [Copy(4096, 8192, 100), Copy(8192, 4096, 28)]


class GatedTransport:
    """Writes to a session wait for its gate; sessions without a gate end at once."""

    def __init__(self) -> None:
        self.session_id = "here:1"
        self.gates: dict[str, threading.Event] = {}
        self.entered: dict[str, threading.Event] = {}
        self.failures: dict[str, Exception] = {}
        self.writes: list[tuple[str, Sequence[Copy]]] = []
        self.forgotten: list[str] = []

    def gate(self, session_id: str) -> None:
        self.gates[session_id], self.entered[session_id] = threading.Event(), threading.Event()

    def register(self, address: int, num_bytes: int) -> None:
        raise AssertionError("not the worker's to do")

    def write(self, session_id: str, copies: Sequence[Copy], deadline_s: float) -> None:
        self.writes.append((session_id, copies))
        if session_id in self.gates:
            self.entered[session_id].set()
            assert self.gates[session_id].wait(PATIENCE_S)
        if session_id in self.failures:
            raise self.failures[session_id]

    def begin(self, session_id: str, writes: Sequence[GroupedWrite], refused: Refused | None = None) -> WriteGroup:
        return OneByOne(self.write, session_id, writes, refused)

    def forget(self, session_id: str) -> None:
        self.forgotten.append(session_id)

    def close(self) -> None:
        raise AssertionError("not the worker's to do")


class Waiter:
    """Makes jobs and collects their outcomes."""

    def __init__(self) -> None:
        self.outcomes: list[tuple[str, TransferOutcome]] = []
        self._arrived = threading.Condition()

    def job(
        self,
        owner: str,
        session_id: str = "a:1",
        copies: Sequence[Copy] | Callable[[], Sequence[Copy]] = COPIES,
        timeout_s: float = PATIENCE_S,
        ready: Callable[[float], bool] | None = None,
    ) -> TransferJob:
        def done(outcome: TransferOutcome) -> None:
            with self._arrived:
                self.outcomes.append((owner, outcome))
                self._arrived.notify_all()

        return TransferJob(owner, session_id, copies, time.monotonic() + timeout_s, done, ready)

    def wait_for(self, count: int) -> list[tuple[str, TransferOutcome]]:
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.outcomes) >= count, PATIENCE_S)
            return list(self.outcomes)


@pytest.fixture
def transport() -> GatedTransport:
    return GatedTransport()


@pytest.fixture
def worker(transport: GatedTransport) -> Iterator[TransferWorker]:
    made = TransferWorker(transport, max_queued_jobs=3, max_peers=2)
    yield made
    for gate in transport.gates.values():
        gate.set()
    assert made.close(PATIENCE_S)
    assert (made.num_queued, made.num_running, made.num_peers) == (0, 0, 0)


@pytest.fixture
def waiter() -> Waiter:
    return Waiter()


def occupy(worker: TransferWorker, transport: GatedTransport, waiter: Waiter, session_id: str = "a:1") -> None:
    """Lets a job of owner `first` write until the session's gate opens."""
    transport.gate(session_id)
    worker.submit(waiter.job("first", session_id))
    assert transport.entered[session_id].wait(PATIENCE_S)


def test_jobs_of_a_session_run_in_order_and_report_bytes(
    worker: TransferWorker, transport: GatedTransport, waiter: Waiter
) -> None:
    for owner in ("x", "y", "z"):
        worker.submit(waiter.job(owner, copies=lambda: COPIES))
    outcomes = waiter.wait_for(3)
    assert [owner for owner, _ in outcomes] == ["x", "y", "z"]
    assert all(outcome.ok and outcome.drained and outcome.num_bytes == 128 for _, outcome in outcomes)
    assert transport.writes == [("a:1", COPIES)] * 3
    assert worker.wait_idle(PATIENCE_S)


def test_a_slow_session_holds_up_nobody_else(worker: TransferWorker, transport: GatedTransport, waiter: Waiter) -> None:
    occupy(worker, transport, waiter)
    worker.submit(waiter.job("other", "b:1"))
    assert waiter.wait_for(1)[0][0] == "other"
    assert worker.num_running == 1


def test_full_queues_and_too_many_peers_are_refused_without_a_report(
    worker: TransferWorker, transport: GatedTransport, waiter: Waiter
) -> None:
    occupy(worker, transport, waiter)
    for _ in range(3):
        worker.submit(waiter.job("queued"))
    with pytest.raises(OutOfCapacityError, match="3 transfers wait for a:1"):
        worker.submit(waiter.job("too many"))
    occupy(worker, transport, waiter, "b:1")
    with pytest.raises(OutOfCapacityError, match="2 peers"):
        worker.submit(waiter.job("third peer", "c:1"))
    assert waiter.outcomes == []
    assert (worker.num_queued, worker.num_running) == (3, 2)


def test_jobs_submitted_together_are_taken_all_or_none(
    worker: TransferWorker, transport: GatedTransport, waiter: Waiter
) -> None:
    occupy(worker, transport, waiter)
    for _ in range(3):
        worker.submit(waiter.job("queued"))
    with pytest.raises(OutOfCapacityError):
        worker.submit(waiter.job("pair", "b:1"), waiter.job("pair", "a:1"))
    with pytest.raises(OutOfCapacityError):
        worker.submit(*(waiter.job("pair", session_id) for session_id in ("b:1", "c:1")))
    assert worker.num_queued == 3
    ended: list[bool] = []
    worker.cancel("pair", ended.append)
    assert ended == [True]


def test_one_report_for_jobs_that_belong_together(worker: TransferWorker, transport: GatedTransport) -> None:
    transport.gate("a:1")
    transport.failures["b:1"] = TransferFailedError("lost", drained=False)
    outcomes: list[TransferOutcome] = []
    reported = threading.Event()
    gather = Gather(2, lambda outcome: (outcomes.append(outcome), reported.set())[0])
    deadline_s = time.monotonic() + PATIENCE_S
    worker.submit(*(TransferJob("x", session_id, COPIES, deadline_s, gather) for session_id in ("a:1", "b:1")))
    assert transport.entered["a:1"].wait(PATIENCE_S)
    assert not reported.is_set()
    transport.gates["a:1"].set()
    assert reported.wait(PATIENCE_S)
    (outcome,) = outcomes
    assert isinstance(outcome.error, TransferFailedError)
    assert (outcome.drained, outcome.num_bytes) == (False, 128)


def test_an_idle_peer_makes_room_for_a_new_one(worker: TransferWorker, waiter: Waiter) -> None:
    for index in range(10):
        worker.submit(waiter.job("x", f"peer:{index + 1}"))
        waiter.wait_for(index + 1)
        assert worker.wait_idle(PATIENCE_S)
    assert worker.num_peers <= 2


def test_idle_threads_retire(transport: GatedTransport, waiter: Waiter) -> None:
    worker = TransferWorker(transport, idle_s=0.01)
    worker.submit(waiter.job("x"))
    waiter.wait_for(1)
    assert worker.close(PATIENCE_S)
    assert worker.num_peers == 0


@pytest.mark.parametrize(
    ("raised", "error", "drained"),
    [
        (TransferFailedError("lost", drained=False), TransferFailedError, False),
        (TransferFailedError("refused", drained=True), TransferFailedError, True),
        (InvalidRequestError("copy source", "bad"), InvalidRequestError, True),
        (ZeroDivisionError(), InternalError, False),
    ],
)
def test_a_failed_write_says_whether_bytes_may_still_land(
    worker: TransferWorker,
    transport: GatedTransport,
    waiter: Waiter,
    raised: Exception,
    error: type[GraftlineError],
    drained: bool,
) -> None:
    transport.failures["a:1"] = raised
    worker.submit(waiter.job("x"))
    ((_, outcome),) = waiter.wait_for(1)
    assert isinstance(outcome.error, error)
    assert (outcome.drained, outcome.num_bytes) == (drained, 0)
    del transport.failures["a:1"]
    worker.submit(waiter.job("next"))
    assert waiter.wait_for(2)[1][1].ok


def test_a_plan_that_cannot_be_built_writes_nothing(
    worker: TransferWorker, transport: GatedTransport, waiter: Waiter
) -> None:
    def broken() -> Sequence[Copy]:
        raise KeyError("page")

    worker.submit(waiter.job("x", copies=broken))
    ((_, outcome),) = waiter.wait_for(1)
    assert isinstance(outcome.error, InternalError)
    assert outcome.drained
    assert not transport.writes


def test_a_broken_done_callback_stops_nobody(worker: TransferWorker, waiter: Waiter) -> None:
    """CASES X08: what fails while a transfer is accounted for ends neither its thread nor the transfers behind it."""

    def broken(outcome: TransferOutcome) -> None:
        raise RuntimeError("callback")

    worker.submit(TransferJob("x", "a:1", COPIES, time.monotonic() + PATIENCE_S, broken))
    worker.submit(waiter.job("y"))
    assert waiter.wait_for(1)[0][1].ok
    assert worker.wait_idle(PATIENCE_S)


def test_the_copies_are_built_and_written_once_the_data_is_ready(
    worker: TransferWorker, transport: GatedTransport, waiter: Waiter
) -> None:
    waiting, ready = threading.Event(), threading.Event()

    def wait(timeout_s: float) -> bool:
        waiting.set()
        return ready.wait(timeout_s)

    worker.submit(waiter.job("x", ready=wait))
    assert waiting.wait(PATIENCE_S)
    assert not transport.writes
    ready.set()
    assert waiter.wait_for(1)[0][1].ok


def test_data_that_is_never_ready_fails_at_the_deadline(
    worker: TransferWorker, transport: GatedTransport, waiter: Waiter
) -> None:
    worker.submit(waiter.job("x", timeout_s=0.05, ready=threading.Event().wait))
    ((_, outcome),) = waiter.wait_for(1)
    assert isinstance(outcome.error, TransferFailedError)
    assert outcome.drained
    assert not transport.writes


def test_a_deadline_that_passes_in_the_queue_writes_nothing(
    worker: TransferWorker, transport: GatedTransport, waiter: Waiter
) -> None:
    occupy(worker, transport, waiter)
    worker.submit(waiter.job("late", timeout_s=0.0))
    transport.gates["a:1"].set()
    outcomes = dict(waiter.wait_for(2))
    assert outcomes["first"].ok
    assert isinstance(outcomes["late"].error, TransferFailedError)
    assert len(transport.writes) == 1


def test_cancel_drops_the_queue_and_reports_after_the_running_write(
    worker: TransferWorker, transport: GatedTransport, waiter: Waiter
) -> None:
    """CASES B01: a write cannot be taken back, so the end is reported when it has ended."""
    occupy(worker, transport, waiter)
    worker.submit(waiter.job("first"))
    worker.submit(waiter.job("second"))
    ended: list[bool] = []
    reported = threading.Event()
    worker.cancel("first", lambda drained: (ended.append(drained), reported.set())[0])
    ((owner, dropped),) = waiter.outcomes
    assert (owner, dropped.drained) == ("first", True)
    assert isinstance(dropped.error, CancelledRequestError)
    assert not ended
    transport.gates["a:1"].set()
    assert reported.wait(PATIENCE_S)
    assert ended == [True]
    assert [owner for owner, outcome in waiter.wait_for(3) if outcome.ok] == ["first", "second"]


def test_cancel_says_when_the_running_write_ended_undrained(
    worker: TransferWorker, transport: GatedTransport, waiter: Waiter
) -> None:
    transport.failures["a:1"] = TransferFailedError("lost", drained=False)
    occupy(worker, transport, waiter)
    ended: list[bool] = []
    reported = threading.Event()
    worker.cancel("first", lambda drained: (ended.append(drained), reported.set())[0])
    transport.gates["a:1"].set()
    assert reported.wait(PATIENCE_S)
    assert ended == [False]


def test_cancel_with_nothing_under_way_reports_at_once_every_time(worker: TransferWorker) -> None:
    """CASES B19: a repeated or late cancel is harmless."""
    ended: list[bool] = []
    for _ in range(3):
        worker.cancel("nobody", ended.append)
    assert ended == [True] * 3


def test_cancel_ends_a_job_that_waits_for_its_data(
    worker: TransferWorker, transport: GatedTransport, waiter: Waiter
) -> None:
    waiting = threading.Event()

    def wait(timeout_s: float) -> bool:
        waiting.set()
        return threading.Event().wait(timeout_s)

    worker.submit(waiter.job("x", ready=wait))
    assert waiting.wait(PATIENCE_S)
    reported = threading.Event()
    worker.cancel("x", lambda drained: reported.set())
    assert reported.wait(PATIENCE_S)
    assert isinstance(waiter.outcomes[0][1].error, CancelledRequestError)
    assert not transport.writes


def test_cancel_covers_every_session_of_the_owner(
    worker: TransferWorker, transport: GatedTransport, waiter: Waiter
) -> None:
    occupy(worker, transport, waiter, "a:1")
    occupy(worker, transport, waiter, "b:1")
    reported = threading.Event()
    worker.cancel("first", lambda drained: reported.set())
    transport.gates["a:1"].set()
    waiter.wait_for(1)
    assert not reported.is_set()
    transport.gates["b:1"].set()
    assert reported.wait(PATIENCE_S)


def test_forgetting_a_peer_fails_its_queue_only(
    worker: TransferWorker, transport: GatedTransport, waiter: Waiter
) -> None:
    occupy(worker, transport, waiter)
    worker.submit(waiter.job("queued"))
    worker.forget_peer("a:1")
    ((owner, outcome),) = waiter.outcomes
    assert owner == "queued"
    assert isinstance(outcome.error, PeerUnavailableError)
    assert outcome.drained
    assert transport.forgotten == ["a:1"]


def test_close_fails_the_queue_waits_for_the_write_and_refuses_more(transport: GatedTransport, waiter: Waiter) -> None:
    """CASES F08."""
    worker = TransferWorker(transport)
    occupy(worker, transport, waiter)
    worker.submit(waiter.job("queued"))
    assert not worker.wait_idle(0.0)
    assert not worker.close(0.0)
    assert isinstance(waiter.outcomes[0][1].error, PeerUnavailableError)
    with pytest.raises(PeerUnavailableError):
        worker.submit(waiter.job("more"))
    transport.gates["a:1"].set()
    assert worker.close(PATIENCE_S)
    assert dict(waiter.outcomes)["first"].ok


def test_thousand_jobs_of_many_owners_with_random_cancels_end_once_each(
    transport: GatedTransport, waiter: Waiter
) -> None:
    """CASES B03: every job and every cancel is reported exactly once, and nothing is left."""
    worker = TransferWorker(transport, max_queued_jobs=2000, max_peers=4)
    cancelled: list[bool] = []
    for index in range(1000):
        worker.submit(waiter.job(str(index), f"peer:{index % 4 + 1}"))
        if index % 3 == 0:
            worker.cancel(str(index - index % 7), cancelled.append)
    waiter.wait_for(1000)
    assert worker.wait_idle(PATIENCE_S)
    assert worker.close(PATIENCE_S)
    assert len(cancelled) == 334
    assert sorted(int(owner) for owner, _ in waiter.outcomes) == list(range(1000))
    assert all(outcome.ok or isinstance(outcome.error, CancelledRequestError) for _, outcome in waiter.outcomes)
