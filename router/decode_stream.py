"""The router's end of `GenerateMany`: one long-lived stream to a decode, which carries all attempts on it.

A call of its own would cost each attempt more than everything else the router does for it (docs/router.md).
"""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
from grpc import aio

from graftline.errors import CancelledRequestError, InternalError, PeerUnavailableError
from graftline.proto.channel import Metadata
from graftline.proto.status import Failure, Leg, failure_from_rpc, failure_from_status
from graftline.proto.v1.decode_pb2 import (
    CarriedEvent,
    DecodeServiceGenerateRequest,
    DecodeServiceGenerateResponse,
    GenerateManyRequest,
    GenerateManyResponse,
)
from graftline.wakeup import Wakeup

if TYPE_CHECKING:
    from graftline.proto.v1.decode_pb2_grpc import DecodeServiceAsyncStub

logger = logging.getLogger(__name__)

# A message is closed once it holds so much.
MAX_CALLS_PER_MESSAGE = 64
MAX_MESSAGE_BYTES = 1 << 20
# A waiting request is quiet for longer without being lost; asking costs a few bytes.
ASK_AFTER_S = 10.0

ENDED_EARLY = "the decode ended its stream without finishing"

Stream = aio.StreamStreamCall[GenerateManyRequest, GenerateManyResponse]
Fill = Callable[[DecodeServiceGenerateRequest], None]
"""Writes a request where it is sent from."""


class DecodeCall:
    """One attempt's place on the stream.

    Attributes:
        ended: how it ended: None when its owner or the decode's `finished` ended it, otherwise what failed. Carries
            the exception if its owner raised one over a response.
        heard_s: when it was last heard of, or made, on the loop's clock.
        is_answered: its owner has all it wanted.
    """

    def __init__(
        self, call_id: int, take: Callable[[DecodeServiceGenerateResponse], None], stop: Callable[["DecodeCall"], None]
    ) -> None:
        self.call_id = call_id
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[Failure | None] = self._loop.create_future()
        self.heard_s = self._loop.time()
        self.is_answered = False
        self._take = take
        self._stop = stop
        self._timers: list[asyncio.TimerHandle] = []

    def finish(self, *, answered: bool = False) -> None:
        """Its owner wants no more of it. To be called in any case; the decode hears of it unless it ended the call.

        Args:
            answered: the answer is whole, though the decode cannot tell.
        """
        self.is_answered = self.is_answered or answered
        for timer in self._timers:
            timer.cancel()
        self.end(None)
        self._stop(self)

    def end(self, failure: Failure | None) -> None:
        """It has ended; what comes after is ignored."""
        if not self.ended.done():
            self.ended.set_result(failure)

    def end_in(self, seconds: float, failure: Failure | None) -> None:
        """Ends it then, unless something else does before."""
        self._timers.append(self._loop.call_later(seconds, self.end, failure))

    def came(self, event: CarriedEvent) -> None:
        """Takes the next event at once; a fault in doing so is this call's alone."""
        self.heard_s = self._loop.time()
        if self.ended.done():
            return
        if event.HasField("status"):
            self.end(failure_from_status(event.status) or _unavailable(ENDED_EARLY))
            return
        try:
            self._take(event.response)
        except Exception as error:
            self.break_off(error)

    def break_off(self, error: Exception) -> None:
        """Its owner's own fault ended it."""
        if not self.ended.done():
            self.ended.set_exception(error)


@dataclass(frozen=True, slots=True)
class _Unsent:
    """A call that waits for the next message."""

    call: DecodeCall
    fill: Fill
    timeout_s: float | None
    metadata: Metadata


