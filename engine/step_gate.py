"""Tells transfer threads when a step's KV is in memory."""

import threading
import time
from collections import deque

import torch

from graftline.engine.device_event import has_passed, mark_stream

# Marks of steps that nobody has waited for yet; who asks for an older one waits for the oldest that is left.
_MAX_MARKS = 64
_FIRST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 2e-4  # what follows is what a request waits for behind its first token


class StepGate:
    """Counts computed steps of one stage, for the target's layers and for the drafter's separately.

    Args:
        device: where the steps run. On a GPU a mark is an event in the stream of the thread that marks, behind all that
            the step has put there, and the step is done when the GPU has got that far.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device or torch.device("cpu")
        self._changed = threading.Condition()
        self._done = {False: -1, True: -1}
        self._marks: dict[bool, deque[tuple[int, torch.cuda.Event]]] = {
            drafter: deque(maxlen=_MAX_MARKS) for drafter in (False, True)
        }
        self._closed = False

    def mark(self, step: int, *, drafter: bool) -> None:
        """Everything that steps up to this one write (by the target's layers, or by the drafter) is there, or will be
        once the GPU has done what the calling thread has put on its stream.
        """
        event = mark_stream(self._device) if self._device.type == "cuda" else None
        with self._changed:
            if event is None:
                self._done[drafter] = max(self._done[drafter], step)
            else:
                self._marks[drafter].append((step, event))
            self._changed.notify_all()

    def wait(self, step: int, *, drafter: bool, timeout_s: float) -> bool:
        """Whether the step's data are there, after waiting at most `timeout_s`."""
        if self._done[drafter] >= step:  # it never falls
            return True
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._done[drafter] >= step or self._mark_of(step, drafter) is not None,
                timeout_s,
            )
            mark = self._mark_of(step, drafter)
            if self._done[drafter] >= step or mark is None:
                return self._done[drafter] >= step
        return self._passed(*mark, drafter, deadline)

    def close(self) -> None:
        """Wakes every waiter: the stage ends."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _mark_of(self, step: int, drafter: bool) -> tuple[int, torch.cuda.Event] | None:
        return next((mark for mark in self._marks[drafter] if mark[0] >= step), None)

    def _passed(self, step: int, event: torch.cuda.Event, drafter: bool, deadline: float) -> bool:
        """Asks the GPU again and again: a wait of its own would know no deadline."""
        pause_s = _FIRST_PAUSE_S
        while not has_passed(event):
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        with self._changed:
            self._done[drafter] = max(self._done[drafter], step)
        return True
