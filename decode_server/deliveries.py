"""Events of an engine on their way from its thread to the event loop: one wake-up for all that come together.

A round has an event for every request; waking the loop for each would cost both threads more than the events.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from graftline.engine.service_api import DecodeEvent


class Deliveries:
    """Keeps the order of all events. To be made on the event loop's thread.

    What takes an event must not raise; if it does, the loop's exception handler hears of it and the others go on.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[Callable[[DecodeEvent], None], DecodeEvent]] = deque()
        self._is_called = False

    def put(self, take: Callable[[DecodeEvent], None], event: DecodeEvent) -> None:
        """Has `take` called with the event on the event loop; from any thread."""
        self._waiting.append((take, event))
        if self._is_called:
            return  # what was called for has not begun, or would have said so first
        self._is_called = True
        try:
            self._loop.call_soon_threadsafe(self._take_all)
        except RuntimeError:
            # The loop is closed: the process is on its way out and nobody is left to tell.
            return

    def _take_all(self) -> None:
        self._is_called = False
        try:
            for _ in range(len(self._waiting)):
                take, event = self._waiting.popleft()
                take(event)
        except BaseException:
            self._loop.call_soon(self._take_all)
            raise
