"""A clock that stands still while this process does: silence of others can only be measured while awake."""

import time
from collections.abc import Callable

# A machine that is crowded, not stopped, turns a loop at least so often.
LONGEST_TURN_S = 2.0


class AwakeClock:
    """Seconds in which a loop turned. A standstill of the whole process (SIGSTOP, a suspended machine) counts as one
    turn of at most `LONGEST_TURN_S`, so that peers who could not be heard meanwhile do not look silent afterwards.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_turn_s = clock()
        self.now_s = 0.0

    def tick(self) -> None:
        """The loop turned."""
        turned_s = self._clock()
        self.now_s += min(turned_s - self._last_turn_s, LONGEST_TURN_S)
        self._last_turn_s = turned_s
