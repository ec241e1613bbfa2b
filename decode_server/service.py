"""The gRPC face of a decode worker: one `Generate` call drives one prefill, decodes, and streams tokens.

A call is one or more attempts in a row (`attempt.py`): another one when the prefill has to be paired anew, or when
the pages were taken and prompt plus emitted tokens are prefilled again. Attempts outlive the call that made them
until their prefill leg and pages are over.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from graftline.decode_server import handoff
from graftline.decode_server.attempt import Attempt
from graftline.decode_server.call_stream import CallContext, CallStream
from graftline.decode_server.deliveries import Deliveries
from graftline.decode_server.peers import Peer, PrefillPeers
from graftline.decode_server.settings import ServiceSettings
from graftline.decode_server.traces import AttemptTrace, call_attributes
from graftline.engine.request import FinishReason, Request, RequestKey, TreeOrigin
from graftline.engine.service_api import DecodeEngine, HandoffCounts, SpeculationCounts, Tokens
from graftline.errors import (
    CancelledRequestError,
    GraftlineError,
    IncompatibleError,
    InvalidRequestError,
    OutOfCapacityError,
    PeerUnavailableError,
    PreemptedError,
)
from graftline.proto.channel import Metadata
from graftline.proto.status import Leg, abort_with, rpc_border
from graftline.proto.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from graftline.proto.validation import ModelLimits, check_decode_request
from graftline.tracing import NO_SPAN, NO_TRACER, Span, Tracer
from graftline.worker.metrics import DecodeMetrics
from graftline.worker.translate import (
    finish_reason_message,
    handoff_message,
    logprob_message,
    request_from,
    speculation_message,
    start_message,
)

logger = logging.getLogger(__name__)

# The prefill sees this many attempts for one of the router's, so that no number is ever used twice.
ATTEMPTS_PER_CALL = 256


class Spawn(Protocol):
    """Starts a task that the server owns and waits for."""

    def __call__(self, work: Coroutine[Any, Any, None], *, name: str) -> object:
        """Starts `work`."""


class Call:
    """What one `Generate` has emitted and counted over its attempts."""

    def __init__(self, request: Request, span: Span = NO_SPAN) -> None:
        self.request = request
        self.span = span
        self.emitted: list[int] = []
        self.speculation = SpeculationCounts()
        self.handoff = HandoffCounts()
        self.tree_origin = TreeOrigin.NONE
        self.cached_tokens = 0
        self.num_attempts = 0
        self.started_s = self.last_token_s = time.monotonic()

    @property
    def age_s(self) -> float:
        """Seconds since it came."""
        return time.monotonic() - self.started_s

    def next_request(self) -> Request:
        """Prompt and everything emitted, under the next attempt number."""
        key = self.request.key
        attempt = key.attempt * ATTEMPTS_PER_CALL + self.num_attempts
        self.num_attempts += 1
        return replace(
            self.request,
            key=RequestKey(key.request_id, attempt),
            token_ids=(*self.request.token_ids, *self.emitted),
        )

    def count(self, attempt: Attempt, speculation: SpeculationCounts) -> None:
        """Adds what an attempt did."""
        first = self.tree_origin is TreeOrigin.NONE
        if first:
            self.tree_origin = attempt.tree_origin
        mine, its = self.speculation, speculation
        self.speculation = SpeculationCounts(
            rounds=mine.rounds + its.rounds,
            drafted=mine.drafted + its.drafted,
            accepted=mine.accepted + its.accepted,
            first_round_drafted=its.first_round_drafted if first else mine.first_round_drafted,
            first_round_accepted=its.first_round_accepted if first else mine.first_round_accepted,
        )
        moved, more = self.handoff, attempt.handoff_counts
        self.handoff = HandoffCounts(
            num_bytes=moved.num_bytes + more.num_bytes,
            write_s=moved.write_s + more.write_s,
            queue_s=moved.queue_s + more.queue_s,
            prefill_s=moved.prefill_s + more.prefill_s,
            chunks=moved.chunks + more.chunks,
        )

    def finished_message(self, done: handoff.Done) -> decode_pb2.DecodeServiceGenerateResponse:
        """The last message of a call that went well."""
        usage = common_pb2.Usage(
            prompt_tokens=self.request.num_prompt_tokens,
            completion_tokens=len(self.emitted),
            cached_tokens=self.cached_tokens,
        )
        finished = decode_pb2.DecodeFinished(
            reason=finish_reason_message(done.reason),
            stop_token_id=done.stop_token_id,
            usage=usage,
            speculation=self.speculation_message(),
            handoff=handoff_message(self.handoff),
        )
        return decode_pb2.DecodeServiceGenerateResponse(finished=finished)

    def speculation_message(self) -> common_pb2.SpeculationStats:
        """What speculation did so far."""
        return speculation_message(self.speculation, self.tree_origin)


class DecodeService(decode_pb2_grpc.DecodeServiceServicer):
    """Generate over an engine."""

    def __init__(
        self,
        *,
        identity: common_pb2.WorkerIdentity,
        engine: DecodeEngine,
        peers: PrefillPeers,
        limits: ModelLimits,
        eos_token_ids: frozenset[int],
        settings: ServiceSettings,
        spawn: Spawn,
        metrics: DecodeMetrics,
        metadata: Metadata = (),
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._identity = identity
        self._engine = engine
        self._deliveries = Deliveries()
        self._peers = peers
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self._settings = settings
        self._spawn = spawn
        self._metrics = metrics
        self._metadata = metadata
        self._tracer = tracer
        self._admitting = True
        self._end: str | None = None  # why nothing more begins
        self._num_calls = 0
        self._num_waiting = 0
        self._open: dict[RequestKey, Attempt] = {}
        self._streams: set[CallStream] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    # --- life of the service ---------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Attempts that have not ended, those of vanished callers included, and calls that wait to begin one."""
        return len(self._open) + self._num_waiting

    def stop_admitting(self) -> None:
        """From now on new calls are answered UNAVAILABLE; streams of calls end with the last call on them."""
        self._admitting = False
        for stream in self._streams:
            stream.close_when_idle()

    def cancel_all(self) -> None:
        """Ends everything that is open; the router may go on elsewhere."""
        self._end = "this decode stops"
        for attempt in tuple(self._open.values()):
            attempt.cancel(PeerUnavailableError(self._end))

    def abandon_all(self, reason: str) -> None:
        """The engine is gone: fails everything open."""
        self._end = reason
        for attempt in tuple(self._open.values()):
            attempt.abandon(reason)

    async def wait_idle(self) -> None:
        """Until nothing is open."""
        await self._idle.wait()

    # --- RPC -------------------------------------------------------------------------------------------------

    async def GenerateMany(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        """Calls of `Generate` over one stream, as a router makes them."""
        async with rpc_border(context, leg=Leg.DECODE):
            if not self._admitting:
                raise PeerUnavailableError("this decode is about to stop")
            stream = CallStream(context, self.Generate, self._settings.send_timeout_s)
            self._streams.add(stream)
            try:
                await stream.serve()
            finally:
                self._streams.discard(stream)

    async def Generate(self, request: decode_pb2.DecodeServiceGenerateRequest, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        """One request; the last message of a stream that ends well is `finished`."""
        async with rpc_border(context, leg=Leg.DECODE):
            self._admit()
            check_decode_request(request, self._limits)
            noun = request_from(request, self._eos_token_ids)
            with self._tracer.start("graftline.decode", context.invocation_metadata(), call_attributes(noun)) as span:
                call = Call(noun, span)
                outcome = await self._counted(call, request, context)
                if isinstance(outcome, handoff.Failed):
                    span.fail(str(outcome.error))
            if isinstance(outcome, handoff.Failed):
                await abort_with(context, outcome.error, leg=outcome.leg, speculation=call.speculation_message())
            await self._send(context, call.finished_message(outcome))

    def _admit(self) -> None:
        if not self._admitting:
            raise PeerUnavailableError("this decode is about to stop")
        if max(self._num_calls, len(self._open)) >= self._settings.max_open:
            raise OutOfCapacityError(f"{self._settings.max_open} requests are open", retry_after_s=1.0)

    async def _counted(
        self, call: Call, asked: decode_pb2.DecodeServiceGenerateRequest, context: Any
    ) -> handoff.Done | handoff.Failed:
        """`_serve`, seen by the metrics."""
        self._num_calls += 1
        self._metrics.started()
        ended_as: str | None = None
        try:
            outcome = await self._serve(call, asked, context)
            match outcome:
                case handoff.Done(reason=reason):
                    ended_as = reason.value
                case handoff.Failed(error=failure):
                    ended_as = type(failure).__name__
            return outcome
        except GraftlineError as error:
            ended_as = type(error).__name__
            raise
        finally:
            self._num_calls -= 1
            self._metrics.ended(ended_as or _left_as(context), call.age_s)

    async def _serve(
        self, call: Call, asked: decode_pb2.DecodeServiceGenerateRequest, context: Any
    ) -> handoff.Done | handoff.Failed:
        """Attempts until one ends the call."""
        preemptions_left, repairs_left = self._settings.max_preemptions, 1
        while True:
            self._num_waiting += 1
            self._idle.clear()
            try:
                peer = await self._peers.opening(asked.prefill_address)
                if self._end is not None:
                    peer.opening.release()
                    return handoff.Failed(PeerUnavailableError(self._end), Leg.DECODE)
                attempt, incarnation = self._begin(call, asked, peer), peer.incarnation
            except (PeerUnavailableError, IncompatibleError, OutOfCapacityError) as unpaired:
                return handoff.Failed(unpaired, Leg.PREFILL)
            finally:
                self._num_waiting -= 1
                self._note_idle()
            outcome = await self._relay(call, attempt, context)
            match outcome:
                case handoff.Done(speculation=speculation):
                    call.count(attempt, speculation)
                    return outcome
                case handoff.GoOn(speculation) if preemptions_left > 0:
                    call.count(attempt, speculation)
                    preemptions_left -= 1
                case handoff.GoOn(speculation):
                    call.count(attempt, speculation)
                    return handoff.Failed(PreemptedError("its pages were taken too often"), Leg.DECODE)
                case handoff.Failed(repair=True) if repairs_left > 0:
                    self._peers.unpair(peer, incarnation or "")
                    repairs_left -= 1
                case handoff.Failed(error):
                    if isinstance(error, PeerUnavailableError) and outcome.leg is Leg.PREFILL:
                        self._peers.unpair(peer, incarnation or "")
                    return outcome

    def _begin(self, call: Call, asked: decode_pb2.DecodeServiceGenerateRequest, peer: Peer) -> Attempt:
        """Starts an attempt, which takes the place in the peer's `opening` over."""
        try:
            return self._started(call, asked, peer)
        except BaseException:
            peer.opening.release()
            raise

    def _started(self, call: Call, asked: decode_pb2.DecodeServiceGenerateRequest, peer: Peer) -> Attempt:
        request = call.next_request()
        if request.key in self._open:
            # Whatever became of the second one would be done to what the first one holds.
            asked_for = f"attempt {asked.attempt} of {asked.request_id!r}"
            raise InvalidRequestError("request_id", f"{asked_for} is open already")
        start = start_message(
            request,
            asked,
            decode_incarnation=self._identity.incarnation,
            prefill_incarnation=peer.incarnation or "",
            real_tree=self._settings.real_tree,
        )
        trace = AttemptTrace(call.span, request.key, peer.address)
        attempt = Attempt(
            request,
            peer,
            self._engine,
            self._deliveries,
            self._settings,
            self._on_ended,
            self._metrics.quarantined,
            trace,
        )
        self._open[request.key] = attempt
        self._spawn(attempt.run(start, self._metadata + trace.metadata), name=f"handoff {request.key}")
        return attempt

    async def _relay(self, call: Call, attempt: Attempt, context: Any) -> handoff.Outcome:
        """Tokens to the caller, until the attempt's outcome."""
        if isinstance(context, CallContext):
            attempt.inbox.hand_on(partial(self._pass_on, call, attempt, context))
        try:
            while isinstance(item := await attempt.inbox.get(), Tokens):
                cached_tokens = self._count_tokens(call, attempt, item)
                await self._send(context, tokens_message(item, cached_tokens))
            return item
        except BaseException:
            attempt.cancel(CancelledRequestError("the caller went away"))
            raise

    def _pass_on(self, call: Call, attempt: Attempt, context: CallContext, tokens: Tokens) -> bool:
        """Tokens to the caller without a turn of the call's task; whether there was room for them."""
        if not context.has_room:
            return False
        cached_tokens = self._count_tokens(call, attempt, tokens)
        context.fill(partial(fill_tokens, tokens, cached_tokens))
        return True

    def _count_tokens(self, call: Call, attempt: Attempt, tokens: Tokens) -> int:
        """Counts tokens that go to the caller; how many cached ones to tell it of with them."""
        num_tokens = len(tokens.ids)
        now_s = time.monotonic()
        cached_tokens = 0
        if call.emitted:
            self._metrics.tokens(num_tokens, now_s - call.last_token_s)
        else:
            self._metrics.first_token(now_s - call.started_s)
            # Later attempts find in the cache what this one computed.
            cached_tokens = call.cached_tokens = attempt.cached_tokens
        call.last_token_s = now_s
        call.emitted += tokens.ids
        return cached_tokens

    async def _send(self, context: Any, message: decode_pb2.DecodeServiceGenerateResponse) -> None:
        if isinstance(context, CallContext) and context.has_room:
            await context.write(message)  # at once, so that nothing needs to watch it
            return
        try:
            # Not `wait_for`: before Python 3.12 it swallows a cancel that meets the end of what it waits for.
            async with asyncio.timeout(self._settings.send_timeout_s):
                await context.write(message)
        except TimeoutError as error:
            timeout_s = self._settings.send_timeout_s
            raise OutOfCapacityError(f"the caller read nothing for {timeout_s:g} s") from error

    def _on_ended(self, attempt: Attempt) -> None:
        self._open.pop(attempt.request.key, None)
        self._note_idle()

    def _note_idle(self) -> None:
        if not self.num_open:
            self._idle.set()


def _left_as(context: Any) -> str:
    """What becomes of a call whose caller goes away, as a label of metrics."""
    is_answered = isinstance(context, CallContext) and context.is_answered
    return FinishReason.STOP.value if is_answered else CancelledRequestError.__name__


def tokens_message(tokens: Tokens, cached_tokens: int) -> decode_pb2.DecodeServiceGenerateResponse:
    """Tokens on their way to the caller."""
    message = decode_pb2.DecodeServiceGenerateResponse()
    fill_tokens(tokens, cached_tokens, message)
    return message


def fill_tokens(tokens: Tokens, cached_tokens: int, message: decode_pb2.DecodeServiceGenerateResponse) -> None:
    """Writes tokens into an empty message."""
    message.tokens.token_ids.extend(tokens.ids)
    if cached_tokens:
        message.tokens.cached_tokens = cached_tokens
    if tokens.logprobs:
        message.tokens.logprobs.extend(map(logprob_message, tokens.logprobs))
