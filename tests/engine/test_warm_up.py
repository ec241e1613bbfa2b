"""Warm-up: what is run, that a prefill never verifies (CASES.md S40), and that nothing of it stays."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from tiny_world import TinyWorld, prompt
from torch import Tensor

from graftline.engine.config import EngineConfig, Role, StageMode
from graftline.engine.models.checkpoint import read_model_config
from graftline.engine.plan import PageChange, Segment, SlotOpening, StepPlan, StepResult, StepTokens
from graftline.engine.stage_builder import BuiltStage, build_stage, payload_columns
from graftline.engine.tree_shape import TreeShape
from graftline.engine.warm_up import warm_up, warm_up_steps

TREE = TreeShape(4, 2, 8)


def config(world: TinyWorld, role: Role, split: tuple[int, ...] = (4,)) -> EngineConfig:
    return EngineConfig(
        model=str(world.plain.path),
        role=role,
        draft_head=str(world.eagle3),
        dtype="float32",
        layer_split=split,
        stage_mode=StageMode.THREADS,
        page_size=4,
        num_pages=40,
        max_running=3,
        chunk_tokens=24,
        tree=TREE,
    )


class Worker:
    """The stages of a worker, run one after the other."""

    def __init__(self, settings: EngineConfig) -> None:
        self.config = settings
        self.model = read_model_config(Path(settings.model))
        self.stages = [build_stage(settings, stage) for stage in range(settings.num_stages)]

    def warm_up(self) -> int:
        return sum(
            warm_up(
                built.stage,
                built.pools,
                self.config,
                self.model.context_length,
                payload_columns(self.config, self.model, index),
            )
            for index, built in enumerate(self.stages)
        )

    def answer(self, token_ids: Sequence[int]) -> StepResult:
        """A prompt as one chunk, with a tree behind it."""
        results: list[StepResult] = []

        def take(message: StepTokens | StepResult) -> None:
            if isinstance(message, StepResult):
                results.append(message)

        segment = Segment(1, 0, list(token_ids), None, len(token_ids) - 1, -1, [], True)
        opening = SlotOpening(1, 0.0, 0, 1.0, 0.0, 0, {}, [], 0, -1)
        plan = StepPlan(0, 0, [opening], [PageChange(1, 0, list(range(20, 30)))], [segment], False)
        payload: Tensor | None = None
        with torch.inference_mode():
            for built in self.stages:
                payload = built.stage.execute(plan, payload, take)
        return results[0]


def is_untouched(built: BuiltStage) -> bool:
    pools = [pool for pool in (built.pools.target, built.pools.draft) if pool is not None]
    return all(not pool.data.any() for pool in pools) and not built.stage._pages


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("split", [(4,), (1, 3)])
def test_stages_answer_after_a_warm_up_as_without_one(world: TinyWorld, role: Role, split: tuple[int, ...]) -> None:
    cold, warm = Worker(config(world, role, split)), Worker(config(world, role, split))
    assert warm.warm_up() > 0
    assert all(is_untouched(built) for built in warm.stages)
    assert not any(
        built.gate.wait(0, drafter=drafter, timeout_s=0) for built in warm.stages for drafter in (False, True)
    )
    token_ids = prompt(19)
    expected = cold.answer(token_ids)
    assert warm.answer(token_ids) == expected
    assert expected.outcomes[0].tokens[0].token_id == world.plain.answer(token_ids, 1)[0]


def test_rounds_of_fixed_shape_start_clean_too(world: TinyWorld) -> None:
    settings = msgspec.structs.replace(config(world, Role.DECODE), device_rounds=True)
    warm = Worker(settings)
    warm.warm_up()
    assert all(is_untouched(built) for built in warm.stages)


def test_a_prefill_runs_chunks_and_never_verifies(world: TinyWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(config(world, Role.PREFILL))
    plans: list[StepPlan] = []
    execute = worker.stages[0].stage.execute
    monkeypatch.setattr(
        worker.stages[0].stage,
        "execute",
        lambda plan, payload, emit: (plans.append(plan), execute(plan, payload, emit))[1],
    )
    worker.warm_up()
    segments = [segment for plan in plans for segment in plan.segments]
    assert all(segment.parents is None for segment in segments)
    assert {(len(plan.segments), plan.segments[0].num_rows) for plan in plans} >= {
        (1, 24),
        (1, 1),
        (1, 8),
        (2, 12),
        (3, 8),
    }
    assert any(segment.grow for segment in segments)
    assert any(segment.start > 0 for segment in segments)
    assert any(segment.next_token == 0 for segment in segments)  # a middle chunk
    assert {plan.openings[0].temperature for plan in plans} == {0.0, 1.0}
    assert all(plan.round_size == 0 for plan in plans)


def test_a_prefill_that_ships_roots_alone_grows_nothing(world: TinyWorld) -> None:
    settings = msgspec.structs.replace(config(world, Role.PREFILL), real_trees=False)
    worker = Worker(settings)
    assert worker.stages[0].pools.draft is not None
    worker.warm_up()
    assert is_untouched(worker.stages[0])


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(("num_pages", "max_running", "chunk_tokens"), [(1, 4, 100), (2, 5, 3), (100, 64, 1)])
def test_steps_stay_within_pools_and_context(role: Role, num_pages: int, max_running: int, chunk_tokens: int) -> None:
    settings = EngineConfig(
        model="unread",
        role=role,
        draft_head="unread",
        layer_split=(1,),
        page_size=4,
        num_pages=num_pages,
        max_running=max_running,
        chunk_tokens=chunk_tokens,
        tree=TREE,
    )
    steps = list(warm_up_steps(settings, context_length=32))
    assert steps
    for step in steps:
        assert step.segments * -(-(step.start + step.rows) // 4) <= num_pages
        assert step.start + step.rows <= 32
        assert step.rows > 0
        assert role is Role.DECODE or step.segments * step.rows <= chunk_tokens
