"""What a user says about a worker's engine, with "auto" values, and how it becomes an `EngineConfig`."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import msgspec

from graftline.engine.config import MTP_HEAD, AttentionBackend, EngineConfig, Role, StageChannel, StageMode
from graftline.engine.device_growth import grows_on_device
from graftline.engine.draft_choice import carries_mtp, head_named
from graftline.engine.draft_head.config import DraftHeadConfig
from graftline.engine.layer_split import automatic_split, last_stage_cost, parse_split
from graftline.engine.memory_plan import pages_within, taken_bytes
from graftline.engine.model_fetch import DEFAULT_MODEL, draft_head_path, resolve_model
from graftline.engine.models.checkpoint import read_model_config
from graftline.engine.models.config import ModelConfig
from graftline.engine.tree_shape import NO_SPECULATION, TreeShape
from graftline.engine.verify_mode import VerifyMode
from graftline.errors import InvalidRequestError
from graftline.worker.placement import AUTO, CPU, DEFAULT_FRACTION, Host, stage_budgets, stage_devices

NONE = "none"
MEASURED = "measured"
WEIGHTS = "weights"
_MIB = 1 << 20
_CPU_POOLS_MIB = 512
CPU_TREE = TreeShape(3, 1, 4)
GPU_TREE = TreeShape(5, 4, 16, initial_depth=7)
CPU_CHUNK_TOKENS, GPU_CHUNK_TOKENS = 256, 2048
MAX_VERIFY_ROWS = 128
"""Of a decode round on a GPU, by default; see docs/tuning.md."""


class InitialTree(Enum):
    """What the first decode round verifies."""

    REAL = "real"
    ROOT_ONLY = "root-only"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """One worker's engine, as a user describes it.

    Attributes:
        model: known name, directory or GGUF file.
        model_name: what requests call it; empty: the known name, or that of the directory or file.
        draft_head: directory of the draft head; "mtp": the module that the model's own checkpoint carries; "auto": the
            one beside the model, else its MTP module; "none": no speculation.
        speculation: False turns it off whatever heads there are.
        draft_depth, draft_branching: 0: what was measured to pay on the workers' kind of device, see `tree_shape`.
        draft_nodes: 0: likewise; beside a depth or branching that was given, a chain has depth + 1 nodes, a tree
            2 * depth * branching (or all there can be).
        initial_tree_depth: of the tree that a prefill grows for the first decode round; 0: likewise, or the depth that
            was given.
        devices: "cpu", "auto", "cuda", "cuda:N" or a name for every stage; see `placement.stage_devices`.
        attention_backend: how planned steps attend; every stage settles "auto" for its own machine.
        stages: of the pipeline.
        layer_split: layers of every stage ("10,12,8"); "measured": by times taken at start; "weights": by what each
            part reads; "auto": measured on GPUs, else by weights.
        stage_channel: how hidden states go between stages that are processes.
        pages: 0: as many as there is memory for, up to what all request slots can use.
        memory_mib: for the pools of the largest stage; 0: 512 on CPU, on a GPU what `memory_fraction` leaves.
        memory_fraction: of a GPU's memory, that this worker's stages on it may take; 0: 0.9.
        chunk_tokens: most prompt tokens of a prefill's step; 0: by the kind of device, see `usual_chunk_tokens`.
        prefix_cache: has no effect on models with recurrent state, which have none.
        verify_state: what a decode keeps of draft nodes, of models with recurrent state.
        cuda_graphs: decode rounds and a prefill's short steps are captured and replayed on CUDA.
        max_verify_rows: of decode rounds on CUDA, see `EngineConfig`; 0 for no limit.
        overlap: on CUDA a decode launches its next round before it has read the last one.
        threads: CPU threads of every stage; 0: the machine's cores shared between the stages.
    """

    model: str = DEFAULT_MODEL
    draft_head: str = AUTO
    model_name: str = ""
    speculation: bool = True
    draft_depth: int = 0
    draft_branching: int = 0
    draft_nodes: int = 0
    initial_tree_depth: int = 0
    initial_tree: InitialTree = InitialTree.REAL
    dtype: str = "bfloat16"
    devices: str = CPU
    attention_backend: AttentionBackend = AttentionBackend.AUTO
    stages: int = 1
    layer_split: str = AUTO
    stage_mode: StageMode = StageMode.AUTO
    stage_channel: StageChannel = StageChannel.AUTO
    page_size: int = 16
    pages: int = 0
    memory_mib: int = 0
    memory_fraction: float = 0.0
    chunk_tokens: int = 0
    max_running: int = 16
    max_queued: int = 1024
    prefix_cache: bool = True
    verify_state: VerifyMode = VerifyMode.REPLAY
    cuda_graphs: bool = True
    max_verify_rows: int = MAX_VERIFY_ROWS
    overlap: bool = True
    threads: int = 0
    stage_timeout_s: float = 2.0
    step_timeout_s: float = 10.0
    quarantine_s: float = 60.0
    preempt_every: int = 0


def resolve_engine_config(options: EngineOptions, role: Role, host: Host = Host()) -> EngineConfig:  # noqa: B008  # frozen
    """Settles every "auto"; fetches a named model.

    Args:
        host: where the stages are to run.

    Raises:
        InvalidRequestError: a value that does not fit the model, naming the option.
        OutOfCapacityError: `memory_mib` holds no page.
    """
    path = resolve_model(options.model)
    model = read_model_config(path)
    head_name = find_draft_head(options, path)
    head = head_named(head_name, model) if head_name is not None else None
    devices = stage_devices(options.devices, options.stages, host.num_gpus)
    tree = tree_shape(options, devices[0]) if head is not None else NO_SPECULATION
    config = EngineConfig(
        model=str(path),
        model_name=options.model_name,
        role=role,
        draft_head=head_name,
        dtype=options.dtype,
        devices=devices,
        attention_backend=options.attention_backend,
        layer_split=layer_split(options, role, model, head, tree),
        stage_mode=stage_mode(options.stage_mode, devices, is_one_process=host.measures),
        stage_channel=options.stage_channel,
        page_size=options.page_size,
        num_pages=max(1, options.pages),
        max_running=options.max_running,
        max_queued=options.max_queued,
        chunk_tokens=options.chunk_tokens or usual_chunk_tokens(devices[0]),
        tree=tree,
        real_trees=options.initial_tree is InitialTree.REAL,
        prefix_cache=options.prefix_cache and not model.linear_layers(range(model.num_layers)),
        verify_state=options.verify_state,
        device_rounds=has_device_rounds(devices[0], role, model, tree),
        launch_drafts_early=role is Role.PREFILL and devices[-1] != CPU,
        cuda_graphs=options.cuda_graphs,
        max_verify_rows=options.max_verify_rows,
        overlap=options.overlap,
        threads=options.threads or threads_per_stage(options.stages),
        stage_timeout_s=options.stage_timeout_s,
        step_timeout_s=options.step_timeout_s,
        quarantine_s=options.quarantine_s,
        preempt_every=options.preempt_every,
    )
    if options.stages > 1 and wants_measured_split(options, config, host):
        config = msgspec.structs.replace(config, layer_split=host.measure_split(config))
    if options.pages:
        return config
    pages = pages_within(config, model, head, pool_budgets(options, config, model, head, host))
    return msgspec.structs.replace(config, num_pages=min(pages, most_useful_pages(options, model)))


def pool_budgets(
    options: EngineOptions, config: EngineConfig, model: ModelConfig, head: DraftHeadConfig | None, host: Host
) -> int | list[int]:
    """Bytes for the pools of every stage.

    Raises:
        InvalidRequestError: a GPU has no room for them.
    """
    if options.memory_mib:
        return options.memory_mib * _MIB
    if config.device_type == CPU:
        return _CPU_POOLS_MIB * _MIB
    devices = [config.stage_device(stage) for stage in range(config.num_stages)]
    fraction = options.memory_fraction or DEFAULT_FRACTION
    return stage_budgets(devices, taken_bytes(config, model, head), fraction, host.memory_of)


def stage_mode(mode: StageMode, devices: Sequence[str], *, is_one_process: bool) -> StageMode:
    """How stages on these devices run.

    Args:
        is_one_process: this process starts the others, if there are to be any.
    """
    if mode is not StageMode.AUTO:
        return mode
    is_one_gpu = len(set(devices)) == 1 and devices[0] != CPU
    return StageMode.THREADS if is_one_gpu and is_one_process else StageMode.PROCESSES


def usual_chunk_tokens(device: str) -> int:
    """Prompt tokens of a step: a GPU gets on faster with more at once."""
    return CPU_CHUNK_TOKENS if device == CPU else GPU_CHUNK_TOKENS


def has_device_rounds(device: str, role: Role, model: ModelConfig, tree: TreeShape) -> bool:
    """Whether a worker's rounds have a fixed shape: on CUDA, without recurrent state, with trees that fit masks."""
    is_hybrid = bool(model.linear_layers(range(model.num_layers)))
    return device.startswith("cuda") and role is Role.DECODE and not is_hybrid and grows_on_device(tree)


