"""The groups in which running requests move through the stages."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from graftline.engine.decode_request import DecodeRequest


@dataclass(slots=True)
class Microbatch:
    """Requests that share their rounds.

    Attributes:
        steps: rounds under way, oldest first.
        nodes: V of each.
        carries: the last round left on the device what the next one needs.
        newest: the last round that began, -1 for none.
    """

    index: int
    members: list[DecodeRequest] = field(default_factory=list)
    steps: deque[int] = field(default_factory=deque)
    nodes: deque[int] = field(default_factory=deque)
    carries: bool = False
    newest: int = -1

    def launched(self, step: int, *, nodes: int, carries: bool) -> None:
        """A round began, which verifies so many nodes of a tree at most."""
        self.steps.append(step)
        self.nodes.append(nodes)
        self.newest = step
        self.carries = carries


class MicrobatchSet:
    """As many microbatches as stages, filled evenly and kept even: an empty one leaves a stage without work.

    Args:
        rounds_ahead: rounds that one microbatch may have under way.
    """

    def __init__(self, count: int, rounds_ahead: int = 1) -> None:
        self._rounds_ahead = rounds_ahead
        self._batches = [Microbatch(index) for index in range(count)]

    @property
    def num_requests(self) -> int:
        """Requests in all microbatches."""
        return sum(len(batch.members) for batch in self._batches)

    def ready(self) -> Iterator[Microbatch]:
        """Microbatches with members that may start another round, who waited longest first.

        A round ahead of the host waits on the first stage for the one before it. So microbatches take turns with them:
        two in a row of one would leave that stage idle while another's rounds stand behind.
        """
        filled = sorted((batch for batch in self._batches if batch.members), key=lambda batch: batch.newest)
        return (
            batch
            for index, batch in enumerate(filled)
            if not batch.steps or (index == 0 and len(batch.steps) < self._rounds_ahead)
        )

    def add(self, request: DecodeRequest) -> None:
        """A request joins the emptiest microbatch."""
        min(self._batches, key=lambda batch: len(batch.members)).members.append(request)

    def remove(self, request: DecodeRequest) -> None:
        """A request leaves, if it ever joined."""
        for batch in self._batches:
            if request in batch.members:
                batch.members.remove(request)
                return

    def is_overfull(self, batch: Microbatch) -> bool:
        """Whether `level` would move somebody, once the microbatch has landed with nothing under way."""
        return len(batch.members) - min(len(other.members) for other in self._batches) >= 2

    def level(self, batch: Microbatch) -> None:
        """Moves the latest come of a microbatch that has just landed to the smallest one, until they differ by one at
        most. Only who has no round under way can move.
        """
        smallest = min(self._batches, key=lambda other: len(other.members))
        for request in reversed(batch.members.copy()):
            if len(batch.members) - len(smallest.members) < 2:
                return
            if not request.in_flight:
                batch.members.remove(request)
                smallest.members.append(request)

    def landed(self, index: int, step: int) -> tuple[Microbatch, int]:
        """The round `step` of a microbatch is over; also its V."""
        batch = self._batches[index]
        assert batch.steps, f"step {step} landed in a microbatch without one"
        assert batch.steps[0] == step, f"step {step} landed in a microbatch whose oldest step is {batch.steps[0]}"
        batch.steps.popleft()
        return batch, batch.nodes.popleft()

    def youngest(self) -> DecodeRequest:
        """The latest come request; there must be one."""
        return max((request for batch in self._batches for request in batch.members), key=lambda request: request.order)
