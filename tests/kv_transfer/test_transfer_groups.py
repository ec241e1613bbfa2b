"""What a worker does with jobs that are ready together, and in whose thread."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from graftline.errors import CancelledRequestError, InternalError, PeerUnavailableError, TransferFailedError
from graftline.kv_transfer.copy_plan import Copy
from graftline.kv_transfer.transfer_job import TransferJob, TransferOutcome
from graftline.kv_transfer.transfer_worker import MAX_GROUP_JOBS, TransferWorker
from graftline.kv_transfer.transport import GroupedWrite, Refused, WriteGroup

PATIENCE_S = 10.0
HERE, THERE = "a:1", "b:1"


class SteppedTransport:
    """Writes of a session wait for a step each, if it has steps; others end in the first `advance`.

    Attributes:
        groups: how many writes each group had, by session.
        threads: who carried each write out.
        looks: sessions whose groups were asked to go on.
    """

    def __init__(self) -> None:
        self.session_id = "here:1"
        self.groups: list[tuple[str, int]] = []
        self.written: list[int] = []
        self.threads: list[str] = []
        self.failures: dict[int, Exception] = {}
        self.refusal: Exception | None = None
        self.looks: list[str] = []
        self.steps: dict[str, threading.Semaphore] = {}
        self.begun = threading.Semaphore(0)
        self.forgotten: list[str] = []

    def register(self, address: int, num_bytes: int) -> None:
        raise AssertionError("not the worker's to do")

    def write(self, session_id: str, copies: Sequence[Copy], deadline_s: float) -> None:
        raise AssertionError("groups only")

    def begin(self, session_id: str, writes: Sequence[GroupedWrite], refused: Refused | None = None) -> WriteGroup:
        if self.refusal is not None:
            raise self.refusal
        self.groups.append((session_id, len(writes)))
        return _SteppedGroup(self, session_id, writes)

    def forget(self, session_id: str) -> None:
        self.forgotten.append(session_id)

    def close(self) -> None:
        raise AssertionError("not the worker's to do")


class _SteppedGroup:
    def __init__(self, transport: SteppedTransport, session_id: str, writes: Sequence[GroupedWrite]) -> None:
        self._transport = transport
        self._session_id = session_id
        self._writes = iter(writes)

    def advance(self, until_s: float) -> bool:
        self._transport.looks.append(self._session_id)
        if self._session_id in self._transport.steps:
            return False
        self.finish()
        return True

    def finish(self) -> None:
        transport = self._transport
        for write in self._writes:
            copies = write.start()
            if copies is None:
                continue
            number = copies[0].src_address
            transport.written.append(number)
            transport.threads.append(threading.current_thread().name)
            transport.begun.release()
            if self._session_id in transport.steps:
                assert transport.steps[self._session_id].acquire(timeout=PATIENCE_S)
            failure = transport.failures.get(number)
            if isinstance(failure, ZeroDivisionError):
                raise failure
            write.end(failure, 0.5)  # type: ignore[arg-type]


class Ends:
    """Makes jobs, numbered by their source address, and collects their ends in order."""

    def __init__(self) -> None:
        self.outcomes: dict[int, TransferOutcome] = {}
        self._ended = threading.Condition()

    def job(
        self, number: int, session_id: str = HERE, owner: str = "", ready: Callable[[float], bool] | None = None
    ) -> TransferJob:
        copies = [Copy(number, 1 << 20, 8)]
        return TransferJob(
            owner or str(number), session_id, copies, time.monotonic() + PATIENCE_S, self._done(number), ready
        )

    def wait_for(self, count: int) -> list[int]:
        with self._ended:
            assert self._ended.wait_for(lambda: len(self.outcomes) >= count, PATIENCE_S)
            return list(self.outcomes)

    def _done(self, number: int) -> Callable[[TransferOutcome], None]:
        def done(outcome: TransferOutcome) -> None:
            with self._ended:
                assert number not in self.outcomes
                self.outcomes[number] = outcome
                self._ended.notify_all()

        return done


@pytest.fixture
def transport() -> SteppedTransport:
    return SteppedTransport()


@pytest.fixture
def ends() -> Ends:
    return Ends()


@pytest.fixture
def worker(transport: SteppedTransport) -> Iterator[TransferWorker]:
    made = TransferWorker(transport)
    yield made
    for steps in transport.steps.values():
        steps.release(1000)
    assert made.close(PATIENCE_S)
    assert (made.num_queued, made.num_running, made.num_peers) == (0, 0, 0)


def step(transport: SteppedTransport, session_id: str = HERE) -> None:
    """Lets one write of a session end."""
    transport.steps[session_id].release()


def occupy(worker: TransferWorker, transport: SteppedTransport, ends: Ends, number: int = 1) -> None:
    """Lets a job write until it is stepped on."""
    transport.steps.setdefault(HERE, threading.Semaphore(0))
    worker.submit(ends.job(number))
    assert transport.begun.acquire(timeout=PATIENCE_S)


def test_who_submits_to_an_idle_session_writes(worker: TransferWorker, transport: SteppedTransport, ends: Ends) -> None:
    """No thread changes, and the end was reported when `submit` returns."""
    worker.submit(ends.job(1), ends.job(2), ends.job(3, THERE))
    assert list(ends.outcomes) == [1, 2, 3]
    assert transport.groups == [(HERE, 2), (THERE, 1)]
    assert set(transport.threads) == {threading.current_thread().name}
    assert all(outcome.ok and (outcome.num_bytes, outcome.seconds) == (8, 0.5) for outcome in ends.outcomes.values())
    assert worker.wait_idle(0)


def test_a_group_that_is_over_is_left_alone(worker: TransferWorker, transport: SteppedTransport, ends: Ends) -> None:
    transport.failures = {1: ZeroDivisionError()}
    worker.submit(ends.job(1), ends.job(2, THERE))
    assert isinstance(ends.outcomes[1].error, InternalError)
    assert ends.outcomes[2].ok
    assert transport.looks == [HERE, THERE]


def test_a_group_that_is_not_over_soon_goes_to_the_sessions_thread(
    worker: TransferWorker, transport: SteppedTransport, ends: Ends
) -> None:
    occupy(worker, transport, ends)
    assert not ends.outcomes
    assert transport.threads == [f"transfer {HERE}"]
    worker.submit(ends.job(2, THERE))
    assert list(ends.outcomes) == [2], "others are not held up"
    step(transport)
    assert ends.wait_for(2) == [2, 1]


def test_what_has_queued_up_makes_the_next_group(
    worker: TransferWorker, transport: SteppedTransport, ends: Ends
) -> None:
    occupy(worker, transport, ends)
    for number in range(2, MAX_GROUP_JOBS + 4):
        worker.submit(ends.job(number))
    transport.steps[HERE].release(100)
    assert ends.wait_for(MAX_GROUP_JOBS + 3) == list(range(1, MAX_GROUP_JOBS + 4))
    assert [count for _, count in transport.groups] == [1, MAX_GROUP_JOBS, 2]


def test_jobs_whose_data_is_not_there_end_a_group(
    worker: TransferWorker, transport: SteppedTransport, ends: Ends
) -> None:
    """They keep their place, and those behind them wait."""
    occupy(worker, transport, ends)
    computed = threading.Event()
    worker.submit(ends.job(2), ends.job(3, ready=computed.wait), ends.job(4))
    transport.steps[HERE].release(100)
    assert ends.wait_for(2) == [1, 2]
    worker.submit(ends.job(5))
    assert list(ends.outcomes) == [1, 2]
    computed.set()
    assert ends.wait_for(5) == [1, 2, 3, 4, 5]
    assert [count for _, count in transport.groups][:2] == [1, 1]


def test_a_submitter_does_not_wait_for_data(worker: TransferWorker, transport: SteppedTransport, ends: Ends) -> None:
    computed = threading.Event()
    worker.submit(ends.job(1, ready=computed.wait))
    assert not transport.groups
    computed.set()
    assert ends.wait_for(1) == [1]
    assert transport.threads == [f"transfer {HERE}"]


def test_one_error_of_a_group_is_one_jobs(worker: TransferWorker, transport: SteppedTransport, ends: Ends) -> None:
    transport.failures = {2: TransferFailedError("lost", drained=False), 3: TransferFailedError("no", drained=True)}
    worker.submit(*(ends.job(number) for number in range(1, 5)))
    assert {number: (outcome.ok, outcome.drained) for number, outcome in ends.outcomes.items()} == {
        1: (True, True),
        2: (False, False),
        3: (False, True),
        4: (True, True),
    }


def test_a_cancel_in_the_middle_of_a_group_drops_what_was_not_begun(
    worker: TransferWorker, transport: SteppedTransport, ends: Ends
) -> None:
    """CASES B01: at once; what is being written goes on to its end, and others keep their turn."""
    occupy(worker, transport, ends)
    worker.submit(*(ends.job(number, owner="x" if number % 2 else "y") for number in range(2, 6)))
    step(transport)
    assert transport.begun.acquire(timeout=PATIENCE_S)  # 2 writes; 3 to 5 are in its group
    assert transport.groups[-1] == (HERE, 4)
    reports: list[str] = []
    worker.cancel("x", lambda drained: reports.append(f"x {drained}"))
    assert reports == ["x True"]
    assert list(ends.outcomes) == [1, 3, 5]
    assert all(isinstance(ends.outcomes[number].error, CancelledRequestError) for number in (3, 5))
    worker.cancel("y", lambda drained: reports.append(f"y {drained}"))
    assert list(ends.outcomes) == [1, 3, 5, 4]
    assert reports == ["x True"], "2 is being written"
    transport.steps[HERE].release(100)
    assert ends.wait_for(5) == [1, 3, 5, 4, 2]
    assert ends.outcomes[2].ok
    assert worker.wait_idle(PATIENCE_S)
    assert reports == ["x True", "y True"]
    assert transport.written == [1, 2]


def test_forgetting_a_peer_in_the_middle_of_a_group_fails_what_was_not_begun(
    worker: TransferWorker, transport: SteppedTransport, ends: Ends
) -> None:
    occupy(worker, transport, ends)
    worker.submit(*(ends.job(number) for number in range(2, 5)))
    step(transport)
    assert transport.begun.acquire(timeout=PATIENCE_S)
    worker.submit(ends.job(5))
    worker.forget_peer(HERE)
    assert list(ends.outcomes) == [1, 3, 4, 5]
    assert all(isinstance(ends.outcomes[number].error, PeerUnavailableError) for number in (3, 4, 5))
    assert transport.forgotten == [HERE]
    transport.steps[HERE].release(100)
    ends.wait_for(5)
    assert transport.written == [1, 2]


def test_a_transport_that_breaks_fails_what_it_had_begun(
    worker: TransferWorker, transport: SteppedTransport, ends: Ends
) -> None:
    """What it had not is written by another group."""
    transport.failures = {2: ZeroDivisionError()}
    worker.submit(*(ends.job(number) for number in range(1, 5)))
    ends.wait_for(4)
    assert isinstance(ends.outcomes[2].error, InternalError)
    assert not ends.outcomes[2].drained
    assert all(ends.outcomes[number].ok for number in (1, 3, 4))
    assert transport.written == [1, 2, 3, 4]


@pytest.mark.parametrize("ready", [True, False])
def test_a_transport_that_cannot_begin_fails_the_jobs_and_serves_the_next(
    worker: TransferWorker, transport: SteppedTransport, ends: Ends, ready: bool
) -> None:
    transport.refusal = ZeroDivisionError("no group")
    looks = iter([ready])  # whether it is the submitter or the session's thread that begins
    worker.submit(ends.job(1, ready=lambda _: next(looks, True)))
    assert ends.wait_for(1) == [1]
    assert isinstance(ends.outcomes[1].error, InternalError)
    transport.refusal = None
    worker.submit(ends.job(2))
    assert ends.wait_for(2) == [1, 2]
    assert ends.outcomes[2].ok


def test_a_done_callback_may_submit(worker: TransferWorker, ends: Ends) -> None:
    again = threading.Event()

    def done(outcome: TransferOutcome) -> None:
        worker.submit(ends.job(2))
        again.set()

    worker.submit(TransferJob("x", HERE, [Copy(1, 1 << 20, 8)], time.monotonic() + PATIENCE_S, done))
    assert again.is_set()
    assert ends.wait_for(1) == [2]


def test_submitters_of_many_threads_keep_one_driver_a_session(worker: TransferWorker, ends: Ends) -> None:
    """CASES B03."""

    def submit(first: int) -> None:
        for number in range(first, first + 100):
            worker.submit(ends.job(number, HERE if number % 3 else THERE))
            if number % 7 == 0:
                worker.cancel(str(number), lambda drained: None)

    threads = [threading.Thread(target=submit, args=(1000 * index + 1,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    ends.wait_for(400)
    assert worker.wait_idle(PATIENCE_S)
    assert len(ends.outcomes) == 400
