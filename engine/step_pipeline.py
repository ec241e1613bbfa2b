"""Steps under way in a pipeline: how many there are, and whether one takes suspiciously long."""

from graftline.engine.awake_clock import AwakeClock
from graftline.engine.pipeline import Pipeline
from graftline.engine.plan import Control, StepPlan
from graftline.errors import InternalError


class StepPipeline:
    """A pipeline that remembers which steps it has not answered."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._started: dict[int, float] = {}
        self._awake = AwakeClock()

    @property
    def num_in_flight(self) -> int:
        """Steps submitted and not finished."""
        return len(self._started)

    def submit(self, plan: StepPlan) -> None:
        """Starts a step."""
        self._started[plan.step] = self._awake.now_s
        self._pipeline.submit(plan)

    def finished(self, step: int) -> None:
        """The step's result arrived."""
        del self._started[step]

    def tell(self, control: Control, stages: list[int] | None = None) -> None:
        """Sends a control message; see `Pipeline.tell`."""
        self._pipeline.tell(control, stages)

    def beat(self, hung_after_s: float) -> None:
        """Heartbeat of every stage.

        Raises:
            InternalError: the oldest step has been under way for longer than `hung_after_s`.
        """
        self._pipeline.beat()
        self._awake.tick()
        oldest = min(self._started.values(), default=None)
        if oldest is not None and self._awake.now_s - oldest > hung_after_s:
            raise InternalError(f"a step is under way for {self._awake.now_s - oldest:.1f} s")
