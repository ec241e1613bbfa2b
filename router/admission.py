"""How many requests may be open, and which labels they carry."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from graftline.errors import InvalidRequestError, OutOfCapacityError, PeerUnavailableError


class Admission:
    """Counts open requests; every admitted one leaves on the same path, whatever ends it."""

    def __init__(self, max_open: int, retry_after_s: float) -> None:
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

    @contextmanager
    def admit(self, label: str) -> Iterator[None]:
        """Holds a place, and the label when there is one.

        Raises:
            PeerUnavailableError: this router is about to stop.
            OutOfCapacityError: too many requests are open.
            InvalidRequestError: the label belongs to an open request.
        """
        if self.is_draining:
            raise PeerUnavailableError("this router is draining")
        if self.num_open >= self._max_open:
            raise OutOfCapacityError(
                f"{self.num_open} requests are open, the most this router takes", retry_after_s=self._retry_after_s
            )
        if label and label in self._labels:
            raise InvalidRequestError("request_id", f"{label!r} is the id of a request that is still open")
        self.num_open += 1
        self._idle.clear()
        if label:
            self._labels.add(label)
        try:
            yield
        finally:
            self.num_open -= 1
            if self.num_open == 0:
                self._idle.set()
            self._labels.discard(label)
