"""Where stages go and how much of a GPU they take: on one host, for one worker and for a whole cluster."""

from dataclasses import replace

import msgspec
import pytest
from tiny_world import TinyWorld

from graftline.engine.config import EngineConfig, Role
from graftline.engine.draft_choice import chosen_head
from graftline.engine.memory_plan import plan_memory, taken_bytes
from graftline.engine.models.checkpoint import read_model_config
from graftline.errors import InvalidRequestError
from graftline.launcher import ClusterSpec, worker_arguments
from graftline.worker.options import EngineOptions, resolve_engine_config
from graftline.worker.placement import (
    PROCESS_BYTES,
    DeviceMemory,
    Host,
    placed_workers,
    shared_fractions,
    stage_budgets,
    stage_devices,
)

GIB = 1 << 30


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    return TinyWorld(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize(
    ("text", "stages", "gpus", "wanted"),
    [
        ("cpu", 2, 4, ("cpu",)),
        ("auto", 2, 0, ("cpu",)),
        ("auto", 2, 4, ("cuda:0", "cuda:1")),
        ("cuda", 3, 2, ("cuda:0", "cuda:1", "cuda:0")),
        ("cuda:1", 2, 2, ("cuda:1", "cuda:1")),
        ("cuda:1,cuda:0", 2, 2, ("cuda:1", "cuda:0")),
    ],
)
def test_stages_get_devices(text: str, stages: int, gpus: int, wanted: tuple[str, ...]) -> None:
    assert stage_devices(text, stages, lambda: gpus) == wanted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cuda:0,cuda:1,cuda:0", "names 3 devices for 2 stages"),
        ("cuda:2", "cuda:2: torch sees 2 GPUs"),
        ("tpu", "'tpu' is not auto"),
        ("cpu,cuda:0", "is not auto"),
        ("", "is not auto"),
    ],
)
def test_devices_that_cannot_be_are_named(text: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as raised:
        stage_devices(text, 2, lambda: 2)
    assert raised.value.field == "devices"


def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="torch sees no GPU"):
        stage_devices("cuda", 1, lambda: 0)


def test_workers_of_a_host_take_its_gpus_in_turn() -> None:
    assert placed_workers("auto", [1, 2], lambda: 3) == ["cuda:0", "cuda:1,cuda:2"]
    assert placed_workers("cuda", [1, 2], lambda: 2) == ["cuda:0", "cuda:1,cuda:0"]
    assert placed_workers("auto", [1, 2], lambda: 0) == ["auto", "auto"]
    assert placed_workers("cuda:1", [1, 2], lambda: 2) == ["cuda:1", "cuda:1"]


def test_workers_share_a_gpu_by_their_stages_on_it() -> None:
    assert shared_fractions(["cuda:0", "cuda:1,cuda:2"]) == [0.9, 0.9]
    assert shared_fractions(["cuda:0", "cuda:0,cuda:0"]) == pytest.approx([0.3, 0.6])
    assert shared_fractions(["cuda:0", "cuda:1,cuda:0"]) == pytest.approx([0.45, 0.45])


def test_budgets_leave_room_for_weights_and_the_process() -> None:
    memory = {"cuda:0": DeviceMemory(100 * GIB, 90 * GIB), "cuda:1": DeviceMemory(100 * GIB, 40 * GIB)}
    budgets = stage_budgets(["cuda:0", "cuda:1"], [10 * GIB, 20 * GIB], 0.5, memory.__getitem__)
    assert budgets == [40 * GIB - PROCESS_BYTES, 20 * GIB - PROCESS_BYTES]
    both = stage_budgets(["cuda:0", "cuda:0"], [10 * GIB, 20 * GIB], 0.8, memory.__getitem__)
    assert both == [30 * GIB - PROCESS_BYTES, 20 * GIB - PROCESS_BYTES]
    with pytest.raises(InvalidRequestError, match="leaves stage 1 20480 MiB") as raised:
        stage_budgets(["cuda:0", "cuda:1"], [10 * GIB, 20 * GIB], 0.2, memory.__getitem__)
    assert raised.value.field == "memory_fraction"


