"""Pages and slots that somebody may still write to, and until when."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graftline.engine.pages import PageAllocator
from graftline.engine.request import PageId, SlotId
from graftline.engine.slots import SlotPool


@dataclass(frozen=True, slots=True)
class _Entry:
    peer: str
    pages: tuple[PageId, ...]
    slot: SlotId | None
    free_at_s: float


class Quarantine:
    """Keeps pages and slots out of use until their writer is known to be gone or can write no more.

    Args:
        hold_s: longer than the transport's own timeout, after which no write of that time can land.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        slots: SlotPool,
        hold_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._allocator = allocator
        self._slots = slots
        self._hold_s = hold_s
        self._clock = clock
        self._entries: list[_Entry] = []

    def add(self, peer: str, pages: Sequence[PageId], slot: SlotId | None = None) -> None:
        """Pages, and the slot if it holds state, that `peer` may still write to."""
        self._allocator.quarantine(pages)
        self._entries.append(_Entry(peer, tuple(pages), slot, self._clock() + self._hold_s))

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
                if entry.slot is not None:
                    self._slots.give_back(entry.slot)
            else:
                kept.append(entry)
        self._entries = kept
