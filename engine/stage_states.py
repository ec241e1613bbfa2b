"""Recurrent state of a stage at work: what a plan does to it before, while and after its rows run."""

from collections.abc import Sequence

from graftline.engine.plan import Segment, StepPlan
from graftline.engine.state_pool import StatePool
from graftline.engine.verify_state import AcceptedPath, StepStates, VerifyState
from graftline.kernels.attention_batch import AttentionBatch
from graftline.kernels.state_rows import build_state_rows


class StageStates:
    """The states of one stage with linear layers.

    Args:
        verify: memory for tree nodes; None for a prefill, and where trees have no nodes but roots.
    """

    def __init__(self, pool: StatePool, verify: VerifyState | None) -> None:
        self.pool = pool
        self.verify = verify

    def begin(self, plan: StepPlan) -> None:
        """Clears the slots whose prompts start with this plan, and commits the nodes accepted in the round before.

        A slot opened with a tree is not cleared: its state came with the handoff.
        """
        opened = {opening.slot for opening in plan.openings}
        first_chunks = [segment for segment in plan.segments if segment.slot in opened and segment.parents is None]
        assert all(segment.start == 0 for segment in first_chunks), "recurrent state without its prefix"
        self.pool.clear([segment.slot for segment in first_chunks])
        if self.verify is not None:
            accepted = [AcceptedPath(segment.slot, segment.accepted) for segment in plan.segments if segment.accepted]
            self.verify.commit(self.pool, accepted)

    def step(self, batch: AttentionBatch, segments: Sequence[Segment]) -> StepStates:
        """The states that a plan's rows continue."""
        rows = build_state_rows(
            batch,
            [segment.num_rows for segment in segments],
            [segment.slot for segment in segments],
            [segment.parents is not None for segment in segments],
        )
        return StepStates(self.pool, self.verify, rows)
