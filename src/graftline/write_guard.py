"""Cuts a reader that takes too long over one message, with one timer for all messages instead of one each."""

import asyncio
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from graftline.errors import OutOfCapacityError


class Ticker(ABC):
    """A look at regular intervals while a block is open, on the running event loop: one timer for all that happens.

    Args:
        interval_s: seconds from look to look, and to the first one.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    @abstractmethod
    def _look(self) -> bool:
        """Whether to look again."""

    def __enter__(self) -> Self:
        self._timer = self._loop.call_later(self._interval_s, self._tick)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        if self._look():
            self._timer = self._loop.call_later(self._interval_s, self._tick)


class WriteGuard(Ticker):
    """Around a task's writes. `writing()` before each, `written()` after it.

    A write that takes longer than `timeout_s` (at most twice as long) cancels the task that entered the guard, and
    the guard turns that into an error.

    Args:
        error: its class.
        problem: its text, as far as "for … s".
    """

    def __init__(self, timeout_s: float, error: type[OutOfCapacityError], problem: str) -> None:
        super().__init__(timeout_s)
        self._error = error
        self._problem = problem
        self._task = asyncio.current_task()
        self._writes = 0
        self._is_writing = False
        self._seen = -1
        self._has_cut = False

    def writing(self) -> None:
        """A write begins."""
        self._writes += 1
        self._is_writing = True

    def written(self) -> None:
        """It is done."""
        self._is_writing = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if self._has_cut and self._task is not None:
            still_cancelling = self._task.uncancel()
            if kind is asyncio.CancelledError and not still_cancelling:
                raise self._error(f"{self._problem} for {self._interval_s:g} s") from error

    def _look(self) -> bool:
        if self._is_writing and self._seen == self._writes and self._task is not None:
            self._has_cut = True
            self._task.cancel()
            return False
        self._seen = self._writes if self._is_writing else -1
        return True
