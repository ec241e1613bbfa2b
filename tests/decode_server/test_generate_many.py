"""Calls of a stream through both real services over gRPC: the same handler as `Generate`, and its own ends."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import grpc
import pytest
from fake_engines import FakeDecodeEngine, Points
from service_pair import QUICK, decode_side, expected_ids, prefill_side, request_message

from graftline.errors import InvalidRequestError, OutOfCapacityError, PeerUnavailableError
from graftline.proto.status import failure_from_rpc, failure_from_status
from graftline.proto.v1.decode_pb2 import CarriedCall, CarriedEvent, GenerateManyRequest


async def events_of(stream: Any, num_ends: int) -> dict[int, list[CarriedEvent]]:
    """Events by call, until so many calls have ended."""
    events: dict[int, list[CarriedEvent]] = {}
    async with asyncio.timeout(5):
        while num_ends:
            for event in (await stream.read()).events:
                events.setdefault(event.call_id, []).append(event)
                num_ends -= event.HasField("status") or event.response.HasField("finished")
    return events


def asked(call_id: int, prefill_address: str, **fields: Any) -> CarriedCall:
    return CarriedCall(call_id=call_id, request=request_message(prefill_address, **fields))


async def test_calls_of_a_stream_are_independent() -> None:
    async with prefill_side() as prefill, decode_side() as decode:
        stream = decode.stub.GenerateMany()
        bad = asked(3, prefill.address)
        bad.request.sampling.top_p = 7
        calls = [asked(1, prefill.address, max_tokens=8), asked(2, prefill.address, max_tokens=5), bad]
        await stream.write(GenerateManyRequest(calls=calls))
        events = await events_of(stream, 3)
        for call_id, max_tokens in ((1, 8), (2, 5)):
            ids = [i for event in events[call_id] for i in event.response.tokens.token_ids]
            assert ids == expected_ids(max_tokens)
            assert events[call_id][-1].response.finished.usage.completion_tokens == max_tokens
        failure = failure_from_status(events[3][0].status)
        assert failure is not None
        assert isinstance(failure.error, InvalidRequestError)
        await decode.whole()
        stream.cancel()


@pytest.mark.parametrize("end", ["cancel", "stream"])
async def test_a_call_that_is_given_up_leaves_nothing(end: str) -> None:
    """CASES B01: a cancel on the stream, and the end of the stream, reach the prefill as any cancel does."""
    async with prefill_side("writing") as prefill, decode_side() as decode:
        stream = decode.stub.GenerateMany()
        await stream.write(GenerateManyRequest(calls=[asked(1, prefill.address)]))
        await prefill.engine.points.reached("writing")
        if end == "cancel":
            await stream.write(GenerateManyRequest(cancelled_call_ids=[1]))
        else:
            stream.cancel()
        await decode.whole()
        assert len(prefill.engine.cancels) == 1
        stream.cancel()


async def test_open_calls_of_a_stream_are_bounded() -> None:
    engine = FakeDecodeEngine(points=Points("line"))
    async with prefill_side() as prefill, decode_side(engine, replace(QUICK, max_open=1)) as decode:
        stream = decode.stub.GenerateMany()
        await stream.write(GenerateManyRequest(calls=[asked(1, prefill.address)]))
        await engine.points.reached("line")
        await stream.write(GenerateManyRequest(calls=[asked(2, prefill.address)]))
        events = await events_of(stream, 1)
        failure = failure_from_status(events[2][0].status)
        assert failure is not None
        assert isinstance(failure.error, OutOfCapacityError)
        stream.cancel()
        await decode.whole()


async def test_a_prefill_in_use_is_not_forgotten_for_another() -> None:
    """A call that comes right behind one which has not spoken to its prefill yet must not take its channel away."""
    async with prefill_side() as first, prefill_side() as other, decode_side(settings=replace(QUICK, max_peers=1)) as d:
        stream = d.stub.GenerateMany()
        await stream.write(GenerateManyRequest(calls=[asked(1, first.address)]))
        await events_of(stream, 1)
        await stream.write(GenerateManyRequest(calls=[asked(2, first.address), asked(3, other.address)]))
        events = await events_of(stream, 2)
        assert events[2][-1].response.HasField("finished")
        failure = failure_from_status(events[3][0].status)
        assert failure is not None
        assert isinstance(failure.error, OutOfCapacityError)
        await d.whole()
        await stream.write(GenerateManyRequest(calls=[asked(4, other.address)]))
        assert (await events_of(stream, 1))[4][-1].response.HasField("finished")
        stream.cancel()


async def test_a_drained_decode_ends_its_streams_and_refuses_new_ones() -> None:
    """Nothing of a router's keeps a worker from stopping at once."""
    async with prefill_side() as prefill, decode_side() as decode:
        stream = decode.stub.GenerateMany()
        await stream.write(GenerateManyRequest(calls=[asked(1, prefill.address)]))
        await events_of(stream, 1)
        decode.service.stop_admitting()
        async with asyncio.timeout(2):
            assert await stream.read() is grpc.aio.EOF
            late = decode.stub.GenerateMany()
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await late.read()
        assert isinstance(failure_from_rpc(raised.value).error, PeerUnavailableError)
        started_s = time.monotonic()
        await decode.server.stop(5)
        assert time.monotonic() - started_s < 2
