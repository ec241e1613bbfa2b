"""The router's end of a stream of calls: what a request costs in messages, and what happens when the stream ends."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.rpc import status_pb2
from router_fakes import decode, prefill, reference_ids
from router_harness import harness, until

from graftline.errors import CancelledRequestError, PeerUnavailableError
from graftline.proto.channel import Access, open_channel
from graftline.proto.v1.decode_pb2 import (
    CarriedEvent,
    DecodeServiceGenerateRequest,
    DecodeServiceGenerateResponse,
    GenerateManyResponse,
)
from graftline.proto.v1.decode_pb2_grpc import (
    DecodeServiceServicer,
    DecodeServiceStub,
    add_DecodeServiceServicer_to_server,
)
from graftline.router.decode_stream import DecodeStream

PROMPT = "once upon a time"
IDS = list(PROMPT.encode())


async def test_a_request_costs_messages_and_not_calls() -> None:
    """What keeps the router cheap: one stream, and one message each way for what is ready at the same time."""
    worker = decode()
    async with harness(prefill(), worker) as h:
        await h.answer(text=PROMPT, max_tokens=1)
        received, sent = worker.num_received, worker.num_sent
        for number in range(20):
            answer = await h.answer(text=PROMPT, seed=number, max_tokens=4)
            assert answer.token_ids == reference_ids(IDS, 4, number)
        assert worker.num_streams == 1
        assert worker.num_received - received == 20, "no cancel follows a request that ended"
        # 1 + 3 tokens and the end are said at once, and the last of it is one message for the client too.
        assert worker.num_sent - sent <= 2 * 20
        assert answer.messages <= 2


async def test_requests_that_come_together_share_messages() -> None:
    worker = decode()
    async with harness(prefill(), worker) as h:
        await h.answer(text=PROMPT, max_tokens=1)
        received, sent = worker.num_received, worker.num_sent
        answers = await h.answers(text=PROMPT, n=16, max_tokens=4)
        assert len(answers) == 16
        assert worker.num_received - received <= 4
        assert worker.num_sent - sent <= 8


async def test_a_cancelled_request_is_one_more_message() -> None:
    worker = decode(first_delay_s=30)
    async with harness(prefill(), worker) as h:
        call = h.generate(text=PROMPT)
        await until(lambda: worker.num_running == 1)
        received = worker.num_received
        call.cancel()
        await asyncio.wait_for(worker.cancelled.wait(), 2)
        await h.until_quiescent()
        assert (worker.num_received - received, worker.num_streams) == (1, 1)


async def test_a_decode_hears_that_an_answer_is_whole() -> None:
    """Only the router sees stop strings: to the decode their requests would look given up."""
    worker = decode(forced_ids=list(b"abSTOP" + b"x" * 2000), token_delay_s=0.01)
    async with harness(prefill(), worker) as h:
        assert (await h.answer(text=PROMPT, stop=["STOP"])).text == "ab"
        await until(lambda: worker.num_cancelled == 1)
        assert worker.num_answered == 1
        worker.first_token_sent.clear()
        call = h.generate(text=PROMPT)
        await asyncio.wait_for(worker.first_token_sent.wait(), 2)
        call.cancel()
        await until(lambda: worker.num_cancelled == 2)
        assert worker.num_answered == 1


async def test_a_stream_that_the_decode_ends_is_opened_again() -> None:
    """A decode that was told to drain ends it once nothing is on it; nobody hears of that."""
    worker = decode()
    async with harness(prefill(), worker) as h:
        await h.answer(text=PROMPT, max_tokens=1)
        assert worker.stream is not None
        worker.stream.close_when_idle()
        (router_worker,) = [w for w in h.router.registry.workers if w.address == worker.address]
        await until(lambda: not router_worker.calls.is_open)
        answer = await h.answer(text=PROMPT, max_tokens=4, seed=1)
        assert answer.token_ids == reference_ids(IDS, 4, 1)
        assert answer.finish is not None
        assert (answer.finish.attempts, worker.num_streams) == (1, 2)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAVAILABLE),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE),
        (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAVAILABLE),
        (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAUTHENTICATED),
    ],
)
async def test_what_ends_a_stream_is_no_fault_of_its_calls(code: grpc.StatusCode, expected: grpc.StatusCode) -> None:
    """They may be tried elsewhere, whatever the stream was refused for."""

    class Refusing(DecodeServiceServicer):
        async def GenerateMany(self, request_iterator: Any, context: Any) -> None:
            await context.abort(code, "no")

    server = grpc.aio.server()
    add_DecodeServiceServicer_to_server(Refusing(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = open_channel(f"127.0.0.1:{port}")
    stream = DecodeStream(DecodeServiceStub(channel), ())
    running = asyncio.create_task(stream.run())
    try:
        call = stream.call(fill, lambda _: None, None, ())
        failure = await asyncio.wait_for(call.ended, 5)
        assert failure is not None
        assert failure.code is expected
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await channel.close()
        await server.stop(None)


async def test_a_call_that_the_decode_lost_ends() -> None:
    """It would be waited for as long as the longest queue: ten minutes."""
    asked: list[int] = []

    class Forgetful(DecodeServiceServicer):
        async def GenerateMany(self, request_iterator: Any, context: Any) -> AsyncIterator[GenerateManyResponse]:
            async for request in request_iterator:
                asked.extend(request.asked_call_ids)
                status = status_pb2.Status(code=grpc.StatusCode.UNAVAILABLE.value[0]).SerializeToString()
                # It knows of the first call, although it is quiet, and of no other.
                lost = [call_id for call_id in request.asked_call_ids if call_id != 1]
                yield GenerateManyResponse(events=[CarriedEvent(call_id=call_id, status=status) for call_id in lost])

    server = grpc.aio.server()
    add_DecodeServiceServicer_to_server(Forgetful(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stream = DecodeStream(DecodeServiceStub(channel), (), ask_after_s=0.05)
        running = asyncio.create_task(stream.run())
        try:
            known, lost = (stream.call(fill, lambda _: None) for _ in range(2))
            failure = await asyncio.wait_for(lost.ended, 5)
            assert failure is not None
            assert failure.code is grpc.StatusCode.UNAVAILABLE
            await until(lambda: asked.count(1) > 1)
            assert not known.ended.done()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    await server.stop(None)


async def test_the_stream_carries_the_bearer_token() -> None:
    workers = prefill(tokens=["secret"]), decode(tokens=["secret"])
    async with harness(*workers, worker_access=Access(token="secret")) as h:
        answer = await h.answer(text=PROMPT, max_tokens=4, seed=1)
        assert answer.token_ids == reference_ids(IDS, 4, 1)


# --- without a router --------------------------------------------------------------------------------------------


def fill(request: DecodeServiceGenerateRequest) -> None:
    request.request_id = "r"
    request.attempt = 1
    request.prefill_address = "127.0.0.1:1"
    request.token_ids.extend(IDS)
    request.num_prompt_tokens = len(IDS)
    request.sampling.top_p = 1
    request.stopping.max_tokens = 4


async def ended(stream: DecodeStream, take: Any, **fields: Any) -> Any:
    running = asyncio.create_task(stream.run())
    call = stream.call(fill, take, **fields)
    try:
        return await asyncio.wait_for(call.ended, 2)
    finally:
        call.finish()
        running.cancel()


async def test_without_a_decode_every_call_fails() -> None:
    async with open_channel("127.0.0.1:1") as channel:
        failure = await ended(DecodeStream(DecodeServiceStub(channel), ()), lambda _: None)
    assert isinstance(failure.error, PeerUnavailableError)


async def test_a_call_that_comes_after_the_end_fails() -> None:
    async with open_channel("127.0.0.1:1") as channel:
        stream = DecodeStream(DecodeServiceStub(channel), ())
        running = asyncio.create_task(stream.run())
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        failure = await stream.call(fill, lambda _: None).ended
    assert failure is not None
    assert isinstance(failure.error, PeerUnavailableError)


async def test_a_deadline_needs_no_word_of_the_decode() -> None:
    worker = await decode(first_delay_s=30).start()
    async with open_channel(worker.address) as channel:
        failure = await ended(DecodeStream(DecodeServiceStub(channel), ()), lambda _: None, timeout_s=0.01)
        assert isinstance(failure.error, CancelledRequestError)
        assert failure.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await worker.stop()


async def test_a_call_that_cannot_take_a_message_leaves_the_others_alone() -> None:
    worker = await decode().start()
    async with open_channel(worker.address) as channel:
        stream = DecodeStream(DecodeServiceStub(channel), ())
        running = asyncio.create_task(stream.run())
        taken: list[DecodeServiceGenerateResponse] = []

        def refuse(_: DecodeServiceGenerateResponse) -> None:
            raise RuntimeError("no room")

        bad, good = stream.call(fill, refuse), stream.call(fill, taken.append)
        with pytest.raises(RuntimeError, match="no room"):
            await bad.ended
        bad.finish()
        assert await good.ended is None
        good.finish()
        assert sum(len(response.tokens.token_ids) for response in taken) == 4
        running.cancel()
        await worker.stop()


async def test_a_call_that_cannot_be_written_leaves_the_others_alone() -> None:
    """They share the message that would have carried it."""
    worker = await decode().start()
    async with open_channel(worker.address) as channel:
        stream = DecodeStream(DecodeServiceStub(channel), ())
        running = asyncio.create_task(stream.run())

        def half(request: DecodeServiceGenerateRequest) -> None:
            fill(request)
            raise ValueError("no such number")

        bad, good = stream.call(half, lambda _: None), stream.call(fill, lambda _: None)
        with pytest.raises(ValueError, match="no such number"):
            await bad.ended
        bad.finish()
        assert await good.ended is None
        good.finish()
        assert len(worker.requests) == 1
        assert worker.num_received == 1, "no cancel of what was never sent"
        running.cancel()
        await worker.stop()


async def test_a_call_that_was_given_up_before_it_left_is_never_written() -> None:
    worker = await decode().start()
    async with open_channel(worker.address) as channel:
        stream = DecodeStream(DecodeServiceStub(channel), ())
        running = asyncio.create_task(stream.run())
        written: list[str] = []
        stream.call(lambda _: written.append("given up"), lambda _: None).finish()
        assert await stream.call(fill, lambda _: None).ended is None
        assert not written
        assert len(worker.requests) == 1
        running.cancel()
        await worker.stop()


async def test_a_message_that_cannot_be_written_costs_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = await decode().start()
    async with open_channel(worker.address) as channel:
        stream = DecodeStream(DecodeServiceStub(channel), ())
        running = asyncio.create_task(stream.run())

        def fail(_: DecodeStream) -> None:
            raise ValueError("too large")

        with monkeypatch.context() as patch:
            patch.setattr(DecodeStream, "_next_message", fail)
            failure = await asyncio.wait_for(stream.call(fill, lambda _: None).ended, 2)
        assert failure is not None
        assert isinstance(failure.error, PeerUnavailableError)
        assert await asyncio.wait_for(stream.call(fill, lambda _: None).ended, 2) is None
        running.cancel()
        await worker.stop()
