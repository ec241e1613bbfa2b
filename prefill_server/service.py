"""The gRPC face of a prefill worker: one bidirectional stream a handoff, over any `PrefillEngine`.

The handler of a stream only moves messages. What follows from them is decided in `handoff.step` and done by
`HandoffDriver`, whose life is that of the handoff, not that of the stream: a decode that vanished still has its
request cancelled and waited for.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from graftline.engine.request import PageId, Request, RequestKey, SlotId
from graftline.engine.service_api import (
    Destination,
    Drained,
    FirstToken,
    PrefillEngine,
    PrefillEvent,
    PrefillFailed,
    PrefillFailure,
    PrefillFinished,
    Scheduled,
)
from graftline.errors import InvalidRequestError, OutOfCapacityError
from graftline.kv_transfer.fingerprint import Fingerprint, compare
from graftline.prefill_server import handoff
from graftline.prefill_server.driver import HandoffDriver
from graftline.prefill_server.settings import ServiceSettings
from graftline.prefill_server.traces import HandoffTrace
from graftline.proto.status import rpc_border
from graftline.proto.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from graftline.proto.validation import ModelLimits, check_prefill_start
from graftline.tracing import NO_TRACER, Tracer
from graftline.worker.metrics import PrefillMetrics
from graftline.worker.translate import (
    handoff_message,
    logprob_message,
    request_from,
    tree_message,
    tree_origin_message,
)

logger = logging.getLogger(__name__)

_FAILURE_MESSAGES = {
    PrefillFailure.INVALID_REQUEST: prefill_pb2.PREFILL_FAILURE_INVALID_REQUEST,
    PrefillFailure.OUT_OF_CAPACITY: prefill_pb2.PREFILL_FAILURE_OUT_OF_CAPACITY,
    PrefillFailure.NOT_PAIRED: prefill_pb2.PREFILL_FAILURE_NOT_PAIRED,
    PrefillFailure.TRANSFER_FAILED: prefill_pb2.PREFILL_FAILURE_TRANSFER_FAILED,
    PrefillFailure.DRAINING: prefill_pb2.PREFILL_FAILURE_DRAINING,
    PrefillFailure.INTERNAL: prefill_pb2.PREFILL_FAILURE_INTERNAL,
}
_ALIVE = prefill_pb2.PrefillResponse(alive=prefill_pb2.PrefillAlive())


class PeerDirectory(Protocol):
    """Which decodes this worker may write to, and where."""

    def pair(self, decode: common_pb2.WorkerIdentity, stages: Sequence[common_pb2.StageLayout]) -> None:
        """Learns a decode's layouts; returns at once. A decode that is known already is learned anew.

        Raises:
            IncompatibleError: its layouts cannot be written to from ours.
            InvalidRequestError: its layouts make no sense.
        """

    def is_paired(self, decode_incarnation: str) -> bool:
        """True when requests of that decode can be taken."""


class PrefillService(prefill_pb2_grpc.PrefillServiceServicer):
    """Pair and Prefill over an engine.

    Attributes:
        identity: who this worker is; its address is known once the server is bound.
    """

    def __init__(
        self,
        *,
        identity: common_pb2.WorkerIdentity,
        engine: PrefillEngine,
        directory: PeerDirectory,
        fingerprint: common_pb2.Fingerprint,
        num_stages: int,
        limits: ModelLimits,
        eos_token_ids: frozenset[int],
        settings: ServiceSettings,
        metrics: PrefillMetrics,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self.identity = identity
        self._engine = engine
        self._directory = directory
        self._fingerprint = Fingerprint.from_proto(fingerprint)
        self._num_stages = num_stages
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self._settings = settings
        self._metrics = metrics
        self._tracer = tracer
        self._admitting = True
        self._open: dict[HandoffDriver, RequestKey | None] = {}
        self._keys: set[RequestKey] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    # --- life of the service ---------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Handoffs that have not ended, those of vanished decodes included."""
        return len(self._open)

    def stop_admitting(self) -> None:
        """From now on new handoffs are answered `Failed(DRAINING)`."""
        self._admitting = False

    def cancel_all(self) -> None:
        """Asks the engine to end everything that is open."""
        for driver in tuple(self._open):
            driver.post(handoff.Cancel())

    def abandon_all(self, reason: str) -> None:
        """The engine is gone: fails everything open; its writes may still land."""
        for driver in tuple(self._open):
            driver.post(PrefillFailed(PrefillFailure.INTERNAL, reason, drained=False))

    async def wait_idle(self) -> None:
        """Until no handoff is open."""
        await self._idle.wait()

    # --- RPCs ------------------------------------------------------------------------------------------------

    async def Pair(self, request: prefill_pb2.PairRequest, context: Any) -> prefill_pb2.PairResponse:  # noqa: N802
        """Compares fingerprints and learns the decode's layouts."""
        async with rpc_border(context):
            if not request.decode.incarnation:
                raise InvalidRequestError("decode.incarnation", "is empty")
            response = prefill_pb2.PairResponse(prefill=self.identity, num_stages=self._num_stages)
            theirs = Fingerprint.from_proto(request.fingerprint)
            mismatches = compare(self._fingerprint, theirs)
            if mismatches:
                response.mismatched_fields.extend(mismatch.field for mismatch in mismatches)
                response.detail = "\n".join(str(mismatch) for mismatch in mismatches)
                return response
            self._directory.pair(request.decode, request.stages)
            logger.info("paired with decode %s (%s)", request.decode.address, request.decode.incarnation)
            return response

    async def Prefill(self, request_iterator: AsyncIterator[prefill_pb2.PrefillRequest], context: Any) -> None:  # type: ignore[override]  # noqa: N802
        """One handoff; see docs/handoff.md."""
        async with rpc_border(context):
            if len(self._open) >= self._settings.max_handoffs:
                raise OutOfCapacityError(f"{len(self._open)} handoffs are open", retry_after_s=1.0)
            span = self._tracer.start("graftline.prefill", context.invocation_metadata())
            trace = HandoffTrace(span)
            driver = HandoffDriver(self._engine, self._settings.handoff_timeout_s, self._on_ended, trace)
            self._open[driver] = None
            self._idle.clear()
            try:
                async with asyncio.TaskGroup() as group:
                    reader = group.create_task(self._read(driver, request_iterator))
                    was_read = await self._write(driver, context)
                    reader.cancel()
            finally:
                driver.post(handoff.StreamClosed())
            if not was_read:
                raise OutOfCapacityError(f"the decode read nothing for {self._settings.send_timeout_s:g} s")

    async def _read(self, driver: HandoffDriver, requests: AsyncIterator[prefill_pb2.PrefillRequest]) -> None:
        async for request in requests:
            self._on_request(driver, request)
        # The decode said its last word without waiting for ours: nothing can follow, so nothing is wanted.
        driver.post(handoff.Cancel())

    async def _write(self, driver: HandoffDriver, context: Any) -> bool:
        """Tells the decode everything up to the terminal event; whether it read that."""
        patience_s = self._settings.first_alive_s
        while True:
            event = await self._next_event(driver, patience_s)
            if event is None and not driver.started:
                continue
            patience_s = self._settings.alive_interval_s
            # Not `wait_for`: before Python 3.12 it swallows a cancel that meets the end of what it waits for.
            try:
                async with asyncio.timeout(self._settings.send_timeout_s):
                    await context.write(_ALIVE if event is None else response_of(event))
            except TimeoutError:
                return False
            if isinstance(event, PrefillFinished | PrefillFailed | Drained):
                return True

    async def _next_event(self, driver: HandoffDriver, patience_s: float) -> PrefillEvent | None:
        """The next event for the decode, or None when it is time for a sign of life."""
        try:
            async with asyncio.timeout(patience_s):
                return await driver.outbox.get()
        except TimeoutError:
            return None

    def _on_request(self, driver: HandoffDriver, request: prefill_pb2.PrefillRequest) -> None:
        match request.WhichOneof("message"):
            case "start":
                self._on_start(driver, request.start)
            case "destination":
                pages = tuple(PageId(page_id) for page_id in request.destination.page_ids)
                driver.set_destination(Destination(pages, SlotId(request.destination.slot_id)))
            case "cancel":
                driver.post(handoff.Cancel())

    def _on_start(self, driver: HandoffDriver, start: prefill_pb2.PrefillStart) -> None:
        if driver.started:
            return
        try:
            request = self._admitted(start)
        except _RefusedError as refusal:
            driver.refuse(refusal.code, refusal.reason)
            return
        self._open[driver] = request.key
        self._keys.add(request.key)
        self._metrics.started()
        driver.start(request, start.decode_incarnation, start.real_tree)

    def _admitted(self, start: prefill_pb2.PrefillStart) -> Request:
        """The request to submit. Raises `_RefusedError`."""
        if not self._admitting:
            raise _RefusedError(PrefillFailure.DRAINING, "this prefill is about to stop")
        try:
            check_prefill_start(start, self._limits)
        except InvalidRequestError as error:
            raise _RefusedError(PrefillFailure.INVALID_REQUEST, str(error)) from error
        if start.prefill_incarnation != self.identity.incarnation:
            raise _RefusedError(PrefillFailure.NOT_PAIRED, f"this is incarnation {self.identity.incarnation}")
        if not self._directory.is_paired(start.decode_incarnation):
            raise _RefusedError(PrefillFailure.NOT_PAIRED, f"decode {start.decode_incarnation!r} is not paired")
        request = request_from(start, self._eos_token_ids)
        if request.key in self._keys:
            problem = f"attempt {request.key.attempt} of {request.key.request_id!r} is open already"
            raise _RefusedError(PrefillFailure.INVALID_REQUEST, f"request_id: {problem}")
        return request

    def _on_ended(self, driver: HandoffDriver) -> None:
        key = self._open.pop(driver)
        if key is not None:
            self._keys.discard(key)
            self._metrics.ended(driver.outcome, driver.age_s)
            if driver.first_token_s is not None:
                self._metrics.first_token(driver.first_token_s)
                if driver.outcome == "finished":
                    self._metrics.handed_over(driver.age_s - driver.first_token_s)
        if not self._open:
            self._idle.set()


