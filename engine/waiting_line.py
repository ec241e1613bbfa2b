"""Requests that wait for room: first come, first served, but who needs little may overtake a head that needs much."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

Item = TypeVar("Item")

# While the head of the line does not fit, so many may be served before it; then all wait until it fits.
MAX_OVERTAKING = 32
# Of those behind the head, so many are looked at: a look may cost a search in the prefix cache.
_LOOKED_AT = 8


@dataclass(slots=True, eq=False)
class _Place(Generic[Item]):
    item: Item
    overtaken: int = 0


class WaitingLine(Generic[Item]):
    """A line whose head may be overtaken, a bounded number of times."""

    def __init__(self) -> None:
        self._places: deque[_Place[Item]] = deque()

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Item]:
        return (place.item for place in self._places)

    def append(self, item: Item) -> None:
        """Joins the end."""
        self._places.append(_Place(item))

    def remove(self, item: Item) -> None:
        """Leaves the line. Raises ValueError when it is not there."""
        for place in self._places:
            if place.item is item:
                self._places.remove(place)
                return
        raise ValueError(f"{item!r} does not wait")

    def take(self, fits: Callable[[Item], bool], may: Callable[[Item], bool] = lambda _: True) -> Item | None:
        """Takes out the next item that fits, None when there is none to be served now.

        Args:
            fits: asked of one after another until it says yes; what it takes on saying yes is the item's.
            may: whether an item's turn can come at all; others are passed over, and nobody overtakes them by that.
        """
        candidates = (place for place in self._places if may(place.item))
        head = next(candidates, None)
        if head is None:
            return None
        if fits(head.item):
            self._places.remove(head)
            return head.item
        if head.overtaken >= MAX_OVERTAKING:
            return None
        for place in islice(candidates, _LOOKED_AT):
            if fits(place.item):
                head.overtaken += 1
                self._places.remove(place)
                return place.item
        return None
