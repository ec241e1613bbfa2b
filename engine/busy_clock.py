"""How long a stage computes: the thread's time on CPU, the GPU's own on CUDA, where the thread only launches."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from graftline.engine.device_event import has_passed, mark_stream


class BusyClock:
    """Adds up the times of steps.

    Args:
        device: of the stage; the work of a step is what is put on the current stream of that device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._running: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._lock = threading.Lock()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Counts what is done, or launched, while the block is open."""
        if self._device.type != "cuda":
            started = time.monotonic()
            yield
            self._seconds += time.monotonic() - started
            return
        begin = mark_stream(self._device, timed=True)
        yield
        end = mark_stream(self._device, timed=True)
        self._collect()
        with self._lock:
            self._running.append((begin, end))

    @property
    def seconds(self) -> float:
        """Of all steps whose work is done; from any thread."""
        self._collect()
        return self._seconds

    @property
    def is_pending(self) -> bool:
        """The GPU is not done with what was launched; from any thread."""
        self._collect()
        return bool(self._running)

    def _collect(self) -> None:
        with self._lock:
            while self._running and has_passed(self._running[0][1]):
                begin, end = self._running.popleft()
                self._seconds += begin.elapsed_time(end) / 1e3
