"""What only the GPU's driver knows of a stage, looked up beside the thread that answers heartbeats.

A call into the driver waits for whoever holds its lock, such as an allocator that gives memory back behind a long step.
Heartbeats must not: they tell what was found last, and have the next look begun.
"""

import threading
from dataclasses import dataclass

from graftline.engine.busy_clock import BusyClock
from graftline.engine.process_memory import device_bytes


@dataclass(frozen=True, slots=True)
class Figures:
    """As of the last look.

    Attributes:
        busy_s: seconds that the stage computed.
        is_pending: the GPU was not done with what was launched.
        device_bytes: GPU memory that the process holds.
    """

    busy_s: float = 0.0
    is_pending: bool = False
    device_bytes: int = 0


class DeviceFigures:
    """Looks from a thread of its own; see the module."""

    def __init__(self, busy: BusyClock, name: str) -> None:
        self._busy = busy
        self._last = Figures()
        self._wanted = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def take(self) -> Figures:
        """The last figures, at once; newer ones are looked up from now on."""
        self._wanted.set()
        return self._last

    def close(self) -> None:
        """Ends the thread, unless it hangs in the driver."""
        self._closed = True
        self._wanted.set()

    def _run(self) -> None:
        while self._wanted.wait() and not self._closed:
            self._wanted.clear()
            self._last = Figures(self._busy.seconds, self._busy.is_pending, device_bytes())
