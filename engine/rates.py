"""Rates over the last seconds and totals since start, for load reports and metrics."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


class RecentRate:
    """How much came in a second, over a sliding window."""

    def __init__(self, window_s: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_s = window_s
        self._clock = clock
        self._events: deque[tuple[float, float]] = deque()
        self._sum = 0.0

    def add(self, amount: float) -> None:
        """Counts an amount now."""
        self._events.append((self._clock(), amount))
        self._sum += amount
        self._forget()

    def per_second(self) -> float:
        """Amount a second over the window."""
        self._forget()
        return self._sum / self._window_s

    def total(self) -> float:
        """Amount within the window."""
        self._forget()
        return self._sum

    def _forget(self) -> None:
        oldest = self._clock() - self._window_s
        while self._events and self._events[0][0] < oldest:
            self._sum -= self._events.popleft()[1]
        if not self._events:
            self._sum = 0.0


@dataclass(slots=True)
class DecodeTotals:
    """Counters of a decode engine since start."""

    rounds: int = 0
    request_rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    first_rounds: int = 0
    first_round_drafted: int = 0
    first_round_accepted: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    failures: int = 0


@dataclass(slots=True)
class PrefillTotals:
    """Counters of a prefill engine since start."""

    steps: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    sent_bytes: int = 0
    send_s: float = 0.0
    sends: int = 0
    failed_sends: int = 0
    failures: int = 0
