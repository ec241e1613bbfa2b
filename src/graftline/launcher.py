"""A whole deployment on this machine: routers, prefills and decodes as real processes on loopback.

async with local_cluster(ClusterSpec(model="smollm2-135m")) as cluster:
    ...  # cluster.router_address
Leaving the block stops everything; nothing is left running, even when the launcher is killed.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from graftline.child import Child
from graftline.engine.config import StageChannel, StageMode
from graftline.engine.model_fetch import DEFAULT_MODEL, resolve_model
from graftline.engine.verify_mode import VerifyMode
from graftline.errors import InvalidRequestError
from graftline.kernels.attention_kind import AttentionBackend
from graftline.worker.config import TransportName
from graftline.worker.options import MAX_VERIFY_ROWS, EngineOptions, InitialTree, threads_per_stage, to_arguments
from graftline.worker.placement import AUTO, CPU, num_gpus, placed_workers, shared_fractions, stage_devices

ANY_PORT = "127.0.0.1:0"
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Placement:
    """Devices of a worker, as `EngineOptions` takes them, and the share of them that it may use; 0 on CPU."""

    devices: str
    memory_fraction: float


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """What to start. Fields that `EngineOptions` has too mean what they mean there, for both roles.

    Attributes:
        prefill_stages, decode_stages: pipeline stages of every worker of that role.
        prefill_split, decode_split: layers of every stage, or "auto".
        devices: of all workers; "auto" and "cuda" hand the GPUs out one after another, prefills first.
        prefill_devices, decode_devices: of every worker of that role instead.
        memory_fraction: of a GPU, for each worker on it; 0: 0.9, shared between them.
        policy: how routers pick workers.
        listen, http_listen: addresses of the first router; further ones take any port.
        first_port: workers, and routers behind the first, listen on loopback ports that count up from here, which no
            outgoing connection can take while a process restarts; 0: any port.
        metrics: give every worker a metrics port.
        token: bearer token of every hop; empty: none.
        drain_grace_s: for open requests when the cluster stops.
        peer_silence_s: silence after which a decode gives its prefill up.
        log_dir: where processes log; a temporary directory by default.
        prefill_arguments, decode_arguments, router_arguments: further command-line arguments.
    """

    model: str = DEFAULT_MODEL
    model_name: str = ""
    prefills: int = 1
    decodes: int = 1
    routers: int = 1
    prefill_stages: int = 1
    decode_stages: int = 1
    prefill_split: str = AUTO
    decode_split: str = AUTO
    stage_mode: StageMode = StageMode.AUTO
    stage_channel: StageChannel = StageChannel.AUTO
    draft_head: str = AUTO
    speculation: bool = True
    draft_depth: int = 0
    draft_branching: int = 0
    draft_nodes: int = 0
    initial_tree_depth: int = 0
    initial_tree: InitialTree = InitialTree.REAL
    dtype: str = "bfloat16"
    devices: str = CPU
    prefill_devices: str = ""
    decode_devices: str = ""
    page_size: int = 16
    pages: int = 0
    memory_mib: int = 0
    memory_fraction: float = 0.0
    chunk_tokens: int = 0
    max_running: int = 16
    max_queued: int = 1024
    prefix_cache: bool = True
    verify_state: VerifyMode = VerifyMode.REPLAY
    attention_backend: AttentionBackend = AttentionBackend.AUTO
    max_verify_rows: int = MAX_VERIFY_ROWS
    cuda_graphs: bool = True
    overlap: bool = True
    threads: int = 0
    stage_timeout_s: float = 2.0
    step_timeout_s: float = 10.0
    quarantine_s: float = 60.0
    preempt_every: int = 0
    transport: TransportName = TransportName.MOONCAKE
    policy: str = "least_loaded"
    listen: str = ANY_PORT
    http_listen: str = ANY_PORT
    first_port: int = 0
    metrics: bool = True
    token: str = field(default="", repr=False)
    start_timeout_s: float = 300.0
    drain_grace_s: float = 5.0
    stop_timeout_s: float = 10.0
    peer_silence_s: float = 2.5
    log_dir: Path | None = None
    prefill_arguments: tuple[str, ...] = ()
    decode_arguments: tuple[str, ...] = ()
    router_arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("prefills", "decodes", "routers", "prefill_stages", "decode_stages"):
            if getattr(self, name) < 1:
                raise InvalidRequestError(name, f"{getattr(self, name)} is below 1")

    @property
    def num_stages(self) -> int:
        """Stages of all workers together."""
        return self.prefills * self.prefill_stages + self.decodes * self.decode_stages

    @property
    def stages_at_work(self) -> int:
        """Stages that share the cores: those of the larger pool. The pools seldom compute at once, and with two threads
        each on two cores a prefill and a decode gave 1.25 times the tokens a second of one thread each.
        """
        return max(self.prefills * self.prefill_stages, self.decodes * self.decode_stages)

    def engine_options(self, stages: int, split: str) -> EngineOptions:
        """The engine of one worker, wherever it is placed."""
        shared = {field.name for field in fields(EngineOptions)} & {field.name for field in fields(self)}
        options = EngineOptions(**{name: getattr(self, name) for name in shared})
        threads = self.threads or threads_per_stage(self.stages_at_work)
        return replace(options, stages=stages, layer_split=split, threads=threads)

    def placements(self, gpus: Callable[[], int] = num_gpus) -> dict[str, Placement]:
        """Where every worker goes, by its name.

        Raises:
            InvalidRequestError: devices that there are not.
        """
        stages = {f"prefill-{index}": self.prefill_stages for index in range(self.prefills)}
        stages |= {f"decode-{index}": self.decode_stages for index in range(self.decodes)}
        chosen = {"prefill": self.prefill_devices, "decode": self.decode_devices}
        placed = placed_workers(self.devices, list(stages.values()), gpus)
        texts = [chosen[name.partition("-")[0]] or text for name, text in zip(stages, placed, strict=True)]
        named = [",".join(stage_devices(text, stages[name], gpus)) for name, text in zip(stages, texts, strict=True)]
        fractions = [self.memory_fraction] * len(named) if self.memory_fraction else shared_fractions(named)
        return {
            name: Placement(text, 0.0 if names == CPU else fraction)
            for name, text, names, fraction in zip(stages, texts, named, fractions, strict=True)
        }


class Cluster:
    """Running processes.

    Attributes:
        children: by name: router-0, prefill-0, decode-0, ...
    """

    def __init__(self, spec: ClusterSpec, log_dir: Path, progress: Progress) -> None:
        self.spec = spec
        self.children: dict[str, Child] = {}
        self._log_dir = log_dir
        self._progress = progress
        self._expected_deaths: set[Child] = set()

    @property
    def router_address(self) -> str:
        """host:port of the first router's gRPC."""
        return self.children["router-0"].address

    @property
    def http_address(self) -> str | None:
        """host:port of the first router's HTTP."""
        return self.children["router-0"].ready.get("http")

    def addresses(self, role: str) -> list[str]:
        """host:port of every process of a role, in order."""
        return [child.address for name, child in self.children.items() if name.startswith(f"{role}-")]

    async def wait_for_death(self) -> Child:
        """Until a child ends that nobody asked to end."""
        watched = {asyncio.ensure_future(child.wait()): child for child in self._watched()}
        try:
            done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            return watched[next(iter(done))]
        finally:
            for waiting in watched:
                waiting.cancel()

    async def kill(self, name: str) -> None:
        """Kills a child and its stages at once, as a crash would."""
        child = self.children[name]
        self._expected_deaths.add(child)
        child.kill_group()
        await child.wait()

    async def restart(self, name: str) -> Child:
        """Starts a child that ended once more, at the address it had."""
        old = self.children[name]
        await old.stop(0)
        return await self.start(name, [*old.arguments, "--listen", old.address])

    async def start(self, name: str, arguments: Sequence[str]) -> Child:
        """Starts a further child and waits until it is ready. Raises as `Child.start`."""
        self._progress(f"starting {name}")
        environment = {"OMP_NUM_THREADS": "1", **self.spec.environment}
        if self.spec.token:
            environment["GRAFTLINE_TOKEN"] = self.spec.token
        child = Child(name, arguments, self._log_dir / f"{name}.log", environment)
        # Known before it is ready, so that a start that is given up is cleaned up too.
        self.children[name] = child
        await child.start(self.spec.start_timeout_s)
        self._progress(f"{name} is ready at {child.ready.get('address')}")
        return child

    async def start_all(self) -> None:
        """Starts workers side by side, then routers. Raises ChildDiedError or InternalError."""
        spec = self.spec
        names = [f"prefill-{index}" for index in range(spec.prefills)]
        names += [f"decode-{index}" for index in range(spec.decodes)]
        starts = [asyncio.ensure_future(self.start(name, worker_arguments(spec, name))) for name in names]
        try:
            await asyncio.wait(starts, return_when=asyncio.FIRST_EXCEPTION)
            for start in starts:
                if start.done():
                    start.result()
        finally:
            for start in starts:
                start.cancel()
        for index in range(spec.routers):
            await self.start(f"router-{index}", router_arguments(spec, index, self))

    async def stop(self) -> None:
        """Stops routers, then workers; kills what does not end in time."""
        grace_s = self.spec.drain_grace_s + self.spec.stop_timeout_s
        routers = [child for name, child in self.children.items() if name.startswith("router-")]
        workers = [child for child in self.children.values() if child not in routers]
        for group in (routers, workers):
            self._expected_deaths.update(group)
            await asyncio.gather(*(child.stop(grace_s) for child in group))

    def _watched(self) -> list[Child]:
        return [child for child in self.children.values() if child not in self._expected_deaths]


