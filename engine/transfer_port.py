"""What a stage asks of the transfer layer. The services bring the implementation: the engine opens no sockets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from graftline.engine.kv_pool import KvPool
from graftline.engine.plan import SendDone, SendOrder, SentPool
from graftline.engine.state_pool import StatePool


@dataclass(frozen=True, slots=True)
class StagePools:
    """The memory of one stage that peers may read or write.

    Attributes:
        target: pages of the stage's target layers.
        draft: pages of the drafter, on the last stage of a speculating worker.
        states: recurrent state, on a stage with linear layers.
    """

    stage: int
    target: KvPool
    draft: KvPool | None
    states: StatePool | None = None


class Sending(NamedTuple):
    """An order to a port.

    Attributes:
        ready: waits up to so many seconds for the data; False means not yet.
        done: called exactly once, from any thread.
    """

    order: SendOrder
    ready: Callable[[float], bool]
    done: Callable[[SendDone], None]


class TransferPort(Protocol):
    """One stage's way to other workers' memory. All methods are thread-safe; `send` returns within milliseconds, the
    others, but for `digest`, at once.
    """

    def open(self, pools: StagePools) -> bytes:
        """Registers the pools.

        Returns:
            Where they lie, in an encoding that the engine hands on unread.
        """

    def pair(self, peer: str, layout: bytes) -> None:
        """Learns where a peer's pools lie."""

    def forget(self, peer: str) -> None:
        """Drops a peer and what is queued for it."""

    def send(self, sendings: Sequence[Sending]) -> None:
        """Takes orders, carried out in their order. Those whose data are there may have been answered already then.

        Called by a thread whose current GPU is the pools'.
        """

    def cancel(self, owner: str) -> None:
        """Drops what an owner has queued; `done` is called for each order all the same."""

    def digest(self, units: Sequence[tuple[SentPool, Sequence[int]]]) -> bytes:
        """Of what lies in these pages and slots here; blocks for as long as it takes to read them."""

    def close(self) -> None:
        """Ends everything."""


class NoTransfer:
    """The port of a stage that nobody reads from or writes to."""

    def open(self, pools: StagePools) -> bytes:
        """See `TransferPort`."""
        return b""

    def pair(self, peer: str, layout: bytes) -> None:
        """See `TransferPort`."""

    def forget(self, peer: str) -> None:
        """See `TransferPort`."""

    def send(self, sendings: Sequence[Sending]) -> None:
        """See `TransferPort`."""
        for sending in sendings:
            error = "this stage has no transfer layer"
            sending.done(SendDone(sending.order.order, 0, 0, 0.0, error=error, drained=True))

    def cancel(self, owner: str) -> None:
        """See `TransferPort`."""

    def digest(self, units: Sequence[tuple[SentPool, Sequence[int]]]) -> bytes:
        """See `TransferPort`."""
        return b""

    def close(self) -> None:
        """See `TransferPort`."""


def page_runs(source: Sequence[int], target: Sequence[int]) -> list[tuple[int, int, int]]:
    """Own pages and the peer's that they go to, as the runs of an order; at least one page."""
    runs: list[tuple[int, int, int]] = []
    first_src, first_dst, length = source[0], target[0], 0
    for src, dst in zip(source, target, strict=True):
        if src == first_src + length and dst == first_dst + length:
            length += 1
        else:
            runs.append((first_src, first_dst, length))
            first_src, first_dst, length = src, dst, 1
    runs.append((first_src, first_dst, length))
    return runs
