"""The groups in which running requests move through the stages."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from graftline.engine.decode_request import DecodeRequest


@dataclass(slots=True)
class Microbatch:
    """Requests that share their rounds.

    Attributes:
        step: the round under way, or None.
    """

    index: int
    members: list[DecodeRequest] = field(default_factory=list)
    step: int | None = None

    def launched(self, step: int) -> None:
        """A round began."""
        assert self.step is None, "a microbatch has one round at a time"
        self.step = step


class MicrobatchSet:
    """As many microbatches as stages, filled evenly."""

    def __init__(self, count: int) -> None:
        self._batches = [Microbatch(index) for index in range(count)]

    @property
    def num_requests(self) -> int:
        """Requests in all microbatches."""
        return sum(len(batch.members) for batch in self._batches)

    def idle(self) -> Iterator[Microbatch]:
        """Microbatches with members and no round under way."""
        return (batch for batch in self._batches if batch.members and batch.step is None)

    def add(self, request: DecodeRequest) -> None:
        """A request joins the emptiest microbatch."""
        min(self._batches, key=lambda batch: len(batch.members)).members.append(request)

    def remove(self, request: DecodeRequest) -> None:
        """A request leaves, if it ever joined."""
        for batch in self._batches:
            if request in batch.members:
                batch.members.remove(request)
                return

    def landed(self, index: int, step: int) -> Microbatch:
        """The round `step` of a microbatch is over."""
        batch = self._batches[index]
        assert batch.step == step, f"step {step} landed in a microbatch whose step is {batch.step}"
        batch.step = None
        return batch

    def youngest(self) -> DecodeRequest:
        """The latest come request; there must be one."""
        return max((request for batch in self._batches for request in batch.members), key=lambda request: request.order)
