"""From what a user says to an engine's configuration, and from a spec to a command line and back."""

import inspect
from dataclasses import fields, replace
from pathlib import Path

import pytest
import typer.main
from tiny_world import TinyWorld

from graftline.cli_cluster import _PER_ROLE, _spec, cluster_options
from graftline.cli_worker import ENGINE_OPTIONS, engine_options, worker_config, worker_parameters
from graftline.engine.config import Role, StageMode
from graftline.engine.models.checkpoint import open_checkpoint
from graftline.engine.tree_shape import NO_SPECULATION, TreeShape
from graftline.engine.worker_engine import worker_facts
from graftline.errors import InvalidRequestError, OutOfCapacityError
from graftline.launcher import ClusterSpec, worker_arguments
from graftline.worker.config import TransportName, WorkerConfig
from graftline.worker.options import (
    EngineOptions,
    InitialTree,
    resolve_engine_config,
    stage_mode,
    threads_per_stage,
    to_arguments,
    tree_shape,
)
from graftline.worker.placement import DeviceMemory, Host


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    return TinyWorld(tmp_path_factory.mktemp("world"))


@pytest.fixture
def options(world: TinyWorld) -> EngineOptions:
    return EngineOptions(model=str(world.plain.path), draft_head=str(world.eagle), dtype="float32", page_size=4)


def test_every_auto_is_settled(options: EngineOptions) -> None:
    config = resolve_engine_config(replace(options, stages=2), Role.DECODE)
    assert sum(config.layer_split) == 4
    assert config.num_stages == 2
    assert config.tree == TreeShape(3, 1, 4)
    assert config.threads == threads_per_stage(2)
    assert config.num_pages >= 1


def test_a_model_may_be_given_a_name(options: EngineOptions, world: TinyWorld) -> None:
    """CASES I60: which changes what requests call it, and not whom its workers may be paired with."""
    checkpoint = open_checkpoint(world.plain.path)
    facts = [
        worker_facts(resolve_engine_config(replace(options, model_name=name), Role.DECODE), checkpoint)
        for name in ("", "org/tiny")
    ]
    assert [fact.card.model_id for fact in facts] == [world.plain.path.name, "org/tiny"]
    assert facts[0].fingerprint == facts[1].fingerprint
    assert facts[0].card.card_hash == facts[1].card.card_hash
    for bad in ("a\nb", "\udcff"):
        with pytest.raises(InvalidRequestError, match="model_name"):
            resolve_engine_config(replace(options, model_name=bad), Role.DECODE)


def test_without_a_head_nothing_is_drafted(options: EngineOptions) -> None:
    for changed in (replace(options, draft_head="none"), replace(options, speculation=False)):
        config = resolve_engine_config(changed, Role.PREFILL)
        assert config.draft_head is None
        assert config.tree == NO_SPECULATION


