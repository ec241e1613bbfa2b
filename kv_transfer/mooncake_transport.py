"""The transport over Mooncake's transfer engine (peer-to-peer handshake, TCP or RDMA).

What the engine does when left alone, and what is done about it here:
- A first contact with a silent peer holds a lock of the engine for a minute and stops the writes to every other peer.
  So a peer is asked for a sign of life first, in a thread of its own.
- Its synchronous calls spin on a core and know no deadline. So every copy is an asynchronous one-entry batch, a bounded
  number is under way at a time, and they are polled, with growing pauses where a copy takes milliseconds.
- It remembers a peer's data port for ever. So the one retry uses a second spelling of the peer's name, which makes the
  engine shake hands again.
- The intra-node way for GPUs copies on one CUDA stream of the calling thread and calls a copy done when that stream has
  nothing left to do. So there many copies, of several writes too, make a batch, and how its first copy stands says how
  all of them do.
- A failed write may still land. So nothing is retried unless the failure was quick, which means that the peer's side of
  the connection was gone, and the error says whether late bytes are possible.
"""

import threading
import time
from collections.abc import Callable, Sequence

from graftline.errors import InvalidRequestError, PeerUnavailableError, TransferFailedError
from graftline.kv_transfer.copy_plan import Copy
from graftline.kv_transfer.mooncake_engine import Engine, MooncakeConfig, start_engine
from graftline.kv_transfer.mooncake_group import LoneWrite, MooncakeGroup
from graftline.kv_transfer.mooncake_session import MAX_SPELLINGS, Session
from graftline.kv_transfer.transport import GroupedWrite, MemoryRegions, Refused

_CLOSING_PAUSE_S = 500e-6


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
        self._session_id = config.session_id(port)
        self._regions = MemoryRegions()
        self._sessions: dict[str, Session] = {}
        self._spellings: dict[str, int] = {}  # of forgotten sessions, the next one
        self._lock = threading.Lock()  # guards _sessions, _closed, _writers, and changes of _regions
        self._idle = threading.Condition(self._lock)
        self._opening = threading.Lock()  # first contacts one after another
        self._writers = 0
        self._closed = False

    @property
    def session_id(self) -> str:
        """See `Transport`: `host:port`, `[address]:port` for IPv6."""
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
        alone = LoneWrite(copies, deadline_s)
        self.begin(session_id, (alone,)).finish()
        alone.raise_error()

    def begin(self, session_id: str, writes: Sequence[GroupedWrite], refused: Refused | None = None) -> MooncakeGroup:
        """See `Transport`. A group has one turn."""
        most_bytes = self._config.max_copy_bytes
        return MooncakeGroup(writes, self._regions, most_bytes, lambda: self._enter(session_id), self._leave, refused)

    def forget(self, session_id: str) -> None:
        """See `Transport`."""
        with self._lock:
            session = self._sessions.pop(session_id, None)
            if session is not None:
                # A process that takes the port over must not be taken for this one: the engine would go on writing into
                # the memory of the old one, which on the intra-node way never fails.
                self._spellings[session_id] = (session.spelling + 1) % MAX_SPELLINGS
                session.forgotten = True
        if session is not None and session.turn.acquire(blocking=False):
            session.reap()
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
        while at_rest and any(session.reap() for session in sessions):
            at_rest = time.monotonic() < patience_s
            time.sleep(_CLOSING_PAUSE_S)
        if at_rest:
            for start in self._regions.starts:
                self._engine.unregister_memory(start)

    # --- writing -------------------------------------------------------------------------------------------------

    def _enter(self, session_id: str) -> Session:
        """Counts a writer.

        Raises:
            InvalidRequestError: the session's id is none.
            TransferFailedError: the transport is closed.
        """
        with self._lock:
            if self._closed:
                raise TransferFailedError(f"{self._session_id} is closed", drained=True)
            session = self._sessions.get(session_id)
            if session is None:
                _require_session_id(session_id)
                spelling = self._spellings.get(session_id, 0)
                session = Session(self._engine, self._config, session_id, self._opening, self._regions, spelling)
                self._sessions[session_id] = session
            self._writers += 1
            return session

    def _leave(self) -> None:
        with self._lock:
            self._writers -= 1
            if self._closed:
                self._idle.notify_all()


def _require_session_id(session_id: str) -> None:
    host, separator, port = session_id.rpartition(":")
    if not (separator and host and port.isdecimal() and 0 < int(port) < 65536):
        raise InvalidRequestError("session id", f"{session_id!r} is not host:port")
