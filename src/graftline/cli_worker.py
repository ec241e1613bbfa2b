"""`graftline prefill`, `graftline decode`, `graftline plan`: one worker, or one stage of one, as this process."""

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from graftline import cli_options as shared
from graftline.engine.config import AttentionBackend, EngineConfig, Role, StageChannel, StageMode
from graftline.engine.exact_kernels import check_exact_kernels
from graftline.engine.verify_mode import VerifyMode
from graftline.errors import InvalidRequestError
from graftline.worker.config import TransferConfig, TransferProtocol, TransportName, WorkerConfig
from graftline.worker.host_memory import check_room
from graftline.worker.options import MEASURED, WEIGHTS, EngineOptions, InitialTree, resolve_engine_config
from graftline.worker.placement import AUTO, CPU, DeviceMemory, Host
from graftline.worker.process import die_with_launcher, end_process, outlive_signals, set_up_logging

if TYPE_CHECKING:
    from graftline.engine.memory_plan import MemoryPlan
    from graftline.worker.early_stages import EarlyStage

app = typer.Typer()

_MODEL, _TREES, _PIPELINE, _MEMORY, _TESTS = "Model", "Draft trees", "Pipeline", "Memory and batches", "For tests"
_NETWORK = "Network"
# What waits for the transport's last word waits a little longer than the transport does.
_BEYOND_TRANSPORT_S = 10.0
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Option:
    """A command-line option of both workers; its default is that of the field of the same name."""

    name: str
    kind: Any
    help: str
    panel: str
    least: float | None = None
    default: Any = None
    most: float | None = None

    def parameter(self, default: Any) -> inspect.Parameter:
        """What typer reads."""
        most = shared.MAX_SECONDS if self.name.endswith("_s") else self.most
        option = typer.Option(help=self.help, rich_help_panel=self.panel, min=self.least, max=most)
        kind = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(self.name, kind, default=default, annotation=Annotated[self.kind, option])


