"""Circuit breaker of one worker: after several failures in a row it gets no requests for a while, then one."""

from collections.abc import Callable


class Breaker:
    """Closed: requests pass. Open: none do. Half open: one passes; its outcome decides.

    Args:
        failures: consecutive failures that open it.
        open_s: first pause in seconds; each failed probe doubles it, up to `open_max_s`.
        clock: seconds, monotonic.
    """

    def __init__(self, failures: int, open_s: float, open_max_s: float, clock: Callable[[], float]) -> None:
        self._limit = failures
        self._first_open_s = open_s
        self._max_open_s = open_max_s
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """Forgets everything: the worker is a new one."""
        self._num_failures = 0
        self._last_cause: object = None
        self._open_s = self._first_open_s
        self._open_until: float | None = None
        self._probing = False

    @property
    def is_open(self) -> bool:
        """True while no request may pass."""
        return self._open_until is not None and (self._probing or self._clock() < self._open_until)

    @property
    def retry_in_s(self) -> float:
        """Seconds until a probe may pass; 0 when closed."""
        return 0.0 if self._open_until is None else max(0.0, self._open_until - self._clock())

    def start(self) -> bool:
        """A request goes to the worker. In the half-open state it is the probe and holds others off; whether it is."""
        if self._open_until is not None:
            self._probing = True
        return self._probing

    def succeeded(self) -> None:
        """A request did well."""
        self.reset()

    def failed(self, cause: object = None) -> None:
        """A request failed and it was this worker's doing.

        Args:
            cause: what happened; many requests that fail for the very same one are one failure.
        """
        if cause is not None and cause is self._last_cause:
            return
        self._last_cause = cause
        self._num_failures += 1
        if self._open_until is not None:
            if not self._probing:
                return
            self._open_s = min(2 * self._open_s, self._max_open_s)
        elif self._num_failures < self._limit:
            return
        self._probing = False
        self._open_until = self._clock() + self._open_s

    def undecided(self) -> None:
        """The probe ended without saying anything about the worker (cancelled, refused for its content)."""
        self._probing = False
