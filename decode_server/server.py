"""Starts and stops a decode worker. Tests and the command line use the same context manager."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from graftline.decode_server.peers import PrefillPeers
from graftline.decode_server.service import DecodeService
from graftline.decode_server.settings import ServiceSettings
from graftline.engine.config import EngineConfig
from graftline.engine.decode_engine import DecodeScheduler
from graftline.engine.worker_engine import start_decode_engine
from graftline.kv_transfer.in_process import InProcessHub
from graftline.metrics import ProcessRole
from graftline.proto.v1 import worker_pb2
from graftline.proto.v1.decode_pb2_grpc import add_DecodeServiceServicer_to_server
from graftline.worker.config import WorkerConfig
from graftline.worker.early_stages import EarlyStage
from graftline.worker.engine import RunningEngine
from graftline.worker.facts import fingerprint_message, model_limits, stage_layouts
from graftline.worker.host import WorkerHost
from graftline.worker.metrics import DecodeMetrics
from graftline.worker.stage_main import stage_command
from graftline.worker.tasks import Tasks
from graftline.worker.transfer import PortFactory

SERVICE_NAME = "graftline.v1.DecodeService"


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """A decode worker.

    Attributes:
        hub: where transports meet when all workers live in this process.
        early_stages: processes of later stages that wait already.
    """

    engine: EngineConfig
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    service: ServiceSettings = field(default_factory=ServiceSettings)
    hub: InProcessHub | None = None
    early_stages: tuple[EarlyStage, ...] = ()


DecodeStarter = Callable[[DecodeConfig], RunningEngine[DecodeScheduler]]


@dataclass(frozen=True, slots=True)
class Decode:
    """A running decode worker."""

    host: WorkerHost
    service: DecodeService
    engine: RunningEngine[DecodeScheduler]

    @property
    def address(self) -> str:
        """host:port of its services."""
        return self.host.address


def start_engine(config: DecodeConfig) -> RunningEngine[DecodeScheduler]:
    """The real engine; blocks until every stage is ready."""
    worker = config.worker
    ports = PortFactory(worker.transfer, config.hub)
    command = stage_command(worker.transfer, config.early_stages)
    return start_decode_engine(config.engine, ports, command, worker.start_timeout_s)


@asynccontextmanager
async def running_decode(config: DecodeConfig, start: DecodeStarter = start_engine) -> AsyncIterator[Decode]:
    """Runs a decode worker while the block is open; then drains and stops it.

    Raises:
        InvalidRequestError: the configuration cannot work.
        InternalError: a stage did not start.
        PeerUnavailableError: a port cannot be opened.
    """
    engine = await asyncio.to_thread(start, config)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, engine.stop, config.worker.stop_timeout_s)
        limits = worker_pb2.Limits(
            max_request_tokens=engine.facts.context_len,
            max_running=config.engine.max_running,
            max_queued=config.engine.max_queued,
        )
        host = WorkerHost(ProcessRole.DECODE, config.worker, engine, limits)
        peers = PrefillPeers(
            identity=host.identity,
            fingerprint=fingerprint_message(engine.facts),
            layouts=stage_layouts(engine.layouts),
            access=config.worker.peer_access,
            pair_timeout_s=config.service.pair_timeout_s,
            max_peers=config.service.max_peers,
            forget_incarnation=engine.scheduler.forget_peer,
        )
        stack.push_async_callback(peers.close)
        tasks = await stack.enter_async_context(Tasks())
        service = DecodeService(
            identity=host.identity,
            engine=engine.scheduler,
            peers=peers,
            limits=model_limits(engine.facts),
            eos_token_ids=frozenset(engine.facts.card.eos_token_ids),
            settings=config.service,
            spawn=tasks.start,
            metadata=config.worker.peer_access.metadata,
            metrics=DecodeMetrics(host.metrics),
            tracer=config.worker.tracer,
        )
        host.rpc.add(add_DecodeServiceServicer_to_server, service, SERVICE_NAME)
        await stack.enter_async_context(host.serving(service))
        yield Decode(host, service, engine)