class DecodeStream:
    """Opened on first need, and again after it broke; `run` must be running.

    Args:
        metadata: bearer token.
        ask_after_s: the decode is asked whether it knows a call that nothing was heard of for so long: one that it lost
            ends then, as with a call of its own.

    Attributes:
        is_open: a stream carries calls, or is being opened.
    """

    def __init__(self, stub: "DecodeServiceAsyncStub", metadata: Metadata, ask_after_s: float = ASK_AFTER_S) -> None:
        self._stub = stub
        self._metadata = metadata
        self._ask_after_s = ask_after_s
        self._ids = itertools.count(1)
        self._calls: dict[int, DecodeCall] = {}
        self._unsent: deque[_Unsent] = deque()
        self._unsent_cancels: list[DecodeCall] = []
        self._unsent_asks: list[int] = []
        self._something = Wakeup()
        self._closed: Failure | None = None
        self.is_open = False

    def call(
        self,
        fill: Fill,
        take: Callable[[DecodeServiceGenerateResponse], None],
        timeout_s: float | None = None,
        metadata: Metadata = (),
    ) -> DecodeCall:
        """Sends a request, which `fill` makes once it leaves: a call that was given up before costs nothing more, and
        what `fill` raises ends this call only. `take` gets every response, on the event loop and in order, until the
        call has ended.
        """
        call = DecodeCall(next(self._ids), take, self._stop)
        if self._closed is not None:
            call.end(self._closed)
            return call
        if timeout_s is not None:
            late = CancelledRequestError("the deadline passed")
            call.end_in(timeout_s, Failure(late, grpc.StatusCode.DEADLINE_EXCEEDED))
        self._calls[call.call_id] = call
        self._unsent.append(_Unsent(call, fill, timeout_s, metadata))
        self._something.wake()
        return call

    async def run(self) -> None:
        """Opens the stream whenever a call wants one, until cancelled; then every call fails."""
        try:
            while True:
                while not self._unsent:
                    await self._something.wait()
                self._fail_all(await self._carry())
        finally:
            self._closed = _unavailable("the router forgot the worker")
            self._fail_all(self._closed)

    async def _carry(self) -> Failure:
        """One stream, from its opening to its end."""
        self.is_open = True
        stream = self._stub.GenerateMany(metadata=self._metadata)
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(self._write(stream), name="calls to a decode")
            asking = tasks.create_task(self._ask(), name="calls that nothing is heard of")
            try:
                return await self._read(stream)
            except aio.AioRpcError as error:
                return _failure_of_stream(error)
            except asyncio.CancelledError:
                if not _is_being_cancelled():
                    return _unavailable("calls could not be written to the decode")
                raise
            except Exception as error:  # a border to a foreign process: whatever it sends ends its own stream only
                logger.exception("reading a stream of calls failed")
                return Failure(InternalError(f"{type(error).__name__}: {error}"), grpc.StatusCode.INTERNAL, Leg.DECODE)
            finally:
                self.is_open = False
                writing.cancel()
                asking.cancel()
                stream.cancel()

    async def _read(self, stream: Stream) -> Failure:
        while isinstance(message := await stream.read(), GenerateManyResponse):
            for event in message.events:
                is_last = event.HasField("status") or event.response.HasField("finished")
                call = self._calls.pop(event.call_id, None) if is_last else self._calls.get(event.call_id)
                # None: it was given up, and this was on its way.
                if call is not None:
                    call.came(event)
                    if is_last:
                        call.end(None)
            # What came goes on to the clients before the next read is asked for, which takes as long as a write.
            await asyncio.sleep(0)
        return _unavailable(ENDED_EARLY)

    async def _write(self, stream: Stream) -> None:
        try:
            while True:
                if self._unsent or self._unsent_cancels or self._unsent_asks:
                    await stream.write(self._next_message())
                else:
                    await self._something.wait()
        except (aio.AioRpcError, asyncio.InvalidStateError):
            return  # reading says why
        except Exception:
            logger.exception("writing a stream of calls failed")
            stream.cancel()

    async def _ask(self) -> None:
        while True:
            await asyncio.sleep(self._ask_after_s)
            since_s = asyncio.get_running_loop().time() - self._ask_after_s
            unsent = {waiting.call.call_id for waiting in self._unsent}
            silent = [id_ for id_, call in self._calls.items() if call.heard_s < since_s and id_ not in unsent]
            if silent:
                self._unsent_asks = silent
                self._something.wake()

    def _next_message(self) -> GenerateManyRequest:
        message = GenerateManyRequest()
        num_bytes = 0
        while self._unsent and len(message.calls) < MAX_CALLS_PER_MESSAGE and num_bytes < MAX_MESSAGE_BYTES:
            unsent = self._unsent.popleft()
            if unsent.call.call_id in self._calls:
                num_bytes += self._add(unsent, message)
        if self._unsent_cancels:
            message.cancelled_call_ids.extend(call.call_id for call in self._unsent_cancels)
            message.answered_call_ids.extend(call.call_id for call in self._unsent_cancels if call.is_answered)
            self._unsent_cancels.clear()
        if self._unsent_asks:
            message.asked_call_ids.extend(self._unsent_asks)
            self._unsent_asks.clear()
        return message

    def _add(self, unsent: "_Unsent", message: GenerateManyRequest) -> int:
        """The bytes it takes; none of a call that cannot be written, which ends with what it raised."""
        carried = message.calls.add(call_id=unsent.call.call_id)
        try:
            unsent.fill(carried.request)
        except Exception as error:
            del message.calls[-1]
            del self._calls[unsent.call.call_id]
            unsent.call.break_off(error)
            return 0
        if unsent.timeout_s is not None:
            carried.timeout_s = unsent.timeout_s
        for key, value in unsent.metadata:
            carried.metadata[key] = value
        return carried.ByteSize()

    def _stop(self, call: DecodeCall) -> None:
        """Gives a call up; the decode hears of it unless it ended the call itself."""
        if self._calls.pop(call.call_id, None) is not None:
            self._unsent_cancels.append(call)
            self._something.wake()

    def _fail_all(self, failure: Failure) -> None:
        calls = list(self._calls.values())
        self._calls.clear()
        self._unsent.clear()
        self._unsent_cancels.clear()
        self._unsent_asks.clear()
        for call in calls:
            call.end(failure)


def _is_being_cancelled() -> bool:
    """Whether the task is, rather than the stream it waits for."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _failure_of_stream(error: aio.AioRpcError) -> Failure:
    """What the end of the stream means for the calls on it: none of them has done anything wrong."""
    failure = failure_from_rpc(error)
    if failure.code is grpc.StatusCode.UNAUTHENTICATED:
        return failure
    if failure.code is grpc.StatusCode.UNIMPLEMENTED:
        return _unavailable("the decode is of an older version, without streams of calls: upgrade it first")
    return _unavailable(f"the stream of calls ended: {failure.error}")


def _unavailable(reason: str) -> Failure:
    return Failure(PeerUnavailableError(reason), grpc.StatusCode.UNAVAILABLE, Leg.DECODE)
