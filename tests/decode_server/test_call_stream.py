"""The decode's end of a stream of calls, over a stream of the test's."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from graftline.decode_server.call_stream import MAX_EVENTS_PER_MESSAGE, CallContext, CallStream
from graftline.errors import InvalidRequestError, OutOfCapacityError
from graftline.proto.status import Leg, abort_with, failure_from_status, rpc_border
from graftline.proto.v1.decode_pb2 import (
    CarriedCall,
    CarriedEvent,
    DecodeFinished,
    DecodeServiceGenerateRequest,
    DecodeServiceGenerateResponse,
    DecodeTokens,
    GenerateManyRequest,
    GenerateManyResponse,
)

FINISHED = DecodeServiceGenerateResponse(finished=DecodeFinished())


class Wire:
    """A stream whose other end is the test."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[object] = asyncio.Queue()
        self.sent: list[GenerateManyResponse] = []
        self.may_write = asyncio.Event()
        self.may_write.set()

    async def send_initial_metadata(self, _: object) -> None:
        return

    async def read(self) -> object:
        return await self.incoming.get()

    async def write(self, message: GenerateManyResponse) -> None:
        await self.may_write.wait()
        self.sent.append(message)

    def ask(self, *call_ids: int, cancelled: Sequence[int] = (), **fields: Any) -> None:
        calls = [CarriedCall(call_id=i, request=DecodeServiceGenerateRequest(attempt=i), **fields) for i in call_ids]
        self.incoming.put_nowait(GenerateManyRequest(calls=calls, cancelled_call_ids=cancelled))

    @property
    def events(self) -> list[CarriedEvent]:
        return [event for message in self.sent for event in message.events]

    async def until_events(self, number: int) -> list[CarriedEvent]:
        async with asyncio.timeout(2):
            while len(self.events) < number:  # noqa: ASYNC110
                await asyncio.sleep(0)
        return self.events


def tokens(*ids: int) -> DecodeServiceGenerateResponse:
    return DecodeServiceGenerateResponse(tokens=DecodeTokens(token_ids=ids))


@asynccontextmanager
async def served(handler: Any, send_timeout_s: float = 5) -> AsyncIterator[tuple[Wire, CallStream, asyncio.Task[None]]]:
    wire = Wire()
    stream = CallStream(wire, handler, send_timeout_s)
    serving = asyncio.create_task(stream.serve())
    try:
        yield wire, stream, serving
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def answer(request: DecodeServiceGenerateRequest, call: CallContext) -> None:
    await call.write(tokens(request.attempt))
    await call.write(FINISHED)


async def wait_for_ever(request: DecodeServiceGenerateRequest, call: CallContext) -> None:
    await asyncio.Event().wait()


async def test_what_many_calls_say_leaves_in_one_message() -> None:
    async with served(answer) as (wire, _, _):
        wire.ask(*range(1, 21))
        events = await wire.until_events(40)
        assert len(wire.sent) == 1
        assert [e.response.tokens.token_ids[0] for e in events[::2]] == [e.call_id for e in events[::2]]
        assert all(e.response.HasField("finished") for e in events[1::2])


async def test_a_message_holds_a_bounded_number_of_events() -> None:
    async with served(answer) as (wire, _, _):
        wire.ask(*range(MAX_EVENTS_PER_MESSAGE))
        await wire.until_events(2 * MAX_EVENTS_PER_MESSAGE)
        assert [len(message.events) for message in wire.sent] == [MAX_EVENTS_PER_MESSAGE] * 2


async def test_a_call_waits_for_its_own_messages_to_leave() -> None:
    """CASES G10: a stream that is not read holds a few messages a call, however much a call has to say."""
    written = 0

    async def talk(request: DecodeServiceGenerateRequest, call: CallContext) -> None:
        nonlocal written
        for number in range(50):
            await call.write(tokens(number))
            written += 1
        await call.write(FINISHED)

    async with served(talk) as (wire, _, _):
        wire.may_write.clear()
        wire.ask(1)
        for _ in range(20):
            await asyncio.sleep(0)
        assert written == 4
        wire.may_write.set()
        events = await wire.until_events(51)
        assert [e.response.tokens.token_ids[0] for e in events[:-1]] == list(range(50))


async def test_a_stream_that_is_not_read_ends() -> None:
    """CASES G10."""
    async with served(answer, send_timeout_s=0.05) as (wire, _, serving):
        wire.may_write.clear()
        wire.ask(1)
        with pytest.raises(OutOfCapacityError, match="read nothing"):
            await asyncio.wait_for(serving, 2)


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_cancel_ends_one_call_and_nothing_is_said_of_it(at_once: bool) -> None:
    cancelled: list[int] = []

    async def hold(request: DecodeServiceGenerateRequest, call: CallContext) -> None:
        try:
            await asyncio.sleep(0.01 if request.attempt == 2 else 30)
        except asyncio.CancelledError:
            cancelled.append(request.attempt)
            raise
        await call.write(FINISHED)

    async with served(hold) as (wire, stream, _):
        wire.ask(1, 2, cancelled=[1] if at_once else [])
        await asyncio.sleep(0.002)
        wire.ask(cancelled=[1, 99])
        await wire.until_events(1)
        assert [e.call_id for e in wire.events] == [2]
        assert cancelled == ([] if at_once else [1])
        # Its id is free, so nothing is kept of it.
        wire.ask(1)
        await asyncio.sleep(0.002)
        assert not stream._is_over