ENGINE_OPTIONS = (
    Option("model", str, "Known name, Hugging Face directory or GGUF file.", _MODEL),
    Option("model_name", str, "What requests call it; empty: the name of the directory or file.", _MODEL),
    Option("draft_head", str, "Directory of a draft head; mtp: the model's own; auto: the one there is; none.", _MODEL),
    Option("dtype", str, "float32 or bfloat16.", _MODEL),
    Option("devices", str, "cpu, cuda, auto, cuda:N, or a name for every stage: cuda:0,cuda:1.", _MODEL),
    Option("attention_backend", AttentionBackend, "How prompts attend on a GPU; on CPU there is one way.", _MODEL),
    Option("speculation", bool, "Draft at all.", _TREES),
    Option("draft_depth", int, "S: levels below the root; 0: by the kind of device.", _TREES, 0),
    Option("draft_branching", int, "K: children considered a node; 0: likewise.", _TREES, 0),
    Option("draft_nodes", int, "V: nodes with the root; 0: S + 1 for a chain, 2 S K for a tree.", _TREES, 0),
    Option("initial_tree_depth", int, "S of the tree that a prefill grows; 0: by the kind of device, or S.", _TREES, 0),
    Option("initial_tree", InitialTree, "What a prefill grows for the first decode round.", _TREES),
    Option("stages", int, "Pipeline stages.", _PIPELINE, 1),
    Option("layer_split", str, "Layers of every stage (10,12,8), measured, weights, or auto.", _PIPELINE),
    Option("stage_mode", StageMode, "Stages as processes, or as threads of this one; auto: by devices.", _PIPELINE),
    Option("stage_channel", StageChannel, "Hidden states through the host, from GPU to GPU, or by NCCL.", _PIPELINE),
    Option("threads", int, "CPU threads of every stage; 0: the cores shared.", _PIPELINE, 0),
    Option("stage_timeout_s", float, "Silence after which a stage is dead or frozen.", _PIPELINE, 0.5),
    Option("step_timeout_s", float, "A step without any progress for so long is hung.", _PIPELINE, 0.5),
    Option("page_size", int, "Token positions a page.", _MEMORY, 1),
    Option("pages", int, "Pages; 0: as many as there is memory for.", _MEMORY, 0),
    Option("memory_mib", int, "MiB for the largest stage's pools; 0: 512, on a GPU by --memory-fraction.", _MEMORY, 0),
    Option("memory_fraction", float, "Share of a GPU for this worker's stages on it; 0: 0.9.", _MEMORY, 0, most=1),
    Option("chunk_tokens", int, "Most prompt tokens of a prefill step; 0: 256, on a GPU 2048.", _MEMORY, 0),
    Option("max_running", int, "Request slots.", _MEMORY, 1),
    Option("max_queued", int, "Waiting requests beyond which new ones are refused.", _MEMORY, 1),
    Option("prefix_cache", bool, "A prefill keeps the KV of prompts for later ones.", _MEMORY),
    Option("verify_state", VerifyMode, "Of draft nodes, in models with recurrent state: states or inputs.", _MEMORY),
    Option(
        "max_verify_rows", int, "Rows above which a GPU's rounds cut trees to their best nodes; 0: never.", _TREES, 0
    ),
    Option("cuda_graphs", bool, "Capture decode rounds and short prompts and replay them, on a GPU.", _PIPELINE),
    Option("overlap", bool, "Launch a decode round before the last one is read, on a GPU.", _PIPELINE),
    Option("quarantine_s", float, "How long pages of a lost prefill stay out of use.", _MEMORY, 0),
    Option("preempt_every", int, "Force a preemption every so many rounds; 0: never.", _TESTS, 0),
)
WORKER_OPTIONS = (
    Option("metrics_listen", str, "host:port of Prometheus metrics; empty: none.", _NETWORK, default=""),
    Option("transport", TransportName, "How KV moves.", _NETWORK, default=TransportName.MOONCAKE),
    Option("transfer_host", str, "Host of the transfer ports; by default the one advertised.", _NETWORK, default=""),
    Option(
        "transfer_protocol",
        TransferProtocol,
        "Between hosts.",
        _NETWORK,
        default=TransferProtocol.AUTO,
    ),
    Option("rdma_devices", str, "RDMA devices, comma-separated; by default the engine picks.", _NETWORK, default=""),
    Option("intra_node_gpu", bool, "KV between GPUs of one host by peer copies (NVLink).", _NETWORK, default=True),
    Option("stall_timeout_s", float, "A write without progress for so long has failed.", _NETWORK, 1, default=2.0),
    Option("order_timeout_s", float, "The last byte of a write must arrive by then.", _NETWORK, 1, default=30.0),
    Option("start_timeout_s", float, "Seconds for all stages to be ready.", _NETWORK, 1, default=300.0),
    Option("stop_timeout_s", float, "Seconds for stages and writes to end.", _NETWORK, 0.1, default=15.0),
    Option("peer_silence_s", float, "Silence after which a peer is given up.", _NETWORK, 0.1, default=2.5),
    Option("kv_digest", bool, "Decodes compare what arrives with what was sent; slow.", _TESTS, default=False),
    Option("transfer_faults", str, "What goes wrong with writes: fail@7,delay:0.5s@/50.", _TESTS, default=""),
)
_TYPED = (
    ("listen", shared.Listen, "127.0.0.1:7001"),
    ("advertise", shared.Advertise, None),
    ("drain_grace_s", shared.DrainGrace, 30.0),
    ("token", shared.Token, None),
    ("tls_certificate", shared.TlsCertificate, None),
    ("tls_key", shared.TlsKey, None),
    ("tls_ca", shared.TlsCa, None),
    ("otlp_endpoint", shared.OtlpEndpoint, None),
)


def with_options(function: Callable[..., None], parameters: Sequence[inspect.Parameter]) -> Callable[..., None]:
    """Gives a function that takes `**given` the parameters that typer shall read."""
    own = [parameter for parameter in inspect.signature(function).parameters.values() if parameter.name != "given"]
    function.__signature__ = inspect.Signature([*own, *parameters])  # type: ignore[attr-defined]
    function.__annotations__ |= {parameter.name: parameter.annotation for parameter in parameters}
    function.__annotations__.pop("given", None)
    return function


