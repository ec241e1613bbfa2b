"""How busy stages were within given windows, from the signs of life that they gave meanwhile.

A sign of life tells steps as of now, but seconds of compute as of the heartbeat before: only then a look at the device
was begun (see `engine/device_figures.py`). So two signs in a row make one sample.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from graftline.engine.plan import StageAlive

_POLL_S = 0.01
_LAST_SIGNS_S = 2.0
_LEAST_SPAN_S = 0.15


@dataclass(frozen=True, slots=True)
class Sign:
    """A sign of life and the second, of the monotonic clock, at which it was there; at most `_POLL_S` late."""

    second: float
    alive: StageAlive


@dataclass(frozen=True, slots=True)
class StageUse:
    """A stage within some windows.

    Attributes:
        seconds: between the first and the last sample of every window, added up.
        busy_s: of these, how long it computed.
        steps: that it began meanwhile.
    """

    stage: int
    seconds: float
    busy_s: float
    steps: int

    @property
    def busy(self) -> float:
        """Share of the time that it computed."""
        return self.busy_s / self.seconds

    @property
    def s_a_step(self) -> float | None:
        """Seconds of compute a step; None without steps."""
        return self.busy_s / self.steps if self.steps else None


class SignLog:
    """Keeps every sign of life of some stages, from now until `finish`.

    Args:
        look: gives the last sign of life of every stage.
    """

    def __init__(self, look: Callable[[], Sequence[StageAlive]]) -> None:
        self._look = look
        self._signs: list[Sign] = []
        self._last: dict[int, int] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sign-log", daemon=True)
        self._thread.start()

    @property
    def num_signs(self) -> int:
        """Signs kept so far."""
        return len(self._signs)

    def finish(self) -> list[Sign]:
        """What was kept, with two more signs of every stage: they tell of the time until now."""
        wanted = {stage: sequence + 2 for stage, sequence in self._last.copy().items()}
        deadline = time.monotonic() + _LAST_SIGNS_S
        while time.monotonic() < deadline and any(self._last[stage] < sequence for stage, sequence in wanted.items()):
            time.sleep(_POLL_S)
        self._ended.set()
        self._thread.join()
        return self._signs

    def _run(self) -> None:
        while not self._ended.wait(_POLL_S):
            now = time.monotonic()
            for alive in self._look():
                if self._last.get(alive.stage) != alive.sequence:
                    self._last[alive.stage] = alive.sequence
                    self._signs.append(Sign(now, alive))


def stage_uses(signs: Sequence[Sign], windows: Sequence[tuple[float, float]]) -> list[StageUse]:
    """Of every stage that has samples from far enough apart within a window; by stage.

    Args:
        windows: (begin, end) in seconds of the monotonic clock.
    """
    by_stage: defaultdict[int, list[Sign]] = defaultdict(list)
    for sign in signs:
        by_stage[sign.alive.stage].append(sign)
    uses = []
    for stage, own in sorted(by_stage.items()):
        spans = [span for window in windows if (span := _span(list(_samples(own)), *window)) is not None]
        if spans:
            seconds, busy_s, steps = (sum(figures) for figures in zip(*spans, strict=True))
            uses.append(StageUse(stage, seconds, busy_s, int(steps)))
    return uses


def _samples(signs: Sequence[Sign]) -> Iterator[tuple[float, float, int]]:
    """(second, seconds of compute until then, steps until then) of one stage's signs."""
    for sign, following in pairwise(signs):
        if following.alive.sequence == sign.alive.sequence + 1:
            yield sign.second, following.alive.busy_s, sign.alive.steps


def _span(samples: Sequence[tuple[float, float, int]], begin_s: float, end_s: float) -> tuple[float, float, int] | None:
    """What passed between the first and the last sample within a window: seconds, seconds of compute, steps.

    None where they are so close that their own lateness would tell.
    """
    inside = [sample for sample in samples if begin_s <= sample[0] <= end_s]
    if not inside or inside[-1][0] - inside[0][0] < _LEAST_SPAN_S:
        return None
    first, last = inside[0], inside[-1]
    return last[0] - first[0], last[1] - first[1], last[2] - first[2]
