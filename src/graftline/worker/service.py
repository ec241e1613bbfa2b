"""What prefill and decode services both answer: who they are, how loaded they are, and to stop admitting."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import Any

import graftline
from graftline.engine.plan import StageAlive
from graftline.engine.service_api import EngineLoad
from graftline.engine.worker_engine import WorkerFacts
from graftline.errors import InvalidRequestError
from graftline.proto.status import rpc_border
from graftline.proto.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from graftline.worker.facts import card_message, fingerprint_message

MIN_WATCH_INTERVAL_S = 0.02
MAX_WATCH_INTERVAL_S = 60.0


class WorkerState(Enum):
    """Whether a worker takes requests."""

    SERVING = worker_pb2.WORKER_STATE_SERVING
    DRAINING = worker_pb2.WORKER_STATE_DRAINING
    FAILED = worker_pb2.WORKER_STATE_FAILED


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """Describe, Watch and Drain of one worker.

    Attributes:
        state: set by the server that owns the worker.
    """

    def __init__(
        self,
        *,
        identity: common_pb2.WorkerIdentity,
        facts: WorkerFacts,
        limits: worker_pb2.Limits,
        load: Callable[[], EngineLoad],
        stage_load: Callable[[], Sequence[StageAlive]],
        drain: Callable[[float], Awaitable[None]],
        watch_interval_s: float,
    ) -> None:
        self.state = WorkerState.SERVING
        self._identity = identity
        self._facts = facts
        self._limits = limits
        self._load = load
        self._stage_load = stage_load
        self._drain = drain
        self._watch_interval_s = watch_interval_s
        self._closing = asyncio.Event()
        self._signs_of_life = 0
        self._last_taken_s = 0.0
        self._last_heard = 0

    def close(self) -> None:
        """Ends every watch."""
        self._closing.set()

    async def Describe(self, request: worker_pb2.DescribeRequest, context: Any) -> worker_pb2.DescribeResponse:  # noqa: N802
        """Who this worker is and what it serves."""
        card = self._facts.card
        return worker_pb2.DescribeResponse(
            identity=self._identity,
            model_card=card_message(card, with_text=request.known_card_hash != card.card_hash),
            fingerprint=fingerprint_message(self._facts),
            num_stages=self._facts.num_stages,
            limits=self._limits,
            version=graftline.__version__,
        )

    async def Watch(self, request: worker_pb2.WatchRequest, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        """Load and progress, at once and then at every interval."""
        async with rpc_border(context):
            interval_s = request.interval_s or self._watch_interval_s
            if not MIN_WATCH_INTERVAL_S <= interval_s <= MAX_WATCH_INTERVAL_S:
                allowed = f"[{MIN_WATCH_INTERVAL_S}, {MAX_WATCH_INTERVAL_S}]"
                raise InvalidRequestError("interval_s", f"{interval_s} is not in {allowed}")
            while not self._closing.is_set():
                await context.write(self._watch_message())
                await self._pause(interval_s)

    async def Drain(self, request: worker_pb2.DrainRequest, context: Any) -> worker_pb2.DrainResponse:  # noqa: N802
        """Stops admitting at once; answers when nothing is open any more."""
        async with rpc_border(context):
            if not 0 <= request.grace_s <= 86_400:
                raise InvalidRequestError("grace_s", f"{request.grace_s} is not in [0, 86400]")
            await self._drain(request.grace_s)
            return worker_pb2.DrainResponse()

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._closing.wait()
        except TimeoutError:
            return

    def _progress(self, load: EngineLoad) -> int:
        """Steps, plus signs of life: turns of the loop between which every stage answered a newer heartbeat.

        A long step or a wait for a peer is no hang; a stage or a loop that stands still stops the count.
        """
        stages = self._stage_load()
        heard = min((stage.sequence for stage in stages), default=0)
        if load.taken_s > self._last_taken_s and heard > self._last_heard:
            self._signs_of_life += 1
            self._last_taken_s, self._last_heard = load.taken_s, heard
        return load.progress + self._signs_of_life

    def _watch_message(self) -> worker_pb2.WatchResponse:
        load = self._load()
        return worker_pb2.WatchResponse(
            incarnation=self._identity.incarnation,
            state=self.state.value,
            queued=load.queued,
            queued_tokens=load.queued_tokens,
            running=load.running,
            pages_total=load.pages.total,
            pages_free=load.pages.free + load.pages.cached,
            pages_quarantined=load.pages.quarantined,
            progress=self._progress(load),
            tokens_per_s=load.tokens_per_s,
            accept_length=load.accept_length,
        )