async def test_the_end_of_the_stream_cancels_its_calls() -> None:
    left = asyncio.Event()

    async def hold(request: DecodeServiceGenerateRequest, call: CallContext) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    async with served(hold) as (wire, _, serving):
        wire.ask(1)
        await asyncio.sleep(0.002)
        wire.incoming.put_nowait(grpc.aio.EOF)
        await asyncio.wait_for(serving, 2)
        assert left.is_set()


async def test_a_deadline_is_the_calls_own() -> None:
    async with served(wait_for_ever) as (wire, _, _):
        wire.ask(1, timeout_s=0.01)
        wire.ask(2)
        (event,) = await wire.until_events(1)
        failure = failure_from_status(event.status)
        assert event.call_id == 1
        assert failure is not None
        assert failure.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_failure_keeps_its_class_its_leg_and_its_figures() -> None:
    async def fail(request: DecodeServiceGenerateRequest, call: CallContext) -> None:
        async with rpc_border(call, leg=Leg.DECODE):
            await abort_with(call, OutOfCapacityError("full", retry_after_s=2.0), leg=Leg.PREFILL)

    async with served(fail) as (wire, _, _):
        wire.ask(1)
        (event,) = await wire.until_events(1)
        failure = failure_from_status(event.status)
        assert failure is not None
        assert isinstance(failure.error, OutOfCapacityError)
        assert (failure.error.retry_after_s, failure.leg) == (2.0, Leg.PREFILL)


@pytest.mark.parametrize(("fault", "code"), [(None, grpc.StatusCode.OK), (ValueError("x"), grpc.StatusCode.INTERNAL)])
async def test_every_call_ends_with_a_word(fault: Exception | None, code: grpc.StatusCode) -> None:
    async def vanish(request: DecodeServiceGenerateRequest, call: CallContext) -> None:
        if fault is not None:
            raise fault

    async with served(vanish) as (wire, _, _):
        wire.ask(1)
        (event,) = await wire.until_events(1)
        failure = failure_from_status(event.status)
        assert (grpc.StatusCode.OK if failure is None else failure.code) is code


async def test_a_call_that_is_cancelled_from_within_ends_with_a_word_too() -> None:
    """Such as by the end of a channel that its handler uses: the router, who did not ask for it, must hear of it."""

    async def vanish(request: DecodeServiceGenerateRequest, call: CallContext) -> None:
        raise asyncio.CancelledError

    async with served(vanish) as (wire, _, _):
        wire.ask(1)
        (event,) = await wire.until_events(1)
        failure = failure_from_status(event.status)
        assert failure is not None
        assert failure.code is grpc.StatusCode.UNAVAILABLE


async def test_who_asks_for_a_call_that_is_not_there_is_told() -> None:
    """And of one that is there nothing is said, nor is one contradicted that has just ended."""
    may_end = asyncio.Event()

    async def wait(request: DecodeServiceGenerateRequest, call: CallContext) -> None:
        await may_end.wait()
        await call.write(FINISHED)

    async with served(wait) as (wire, _, _):
        wire.ask(1)
        wire.incoming.put_nowait(GenerateManyRequest(asked_call_ids=[1, 7]))
        (event,) = await wire.until_events(1)
        failure = failure_from_status(event.status)
        assert event.call_id == 7
        assert failure is not None
        assert failure.code is grpc.StatusCode.UNAVAILABLE
        wire.may_write.clear()
        may_end.set()
        await asyncio.sleep(0.01)
        wire.incoming.put_nowait(GenerateManyRequest(asked_call_ids=[1]))
        await asyncio.sleep(0.01)
        wire.may_write.set()
        _, first, second = await wire.until_events(3)
        assert (first.call_id, second.call_id) == (1, 1)
        assert first.response.HasField("finished"), "the true end comes first"
        assert second.HasField("status")


async def test_its_metadata_is_the_calls_own() -> None:
    seen: list[object] = []

    async def look(request: DecodeServiceGenerateRequest, call: CallContext) -> None:
        seen.append(call.invocation_metadata())
        await call.write(FINISHED)

    async with served(look) as (wire, _, _):
        wire.ask(1, metadata={"traceparent": "00-a-b-01"})
        await wire.until_events(1)
        assert seen == [(("traceparent", "00-a-b-01"),)]


async def test_an_id_in_use_ends_the_stream() -> None:
    async with served(wait_for_ever) as (wire, _, serving):
        wire.ask(7)
        wire.ask(7)
        with pytest.raises(InvalidRequestError, match="in use"):
            await asyncio.wait_for(serving, 2)


async def test_a_stream_that_closes_waits_for_its_calls() -> None:
    """A worker that drains waits for its requests and not for routers to go away."""
    go_on = asyncio.Event()

    async def hold(request: DecodeServiceGenerateRequest, call: CallContext) -> None:
        await go_on.wait()
        await call.write(FINISHED)

    async with served(hold) as (wire, stream, serving):
        wire.ask(1)
        await asyncio.sleep(0.002)
        stream.close_when_idle()
        await asyncio.sleep(0.002)
        assert not serving.done()
        go_on.set()
        await asyncio.wait_for(serving, 2)
        assert len(wire.events) == 1


async def test_messages_made_as_they_leave_keep_their_place() -> None:
    """Tokens that are passed on between messages that were written."""

    async def talk(request: DecodeServiceGenerateRequest, call: CallContext) -> None:
        await call.write(tokens(1))
        call.fill(lambda message: message.tokens.token_ids.append(2))
        assert not call.has_room
        await call.write(FINISHED)

    async with served(talk) as (wire, _, _):
        wire.ask(1, 2)
        events = await wire.until_events(6)
    for call_id in (1, 2):
        said = [event.response for event in events if event.call_id == call_id]
        assert said == [tokens(1), tokens(2), FINISHED]
