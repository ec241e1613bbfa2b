"""What every worker process does around its service: ports, health, load reports, metrics, drain, failure."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

from graftline.engine.service_api import EngineLoad
from graftline.metrics import Metrics, ProcessRole
from graftline.proto.server import RpcServer
from graftline.proto.v1 import common_pb2, worker_pb2
from graftline.proto.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from graftline.worker.config import WorkerConfig
from graftline.worker.engine import RunningEngine
from graftline.worker.metrics import EngineCollector, MetricsServer
from graftline.worker.service import WorkerService, WorkerState
from graftline.worker.tasks import Tasks

logger = logging.getLogger(__name__)

WORKER_SERVICE_NAME = "graftline.v1.WorkerService"
_MONITOR_S = 0.1
_LAST_MESSAGES_S = 1.0
_ROLES = {
    ProcessRole.PREFILL: common_pb2.WORKER_ROLE_PREFILL,
    ProcessRole.DECODE: common_pb2.WORKER_ROLE_DECODE,
}


class DrainableService(Protocol):
    """A role's service, as the host sees it."""

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""

    def stop_admitting(self) -> None:
        """Refuses new requests from now on."""

    def cancel_all(self) -> None:
        """Asks everything open to end."""

    def abandon_all(self, reason: str) -> None:
        """Fails everything open: the engine is gone."""

    async def wait_idle(self) -> None:
        """Until nothing is open."""


class WorkerHost:
    """Hosts one service over one engine.

    Attributes:
        identity: this incarnation; its address is final from the start.
        rpc: the gRPC server, bound and not started; services are added before `serving`.
        failed: set once the engine cannot go on; `failure` says why.
    """

    def __init__(
        self, role: ProcessRole, config: WorkerConfig, engine: RunningEngine[Any], limits: worker_pb2.Limits
    ) -> None:
        self.metrics = Metrics(role)
        self.rpc = RpcServer(
            config.listen,
            advertise=config.advertise,
            tls=config.tls,
            tokens=config.tokens,
            peer_silence_s=config.peer_silence_s,
        )
        self.rpc.bind()
        self.identity = common_pb2.WorkerIdentity(
            role=_ROLES[role], incarnation=uuid.uuid4().hex, address=self.rpc.address
        )
        self.failed = asyncio.Event()
        self.failure: str | None = None
        self.metrics_address: str | None = None
        self._role = role
        self._config = config
        self._engine = engine
        self._service: DrainableService | None = None
        self._worker_service = WorkerService(
            identity=self.identity,
            facts=engine.facts,
            limits=limits,
            load=engine.load,
            stage_load=engine.stage_load,
            drain=self.drain,
            watch_interval_s=config.watch_interval_s,
        )
        self.rpc.add(add_WorkerServiceServicer_to_server, self._worker_service, WORKER_SERVICE_NAME)

    @property
    def address(self) -> str:
        """host:port under which peers reach this worker."""
        return self.rpc.address

    @asynccontextmanager
    async def serving(self, service: DrainableService) -> AsyncIterator[None]:
        """Serves while the block is open; then drains for the configured grace and stops."""
        self._service = service
        metrics_server = self._start_metrics(service)
        async with Tasks() as tasks:
            tasks.start(self._monitor(), name="engine-monitor")
            try:
                await self.rpc.start()
                await self.rpc.set_serving(True)
                logger.info("%s %s serves on %s", self._role.value, self.identity.incarnation, self.address)
                yield
            finally:
                await self.drain(self._config.drain_grace_s)
                self._worker_service.close()
                await self.rpc.stop(_LAST_MESSAGES_S)
                if metrics_server is not None:
                    await asyncio.to_thread(metrics_server.close)

    async def drain(self, grace_s: float) -> None:
        """Stops admitting, waits `grace_s` for what is open, cancels the rest and waits for its end (bounded)."""
        assert self._service is not None, "serving"
        if self._worker_service.state is WorkerState.SERVING:
            self._worker_service.state = WorkerState.DRAINING
        self._service.stop_admitting()
        await self.rpc.set_serving(False)
        if self.failure is not None or await self._idle_within(grace_s):
            return
        logger.warning("%d requests are cancelled after a grace of %g s", self._service.num_open, grace_s)
        self._service.cancel_all()
        if not await self._idle_within(self._config.stop_timeout_s):
            logger.error("%d requests did not end", self._service.num_open)

    async def _idle_within(self, seconds: float) -> bool:
        assert self._service is not None
        try:
            async with asyncio.timeout(seconds):
                await self._service.wait_idle()
        except TimeoutError:
            return False
        return True

    def _start_metrics(self, service: DrainableService) -> MetricsServer | None:
        collector = EngineCollector(
            self._role,
            load=self._engine.load,
            stage_load=self._engine.stage_load,
            totals=self._engine.scheduler.totals,
            num_open=lambda: service.num_open,
            memory=self._engine.facts.memory,
        )
        self.metrics.registry.register(collector)
        if self._config.metrics_listen is None:
            return None
        server = MetricsServer(self.metrics, self._config.metrics_listen)
        self.metrics_address = server.address
        return server

    async def _monitor(self) -> None:
        """Notices an engine that failed or hangs."""
        watch = EngineWatch(_MONITOR_S, self._config.engine_silence_s)
        while True:
            reason = watch.look(self._engine.load())
            if reason is not None:
                await self._fail(reason)
                return
            await asyncio.sleep(_MONITOR_S)

    async def _fail(self, reason: str) -> None:
        logger.error("the %s engine cannot go on: %s", self._role.value, reason)
        assert self._service is not None, "serving"
        self.failure = reason
        self._worker_service.state = WorkerState.FAILED
        await self.rpc.set_serving(False)
        self._service.stop_admitting()
        self._service.abandon_all(reason)
        self.failed.set()


class EngineWatch:
    """Looks at an engine again and again. Silence is counted in looks: after a standstill of this whole process the
    engine's thread may come later than the one that looks.
    """

    def __init__(self, look_s: float, silence_s: float) -> None:
        self._look_s = look_s
        self._silence_s = silence_s
        self._last_turn_s = -1.0
        self._num_silent = 0

    def look(self, load: EngineLoad) -> str | None:
        """Why the engine cannot be relied on any more, or None."""
        if load.failed is not None:
            return load.failed
        self._num_silent = self._num_silent + 1 if load.taken_s == self._last_turn_s else 0
        self._last_turn_s = load.taken_s
        silent_s = self._num_silent * self._look_s
        return f"its loop has not turned for {silent_s:.1f} s" if silent_s >= self._silence_s else None