def test_the_head_beside_the_model_is_found(options: EngineOptions, world: TinyWorld, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in world.plain.path.iterdir():
        (model / file.name).symlink_to(file)
    assert resolve_engine_config(replace(options, model=str(model), draft_head="auto"), Role.DECODE).draft_head is None
    (model / "draft-head").symlink_to(world.eagle)
    config = resolve_engine_config(replace(options, model=str(model), draft_head="auto"), Role.DECODE)
    assert config.draft_head == str(model / "draft-head")


def test_chunks_follow_the_kind_of_device(options: EngineOptions) -> None:
    there = Host(lambda: 1, lambda device: DeviceMemory(1 << 38, 1 << 38), measures=False)
    assert resolve_engine_config(options, Role.PREFILL).chunk_tokens == 256
    on_gpu = replace(options, devices="cuda:0")
    assert resolve_engine_config(on_gpu, Role.PREFILL, there).chunk_tokens == 2048
    assert resolve_engine_config(replace(on_gpu, chunk_tokens=300), Role.PREFILL, there).chunk_tokens == 300


def test_trees_follow_the_kind_of_device(options: EngineOptions) -> None:
    assert tree_shape(options, "cpu") == TreeShape(3, 1, 4)
    assert tree_shape(options, "cuda:1") == TreeShape(5, 4, 16, initial_depth=7)
    assert tree_shape(replace(options, draft_nodes=3), "cuda:0") == TreeShape(3, 1, 3)
    assert tree_shape(replace(options, draft_depth=2), "cuda:0") == TreeShape(2, 1, 3)


def test_tree_shapes(options: EngineOptions) -> None:
    tree = resolve_engine_config(replace(options, draft_depth=2, draft_branching=2), Role.DECODE).tree
    assert (tree.depth, tree.branching, tree.nodes) == (2, 2, 7)
    assert tree.initial_depth is None
    root_only = resolve_engine_config(replace(options, initial_tree=InitialTree.ROOT_ONLY), Role.PREFILL)
    assert not root_only.real_trees


def test_initial_trees_may_have_a_depth_of_their_own(options: EngineOptions) -> None:
    given = replace(options, initial_tree_depth=6)
    assert tree_shape(given, "cuda") == TreeShape(5, 4, 16, initial_depth=6)
    assert tree_shape(given, "cpu") == TreeShape(3, 1, 4, initial_depth=6)
    assert tree_shape(replace(given, draft_depth=4, draft_branching=2), "cpu") == TreeShape(4, 2, 15, initial_depth=6)
    assert tree_shape(replace(given, draft_nodes=3), "cpu") == TreeShape(3, 1, 3, initial_depth=6)
    for role in Role:
        assert resolve_engine_config(given, role).tree.initial_depth == 6


def test_memory_bounds_the_pages(options: EngineOptions) -> None:
    small = resolve_engine_config(replace(options, memory_mib=1, max_running=1), Role.DECODE)
    large = resolve_engine_config(replace(options, memory_mib=4, max_running=1), Role.DECODE)
    assert small.num_pages <= large.num_pages
    assert resolve_engine_config(replace(options, pages=7), Role.DECODE).num_pages == 7


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model": "no-such-model"}, "model"),
        ({"draft_head": "/no/such/head"}, "draft_head"),
        ({"layer_split": "1,x"}, "layer_split"),
        ({"stages": 9}, "num_stages"),
        ({"dtype": "int8"}, "dtype"),
        ({"draft_nodes": 60}, "draft_nodes"),
        ({"initial_tree_depth": 65}, "initial_tree_depth"),
        ({"draft_depth": 4, "draft_branching": 2, "draft_nodes": 8, "initial_tree_depth": 2}, "initial_tree_depth"),
    ],
)
def test_what_does_not_fit_is_named(options: EngineOptions, changes: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        resolve_engine_config(replace(options, **changes), Role.DECODE)  # type: ignore[arg-type]
    assert raised.value.field == field


def test_no_page_fits(options: EngineOptions) -> None:
    with pytest.raises(OutOfCapacityError):
        resolve_engine_config(replace(options, page_size=1 << 16, memory_mib=1), Role.DECODE)


@pytest.mark.parametrize(
    ("mode", "devices", "is_one_process", "expected"),
    [
        (StageMode.AUTO, ("cuda:0", "cuda:0"), True, StageMode.THREADS),  # else processes would take turns on the GPU
        (StageMode.AUTO, ("cuda:0",), True, StageMode.THREADS),
        (StageMode.AUTO, ("cuda:0",), False, StageMode.PROCESSES),  # a GPU of each process's own
        (StageMode.AUTO, ("cuda:0", "cuda:1"), True, StageMode.PROCESSES),
        (StageMode.AUTO, ("cpu",), True, StageMode.PROCESSES),
        (StageMode.PROCESSES, ("cuda:0", "cuda:0"), True, StageMode.PROCESSES),
        (StageMode.THREADS, ("cpu", "cpu"), True, StageMode.THREADS),
    ],
)
def test_how_stages_run(mode: StageMode, devices: tuple[str, ...], is_one_process: bool, expected: StageMode) -> None:
    assert stage_mode(mode, devices, is_one_process=is_one_process) is expected


def test_every_field_has_an_option_of_its_name() -> None:
    assert {option.name for option in ENGINE_OPTIONS} == {field.name for field in fields(EngineOptions)}


def parse(role: str, arguments: list[str]) -> dict[str, object]:
    """What a worker's command gets for a command line."""
    import graftline.cli_worker

    command = typer.main.get_command(graftline.cli_worker.app).get_command(None, role)  # type: ignore[attr-defined]
    context = command.make_context(role, list(arguments), resilient_parsing=False)
    return dict(context.params)


def test_arguments_say_what_options_said() -> None:
    options = EngineOptions(
        model="m",
        speculation=False,
        initial_tree=InitialTree.ROOT_ONLY,
        stage_mode=StageMode.THREADS,
        prefix_cache=False,
        threads=3,
        quarantine_s=1.5,
        layer_split="1,2",
    )
    given = parse("decode", to_arguments(options))
    converted = {
        **given,
        "initial_tree": InitialTree(given["initial_tree"]),
        "stage_mode": StageMode(given["stage_mode"]),
    }
    assert engine_options(converted) == options
    assert to_arguments(EngineOptions()) == []


def test_a_spec_becomes_command_lines() -> None:
    spec = ClusterSpec(model="m", decode_stages=3, decode_split="1,1,2", peer_silence_s=1.0, token="t", threads=2)
    assert spec.num_stages == 4
    given = parse("decode", worker_arguments(spec, "decode-0")[1:])
    assert (given["stages"], given["layer_split"], given["threads"]) == (3, "1,1,2", 2)
    assert given["peer_silence_s"] == 1.0
    assert given["listen"] == "127.0.0.1:0"
    given["transport"] = TransportName(given["transport"])
    assert worker_config(given).drain_grace_s == spec.drain_grace_s
    assert parse("prefill", worker_arguments(spec, "prefill-0")[1:])["stages"] == 1


def test_up_takes_the_defaults_of_the_spec() -> None:
    defaults = {parameter.name: parameter.default for parameter in cluster_options()}
    assert _spec(defaults) == ClusterSpec()
    named = {option.name for option in ENGINE_OPTIONS} - _PER_ROLE
    assert named <= {field.name for field in fields(ClusterSpec)}, "an option of `up` that would be dropped"
    names = [parameter.name for parameter in worker_parameters()]
    assert len(names) == len(set(names))
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in worker_parameters())


@pytest.mark.parametrize("name", ["prefills", "decodes", "routers", "prefill_stages", "decode_stages"])
def test_a_cluster_needs_one_of_each(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        ClusterSpec(**{name: 0})


def test_tokens_are_not_shown_by_repr() -> None:
    """Configurations end up in logs and tracebacks."""
    assert "secret" not in repr(WorkerConfig(tokens=("secret",)))
    assert "secret" not in repr(ClusterSpec(token="secret"))
