"""The decode's end of `GenerateMany`: runs the calls that one stream carries, and sends what they say in few messages.

Knows nothing of requests: each call runs the handler of `Generate`, with a context that writes to the stream.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Container, Iterable
from contextlib import nullcontext
from typing import Any, NoReturn

import grpc
from google.rpc import status_pb2
from grpc import aio

from graftline.errors import InvalidRequestError, OutOfCapacityError
from graftline.proto.channel import Metadata
from graftline.proto.v1.decode_pb2 import (
    CarriedCall,
    CarriedEvent,
    DecodeServiceGenerateRequest,
    DecodeServiceGenerateResponse,
    GenerateManyRequest,
    GenerateManyResponse,
)
from graftline.wakeup import Wakeup
from graftline.worker.tasks import Tasks
from graftline.write_guard import WriteGuard

logger = logging.getLogger(__name__)

# A message is closed once it holds so much: its reader takes it in one go, a few milliseconds for so many events.
MAX_EVENTS_PER_MESSAGE = 64
MAX_MESSAGE_BYTES = 1 << 20
# Of the event loop: a call begins in the first, and what it does then in the second.
TURNS_BEFORE_READ = 2
# Of one call: its last tokens, and `finished` right behind them.
MAX_UNSENT_EVENTS = 2

Handler = Callable[[DecodeServiceGenerateRequest, "CallContext"], Awaitable[None]]
Fill = Callable[[DecodeServiceGenerateResponse], None]
"""Writes a response where it is sent from."""


class CallContext:
    """What a handler needs of `grpc.aio.ServicerContext`, for one call of a stream.

    Attributes:
        is_unwanted: the other end has cancelled it.
        is_answered: it has because the answer is whole.
    """

    def __init__(self, stream: "CallStream", call: CarriedCall) -> None:
        self._stream = stream
        self.call_id = call.call_id
        self._metadata: Metadata = tuple(call.metadata.items())
        self._status: bytes | None = None
        self._has_finished = False
        self.has_ended = False
        self.is_unwanted = False
        self.is_answered = False
        self.num_unsent = 0

    def invocation_metadata(self) -> Metadata:
        """The call's own metadata."""
        return self._metadata

    @property
    def has_room(self) -> bool:
        """Whether a message can be sent without waiting."""
        return self.num_unsent < MAX_UNSENT_EVENTS

    def fill(self, fill: Fill) -> None:
        """Sends a message that is not the last one and need not wait, made once it leaves."""
        self._say(fill)

    async def write(self, message: DecodeServiceGenerateResponse) -> None:
        """Sends a message; waits only while too many earlier ones of this call have not left."""
        while not self.has_room:
            await self._stream.departure()
        self._has_finished = message.HasField("finished")
        self._say(CarriedEvent(response=message))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        """Ends the call; raises what grpc raises then."""
        packed: object = dict(trailing_metadata).get("grpc-status-details-bin")
        self._status = packed if isinstance(packed, bytes) else _status(code, details)
        raise aio.AbortError

    def end(self) -> None:
        """The handler is done: says how the call ended, unless `finished` did."""
        self.has_ended = True
        if self._status is None and self._has_finished:
            return
        status = _status(grpc.StatusCode.OK, "") if self._status is None else self._status
        self._say(CarriedEvent(status=status))

    def fail(self, code: grpc.StatusCode, details: str) -> None:
        """The handler never got to say how the call ended."""
        self.has_ended = True
        self._say(CarriedEvent(status=_status(code, details)))

    def _say(self, event: CarriedEvent | Fill) -> None:
        self.num_unsent += 1
        self._stream.say(self, event)


