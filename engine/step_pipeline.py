"""Steps under way in a pipeline: how many there are, and whether the oldest one still gets on."""

from graftline.engine.pipeline import Pipeline
from graftline.engine.plan import Control, StepPlan
from graftline.engine.step_watch import StepWatch
from graftline.errors import InternalError


class StepPipeline:
    """A pipeline that remembers which steps it has not answered."""

    def __init__(self, pipeline: Pipeline, watch: StepWatch) -> None:
        self._pipeline = pipeline
        self._watch = watch
        self._under_way: set[int] = set()

    @property
    def num_in_flight(self) -> int:
        """Steps submitted and not finished."""
        return len(self._under_way)

    def submit(self, plan: StepPlan) -> None:
        """Starts a step."""
        self._under_way.add(plan.step)
        self._pipeline.submit(plan)

    def finished(self, step: int) -> None:
        """The step's result arrived."""
        self._under_way.remove(step)

    def tell(self, control: Control, stages: list[int] | None = None) -> None:
        """Sends a control message; see `Pipeline.tell`."""
        self._pipeline.tell(control, stages)

    def beat(self) -> None:
        """Heartbeat of every stage, and a look at the steps under way.

        Raises:
            InternalError: a step will not end.
        """
        self._pipeline.beat()
        trouble = self._watch.look(min(self._under_way, default=None), self._pipeline.stage_load())
        if trouble is not None:
            raise InternalError(trouble)
