"""One attempt: does what the decode's handoff machine says, on the event loop's thread.

Lives until prefill leg and pages are over, whether or not the caller still waits for it. Everything but the pump
of the stream is synchronous: a message is taken, the machine steps, its actions are done.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TYPE_CHECKING

import grpc

from graftline.decode_server import handoff
from graftline.decode_server.deliveries import Deliveries
from graftline.decode_server.peers import Peer
from graftline.decode_server.settings import ServiceSettings
from graftline.decode_server.traces import AttemptTrace
from graftline.engine.request import FinishReason, Request, Token, TokenLogprob, TreeOrigin
from graftline.engine.service_api import (
    DecodeEngine,
    DecodeFailed,
    DecodeFailure,
    Destination,
    Drained,
    FirstToken,
    HandoffCounts,
    PrefillFailed,
    PrefillFailure,
    PrefillFinished,
    Scheduled,
    Tokens,
)
from graftline.errors import GraftlineError, OutOfCapacityError, PeerUnavailableError
from graftline.proto.channel import Metadata
from graftline.proto.v1 import prefill_pb2
from graftline.worker.mailbox import Mailbox
from graftline.worker.translate import handoff_from, token_from, tree_from, tree_origin_from

if TYPE_CHECKING:
    from grpc.aio import StreamStreamCall

logger = logging.getLogger(__name__)

SILENT_TICKS = 4
# Of a prefill that others hear: it has yet to take the handoff up, or has lost it.
LOST_TICKS = 4 * SILENT_TICKS

_FAILURES = {
    prefill_pb2.PREFILL_FAILURE_INVALID_REQUEST: PrefillFailure.INVALID_REQUEST,
    prefill_pb2.PREFILL_FAILURE_OUT_OF_CAPACITY: PrefillFailure.OUT_OF_CAPACITY,
    prefill_pb2.PREFILL_FAILURE_NOT_PAIRED: PrefillFailure.NOT_PAIRED,
    prefill_pb2.PREFILL_FAILURE_TRANSFER_FAILED: PrefillFailure.TRANSFER_FAILED,
    prefill_pb2.PREFILL_FAILURE_DRAINING: PrefillFailure.DRAINING,
}


class Inbox:
    """What waits for the caller: tokens of several rounds in one go, then the outcome.

    Whoever waits in `get` need not be woken for tokens that `hand_on` can pass on at once.
    """

    def __init__(self) -> None:
        self._hand_on: Callable[[Tokens], bool] | None = None
        self._is_awaited = False
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._outcome: handoff.Outcome | None = None
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._ids)

    def hand_on(self, take: Callable[[Tokens], bool]) -> None:
        """From now on tokens are offered to `take` first, which says whether it took them; never before others that
        wait, or were given to `get` and not dealt with yet.
        """
        self._hand_on = take

    def put(self, item: Tokens | handoff.Outcome) -> None:
        """Adds tokens, or the outcome after which nothing comes."""
        if isinstance(item, Tokens):
            if self._hand_on is not None and self._is_awaited and not self._ids and self._hand_on(item):
                return
            self._ids += item.ids
            self._logprobs += item.logprobs
        else:
            self._outcome = item
        self._changed.set()

    async def get(self) -> Tokens | handoff.Outcome:
        """All tokens that wait, or the outcome once there are none."""
        while True:
            if self._ids:
                tokens = Tokens(tuple(self._ids), tuple(self._logprobs))
                self._ids.clear()
                self._logprobs.clear()
                return tokens
            if self._outcome is not None:
                return self._outcome
            self._changed.clear()
            self._is_awaited = True
            try:
                await self._changed.wait()
            finally:
                self._is_awaited = False


class Attempt:
    """A handoff and the decoding that follows it. Takes a place in the peer's `opening` over, until it hears of it.

    Attributes:
        request: prompt and tokens emitted by earlier attempts.
        inbox: what the caller gets.
        cached_tokens: prompt tokens the prefill found in its cache.
        handoff_counts: what moved, once the prefill told.
        tree_origin: of the tree that came.
    """

    def __init__(
        self,
        request: Request,
        peer: Peer,
        engine: DecodeEngine,
        deliveries: Deliveries,
        settings: ServiceSettings,
        on_ended: Callable[["Attempt"], None],
        on_quarantine: Callable[[], None],
        trace: AttemptTrace,
    ) -> None:
        assert peer.incarnation is not None, "the peer is paired"
        peer.num_open += 1  # from now on, not from the task's first step: until then its channel would look idle
        self.request = request
        self.inbox = Inbox()
        self.cached_tokens = 0
        self.handoff_counts = HandoffCounts()
        self.tree_origin = TreeOrigin.NONE
        self._peer = peer
        self._peer_incarnation = peer.incarnation
        self._engine = engine
        self._deliveries = deliveries
        self._settings = settings
        self._on_ended = on_ended
        self._on_quarantine = on_quarantine
        self._trace = trace
        self._state = handoff.State(wants_pages=request.num_earlier_tokens + 1 < request.stopping.max_tokens)
        self._mailbox: Mailbox[handoff.Message] = Mailbox(self._step)
        self._first_token: Token | None = None
        self._loop = asyncio.get_running_loop()
        self._to_prefill: asyncio.Queue[prefill_pb2.PrefillRequest | None] = asyncio.Queue()
        self._call: StreamStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse] | None = None
        self._is_opening = True
        self._silent_ticks = self._silent_ticks_of_peer = 0
        self._num_heard_of_peer = peer.num_heard
        self._silence_timer = self._loop.call_later(self._tick_s, self._on_silence_tick)
        self._drain_timer: asyncio.TimerHandle | None = None
        self._leg_closed = False

    @property
    def ended(self) -> bool:
        """Nothing is held or awaited any more."""
        return self._state.ended

    def cancel(self, error: GraftlineError) -> None:
        """The caller wants no more; `error` is what it is told if it still listens."""
        self.post(handoff.CallerGone(error))

    def abandon(self, reason: str) -> None:
        """The engine is gone."""
        self.post(DecodeFailed(reason, DecodeFailure.ENGINE_LOST))
        self.cancel(PeerUnavailableError(reason))

    # --- the stream to the prefill ---------------------------------------------------------------------------

    async def run(self, start: prefill_pb2.PrefillStart, metadata: Metadata) -> None:
        """Opens the stream and pumps it to its end; to be run as a task of the service."""
        reason = "the stream ended without a terminal event"
        try:
            self._call = self._peer.stub.Prefill(self._outgoing(start), metadata=metadata)
            async for response in self._call:
                self._heard()
                self._on_response(response)
        except grpc.RpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except asyncio.CancelledError:
            # Our own call.cancel() arrives here as well as the end of the service.
            reason = "the call was cancelled"
        finally:
            self._peer.num_open -= 1
            self._opened()
            self.post(handoff.StreamLost(reason))

    async def _outgoing(self, start: prefill_pb2.PrefillStart) -> AsyncIterator[prefill_pb2.PrefillRequest]:
        yield prefill_pb2.PrefillRequest(start=start)
        try:
            while (message := await self._to_prefill.get()) is not None:
                yield message
        except asyncio.CancelledError:
            # The call is over. gRPC would write the exception out, a millisecond for each of thousands.
            return

    def _heard(self) -> None:
        self._silent_ticks = 0
        self._peer.num_heard += 1
        self._opened()

    def _opened(self) -> None:
        if self._is_opening:
            self._is_opening = False
            self._peer.opening.release()

    def _on_response(self, response: prefill_pb2.PrefillResponse) -> None:
        match response.WhichOneof("event"):
            case "scheduled":
                self.cached_tokens = min(response.scheduled.cached_tokens, self.request.num_prompt_tokens)
                self.post(Scheduled(response.scheduled.cached_tokens))
            case "first_token":
                self._on_first_token(response.first_token)
            case "finished":
                self._on_finished(response.finished)
            case "failed":
                failed = response.failed
                code = _FAILURES.get(failed.code, PrefillFailure.INTERNAL)
                self.post(PrefillFailed(code, failed.reason, failed.drained))
            case "drained":
                self.post(Drained())

    def _on_first_token(self, message: prefill_pb2.PrefillFirstToken) -> None:
        token = token_from(message.token_id, message.logprob if message.HasField("logprob") else None)
        self._first_token = token
        stopping = self.request.stopping
        if token.token_id in stopping.ending_ids:
            self.post(handoff.FirstTokenEnds(token, FinishReason.STOP, token.token_id))
        elif not self._state.wants_pages:
            self.post(handoff.FirstTokenEnds(token, FinishReason.LENGTH, None))
        else:
            self.post(FirstToken(token))

    def _on_finished(self, message: prefill_pb2.PrefillFinished) -> None:
        try:
            tree = tree_from(message.tree)
        except ValueError as error:
            self.post(PrefillFailed(PrefillFailure.INTERNAL, f"the prefill sent {error}", drained=True))
            return
        self.handoff_counts = handoff_from(message.handoff)
        self.tree_origin = tree_origin_from(message.tree_origin)
        self.post(PrefillFinished(tree, self.tree_origin, self.handoff_counts, message.kv_digest))

    # --- the machine -----------------------------------------------------------------------------------------

    def post(self, message: handoff.Message) -> None:
        """Takes a message and acts on it; never blocks. An action may post in its turn."""
        self._mailbox.post(message)

    def _step(self, message: handoff.Message) -> None:
        if self._state.ended:
            return
        self._trace.saw(message)
        self._state, actions = handoff.step(self._state, message)
        for action in actions:
            self._do(action)
        if not self._leg_closed and self._state.leg_over:
            self._close_leg()
        if self._state.ended:
            self._trace.ended()
            self._on_ended(self)

    def _do(self, action: handoff.Action) -> None:
        key = self.request.key
        match action:
            case handoff.Emit(tokens):
                self._emit(tokens)
            case handoff.Reserve():
                self._reserve()
            case handoff.SendDestination(destination):
                self._to_prefill.put_nowait(destination_message(destination))
            case handoff.SendCancel():
                self._to_prefill.put_nowait(prefill_pb2.PrefillRequest(cancel=prefill_pb2.PrefillCancel()))
                timeout_s = self._settings.drain_timeout_s
                self._drain_timer = self._loop.call_later(timeout_s, self.post, handoff.DrainTimedOut())
            case handoff.DropStream():
                if self._call is not None:
                    self._call.cancel()
            case handoff.StartDecoding(tree, kv_digest):
                assert self._first_token is not None, "the machine starts decoding only after a first token"
                self._engine.start(key, self._first_token, tree, kv_digest)
            case handoff.Release():
                self._engine.release(key)
            case handoff.Quarantine():
                logger.warning("pages of %s go into quarantine: %s", key, self._peer_incarnation)
                self._engine.quarantine(key, self._peer_incarnation)
                self._on_quarantine()
            case handoff.CancelDecoding():
                self._engine.cancel(key)
            case handoff.Tell(outcome):
                self.inbox.put(outcome)

    def _reserve(self) -> None:
        try:
            self._engine.reserve(self.request, partial(self._deliveries.put, self.post))
        except GraftlineError as error:
            self.post(handoff.ReserveRefused(error))

    def _emit(self, tokens: Tokens) -> None:
        self.inbox.put(tokens)
        if len(self.inbox) > self._settings.max_unsent_tokens:
            self.cancel(OutOfCapacityError(f"the caller left {len(self.inbox)} tokens unread"))

    # --- timers ----------------------------------------------------------------------------------------------

    @property
    def _tick_s(self) -> float:
        return self._settings.peer_silence_s / SILENT_TICKS

    def _on_silence_tick(self) -> None:
        """Counts ticks, not seconds: a late event loop of ours cannot make a peer look silent."""
        self._silent_ticks += 1
        self._silent_ticks_of_peer += 1
        if self._peer.num_heard != self._num_heard_of_peer:
            self._num_heard_of_peer, self._silent_ticks_of_peer = self._peer.num_heard, 0
        is_silent = min(self._silent_ticks, self._silent_ticks_of_peer) > SILENT_TICKS
        if is_silent or self._silent_ticks > LOST_TICKS:
            num_ticks = SILENT_TICKS if is_silent else LOST_TICKS
            silence = f"nothing heard for {num_ticks * self._tick_s:g} s"
            self.post(handoff.StreamLost(silence, silent=True))
            return
        self._silence_timer = self._loop.call_later(self._tick_s, self._on_silence_tick)

    def _close_leg(self) -> None:
        self._leg_closed = True
        self._silence_timer.cancel()
        if self._drain_timer is not None:
            self._drain_timer.cancel()
        self._to_prefill.put_nowait(None)


def destination_message(destination: Destination) -> prefill_pb2.PrefillRequest:
    """Tells a prefill where to write."""
    return prefill_pb2.PrefillRequest(
        destination=prefill_pb2.PrefillDestination(page_ids=destination.page_ids, slot_id=destination.slot_id)
    )
