"""The thread that owns a scheduler: everything reaches it through one inbox, in order.

Commands of services and reports of stages are handled alike; between two batches of them the owner
schedules. The thread also keeps the stages' heartbeat.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from graftline.engine.plan import Report, StageFailed

logger = logging.getLogger(__name__)

Command = TypeVar("Command")

MAX_BATCH = 256


class EngineThread(Generic[Command]):
    """Runs `handle` on every item that was put, `schedule` whenever the inbox ran dry, `beat` at intervals.

    Args:
        handle: takes one command or report; its exceptions fail the engine.
        fail: told once why the engine cannot go on; the thread then only answers commands through `handle`.
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
            item = self._next(next_beat - time.monotonic())
            try:
                for _ in range(MAX_BATCH):
                    if item is _NOTHING:
                        break
                    if item is None:
                        return
                    self._take(item)  # type: ignore[arg-type]  # narrowed by the two tests above
                    item = self._next(0.0)
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + self._beat_s
                    self._beat()
                if not self._failed:
                    self._schedule()
            except Exception as error:
                logger.exception("the engine loop failed")
                self._end(f"{type(error).__name__}: {error}")

    def _take(self, item: Command | Report) -> None:
        if isinstance(item, StageFailed):
            self._end(f"stage {item.stage}: {item.reason}")
        else:
            self._handle(item)

    def _end(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            self._fail(reason)

    def _next(self, wait_s: float) -> "Command | Report | _Nothing | None":
        try:
            return self._inbox.get(timeout=wait_s) if wait_s > 0 else self._inbox.get_nowait()
        except queue.Empty:
            return _NOTHING


class _Nothing:
    """The inbox was empty."""


_NOTHING = _Nothing()
