"""Splits by times: stages are really built and run, and what they are timed with is their role's work."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from msgspec import structs
from tiny_world import TinyWorld

from graftline.bench.gpu_models import write_dummy_model
from graftline.bench.multi_gpu_configs import TINY
from graftline.engine import split_measure
from graftline.engine.config import MTP_HEAD, EngineConfig, Role
from graftline.engine.models.checkpoint import read_model_config
from graftline.engine.models.qwen3_next_random import write_tiny_qwen3_next
from graftline.engine.split_measure import StageTimes, measure_stages, measured_split
from graftline.engine.stage_builder import BuiltStage, build_stage
from graftline.engine.tree_shape import NO_SPECULATION, TreeShape


def config(model: Path, role: Role, split: tuple[int, ...], head: str) -> EngineConfig:
    return EngineConfig(
        model=str(model),
        role=role,
        draft_head=head,
        dtype="float32",
        layer_split=split,
        page_size=4,
        max_running=2,
        chunk_tokens=32,
        tree=TreeShape(2, 1, 3),
    )


@pytest.mark.parametrize("role", Role)
def test_stages_of_either_role_are_timed(world: TinyWorld, role: Role) -> None:
    settings = config(world.plain.path, role, (2, 2), str(world.eagle))
    times = measure_stages(settings, read_model_config(world.plain.path))
    assert times.layer_s > 0
    assert times.last_s >= 0
    split = measured_split(settings)
    assert sum(split) == 4
    assert len(split) == 2


@pytest.mark.parametrize(
    ("role", "max_running", "split", "requests"),
    [
        (Role.PREFILL, 32, (2, 2), 1),
        (Role.DECODE, 1, (2, 2), 1),
        (Role.DECODE, 9, (2, 2), 5),
        (Role.DECODE, 9, (1, 1, 2), 3),
        (Role.DECODE, 64, (2, 2), 16),
    ],
)
def test_steps_are_those_of_a_full_microbatch(
    world: TinyWorld, role: Role, max_running: int, split: tuple[int, ...], requests: int
) -> None:
    settings = structs.replace(config(world.plain.path, role, split, str(world.eagle)), max_running=max_running)
    small = split_measure._small(settings, (2, 2))
    plan = split_measure._plan(small, read_model_config(world.plain.path))
    assert len(plan.segments) == requests
    assert small.num_pages * small.page_size >= sum(one.start + one.num_rows for one in plan.segments)


def test_trees_are_cut_as_rounds_cut_them(world: TinyWorld) -> None:
    whole = config(world.plain.path, Role.DECODE, (2, 2), str(world.eagle))
    rounds = {"tree": TreeShape(2, 2, 6), "max_running": 32, "device_rounds": True, "max_verify_rows": 64}
    settings = structs.replace(whole, **rounds)
    plan = split_measure._plan(split_measure._small(settings, (2, 2)), read_model_config(world.plain.path))
    assert [one.num_rows for one in plan.segments] == [4] * 16
    assert plan.round_size == 16


def test_stages_are_timed_with_their_own_gpu_current(world: TinyWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first stage on another GPU than the first: kernels go to the thread's current one."""
    entered: list[torch.device] = []

    class Stream:
        def __init__(self, device: torch.device, *, urgent: bool) -> None:
            self._device = device

        @contextmanager
        def entered(self) -> Iterator[None]:
            entered.append(self._device)
            yield
            entered.pop()

    def build(small: EngineConfig, index: int, **options: bool) -> BuiltStage:
        assert entered == [torch.device(small.stage_device(index))]
        return build_stage(small, index, **options)

    monkeypatch.setattr(split_measure, "StageStream", Stream)
    monkeypatch.setattr(split_measure, "build_stage", build)
    assert sum(measured_split(config(world.plain.path, Role.DECODE, (2, 2), str(world.eagle)))) == 4


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_stages_on_other_gpus_than_the_first_are_timed(world: TinyWorld) -> None:
    settings = structs.replace(
        config(world.plain.path, Role.DECODE, (2, 2), str(world.eagle)),
        dtype="bfloat16",
        devices=("cuda:1", "cuda:0"),
        device_rounds=True,
    )
    assert sum(measured_split(settings)) == 4


@pytest.mark.parametrize(
    ("fixed_s", "long_s", "layer_s"),
    [
        (6.0, 8 * 1.0, 1.0),  # what a stage does besides is no layer's
        (0.0, 8 * 1.0, 1.0),
        (6.0, 3.0, 2.5),  # a stage of twice as many layers that is faster tells nothing
    ],
)
def test_what_a_stage_does_besides_is_not_counted_as_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fixed_s: float, long_s: float, layer_s: float
) -> None:
    model = write_dummy_model(tmp_path / "model", {**TINY, "num_hidden_layers": 20})
    timed: dict[tuple[int, int], float] = {(0, 4): fixed_s + 4.0, (1, 4): fixed_s + 9.0, (0, 8): fixed_s + long_s}

    def time_stage(small: EngineConfig, index: int, *_: object) -> float:
        return timed[index, small.layer_split[index]]

    monkeypatch.setattr(split_measure, "_time_stage", time_stage)
    settings = structs.replace(config(model, Role.DECODE, (10, 10), ""), draft_head=None, tree=NO_SPECULATION)
    times = measure_stages(settings, read_model_config(model))
    assert times == StageTimes(layer_s, 5.0)


def test_layers_of_every_kind_are_timed(tmp_path: Path) -> None:
    model = write_tiny_qwen3_next(tmp_path / "model")
    times = measure_stages(config(model, Role.DECODE, (4, 4), MTP_HEAD), read_model_config(model))
    assert times.layer_s > 0


@pytest.mark.parametrize(("last_s", "split"), [(0.0, (2, 2)), (2.0, (3, 1)), (9.0, (3, 1))])
def test_the_slower_head_and_drafter_the_fewer_layers_beside_them(
    world: TinyWorld, monkeypatch: pytest.MonkeyPatch, last_s: float, split: tuple[int, ...]
) -> None:
    monkeypatch.setattr(split_measure, "measure_stages", lambda *_: StageTimes(1.0, last_s))
    assert measured_split(config(world.plain.path, Role.DECODE, (2, 2), str(world.eagle))) == split
