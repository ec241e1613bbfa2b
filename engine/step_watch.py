"""Judges from the stages' signs of life whether steps under way still get on.

Time is counted in looks, one a heartbeat of the loop that asks: a standstill of this process is one look long. A long
step is no hang while its stages show that they work on it.
"""

from collections.abc import Sequence

from graftline.engine.plan import StageAlive

# A computing thread that used this share of a look's time got on.
_WORKED_SHARE = 0.05
# A step that keeps its threads busy and never ends is hung too, after so many times the patience with an idle one.
_BUSY_PATIENCE = 10


class StepWatch:
    """Looks at the oldest step under way.

    Args:
        look_s: time between two looks.
        lost_after_s: a step that no stage is at work on for so long was lost between two of them.
        hung_after_s: a step is hung when for so long no stage finished one and no computing thread used the processor.
    """

    def __init__(self, look_s: float, lost_after_s: float, hung_after_s: float) -> None:
        self._look_s = look_s
        self._lost_after_s = lost_after_s
        self._hung_after_s = hung_after_s
        self._oldest: int | None = None
        self._seen: dict[int, StageAlive] = {}
        self._looks = 0
        self._still = 0
        self._idle = 0

    def look(self, oldest: int | None, stages: Sequence[StageAlive]) -> str | None:
        """Why the oldest step will not end, or None.

        Args:
            oldest: number of the oldest step under way, None without any.
            stages: the last sign of life of every stage.
        """
        seen, self._seen = self._seen, {alive.stage: alive for alive in stages}
        if oldest is None or oldest != self._oldest:
            self._oldest, self._looks, self._still, self._idle = oldest, 0, 0, 0
            return None
        is_fresh = bool(stages) and all(
            alive.stage in seen and alive.sequence > seen[alive.stage].sequence for alive in stages
        )
        has_moved = any(alive.stage in seen and alive.steps > seen[alive.stage].steps for alive in stages)
        has_worked = any(
            alive.stage in seen and alive.cpu_s - seen[alive.stage].cpu_s > _WORKED_SHARE * self._look_s
            for alive in stages
        )
        self._looks += 1
        self._still = 0 if has_moved or has_worked else self._still + 1
        if has_moved or any(alive.working for alive in stages):
            self._idle = 0
        elif is_fresh:
            self._idle += 1
        return self._verdict()

    def _verdict(self) -> str | None:
        if self._idle * self._look_s > self._lost_after_s:
            return f"step {self._oldest} was lost: no stage is at work on it"
        if self._still * self._look_s > self._hung_after_s:
            return f"step {self._oldest} makes no progress for {self._still * self._look_s:.1f} s"
        if self._looks * self._look_s > _BUSY_PATIENCE * self._hung_after_s:
            return f"step {self._oldest} is under way for {self._looks * self._look_s:.0f} s"
        return None
