"""The thread that owns a scheduler: everything reaches it through one inbox, in order.

Commands of services and reports of stages are handled alike; between two batches of them the owner
schedules. The thread also keeps the stages' heartbeat.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from graftline.engine.plan import Report, StageFailed

logger = logging.getLogger(__name__)

Command = TypeVar("Command")

MAX_BATCH = 256


class EngineThread(Generic[Command]):
    """Runs `handle` on every item that was put, `schedule` behind every batch of them, `beat` at intervals.

    Args:
        handle: takes one command or report; its exceptions fail the engine.
        fail: told once why the engine cannot go on, that it was stopped included. The thread then only hands
            commands to `handle`, which is to refuse them; late reports are dropped.
    """

    def __init__(
        self,
        name: str,
        *,
        handle: Callable[[Command | Report], None],
        schedule: Callable[[], None],
        beat: Callable[[], None],
        fail: Callable[[str], None],
        beat_s: float,
    ) -> None:
        self._inbox: queue.SimpleQueue[Command | Report | None] = queue.SimpleQueue()
        self._handle = handle
        self._schedule = schedule
        self._beat = beat
        self._fail = fail
        self._beat_s = beat_s
        self._failed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def put(self, item: Command | Report) -> None:
        """Hands an item over; thread-safe, never blocks."""
        self._inbox.put(item)

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread once everything put before is handled; whether it ended in time."""
        self._inbox.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        next_beat = time.monotonic()
        while True:
            for item in self._batch(next_beat - time.monotonic()):
                if item is None:
                    self._guarded(lambda: self._end("it was stopped"))
                    return
                self._guarded(lambda item=item: self._take(item))  # type: ignore[misc]  # bound at once
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + self._beat_s
                if not self._failed:
                    self._guarded(self._beat)
            if not self._failed:
                self._guarded(self._schedule)

    def _batch(self, wait_s: float) -> "Iterator[Command | Report | None]":
        """What is in the inbox, at most `MAX_BATCH` items, after waiting for the first one."""
        try:
            yield self._inbox.get(timeout=wait_s) if wait_s > 0 else self._inbox.get_nowait()
            for _ in range(MAX_BATCH - 1):
                yield self._inbox.get_nowait()
        except queue.Empty:
            return

    def _guarded(self, act: Callable[[], None]) -> None:
        """The border of the loop: an exception fails the engine, and the loop goes on answering."""
        try:
            act()
        except Exception as error:
            logger.exception("the loop of %s failed", self._thread.name)
            self._end(f"{type(error).__name__}: {error}")

    def _take(self, item: Command | Report) -> None:
        if isinstance(item, StageFailed):
            if not self._failed:
                logger.error("%s: stage %d failed: %s", self._thread.name, item.stage, item.reason)
            self._end(f"stage {item.stage}: {item.reason}")
        elif not (self._failed and isinstance(item, Report)):
            self._handle(item)

    def _end(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            self._fail(reason)