def engine_parameters() -> list[inspect.Parameter]:
    """One for every field of `EngineOptions`."""
    defaults = EngineOptions()
    return [option.parameter(getattr(defaults, option.name)) for option in ENGINE_OPTIONS]


def worker_parameters() -> list[inspect.Parameter]:
    """Engine and network."""
    kind = inspect.Parameter.KEYWORD_ONLY
    typed = [inspect.Parameter(name, kind, default=default, annotation=hint) for name, hint, default in _TYPED]
    return [*engine_parameters(), *(option.parameter(option.default) for option in WORKER_OPTIONS), *typed]


def prefill(**given: Any) -> None:
    """Run a prefill worker (or, with torchrun's variables, the stage of this rank)."""
    early_stages = _fork_later_stages(given)
    engine, worker = _begin(Role.PREFILL, given)
    from graftline.prefill_server.server import PrefillConfig, running_prefill
    from graftline.worker.main import run_worker

    with shared.tracing("graftline-prefill", given["otlp_endpoint"]) as tracer:
        config = PrefillConfig(engine, replace(worker, tracer=tracer), early_stages=early_stages)
        status = run_worker(lambda: running_prefill(config))
    end_process(status)


def decode(**given: Any) -> None:
    """Run a decode worker (or, with torchrun's variables, the stage of this rank)."""
    early_stages = _fork_later_stages(given)
    engine, worker = _begin(Role.DECODE, given)
    from graftline.decode_server.server import DecodeConfig, running_decode
    from graftline.decode_server.settings import ServiceSettings
    from graftline.worker.main import run_worker

    service = ServiceSettings(
        pair_timeout_s=given["peer_silence_s"],
        peer_silence_s=given["peer_silence_s"],
        drain_timeout_s=given["order_timeout_s"] + _BEYOND_TRANSPORT_S,
        real_tree=given["initial_tree"] is InitialTree.REAL,
    )
    with shared.tracing("graftline-decode", given["otlp_endpoint"]) as tracer:
        config = DecodeConfig(engine, replace(worker, tracer=tracer), service, early_stages=early_stages)
        status = run_worker(lambda: running_decode(config))
    end_process(status)


class PlannedRole(Enum):
    """Whose memory is planned."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


def plan(
    role: Annotated[PlannedRole, typer.Option(help="Whose memory to plan.")] = PlannedRole.BOTH, **given: Any
) -> None:
    """Print how many bytes every stage of a worker would take, without loading weights."""
    from graftline.engine.draft_choice import chosen_head
    from graftline.engine.memory_plan import plan_memory
    from graftline.engine.models.checkpoint import read_model_config

    for planned in Role if role is PlannedRole.BOTH else (Role(role.value),):
        config = resolve_engine_config(engine_options(given), planned, _UNSEEN_HOST)
        model = read_model_config(Path(config.model))
        _print_plan(plan_memory(config, model, chosen_head(config, model)))


_PLANNED_PARTS = {
    "weights": "weight_bytes",
    "draft weights": "draft_weight_bytes",
    "target KV": "target_kv_bytes",
    "draft KV": "draft_kv_bytes",
    "draft scratch": "draft_scratch_bytes",
    "state": "state_bytes",
    "verify state": "verify_state_bytes",
    "pools": "pool_bytes",
}


def _unknown_memory(device: str) -> DeviceMemory:
    raise InvalidRequestError("memory_mib", f"must be said: a plan does not look at {device}")


# A plan is made for machines that may be others.
_UNSEEN_HOST = Host(num_gpus=lambda: 1 << 10, memory_of=_unknown_memory, measures=False)


def _print_plan(memory: "MemoryPlan") -> None:
    """A table of a worker's stages, in MiB, with what fits and what the role skips."""
    console = Console(width=120, soft_wrap=True) if not Console().is_terminal else Console()
    table = Table("stage", "layers", *_PLANNED_PARTS, title=f"{memory.role.value}: MiB")
    for stage in memory.stages:
        layers = f"{stage.layers.start}-{stage.layers.stop - 1}"
        parts = (getattr(stage, name) for name in _PLANNED_PARTS.values())
        table.add_row(str(stage.stage), layers, *(f"{part / _MIB:.1f}" for part in parts))
    console.print(table)
    tokens = f"{memory.num_tokens} tokens of KV fit ({memory.num_pages} pages of {memory.page_size})"
    console.print(f"{tokens}; pools of all stages {memory.pool_bytes / _MIB:.1f} MiB")
    if memory.skips_verify:
        skipped = f"{memory.skipped_bytes / _MIB:.1f} MiB of verify state"
        console.print(f"never verifies: takes no {skipped}, captures no verify graphs, warms none up")


