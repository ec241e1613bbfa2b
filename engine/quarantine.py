"""Pages that somebody may still write to, and until when."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graftline.engine.pages import PageAllocator
from graftline.engine.request import PageId


@dataclass(frozen=True, slots=True)
class _Entry:
    peer: str
    pages: tuple[PageId, ...]
    free_at_s: float


class Quarantine:
    """Keeps pages out of use until their writer is known to be gone or can write no more.

    Args:
        hold_s: longer than the transport's own timeout, after which no write of that time can land.
    """

    def __init__(self, allocator: PageAllocator, hold_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._allocator = allocator
        self._hold_s = hold_s
        self._clock = clock
        self._entries: list[_Entry] = []

    def add(self, peer: str, pages: Sequence[PageId]) -> None:
        """Pages that `peer` may still write to."""
        self._allocator.quarantine(pages)
        self._entries.append(_Entry(peer, tuple(pages), self._clock() + self._hold_s))

    def forget_peer(self, peer: str) -> None:
        """The peer's process is gone, and with it its writes."""
        self._free(lambda entry: entry.peer == peer)

    def expire(self) -> None:
        """Frees what was held long enough."""
        now = self._clock()
        self._free(lambda entry: entry.free_at_s <= now)

    def _free(self, ends: Callable[[_Entry], bool]) -> None:
        kept = []
        for entry in self._entries:
            if ends(entry):
                self._allocator.end_quarantine(entry.pages)
            else:
                kept.append(entry)
        self._entries = kept
