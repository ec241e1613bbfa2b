"""Slot ids of running requests."""

import heapq

from graftline.engine.request import SlotId


class SlotPool:
    """Hands out the lowest free slot."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))

    @property
    def num_free(self) -> int:
        """Slots nobody holds."""
        return len(self._free)

    def take(self) -> SlotId:
        """Takes a slot; there must be one."""
        return SlotId(heapq.heappop(self._free))

    def give_back(self, slot: SlotId) -> None:
        """The slot is free again."""
        assert slot not in self._free, f"slot {slot} is given back twice"
        heapq.heappush(self._free, slot)