class CallStream:
    """One stream and the calls on it. What ends the stream cancels them.

    Args:
        handler: serves each call.
        send_timeout_s: how long the other end may leave one message unread; it is cut within twice as long.
    """

    def __init__(self, context: Any, handler: Handler, send_timeout_s: float) -> None:
        self._context = context
        self._handler = handler
        self._send_timeout_s = send_timeout_s
        self._running: dict[int, tuple[CallContext, asyncio.Task[None]]] = {}
        self._unsent: deque[tuple[CallContext, CarriedEvent | Fill]] = deque()
        self._something = Wakeup()
        # Made by the first that waits for it.
        self._departure: asyncio.Event | None = None
        self._read_error: InvalidRequestError | None = None
        self._is_closed = False
        self._is_closing = False

    def close_when_idle(self) -> None:
        """Ends the stream as soon as no call is on it."""
        self._is_closing = True
        self._something.wake()

    async def serve(self) -> None:
        """Until the other end closes the stream, or this one does.

        Raises:
            InvalidRequestError: a call id was used twice.
            OutOfCapacityError: the other end does not read.
        """
        guard = WriteGuard(self._send_timeout_s, OutOfCapacityError, "the caller read nothing")
        with guard:
            await self._serve(guard)
        if self._read_error is not None:
            raise self._read_error

    async def _serve(self, guard: WriteGuard) -> None:
        async with Tasks() as tasks:
            await self._context.send_initial_metadata(())
            tasks.start(self._read(tasks), name="calls of a stream")
            while not self._is_over:
                if self._unsent:
                    guard.writing()
                    await self._context.write(self._next_message())
                    guard.written()
                else:
                    await self._something.wait()

    @property
    def _is_over(self) -> bool:
        return self._is_closed or (self._is_closing and not self._running and not self._unsent)

    def say(self, context: CallContext, event: CarriedEvent | Fill) -> None:
        """Queues an event of a call."""
        self._unsent.append((context, event))
        self._something.wake()

    async def departure(self) -> None:
        """Until the next message leaves."""
        if self._departure is None:
            self._departure = asyncio.Event()
        await self._departure.wait()

    # --- in --------------------------------------------------------------------------------------------------

    async def _read(self, tasks: Tasks) -> None:
        try:
            while isinstance(message := await self._context.read(), GenerateManyRequest):
                for call in message.calls:
                    self._begin(call, tasks)
                self._cancel(message.cancelled_call_ids, frozenset(message.answered_call_ids))
                for call_id in message.asked_call_ids:
                    if call_id not in self._running:
                        # Behind all that was said of it, so that one who has just ended is not contradicted.
                        context = CallContext(self, CarriedCall(call_id=call_id))
                        context.fail(grpc.StatusCode.UNAVAILABLE, "the decode knows nothing of the call")
                # What was asked goes on its way before the next read is asked for, which takes as long as a write.
                for _ in range(TURNS_BEFORE_READ):
                    await asyncio.sleep(0)
        except InvalidRequestError as error:
            self._read_error = error
        finally:
            self._is_closed = True
            self._something.wake()

    def _begin(self, call: CarriedCall, tasks: Tasks) -> None:
        if call.call_id in self._running:
            raise InvalidRequestError("call_id", f"{call.call_id} is in use on this stream")
        context = CallContext(self, call)
        task = tasks.start(self._run(call, context), name=f"call {call.call_id}")
        self._running[call.call_id] = context, task
        # A task that is cancelled before its first step runs no `finally`.
        task.add_done_callback(lambda _: self._forget(call.call_id, context))

    def _cancel(self, call_ids: Iterable[int], answered: Container[int]) -> None:
        for call_id in call_ids:
            if call_id in self._running:
                context, task = self._running[call_id]
                context.is_unwanted, context.is_answered = True, call_id in answered
                task.cancel()

    def _forget(self, call_id: int, context: CallContext) -> None:
        """The last word of every call that somebody still waits for: HTTP/2 would have said it."""
        del self._running[call_id]
        if not context.has_ended and not context.is_unwanted:
            context.fail(grpc.StatusCode.UNAVAILABLE, "the call ended without a word")
        self._something.wake()

    async def _run(self, call: CarriedCall, context: CallContext) -> None:
        limit = asyncio.timeout(call.timeout_s) if call.HasField("timeout_s") else nullcontext()
        try:
            async with limit:
                await self._handler(call.request, context)
            context.end()
        except aio.AbortError:
            context.end()
        except TimeoutError:
            context.fail(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed")
        except Exception as error:
            logger.exception("a call of a stream failed")
            context.fail(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")

    # --- out -------------------------------------------------------------------------------------------------

    def _next_message(self) -> GenerateManyResponse:
        """Takes what waits, as far as one message may hold it."""
        message = GenerateManyResponse()
        num_bytes = 0
        while self._unsent and len(message.events) < MAX_EVENTS_PER_MESSAGE and num_bytes < MAX_MESSAGE_BYTES:
            context, said = self._unsent.popleft()
            context.num_unsent -= 1
            event = message.events.add(call_id=context.call_id)
            if isinstance(said, CarriedEvent):
                event.MergeFrom(said)
            else:
                said(event.response)
            num_bytes += event.ByteSize()
        if self._departure is not None:
            self._departure.set()
            self._departure = None
        return message


def _status(code: grpc.StatusCode, message: str) -> bytes:
    packed: bytes = status_pb2.Status(code=code.value[0], message=message).SerializeToString()
    return packed
