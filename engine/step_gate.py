"""Tells transfer threads when a step's KV is in memory."""

import threading


class StepGate:
    """Counts computed steps of one stage, for the target's layers and for the drafter's separately."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._done = {False: -1, True: -1}
        self._closed = False

    def mark(self, step: int, *, drafter: bool) -> None:
        """Everything that steps up to this one write (by the target's layers, or by the drafter) is there."""
        with self._changed:
            self._done[drafter] = max(self._done[drafter], step)
            self._changed.notify_all()

    def wait(self, step: int, *, drafter: bool, timeout_s: float) -> bool:
        """Whether the step's data are there, after waiting at most `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._done[drafter] >= step, timeout_s)
            return self._done[drafter] >= step

    def close(self) -> None:
        """Wakes every waiter: the stage ends."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