def find_draft_head(options: EngineOptions, model_path: Path) -> str | None:
    """The draft head to use (see `EngineConfig.draft_head`), or None when nothing is to be drafted.

    Raises:
        InvalidRequestError: the one asked for is not there.
    """
    if not options.speculation or options.draft_head == NONE:
        return None
    if options.draft_head == AUTO:
        beside = draft_head_path(model_path)
        if beside is not None:
            return str(beside)
        return MTP_HEAD if carries_mtp(model_path) else None
    if options.draft_head == MTP_HEAD:
        return MTP_HEAD
    path = Path(options.draft_head).expanduser()
    if not path.is_dir():
        raise InvalidRequestError("draft_head", f"{options.draft_head!r} is no directory")
    return str(path)


def tree_shape(options: EngineOptions, device: str) -> TreeShape:
    """The shape of draft trees. Raises InvalidRequestError for impossible ones.

    A row of a verify costs a CPU about as much as a token, and a GPU next to nothing (docs/results.md): chains there,
    trees here. Prefill and decode must agree, so workers on different kinds of device need an explicit shape.
    """
    initial_depth = options.initial_tree_depth or None
    if not (options.draft_depth or options.draft_branching or options.draft_nodes):
        usual = CPU_TREE if device == CPU else GPU_TREE
        return usual if initial_depth is None else msgspec.structs.replace(usual, initial_depth=initial_depth)
    depth, branching = options.draft_depth or 3, options.draft_branching or 1
    if options.draft_nodes:
        return TreeShape(depth, branching, options.draft_nodes, initial_depth)
    largest = TreeShape(depth, branching, 2).max_candidates + 1
    nodes = depth + 1 if branching == 1 else min(2 * depth * branching, largest)
    return TreeShape(depth, branching, nodes, initial_depth)


