"""What a transport is: one-sided writes into memory that a peer has registered.

Copies reach a transport as bare addresses, so every local address is checked against the registered regions before
anything else sees it.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

from graftline.errors import InvalidRequestError
from graftline.kv_transfer.copy_plan import Copy


class Transport(Protocol):
    """Writes into peers. All methods are thread-safe."""

    @property
    def session_id(self) -> str:
        """The name under which peers write into this process; another one after every start."""

    def register(self, address: int, num_bytes: int) -> None:
        """Opens a region to writes by peers and to reads for writes to peers. Once a pool, at start-up.

        Raises:
            InvalidRequestError: an impossible region, or one that overlaps another.
        """

    def write(self, session_id: str, copies: Sequence[Copy], deadline_s: float) -> None:
        """Copies bytes into a peer and returns once all of them are in its memory.

        Args:
            session_id: the peer.
            copies: non-overlapping destinations; the sources keep their bytes until this returns.
            deadline_s: when to give up, on the `time.monotonic` clock.

        Raises:
            InvalidRequestError: a source outside the registered regions; nothing was written.
            TransferFailedError: not acknowledged. Unless `drained`, bytes may still land for a while.
        """

    def forget(self, session_id: str) -> None:
        """Drops what is remembered of a peer that is gone."""

    def close(self) -> None:
        """Waits (bounded) for the writes under way and lets go of the regions. Later writes fail."""


class MemoryRegions:
    """The registered regions of one process; a copy must lie inside a single one. Not thread-safe."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, address: int, num_bytes: int) -> None:
        """Adds [address, address + num_bytes).

        Raises:
            InvalidRequestError: empty, at address 0, or overlapping another region.
        """
        if address <= 0 or num_bytes <= 0:
            raise InvalidRequestError("region", f"[{address:#x}, +{num_bytes}) is impossible")
        index = bisect_right(self._starts, address)
        after_previous = index == 0 or self._ends[index - 1] <= address
        before_next = index == len(self._starts) or address + num_bytes <= self._starts[index]
        if not (after_previous and before_next):
            raise InvalidRequestError("region", f"[{address:#x}, +{num_bytes}) overlaps a registered one")
        self._starts.insert(index, address)
        self._ends.insert(index, address + num_bytes)

    def contains(self, address: int, num_bytes: int) -> bool:
        """Whether [address, address + num_bytes) lies inside one region."""
        index = bisect_right(self._starts, address) - 1
        return index >= 0 and num_bytes > 0 and address + num_bytes <= self._ends[index]

    def require_sources(self, copies: Sequence[Copy]) -> None:
        """Passes when every copy reads registered memory only.

        Raises:
            InvalidRequestError: names the first offender.
        """
        for copy in copies:
            if not self.contains(copy.src_address, copy.num_bytes):
                place = f"[{copy.src_address:#x}, +{copy.num_bytes})"
                raise InvalidRequestError("copy source", f"{place} is not in a registered region")

    @property
    def starts(self) -> tuple[int, ...]:
        """The first address of every region."""
        return tuple(self._starts)
