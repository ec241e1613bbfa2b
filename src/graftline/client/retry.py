"""When a request is tried again: only when nothing of it was answered yet and the router was out of reach."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tenacity

from graftline.errors import CancelledRequestError, PeerUnavailableError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Bounds of retrying.

    Attributes:
        attempts: tries in all.
        first_pause_s: doubles with every further one, with jitter.
    """

    attempts: int = 3
    first_pause_s: float = 0.1
    max_pause_s: float = 2.0

    def settings(self) -> dict[str, Any]:
        """Arguments of tenacity's retrying classes."""
        return {
            "stop": tenacity.stop_after_attempt(self.attempts),
            "wait": tenacity.wait_random_exponential(multiplier=self.first_pause_s, max=self.max_pause_s),
            "retry": tenacity.retry_if_exception_type(PeerUnavailableError),
            "reraise": True,
        }


class Deadline:
    """Seconds that are left of a request, its retries included."""

    def __init__(self, timeout_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at = None if timeout_s is None else clock() + timeout_s

    def remaining_s(self) -> float | None:
        """What is left; None for no deadline.

        Raises:
            CancelledRequestError: nothing is.
        """
        if self._at is None:
            return None
        left_s = self._at - self._clock()
        if left_s <= 0:
            raise CancelledRequestError("the deadline passed")
        return left_s
