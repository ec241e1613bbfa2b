"""The transport between stages of one process: plain memory copies, checked on both ends."""

import ctypes
import threading
import time
from collections.abc import Callable, Sequence

from graftline.errors import TransferFailedError
from graftline.kv_transfer.copy_plan import Copy
from graftline.kv_transfer.transport import GroupedWrite, MemoryRegions, OneByOne, Refused, WriteGroup

CopyBytes = Callable[[int, int, int], object]
"""(destination address, source address, number of bytes): must have copied when it returns."""


class InProcessHub:
    """Where the transports of one process meet. Both sides get the same hub; there is no global one.

    Args:
        copy_bytes: how to move bytes; the default serves host memory.
    """

    def __init__(self, copy_bytes: CopyBytes = ctypes.memmove) -> None:
        self._copy_bytes = copy_bytes
        self._lock = threading.Lock()
        self._next = 0
        self._members: dict[str, InProcessTransport] = {}

    def join(self) -> "InProcessTransport":
        """A new transport with a session of its own."""
        with self._lock:
            self._next += 1
            transport = InProcessTransport(self, f"in-process:{self._next}", self._copy_bytes)
            self._members[transport.session_id] = transport
            return transport

    def find(self, session_id: str) -> "InProcessTransport | None":
        """The transport of a session, unless it was closed."""
        with self._lock:
            return self._members.get(session_id)

    def leave(self, session_id: str) -> None:
        """Takes a session out; it can no longer be found."""
        with self._lock:
            self._members.pop(session_id, None)


class InProcessTransport:
    """A `Transport` inside one process; see `InProcessHub.join`."""

    def __init__(self, hub: InProcessHub, session_id: str, copy_bytes: CopyBytes) -> None:
        self._hub = hub
        self._session_id = session_id
        self._copy_bytes = copy_bytes
        self._regions = MemoryRegions()
        self._inbound = threading.Lock()  # held while bytes move into or regions change in this session
        self._closed = False

    @property
    def session_id(self) -> str:
        """See `Transport`."""
        return self._session_id

    def register(self, address: int, num_bytes: int) -> None:
        """See `Transport`."""
        with self._inbound:
            self._regions.add(address, num_bytes)

    def write(self, session_id: str, copies: Sequence[Copy], deadline_s: float) -> None:
        """See `Transport`. A failure is always drained: nothing is left under way."""
        if self._closed:
            raise TransferFailedError(f"{self._session_id} is closed", drained=True)
        self._regions.require_sources(copies)
        peer = self._hub.find(session_id)
        if peer is None:
            raise TransferFailedError(f"no session {session_id} in this process", drained=True)
        peer._receive(copies, deadline_s)

    def begin(self, session_id: str, writes: Sequence[GroupedWrite], refused: Refused | None = None) -> WriteGroup:
        """See `Transport`."""
        return OneByOne(self.write, session_id, writes, refused)

    def forget(self, session_id: str) -> None:
        """See `Transport`. Nothing is remembered."""

    def close(self) -> None:
        """See `Transport`. Returns once no peer writes here any more."""
        self._hub.leave(self._session_id)
        with self._inbound:
            self._closed = True

    def _receive(self, copies: Sequence[Copy], deadline_s: float) -> None:
        if not self._inbound.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            raise TransferFailedError(f"{self._session_id} stayed busy until the deadline", drained=True)
        try:
            if self._closed:
                raise TransferFailedError(f"{self._session_id} is closed", drained=True)
            self._require_destinations(copies)
            for copy in copies:
                self._copy_bytes(copy.dst_address, copy.src_address, copy.num_bytes)
        finally:
            self._inbound.release()

    def _require_destinations(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            if not self._regions.contains(copy.dst_address, copy.num_bytes):
                place = f"[{copy.dst_address:#x}, +{copy.num_bytes})"
                raise TransferFailedError(f"{self._session_id} has no region for {place}", drained=True)