@asynccontextmanager
async def local_cluster(spec: ClusterSpec, progress: Progress = lambda _: None) -> AsyncIterator[Cluster]:
    """Runs a cluster while the block is open.

    Args:
        progress: hears one line at every step of the start.

    Raises:
        ChildDiedError: a process ended while starting; the message has the end of its log.
        InternalError: a process was not ready in time.
        InvalidRequestError: the model or a setting cannot work.
    """
    path = await asyncio.to_thread(resolve_model, spec.model)
    spec = replace(spec, model=str(path))
    with tempfile.TemporaryDirectory(prefix="graftline-") as scratch:
        log_dir = spec.log_dir or Path(scratch)
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidRequestError("log_dir", f"cannot be made: {error}") from error
        cluster = Cluster(spec, log_dir, progress)
        try:
            await cluster.start_all()
            yield cluster
        finally:
            await asyncio.shield(cluster.stop())


def worker_arguments(spec: ClusterSpec, name: str) -> list[str]:
    """Command line of a worker."""
    role = name.partition("-")[0]
    is_prefill = role == "prefill"
    stages = spec.prefill_stages if is_prefill else spec.decode_stages
    split = spec.prefill_split if is_prefill else spec.decode_split
    placement = spec.placements()[name]
    options = replace(
        spec.engine_options(stages, split), devices=placement.devices, memory_fraction=placement.memory_fraction
    )
    arguments = [
        role,
        *to_arguments(options),
        *_flag("listen", _listen(spec, name)),
        *_flag("transport", spec.transport.value),
        *_flag("start-timeout-s", spec.start_timeout_s),
        *_flag("drain-grace-s", spec.drain_grace_s),
        *_flag("stop-timeout-s", spec.stop_timeout_s),
    ]
    if spec.metrics:
        arguments += _flag("metrics-listen", ANY_PORT)
    if not is_prefill:
        arguments += _flag("peer-silence-s", spec.peer_silence_s)
    return [*arguments, *(spec.prefill_arguments if is_prefill else spec.decode_arguments)]


def router_arguments(spec: ClusterSpec, index: int, cluster: Cluster) -> list[str]:
    """Command line of a router over the cluster's workers."""
    listen, http_listen = spec.listen, spec.http_listen
    if index > 0:
        listen, http_listen = _listen(spec, f"router-{index}"), ANY_PORT
    arguments = ["router", *_flag("listen", listen), *_flag("http-listen", http_listen)]
    arguments += [*_flag("policy", spec.policy), *_flag("drain-grace-s", spec.drain_grace_s)]
    for role in ("prefill", "decode"):
        for address in cluster.addresses(role):
            arguments += _flag(role, address)
    return [*arguments, *spec.router_arguments]


def _listen(spec: ClusterSpec, name: str) -> str:
    """Where a process listens: prefills, decodes and routers in this order, from the first port on."""
    if not spec.first_port:
        return ANY_PORT
    role, _, number = name.partition("-")
    before = {"prefill": 0, "decode": spec.prefills, "router": spec.prefills + spec.decodes}[role]
    return f"127.0.0.1:{spec.first_port + before + int(number)}"


def _flag(name: str, value: object) -> list[str]:
    return [f"--{name}", str(value)]
