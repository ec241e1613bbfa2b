"""The transport over Mooncake's transfer engine (peer-to-peer handshake, TCP or RDMA).

What the engine does when left alone, and what is done about it here:
- A first contact with a silent peer holds a lock of the engine for a minute and stops the writes to every other peer.
  So a peer is asked for a sign of life first, in a thread of its own.
- Its synchronous calls spin on a core and know no deadline. So every copy is an asynchronous one-entry batch, a bounded
  number is under way at a time, and they are polled with growing pauses.
- It remembers a peer's data port for ever. So the one retry uses a second spelling of the peer's name, which makes the
  engine shake hands again.
- The intra-node way for GPUs copies on one CUDA stream of the calling thread and calls a copy done when that stream has
  nothing left to do. So there many copies make a batch, and how its first copy stands says how all of them do.
- A failed write may still land. So nothing is retried unless the failure was quick, which means that the peer's side of
  the connection was gone, and the error says whether late bytes are possible.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from graftline.errors import InvalidRequestError, PeerUnavailableError, TransferFailedError
from graftline.kv_transfer.copy_plan import Copy
from graftline.kv_transfer.mooncake_engine import Engine, MooncakeConfig, start_engine
from graftline.kv_transfer.transport import MemoryRegions

_UNDER_WAY = 0
_DONE = 1
_FIRST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 500e-6
_PAUSE_SHARE = 1 / 32  # of the time since the start: what a write may seem longer than it was
_QUICK_FAILURE_S = 0.5
_MAX_SPELLINGS = 16


class _Probe:
    """One question for a sign of life, asked in a daemon thread because it may block for a minute."""

    def __init__(self, engine: Engine, session_id: str) -> None:
        self._answered = threading.Event()
        self._code: int | None = None
        self._thread = threading.Thread(target=self._ask, args=(engine, session_id), daemon=True, name="probe")
        self._thread.start()

    def _ask(self, engine: Engine, session_id: str) -> None:
        self._code = engine.send_probe(session_id)
        self._answered.set()

    @property
    def pending(self) -> bool:
        return not self._answered.is_set()

    def wait(self, timeout_s: float) -> int | None:
        """The engine's answer, 0 for a live peer; None when the time is up."""
        return self._code if self._answered.wait(max(0.0, timeout_s)) else None


@dataclass(slots=True)
class _Session:
    """What is known of one peer. Everything but `turn` is guarded by `turn`."""

    session_id: str
    turn: threading.Lock = field(default_factory=threading.Lock)
    reachable: bool = False
    opened: bool = False
    probe: _Probe | None = None
    spelling: int = 0
    abandoned: list[int] = field(default_factory=list)  # batch ids given up on; the engine still holds them

    @property
    def target(self) -> str:
        """The peer's name in its current spelling: leading zeros of the port make the engine see a new peer."""
        host, _, port = self.session_id.rpartition(":")
        return f"{host}:{'0' * self.spelling}{port}"


@dataclass(slots=True)
class _Attempt:
    """One pass over some copies."""

    start_s: float
    waiting: deque[Copy]
    under_way: deque[tuple[int, list[Copy]]] = field(default_factory=deque)
    failed: list[Copy] = field(default_factory=list)
    submitted: int = 0
    timed_out: bool = False
    seconds: float = 0.0

    @property
    def ended(self) -> bool:
        """Whether all copies arrived, or one failed and the engine has let go of the others."""
        return not self.under_way and (not self.waiting or bool(self.failed))

    @property
    def quick(self) -> bool:
        """Whether the failure came so soon that the peer's side of the connection must have been gone."""
        return not self.timed_out and self.seconds < _QUICK_FAILURE_S

    def give_up(self) -> list[int]:
        """Closes the books: what did not arrive has failed. Returns the batches that the engine still holds."""
        self.seconds = time.monotonic() - self.start_s
        batch_ids = [batch_id for batch_id, _ in self.under_way]
        self.failed += [copy for _, copies in self.under_way for copy in copies]
        self.failed += self.waiting
        return batch_ids