def layer_split(
    options: EngineOptions, role: Role, model: ModelConfig, head: DraftHeadConfig | None, tree: TreeShape
) -> tuple[int, ...]:
    """Layers of every stage. Raises InvalidRequestError when they do not add up."""
    if options.layer_split not in (AUTO, MEASURED, WEIGHTS):
        return parse_split(options.layer_split)
    # All of a prompt's rows pass the drafter's layer, but only one row of each request passes the output head.
    prefill_cost = 0.0 if head is None else 1.0
    cost = last_stage_cost(model, head, tree) if role is Role.DECODE else prefill_cost
    return automatic_split(model.num_layers, options.stages, cost)


def wants_measured_split(options: EngineOptions, config: EngineConfig, host: Host) -> bool:
    """Whether the split by weights is to give way to one by times.

    Raises:
        InvalidRequestError: it is asked for where it cannot be had.
    """
    if options.layer_split == MEASURED and not host.measures:
        raise InvalidRequestError("layer_split", f"{MEASURED}: not for plans, nor for stages of several hosts")
    return options.layer_split == MEASURED or (
        options.layer_split == AUTO and host.measures and config.device_type == "cuda"
    )


def threads_per_stage(num_stages: int) -> int:
    """The machine's cores, shared."""
    return max(1, (os.cpu_count() or 1) // num_stages)


def most_useful_pages(options: EngineOptions, model: ModelConfig) -> int:
    """Pages that `max_running` requests of the longest kind can use; more would lie idle."""
    return -(-model.context_length // options.page_size) * options.max_running


def to_arguments(options: EngineOptions) -> list[str]:
    """Command-line arguments that say the same; values that are the defaults are left out."""
    arguments: list[str] = []
    defaults = EngineOptions()
    for name in EngineOptions.__dataclass_fields__:
        value = getattr(options, name)
        if value == getattr(defaults, name):
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            arguments += [f"--{flag}", str(value.value if isinstance(value, Enum) else value)]
    return arguments
