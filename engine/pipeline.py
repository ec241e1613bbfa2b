"""Stage 0's hold on all stages of a worker: starts them, feeds them plans and controls, hears their reports.

Whatever any stage says lands in one inbox, in order per stage. Sends never wait for receives: results return
on links of their own, read by threads of their own.
"""

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from graftline.engine.config import EngineConfig, Role, StageMode
from graftline.engine.links import HubLinks, LocalLink, QueuedSender, Receiver, Sender, StageLinks
from graftline.engine.links_distributed import StageEnds, connect_stages, leave_job
from graftline.engine.links_payload import Payloads
from graftline.engine.plan import (
    Control,
    Heartbeat,
    Message,
    Report,
    StageAlive,
    StageFailed,
    StageReady,
    StepPlan,
    Stop,
)
from graftline.engine.round_returns import returned_bytes
from graftline.engine.round_state import RoundState
from graftline.engine.stage_builder import build_stage, shared_round_state
from graftline.engine.stage_stream import StageStream
from graftline.engine.stage_worker import StageWorker
from graftline.engine.transfer_port import TransferPort
from graftline.errors import InternalError, PeerUnavailableError

logger = logging.getLogger(__name__)

STAGE_CONFIG_VARIABLE = "GRAFTLINE_STAGE_CONFIG"


def joined_key(stage: int) -> str:
    """What a stage process writes into the rendezvous store as soon as it runs."""
    return f"graftline/stage/{stage}"


class Inbox(Protocol):
    """Takes what stages report; thread-safe."""

    def put(self, item: Report) -> None:
        """Takes a report."""