app.command()(with_options(prefill, worker_parameters()))
app.command()(with_options(decode, worker_parameters()))
app.command()(with_options(plan, engine_parameters()))


def engine_options(given: dict[str, Any]) -> EngineOptions:
    """The engine that the options describe."""
    return EngineOptions(**{field.name: given[field.name] for field in fields(EngineOptions)})


def worker_config(given: dict[str, Any]) -> WorkerConfig:
    """The surroundings that the options describe."""
    advertise = shared.settled_advertise(given["advertise"])
    return WorkerConfig(
        listen=given["listen"],
        advertise=advertise,
        metrics_listen=given["metrics_listen"] or None,
        transfer=TransferConfig(
            transport=given["transport"],
            host=shared.settled_transfer_host(given["transfer_host"], given["listen"], advertise),
            stall_timeout_s=given["stall_timeout_s"],
            order_timeout_s=given["order_timeout_s"],
            protocol=given["transfer_protocol"],
            rdma_devices=given["rdma_devices"],
            intra_node_gpu=given["intra_node_gpu"],
            faults=given["transfer_faults"],
            kv_digest=given["kv_digest"],
        ),
        tls=shared.server_tls(given["tls_certificate"], given["tls_key"], given["tls_ca"]),
        tokens=shared.tokens(given["token"]),
        peer_access=shared.access(
            given["token"], given["tls_certificate"], given["tls_key"], given["tls_ca"], given["peer_silence_s"]
        ),
        peer_silence_s=given["peer_silence_s"],
        start_timeout_s=given["start_timeout_s"],
        drain_grace_s=given["drain_grace_s"],
        stop_timeout_s=given["stop_timeout_s"],
    )


def _fork_later_stages(given: dict[str, Any]) -> "tuple[EarlyStage, ...]":
    """Forks the processes of later stages, unless they are threads, a launcher starts them, or a GPU forbids it."""
    if "WORLD_SIZE" in os.environ or given["stage_mode"] is StageMode.THREADS or given["devices"] != CPU:
        return ()
    split = given["layer_split"]
    count = given["stages"] if split in (AUTO, MEASURED, WEIGHTS) else split.count(",") + 1
    if count == 1:
        return ()
    from graftline.worker.early_stages import fork_stages
    from graftline.worker.stage_main import main

    return fork_stages(count - 1, main)


def _begin(role: Role, given: dict[str, Any]) -> tuple[EngineConfig, WorkerConfig]:
    """Configurations of a worker; does not return in a process that is to be a later stage."""
    die_with_launcher()
    set_up_logging(role.value)
    options = engine_options(given)
    is_wide = "WORLD_SIZE" in os.environ
    engine = resolve_engine_config(options, role, Host(measures=not is_wide))
    worker = worker_config(given)
    if engine.device_type == CPU:
        check_room(engine, None if not is_wide else int(os.environ.get("RANK", "0")))
        check_exact_kernels()
    if is_wide and engine.device_type == "cuda" and not (options.pages or options.memory_mib):
        raise InvalidRequestError("memory_mib", "must be said (or pages): stages of several hosts have to agree")
    if int(os.environ.get("RANK", "0")) > 0 and engine.num_stages > 1:
        from graftline.engine.stage_process import run_stage
        from graftline.worker.transfer import PortFactory

        outlive_signals(worker.drain_grace_s + worker.stop_timeout_s)
        end_process(run_stage(engine, PortFactory(worker.transfer)))
    return engine, worker
