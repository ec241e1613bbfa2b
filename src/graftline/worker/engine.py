"""What a worker's server needs of an engine besides its service face; tests bring fakes."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from graftline.engine.plan import StageAlive
from graftline.engine.service_api import EngineLoad
from graftline.engine.worker_engine import WorkerFacts

S_co = TypeVar("S_co", covariant=True)


class RunningEngine(Protocol[S_co]):
    """A started engine; `graftline.engine.worker_engine.WorkerEngine` is the real one."""

    @property
    def facts(self) -> WorkerFacts:
        """What the worker says about itself."""

    @property
    def scheduler(self) -> S_co:
        """What the service talks to."""

    @property
    def layouts(self) -> Sequence[bytes]:
        """One serialized `StageLayout` a stage."""

    def load(self) -> EngineLoad:
        """A snapshot of queues and pools."""

    def stage_load(self) -> Sequence[StageAlive]:
        """The last sign of life of every stage."""

    def stop(self, timeout_s: float) -> None:
        """Ends the loop and every stage; blocks."""
