"""Orders rounds of one microbatch whose stages are threads, whatever streams they have: the first stage of the next one
may start once the last stage of the one before has been launched, and runs on the device behind it.
"""

import threading

import torch

from graftline.engine.device_event import mark_stream
from graftline.errors import InternalError


class RoundOrder:
    """The newest round that the last stage has launched, by microbatch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._changed = threading.Condition()
        self._launched: dict[int, tuple[int, torch.cuda.Event | None]] = {}

    def launched(self, microbatch: int, step: int) -> None:
        """The last stage has launched a round on the current stream."""
        event = mark_stream(self._device) if self._device.type == "cuda" else None
        with self._changed:
            self._launched[microbatch] = step, event
            self._changed.notify_all()

    def follow(self, microbatch: int, step: int, timeout_s: float) -> None:
        """Makes the current stream wait for a round, once it has been launched.

        Raises:
            InternalError: it was not within `timeout_s`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._launched.get(microbatch, (-1, None))[0] >= step, timeout_s):
                raise InternalError(f"the last stage did not launch step {step} within {timeout_s:g} s")
            event = self._launched[microbatch][1]
        if event is not None:
            event.wait()