class _RefusedError(Exception):
    def __init__(self, code: PrefillFailure, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


def response_of(event: PrefillEvent) -> prefill_pb2.PrefillResponse:
    """The message that tells a decode about an event."""
    match event:
        case Scheduled(cached_tokens):
            return prefill_pb2.PrefillResponse(scheduled=prefill_pb2.PrefillScheduled(cached_tokens=cached_tokens))
        case FirstToken(token):
            logprob = None if token.logprob is None else logprob_message(token.logprob)
            first = prefill_pb2.PrefillFirstToken(token_id=token.token_id, logprob=logprob)
            return prefill_pb2.PrefillResponse(first_token=first)
        case PrefillFinished(tree, origin, counts, kv_digest):
            finished = prefill_pb2.PrefillFinished(
                tree=tree_message(tree),
                tree_origin=tree_origin_message(origin),
                handoff=handoff_message(counts),
                kv_digest=kv_digest,
            )
            return prefill_pb2.PrefillResponse(finished=finished)
        case PrefillFailed(code, reason, drained):
            failed = prefill_pb2.PrefillFailed(code=_FAILURE_MESSAGES[code], reason=reason, drained=drained)
            return prefill_pb2.PrefillResponse(failed=failed)
        case Drained():
            return prefill_pb2.PrefillResponse(drained=prefill_pb2.PrefillDrained())