def test_pages_come_from_what_the_gpus_have(world: TinyWorld) -> None:
    """Contract 8: with every default, the pools of the fullest stage and its weights stay within the share."""
    options = EngineOptions(str(world.plain.path), str(world.eagle), devices="auto", stages=2, max_running=4096)
    host = Host(lambda: 2, lambda device: DeviceMemory(3 * GIB, 3 * GIB), measures=False)
    config = resolve_engine_config(options, Role.DECODE, host)
    assert config.devices == ("cuda:0", "cuda:1")
    model = read_model_config(world.plain.path)

    def taken(pages: int) -> int:
        changed = msgspec.structs.replace(config, num_pages=pages)
        head = chosen_head(changed, model)
        stages = zip(plan_memory(changed, model, head).stages, taken_bytes(changed, model, head), strict=True)
        return max(stage.pool_bytes + taken for stage, taken in stages) + PROCESS_BYTES

    assert taken(config.num_pages) <= 0.9 * 3 * GIB < taken(config.num_pages + 1)
    explicit = resolve_engine_config(
        EngineOptions(str(world.plain.path), str(world.eagle), devices="cuda:1", memory_mib=4), Role.PREFILL, host
    )
    assert explicit.devices == ("cuda:1",)
    assert explicit.num_pages < config.num_pages


def test_chunks_of_prompts_take_nothing_of_a_decode(world: TinyWorld) -> None:
    options = EngineOptions(str(world.plain.path), devices="cuda:0", draft_head="none", max_running=2, chunk_tokens=64)
    host = Host(lambda: 1, lambda device: DeviceMemory(3 * GIB, 3 * GIB), measures=False)
    model = read_model_config(world.plain.path)

    def taken(role: Role, chunk_tokens: int) -> list[int]:
        return taken_bytes(resolve_engine_config(replace(options, chunk_tokens=chunk_tokens), role, host), model, None)

    assert taken(Role.DECODE, 64) == taken(Role.DECODE, 2048)
    assert taken(Role.PREFILL, 64) < taken(Role.PREFILL, 2048)


def test_a_cluster_says_where_its_workers_go(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ClusterSpec(model="tiny", decode_stages=2, devices="auto")
    placed = spec.placements(lambda: 2)
    assert {name: place.devices for name, place in placed.items()} == {
        "prefill-0": "cuda:0",
        "decode-0": "cuda:1,cuda:0",
    }
    assert [place.memory_fraction for place in placed.values()] == pytest.approx([0.45, 0.45])
    assert {place.memory_fraction for place in spec.placements(lambda: 0).values()} == {0.0}
    apart = ClusterSpec(model="tiny", decode_stages=2, prefill_devices="cuda:2", decode_devices="cuda:0,cuda:1")
    placed = apart.placements(lambda: 3)
    assert [(place.devices, place.memory_fraction) for place in placed.values()] == [
        ("cuda:2", 0.9),
        ("cuda:0,cuda:1", 0.9),
    ]
    assert "--devices" not in worker_arguments(ClusterSpec(model="tiny"), "prefill-0")


def test_splits_are_measured_where_that_can_be(world: TinyWorld) -> None:
    """By itself on GPUs, on request on CPU; never in a plan or where several hosts would each find another one."""
    asked: list[tuple[int, ...]] = []

    def measure(config: EngineConfig) -> tuple[int, ...]:
        asked.append(config.layer_split)
        return (3, 1)

    host = Host(lambda: 2, lambda device: DeviceMemory(3 * GIB, 3 * GIB), measure_split=measure)
    options = EngineOptions(str(world.plain.path), str(world.eagle), stages=2)
    by_weights = resolve_engine_config(options, Role.DECODE, host).layer_split
    assert asked == []
    for wanted in (replace(options, layer_split="measured"), replace(options, devices="auto")):
        assert resolve_engine_config(wanted, Role.DECODE, host).layer_split == (3, 1)
    assert asked == [by_weights] * 2
    on_gpu = replace(options, devices="auto", layer_split="weights")
    assert resolve_engine_config(on_gpu, Role.DECODE, host).layer_split == by_weights
    assert resolve_engine_config(replace(on_gpu, layer_split="1,3"), Role.DECODE, host).layer_split == (1, 3)
    assert resolve_engine_config(replace(on_gpu, stages=1), Role.DECODE, host).layer_split == (4,)
    elsewhere = replace(host, measures=False)
    assert resolve_engine_config(replace(on_gpu, layer_split="auto"), Role.DECODE, elsewhere).layer_split == by_weights
    with pytest.raises(InvalidRequestError, match="not for plans") as raised:
        resolve_engine_config(replace(options, layer_split="measured"), Role.DECODE, elsewhere)
    assert raised.value.field == "layer_split"
    assert len(asked) == 2
