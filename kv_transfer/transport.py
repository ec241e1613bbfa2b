"""What a transport is: one-sided writes into memory that a peer has registered.

Copies reach a transport as bare addresses, so every local address is checked against the registered regions before
anything else sees it.
"""

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import add
from typing import Protocol

from graftline.errors import GraftlineError, InvalidRequestError, TransferFailedError
from graftline.kv_transfer.copy_plan import Copy


class GroupedWrite(Protocol):
    """One of several writes to a peer that go out together."""

    @property
    def deadline_s(self) -> float:
        """When to give up, on the `time.monotonic` clock."""

    def start(self) -> Sequence[Copy] | None:
        """Called once, before anything is written: copies into places of their own. The sources do not change.

        None: it should not be written any more. Nothing else is called then.
        """

    def end(self, error: GraftlineError | None, seconds: float) -> None:
        """Called once, maybe without `start`: None when all bytes are in the peer's memory.

        Args:
            error: as `Transport.write` raises it.
            seconds: this write's share of the time in which the group was written.
        """


Refused = Callable[[GroupedWrite, Sequence[Copy], TransferFailedError], bool]
"""Told of a write that was refused, and its copies: whether somebody carries it out all the same, and it goes on."""


class WriteGroup(Protocol):
    """Writes to one peer that a transport carries out, in their order. One thread at a time may call it."""

    def advance(self, until_s: float) -> bool:
        """Goes on without waiting for anything but copies that should have arrived by then.

        Args:
            until_s: when to return, on the `time.monotonic` clock; in the past: only submits.

        Returns:
            Whether all writes have ended. If not, `finish` must be called.
        """

    def finish(self) -> None:
        """Goes on until all writes have ended, as long as it takes."""


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

    def begin(self, session_id: str, writes: Sequence[GroupedWrite], refused: Refused | None = None) -> WriteGroup:
        """Several writes at once; one that fails leaves the others alone. The group is what does them."""

    def forget(self, session_id: str) -> None:
        """Drops what is remembered of a peer that is gone."""

    def close(self) -> None:
        """Waits (bounded) for the writes under way and lets go of the regions. Later writes fail."""


class OneByOne:
    """A `WriteGroup` of a transport that has nothing to gain from several writes at once.

    Args:
        write: see `Transport.write`.
    """

    def __init__(
        self,
        write: Callable[[str, Sequence[Copy], float], None],
        session_id: str,
        writes: Sequence[GroupedWrite],
        refused: Refused | None = None,
    ) -> None:
        self._write = write
        self._session_id = session_id
        self._writes = writes
        self._refused = refused

    def advance(self, until_s: float) -> bool:
        """See `WriteGroup`."""
        return False

    def finish(self) -> None:
        """See `WriteGroup`."""
        for write in self._writes:
            copies = write.start()
            if copies is not None:
                start_s = time.monotonic()
                error = self._error_of(copies, write.deadline_s)
                if not is_taken_over(write, copies, error, self._refused):
                    write.end(error, time.monotonic() - start_s)

    def _error_of(self, copies: Sequence[Copy], deadline_s: float) -> GraftlineError | None:
        try:
            self._write(self._session_id, copies, deadline_s)
        except GraftlineError as error:
            return error
        return None


def is_taken_over(
    write: GroupedWrite, copies: Sequence[Copy], error: GraftlineError | None, refused: Refused | None
) -> bool:
    """Whether somebody carries out a write that failed."""
    if refused is None or not isinstance(error, TransferFailedError) or not error.refused:
        return False
    return refused(write, copies, error)


class MemoryRegions:
    """The registered regions of one process; a copy must lie inside a single one. One thread at a time may add."""

    def __init__(self) -> None:
        self._bounds: tuple[list[int], list[int]] = [], []  # starts and ends; replaced, never changed

    def add(self, address: int, num_bytes: int) -> None:
        """Adds [address, address + num_bytes).

        Raises:
            InvalidRequestError: empty, at address 0, or overlapping another region.
        """
        if address <= 0 or num_bytes <= 0:
            raise InvalidRequestError("region", f"[{address:#x}, +{num_bytes}) is impossible")
        starts, ends = self._bounds
        index = bisect_right(starts, address)
        after_previous = index == 0 or ends[index - 1] <= address
        before_next = index == len(starts) or address + num_bytes <= starts[index]
        if not (after_previous and before_next):
            raise InvalidRequestError("region", f"[{address:#x}, +{num_bytes}) overlaps a registered one")
        self._bounds = (
            [*starts[:index], address, *starts[index:]],
            [*ends[:index], address + num_bytes, *ends[index:]],
        )

    def contains(self, address: int, num_bytes: int) -> bool:
        """Whether [address, address + num_bytes) lies inside one region."""
        starts, ends = self._bounds
        index = bisect_right(starts, address) - 1
        return index >= 0 and num_bytes > 0 and address + num_bytes <= ends[index]

    def end_of(self, address: int) -> int:
        """Where the region ends in which an address lies, 0 when it lies in none."""
        starts, ends = self._bounds
        index = bisect_right(starts, address) - 1
        return ends[index] if index >= 0 and address < ends[index] else 0

    def require_sources(self, copies: Sequence[Copy]) -> None:
        """Passes when every copy reads registered memory only.

        Raises:
            InvalidRequestError: names the first offender.
        """
        if len(copies) > 1 and self._one_holds(copies):
            return
        for address, _, num_bytes in copies:
            if not self.contains(address, num_bytes):
                place = f"[{address:#x}, +{num_bytes})"
                raise InvalidRequestError("copy source", f"{place} is not in a registered region")

    def _one_holds(self, copies: Sequence[Copy]) -> bool:
        """Whether one region holds everything from the first to the last byte: for many copies the quick answer."""
        addresses, _, sizes = zip(*copies, strict=True)
        if min(sizes) <= 0:
            return False
        first, end = min(addresses), max(map(add, addresses, sizes))
        return self.contains(first, end - first)

    @property
    def starts(self) -> tuple[int, ...]:
        """The first address of every region."""
        return tuple(self._bounds[0])
