"""Starts and stops a prefill worker. Tests and the command line use the same context manager."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from graftline.engine.config import EngineConfig
from graftline.engine.prefill_engine import PrefillScheduler
from graftline.engine.worker_engine import start_prefill_engine
from graftline.kv_transfer.in_process import InProcessHub
from graftline.metrics import ProcessRole
from graftline.prefill_server.directory import EngineDirectory
from graftline.prefill_server.service import PrefillService
from graftline.prefill_server.settings import ServiceSettings
from graftline.proto.v1 import worker_pb2
from graftline.proto.v1.prefill_pb2_grpc import add_PrefillServiceServicer_to_server
from graftline.worker.config import WorkerConfig
from graftline.worker.early_stages import EarlyStage
from graftline.worker.engine import RunningEngine
from graftline.worker.facts import fingerprint_message, model_limits, stage_layouts
from graftline.worker.host import WorkerHost
from graftline.worker.metrics import PrefillMetrics
from graftline.worker.stage_main import stage_command
from graftline.worker.transfer import PortFactory

SERVICE_NAME = "graftline.v1.PrefillService"


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """A prefill worker.

    Attributes:
        hub: where transports meet when all workers live in this process.
        early_stages: processes of later stages that wait already.
    """

    engine: EngineConfig
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    service: ServiceSettings = field(default_factory=ServiceSettings)
    hub: InProcessHub | None = None
    early_stages: tuple[EarlyStage, ...] = ()


PrefillStarter = Callable[[PrefillConfig], RunningEngine[PrefillScheduler]]


@dataclass(frozen=True, slots=True)
class Prefill:
    """A running prefill worker."""

    host: WorkerHost
    service: PrefillService
    engine: RunningEngine[PrefillScheduler]

    @property
    def address(self) -> str:
        """host:port of its services."""
        return self.host.address


def start_engine(config: PrefillConfig) -> RunningEngine[PrefillScheduler]:
    """The real engine; blocks until every stage is ready."""
    worker = config.worker
    ports = PortFactory(worker.transfer, config.hub)
    command = stage_command(worker.transfer, config.early_stages)
    return start_prefill_engine(config.engine, ports, command, worker.start_timeout_s)


@asynccontextmanager
async def running_prefill(config: PrefillConfig, start: PrefillStarter = start_engine) -> AsyncIterator[Prefill]:
    """Runs a prefill worker while the block is open; then drains and stops it.

    Raises:
        InvalidRequestError: the configuration cannot work.
        InternalError: a stage did not start.
        PeerUnavailableError: a port cannot be opened.
    """
    engine = await asyncio.to_thread(start, config)
    try:
        limits = worker_pb2.Limits(
            max_request_tokens=engine.facts.context_len,
            max_running=config.engine.max_running,
            max_queued=config.engine.max_queued,
        )
        host = WorkerHost(ProcessRole.PREFILL, config.worker, engine, limits)
        service = PrefillService(
            identity=host.identity,
            engine=engine.scheduler,
            directory=EngineDirectory(engine.scheduler, stage_layouts(engine.layouts), config.service.max_peers),
            fingerprint=fingerprint_message(engine.facts),
            num_stages=engine.facts.num_stages,
            limits=model_limits(engine.facts),
            eos_token_ids=frozenset(engine.facts.card.eos_token_ids),
            settings=config.service,
            metrics=PrefillMetrics(host.metrics),
            tracer=config.worker.tracer,
        )
        host.rpc.add(add_PrefillServiceServicer_to_server, service, SERVICE_NAME)
        async with host.serving(service):
            yield Prefill(host, service, engine)
    finally:
        await asyncio.to_thread(engine.stop, config.worker.stop_timeout_s)
