"""Requests that wait for room: first come, first served, but who needs little may overtake a head that needs much."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")

# While the head of the line does not fit, so many may be served before it; then all wait until it fits.
MAX_OVERTAKING = 32
# Of those behind the head, so many are looked at: a look may cost a search in the prefix cache.
_LOOKED_AT = 8


class WaitingLine(Generic[Item]):
    """A line whose head may be overtaken, a bounded number of times."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._overtaken = 0

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def append(self, item: Item) -> None:
        """Joins the end."""
        self._items.append(item)

    def remove(self, item: Item) -> None:
        """Leaves the line. Raises ValueError when it is not there."""
        if self._items and self._items[0] is item:
            self._overtaken = 0
        self._items.remove(item)

    def take(self, fits: Callable[[Item], bool]) -> Item | None:
        """Takes out the next item that fits, None when there is none to be served now.

        Args:
            fits: asked of one after another until it says yes; what it takes on saying yes is the item's.
        """
        if not self._items:
            return None
        if fits(self._items[0]):
            self._overtaken = 0
            return self._items.popleft()
        if self._overtaken >= MAX_OVERTAKING:
            return None
        for index in range(1, min(len(self._items), 1 + _LOOKED_AT)):
            item = self._items[index]
            if fits(item):
                self._overtaken += 1
                del self._items[index]
                return item
        return None
