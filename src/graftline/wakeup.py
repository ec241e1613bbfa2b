"""An event with one waiter, for paths that every message takes: an `asyncio.Event` does several times as much."""

import asyncio


class Wakeup:
    """What one task waits for and others cause. A call of `wake` that nobody waits for is kept for the next `wait`."""

    __slots__ = ("_is_due", "_waiter")

    def __init__(self) -> None:
        self._is_due = False
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """There is something to do; on the event loop's thread."""
        self._is_due = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def wait(self) -> None:
        """Until `wake` was called since the last `wait` returned; by one task at a time."""
        assert self._waiter is None, "somebody waits already"
        if not self._is_due:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_due = False