class _InboxSender:
    """The near end of a link that ends in the hub's own inbox."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    def send(self, message: Message, payload: Tensor | None = None) -> None:
        assert payload is None
        self._inbox.put(message)  # type: ignore[arg-type]  # links carry any message, these two only reports


class StageProcess(Protocol):
    """The process of a later stage, as `subprocess.Popen` has it."""

    def poll(self) -> int | None:
        """Its exit status, or None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, waited for. Raises TimeoutError or subprocess.TimeoutExpired."""

    def kill(self) -> None:
        """Ends it."""


@dataclass(frozen=True, slots=True)
class StageCommand:
    """How to start the process of a later stage: a Python module that takes rank and rendezvous from the
    environment and the engine's configuration from `GRAFTLINE_STAGE_CONFIG`.

    Attributes:
        start: another way to start such a process with the given variables; None: as a new one.
    """

    module: str
    environment: dict[str, str]
    start: Callable[[Mapping[str, str]], StageProcess] | None = None


class Pipeline:
    """All stages of one worker.

    Args:
        port: makes the transfer port of a stage that lives in this process.
        command: starts later stages as processes; unused with threads.
        inbox: hears every report but `StageReady` and `StageAlive`.
    """

    def __init__(
        self, config: EngineConfig, port: Callable[[int], TransferPort], command: StageCommand, inbox: Inbox
    ) -> None:
        self._config = config
        self._make_port = port
        self._command = command
        self._inbox = inbox
        self._layouts: dict[int, bytes] = {}
        self._graph_bytes: dict[int, int] = {}
        self._ring_bytes: dict[int, int] = {}
        self._all_ready = threading.Event()
        self._start_failure: str | None = None
        self._alive: dict[int, StageAlive] = {}
        self._answered: dict[int, int] = {}  # the newest heartbeat that a stage answered
        self._sequence = 0
        self._workers: list[StageWorker] = []
        self._children: dict[int, StageProcess] = {}
        self._readers: list[threading.Thread] = []
        self._chain: list[LocalLink] = []
        self._queued: list[QueuedSender] = []
        self._failed = False
        self._plans: Sender | None = None
        self._controls: list[Sender] = []
        self._stopping = False

    def start(self, timeout_s: float) -> None:
        """Builds or starts every stage and waits until all are ready.

        Raises:
            InternalError: a stage failed or was not ready in time.
            InvalidRequestError: the configuration does not fit the model.
        """
        deadline = time.monotonic() + timeout_s
        if self._runs_processes:
            self._start_processes(deadline)
        else:
            self._start_threads()
        while not self._all_ready.wait(0.2):
            if self._start_failure is not None:
                raise InternalError(f"a stage did not start: {self._start_failure}")
            if time.monotonic() > deadline:
                missing = sorted(set(range(self._config.num_stages)) - set(self._layouts))
                raise InternalError(f"stages {missing} were not ready within {timeout_s:g} s")
            self._check_children()

    @property
    def _runs_processes(self) -> bool:
        return self._config.num_stages > 1 and self._config.stage_mode is StageMode.PROCESSES

    @property
    def layouts(self) -> Sequence[bytes]:
        """What every stage's transfer port said of its pools, stage by stage."""
        return [self._layouts[stage] for stage in range(self._config.num_stages)]

    @property
    def graph_bytes(self) -> Sequence[int]:
        """What the captured graphs of every stage took of its GPU, stage by stage."""
        return [self._graph_bytes[stage] for stage in range(self._config.num_stages)]

    @property
    def ring_bytes(self) -> Sequence[int]:
        """What of every stage's GPU the others write to, stage by stage."""
        return [self._ring_bytes[stage] for stage in range(self._config.num_stages)]

    def submit(self, plan: StepPlan) -> None:
        """Starts a step; its result arrives in the inbox."""
        assert self._plans is not None
        self._plans.send(plan)

    def tell(self, control: Control, stages: Sequence[int] | None = None) -> None:
        """Sends a control message to some stages, to all when none are named."""
        for stage in range(self._config.num_stages) if stages is None else stages:
            self._controls[stage].send(control)

    def beat(self) -> None:
        """Asks every stage for a sign of life and puts a `StageFailed` into the inbox for one that gave none.

        Silence is counted in heartbeats that were not answered: a standstill of this process is no silence of others.
        """
        self._check_children()
        beat_s = self._config.heartbeat_s
        for stage, answered in self._answered.items():
            silent_s = (self._sequence - answered) * beat_s
            if silent_s >= self._config.stage_timeout_s:
                self._fail(stage, f"silent for {silent_s:.1f} s")
                if stage in self._children:
                    self._children[stage].kill()  # it would not hear that it is to stop
        for alive in self.stage_load():
            if alive.order_beats * beat_s > self._config.step_timeout_s:
                self._fail(alive.stage, f"a control message is being obeyed for {alive.order_beats * beat_s:.1f} s")
        self._sequence += 1
        try:
            self.tell(Heartbeat(self._sequence))
        except PeerUnavailableError as error:
            self._fail(0, str(error))

    def stage_load(self) -> Sequence[StageAlive]:
        """The last sign of life of every stage that gave one."""
        alive = self._alive.copy()  # a stage may speak for the first time meanwhile
        return [alive[stage] for stage in sorted(alive)]

    def stop(self, timeout_s: float) -> None:
        """Ends every stage; what does not end in time is killed."""
        self._stopping = True
        deadline = time.monotonic() + timeout_s
        self._say_stop()
        # After a failure a stage of this process may wait on its GPU for a neighbour that is gone.
        patience_s = timeout_s / 2 if self._failed and self._runs_processes else timeout_s
        for stage, worker in enumerate(self._workers):
            if not worker.join(max(0.1, deadline - timeout_s + patience_s - time.monotonic())):
                logger.warning("a stage thread did not end within %.1f s", timeout_s)
            for link in self._chain[stage + 1 : stage + 2]:
                link.close()  # a stage that died handed no `Stop` on
        for stage, child in self._children.items():
            try:
                child.wait(max(0.1, deadline - time.monotonic()))
            except (TimeoutError, subprocess.TimeoutExpired):
                logger.warning("stage %d did not end and is killed", stage)
                child.kill()
                child.wait()
        for queued in self._queued:
            queued.close(max(0.1, deadline - time.monotonic()))
        for reader in self._readers:
            reader.join(max(0.1, deadline - time.monotonic()))
        if self._runs_processes:
            # NCCL's orderly end waits for the other ends, which are gone by now.
            is_cuda = self._config.device_type == "cuda"
            leave_job(max(1.0, deadline - time.monotonic()), abort=self._failed or is_cuda)

    def _say_stop(self) -> None:
        for link in (*([self._plans] if self._plans is not None else []), *self._controls):
            try:
                link.send(Stop())
            except PeerUnavailableError as error:  # the others are to hear it all the same
                logger.warning("a stage was gone before it was told to stop: %s", error)

    # --- reports ---------------------------------------------------------------------------------------------

    def put(self, report: Report) -> None:
        """Takes a report from any stage: keeps the signs of life, passes the rest on."""
        match report:
            case StageReady(stage=stage, layout=layout, graph_bytes=graph_bytes, ring_bytes=ring_bytes):
                self._graph_bytes[stage] = graph_bytes
                self._ring_bytes[stage] = ring_bytes
                self._layouts[stage] = layout
                self._answered[stage] = self._sequence
                if len(self._layouts) == self._config.num_stages:
                    self._all_ready.set()
            case StageAlive(stage=stage, sequence=sequence):
                self._alive[stage] = report
                self._answered[stage] = sequence
            case StageFailed(stage=stage, reason=reason):
                self._fail(stage, reason)
            case _:
                self._inbox.put(report)

    def _fail(self, stage: int, reason: str) -> None:
        if self._stopping:
            return
        self._failed = True
        if not self._all_ready.is_set():
            self._start_failure = self._start_failure or f"stage {stage}: {reason}"
        self._inbox.put(StageFailed(stage, reason))

    def _check_children(self) -> None:
        for stage, child in self._children.items():
            code = child.poll()
            if code is not None:
                self._fail(stage, f"its process ended with code {code}")

    def _on_end(self, stage: int, reason: str | None) -> None:
        if reason is not None:
            self._fail(stage, reason)

    # --- start -----------------------------------------------------------------------------------------------

    def _start_threads(self) -> None:
        count = self._config.num_stages
        self._chain = [LocalLink() for _ in range(count)]
        self._plans = self._chain[0]
        shared = shared_round_state(self._config)
        for stage in range(count):
            downstream = self._chain[stage + 1] if stage + 1 < count else None
            self._start_local_stage(stage, self._chain[stage], downstream, shared)

    def _start_local_stage(
        self,
        stage: int,
        upstream: Receiver,
        downstream: QueuedSender | LocalLink | None,
        round_state: RoundState | None = None,
        returns: Sequence[Payloads] = (),
        *,
        by_memory: bool = False,
        ring_bytes: int = 0,
    ) -> None:
        control = LocalLink()
        self._controls.append(control)
        device = torch.device(self._config.stage_device(stage))
        stream = StageStream(device, urgent=self._config.role is Role.PREFILL)
        with stream.entered():
            built = build_stage(self._config, stage, round_state, returns, by_memory=by_memory)
            port = self._make_port(stage)
            layout = port.open(built.pools)
        inbox = _InboxSender(self)
        links = StageLinks(upstream, downstream, control, inbox, inbox)
        worker = StageWorker(
            stage,
            built.stage,
            links,
            port,
            built.gate,
            self._config.threads,
            stream,
            lambda reason: self._on_end(stage, reason),
        )
        self._workers.append(worker)
        worker.start()
        self.put(StageReady(stage, layout, built.graph_bytes, ring_bytes))

    def _start_processes(self, deadline: float) -> None:
        count = self._config.num_stages
        ends, hubs = self._connect(deadline)
        assert ends.downstream is not None
        plans = LocalLink()
        self._plans = plans
        queued_plans = QueuedSender(ends.downstream, "plan-sender", partial(self._fail, 1))
        self._queued.append(queued_plans)
        self._start_local_stage(
            0, plans, queued_plans, returns=ends.returns, by_memory=ends.by_memory, ring_bytes=ends.ring_bytes
        )
        for stage, hub in enumerate(hubs, start=1):
            queued = QueuedSender(hub.control, f"stage-{stage}-sender", partial(self._fail, stage))
            self._queued.append(queued)
            self._controls.append(queued)
            for receiver in (hub.results, hub.reports):
                reader = threading.Thread(
                    target=self._read, args=(stage, receiver), name=f"stage-{stage}-reader", daemon=True
                )
                self._readers.append(reader)
                reader.start()
        assert len(self._controls) == count

    def _connect(self, deadline: float) -> tuple[StageEnds, list[HubLinks]]:
        """Joins the processes of all stages, starting them unless a launcher did (torchrun's variables)."""
        count = self._config.num_stages
        timeout = timedelta(seconds=max(1.0, deadline - time.monotonic()))
        if "WORLD_SIZE" in os.environ:
            if int(os.environ["WORLD_SIZE"]) != count:
                raise InternalError(f"WORLD_SIZE is {os.environ['WORLD_SIZE']} for {count} stages")
            dist.init_process_group("gloo", init_method="env://", timeout=timeout)
        else:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            store = _local_store(count, timeout)
            for stage in range(1, count):
                self._children[stage] = self._spawn(stage, store.port)
            self._await_children(store, deadline)
            dist.init_process_group("gloo", store=store, rank=0, world_size=count, timeout=timeout)
        config, device = self._config, torch.device(self._config.stage_device(0))
        ends = connect_stages(count, 0, device, config.stage_channel, return_bytes=returned_bytes(config))
        hubs = []
        for star in ends.stars:
            assert star.control is not None
            assert star.results is not None
            assert star.reports is not None
            hubs.append(HubLinks(star.control, star.results, star.reports))
        return ends, hubs

    def _await_children(self, store: TCPStore, deadline: float) -> None:
        """Until every stage process runs; joining them is one long blocking call that would notice no death."""
        keys = [joined_key(stage) for stage in self._children]
        while not store.check(keys):
            self._check_children()
            if self._start_failure is not None:
                raise InternalError(f"a stage did not start: {self._start_failure}")
            if time.monotonic() > deadline:
                raise InternalError("the processes of later stages did not come up in time")
            time.sleep(0.02)

    def _spawn(self, stage: int, port: int) -> StageProcess:
        environment = {
            **self._command.environment,
            "RANK": str(stage),
            "WORLD_SIZE": str(self._config.num_stages),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GRAFTLINE_SPAWNED": "1",
            STAGE_CONFIG_VARIABLE: self._config.to_json(),
        }
        if self._command.start is not None:
            return self._command.start(environment)
        return subprocess.Popen([sys.executable, "-m", self._command.module], env={**os.environ, **environment})

    def _read(self, stage: int, receiver: Receiver) -> None:
        while True:
            try:
                message, _ = receiver.receive()
            except (PeerUnavailableError, InternalError) as error:
                self._fail(stage, str(error))
                return
            self.put(message)  # type: ignore[arg-type]  # a stage sends nothing but reports on these links


def _local_store(count: int, timeout: timedelta) -> TCPStore:
    """Where the stages of this host meet. By itself a store listens on all interfaces, and lets everybody in."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        return TCPStore(
            "127.0.0.1",
            port,
            count,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listener.detach(),
        )
