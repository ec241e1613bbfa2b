"""How many requests may be open, and which labels they carry."""

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from graftline.errors import InvalidRequestError, OutOfCapacityError, PeerUnavailableError


class RateLimit:
    """A token bucket: `per_s` a second, and as many (at least one) at once.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._burst = max(1.0, per_s)
        self._clock = clock
        self._tokens = self._burst
        self._filled_at = clock()

    def take(self) -> None:
        """Takes one.

        Raises:
            OutOfCapacityError: there is none; the hint says when there will be.
        """
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._per_s)
        self._filled_at = now
        if self._tokens < 1:
            wait_s = (1 - self._tokens) / self._per_s
            raise OutOfCapacityError(f"more than {self._per_s:g} requests a second", retry_after_s=wait_s)
        self._tokens -= 1


class Admission:
    """Counts open requests; every admitted one leaves on the same path, whatever ends it."""

    def __init__(self, max_open: int, retry_after_s: float, rate: RateLimit | None = None) -> None:
        self._rate = rate
        self._max_open = max_open
        self._retry_after_s = retry_after_s
        self._labels: set[str] = set()
        self.num_open = 0
        self.is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_until_idle(self, timeout_s: float) -> bool:
        """Until no request is open; False when some still were after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def places(self) -> "Places":
        """None yet; what is taken is given back at the end of its block."""
        return Places(self)

    def take(self, label: str) -> None:
        """Takes a place, and the label when there is one. Raises as `Places.take`."""
        if self.is_draining:
            raise PeerUnavailableError("this router is draining")
        if self.num_open >= self._max_open:
            raise OutOfCapacityError(
                f"{self.num_open} requests are open, the most this router takes", retry_after_s=self._retry_after_s
            )
        if label and label in self._labels:
            raise InvalidRequestError("request_id", f"{label!r} is the id of a request that is still open")
        if self._rate is not None:
            self._rate.take()
        self.num_open += 1
        self._idle.clear()
        if label:
            self._labels.add(label)

    def give_back(self, label: str) -> None:
        """The end of a place that was taken with this label."""
        self.num_open -= 1
        if self.num_open == 0:
            self._idle.set()
        self._labels.discard(label)


class Places:
    """What one caller holds of an admission, for as long as the block is open."""

    __slots__ = ("_admission", "_labels")

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._labels: list[str] = []

    def take(self, label: str) -> None:
        """One more place.

        Raises:
            PeerUnavailableError: this router is about to stop.
            OutOfCapacityError: too many requests are open, or came within a second.
            InvalidRequestError: the label belongs to an open request.
        """
        self._admission.take(label)
        self._labels.append(label)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for label in self._labels:
            self._admission.give_back(label)