class MooncakeTransport:
    """A `Transport` over Mooncake.

    Args:
        config: how this process takes part.
        start: makes the initialised engine; tests put a faulty one here.

    Raises:
        PeerUnavailableError: the engine is missing or did not start.
    """

    def __init__(self, config: MooncakeConfig, start: Callable[[MooncakeConfig], Engine] = start_engine) -> None:
        self._config = config
        self._engine = start(config)
        port = self._engine.get_rpc_port()
        if not 0 < port < 65536:
            raise PeerUnavailableError(f"the transfer engine reports port {port}")
        self._session_id = f"{config.host}:{port}"
        self._regions = MemoryRegions()
        self._sessions: dict[str, _Session] = {}
        self._spellings: dict[str, int] = {}  # of forgotten sessions, the next one
        self._lock = threading.Lock()  # guards _regions, _sessions, _closed, _writers
        self._idle = threading.Condition(self._lock)
        self._opening = threading.Lock()  # first contacts one after another
        self._writers = 0
        self._closed = False

    @property
    def session_id(self) -> str:
        """See `Transport`: `host:port`."""
        return self._session_id

    def register(self, address: int, num_bytes: int) -> None:
        """See `Transport`.

        Raises:
            PeerUnavailableError: the engine refused.
        """
        with self._lock:
            self._regions.add(address, num_bytes)
        code = self._engine.register_memory(address, num_bytes)
        if code != 0:
            raise PeerUnavailableError(f"the transfer engine refused [{address:#x}, +{num_bytes}): {code}")

    def write(self, session_id: str, copies: Sequence[Copy], deadline_s: float) -> None:
        """See `Transport`. Writes to one peer take turns; peers do not wait for each other."""
        with self._writer(copies):
            if not copies:
                return
            session = self._session(session_id)
            if not session.turn.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
                raise TransferFailedError(f"{session_id} stayed busy until the deadline", drained=True)
            try:
                self._write(session, copies, deadline_s)
            finally:
                session.turn.release()

    def forget(self, session_id: str) -> None:
        """See `Transport`."""
        with self._lock:
            session = self._sessions.pop(session_id, None)
            if session is not None:
                # A process that takes the port over must not be taken for this one: the engine would go on writing into
                # the memory of the old one, which on the intra-node way never fails.
                self._spellings[session_id] = (session.spelling + 1) % _MAX_SPELLINGS
        if session is not None and session.turn.acquire(blocking=False):
            self._reap(session)
            session.turn.release()

    def close(self) -> None:
        """See `Transport`. Waits up to the stall timeout; regions that are still being read stay registered."""
        patience_s = time.monotonic() + self._config.stall_timeout_s + 1.0
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._idle.wait_for(lambda: self._writers == 0, timeout=patience_s - time.monotonic())
            at_rest = self._writers == 0
        sessions = list(self._sessions.values()) if at_rest else []
        while at_rest and any(self._reap(session) for session in sessions):
            at_rest = time.monotonic() < patience_s
            time.sleep(_LONGEST_PAUSE_S)
        if at_rest:
            for start in self._regions.starts:
                self._engine.unregister_memory(start)

    # --- one write -----------------------------------------------------------------------------------------------

    @contextmanager
    def _writer(self, copies: Sequence[Copy]) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise TransferFailedError(f"{self._session_id} is closed", drained=True)
            self._regions.require_sources(copies)
            self._writers += 1
        try:
            yield
        finally:
            with self._lock:
                self._writers -= 1
                self._idle.notify_all()

    def _session(self, session_id: str) -> _Session:
        _require_session_id(session_id)
        with self._lock:
            session = self._sessions.get(session_id)
            if session is None:
                spelling = self._spellings.get(session_id, 0)
                session = self._sessions[session_id] = _Session(session_id, spelling=spelling)
            return session

    def _write(self, session: _Session, copies: Sequence[Copy], deadline_s: float) -> None:
        self._reap(session)
        self._make_contact(session, deadline_s)
        first = self._attempt(session, _cut(copies, self._config.max_copy_bytes), deadline_s)
        if not first.failed:
            return
        session.reachable = session.opened = False
        error = self._failure(session, first, drained=first.submitted == 0)
        if not first.quick or session.spelling >= _MAX_SPELLINGS:
            raise error
        try:
            self._make_contact(session, deadline_s)
        except TransferFailedError as gone:
            raise error from gone
        session.spelling += 1
        second = self._attempt(session, first.failed, deadline_s)
        if second.failed:
            session.reachable = session.opened = False
            raise self._failure(session, second, drained=first.submitted + second.submitted == 0)

    def _failure(self, session: _Session, attempt: _Attempt, drained: bool) -> TransferFailedError:
        how = "were not acknowledged in time" if attempt.timed_out else "failed"
        counts = f"{len(attempt.failed)} copies to {session.session_id} {how} after {attempt.seconds:.3f} s"
        return TransferFailedError(counts, drained=drained)

    def _make_contact(self, session: _Session, deadline_s: float) -> None:
        """Asks a peer that has not been heard of, or that just failed, for a sign of life."""
        if session.reachable:
            return
        if session.probe is None or not session.probe.pending:
            session.probe = _Probe(self._engine, session.session_id)
        patience_s = min(self._config.contact_timeout_s, deadline_s - time.monotonic())
        code = session.probe.wait(patience_s)
        if code is None:
            raise TransferFailedError(f"{session.session_id} did not answer in {patience_s:.1f} s", drained=True)
        session.probe = None
        if code != 0:
            raise TransferFailedError(f"{session.session_id} cannot be reached ({code})", drained=True)
        session.reachable = True

    def _attempt(self, session: _Session, copies: Iterable[Copy], deadline_s: float) -> _Attempt:
        """Submits and polls, oldest first, until all ended, something failed, or the deadline passed.

        Nothing is submitted after the deadline, so that a process that was stopped for a while does not go on writing
        into pages that have found another owner.
        """
        attempt = _Attempt(start_s=time.monotonic(), waiting=deque(copies))
        spin_until_s = attempt.start_s + self._config.spin_s
        while not attempt.ended:
            if time.monotonic() >= deadline_s:
                attempt.timed_out = True
                break
            self._fill(session, attempt, deadline_s)
            if attempt.under_way and not self._collect_oldest(attempt):
                now_s = time.monotonic()
                pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, _PAUSE_SHARE * (now_s - attempt.start_s)))
                time.sleep(0 if now_s < spin_until_s else pause_s)
        session.abandoned.extend(attempt.give_up())
        return attempt

    def _fill(self, session: _Session, attempt: _Attempt, deadline_s: float) -> None:
        """Submits as many batches as may be under way; none after a failure."""
        while attempt.waiting and not attempt.failed and len(attempt.under_way) < self._config.max_in_flight:
            size = min(self._config.copies_per_batch, len(attempt.waiting))
            copies = [attempt.waiting.popleft() for _ in range(size)]
            batch_id = self._submit(session, copies, deadline_s)
            if batch_id is None:
                attempt.failed += copies
            else:
                attempt.under_way.append((batch_id, copies))
                attempt.submitted += size

    def _collect_oldest(self, attempt: _Attempt) -> bool:
        """Takes the oldest batch's end, if it has ended."""
        batch_id, copies = attempt.under_way[0]
        status = self._engine.transfer_check_status(batch_id)
        if status == _UNDER_WAY:
            return False
        attempt.under_way.popleft()
        if status != _DONE:
            attempt.failed += copies
        return True

    def _submit(self, session: _Session, copies: list[Copy], deadline_s: float) -> int | None:
        """Hands copies to the engine; None when the engine did not take them."""
        if session.opened:
            return self._hand_over(session, copies)
        if not self._opening.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            return None
        try:
            batch_id = self._hand_over(session, copies)
        finally:
            self._opening.release()
        session.opened = batch_id is not None
        return batch_id

    def _hand_over(self, session: _Session, copies: list[Copy]) -> int | None:
        if len(copies) == 1:
            return _batch_id(self._engine.transfer_submit_write(session.target, *copies[0]))
        sources, targets, lengths = (list(column) for column in zip(*copies, strict=True))
        return _batch_id(self._engine.batch_transfer_async_write(session.target, sources, targets, lengths))

    def _reap(self, session: _Session) -> int:
        """Lets the engine free batches that were given up on and have ended since; how many are left."""
        session.abandoned = [
            batch_id for batch_id in session.abandoned if self._engine.transfer_check_status(batch_id) == _UNDER_WAY
        ]
        return len(session.abandoned)


def _cut(copies: Iterable[Copy], max_bytes: int) -> Iterator[Copy]:
    """The same bytes in copies of at most `max_bytes`."""
    for src, dst, num_bytes in copies:
        for offset in range(0, num_bytes, max_bytes):
            yield Copy(src + offset, dst + offset, min(max_bytes, num_bytes - offset))


def _batch_id(answer: int) -> int | None:
    """A failed submit answers 0 or -1, the latter also as an unsigned number; none of these may be asked about."""
    return answer if 0 < answer < (1 << 64) - 1 else None


def _require_session_id(session_id: str) -> None:
    host, separator, port = session_id.rpartition(":")
    if not (separator and host and port.isdecimal() and 0 < int(port) < 65536):
        raise InvalidRequestError("session id", f"{session_id!r} is not host:port")
