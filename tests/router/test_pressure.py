"""Slow clients, many clients, frozen peers."""

import asyncio
import socket
from dataclasses import replace
from typing import Any

import grpc
import pytest
from router_fakes import Fault, decode, prefill, reference_ids
from router_harness import QUICK_HEALTH, QUICK_REQUESTS, Harness, harness, request, until

from graftline.errors import OutOfCapacityError
from graftline.metrics import REQUESTS_ENDED, REQUESTS_STARTED, SLOW_CONSUMERS_CUT
from graftline.proto.channel import open_channel
from graftline.proto.status import error_from_rpc
from graftline.proto.v1.router_pb2_grpc import RouterServiceStub
from graftline.proto.v1.worker_pb2 import Limits
from graftline.router.config import RequestConfig

PROMPT = "once upon a time"
IDS = list(PROMPT.encode())


async def stalled(h: Harness, **fields: Any) -> Any:
    """A client that takes the first message and then reads no more, with a small HTTP/2 window."""
    options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    channel = grpc.aio.insecure_channel(h.router.address, options=options)
    call = RouterServiceStub(channel).Generate(request(text=PROMPT, ignore_eos=True, **fields))
    await call.read()
    return channel, call


async def read_all(call: Any) -> None:
    while await call.read():
        pass


async def test_a_client_that_stops_reading_is_cut_and_others_go_on() -> None:
    """CASES G10: bounded memory, other clients unaffected."""
    worker = decode(round_tokens=8)
    limits = replace(QUICK_REQUESTS, max_unread_tokens=500, write_timeout_s=30.0)
    async with harness(prefill(), worker, requests=limits) as h:
        channel, call = await stalled(h, max_tokens=4000, logprobs=20)
        answers = await asyncio.gather(*(h.answer(text=PROMPT, seed=n, max_tokens=40) for n in range(8)))
        assert [a.token_ids for a in answers] == [reference_ids(IDS, 40, n) for n in range(8)]
        await until(lambda: worker.num_running == 0, 5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(call)
        assert isinstance(error_from_rpc(caught.value), OutOfCapacityError)
        assert "too slowly" in caught.value.details()
        await channel.close()
        await h.until_quiescent()
        assert h.router.metrics.total(SLOW_CONSUMERS_CUT) == 1


async def test_a_write_that_never_ends_is_cut_by_the_clock() -> None:
    """CASES G10: also when everything was generated already."""
    worker = decode(round_tokens=100)
    limits = replace(QUICK_REQUESTS, write_timeout_s=0.2)
    async with harness(prefill(), worker, requests=limits) as h:
        channel, _ = await stalled(h, max_tokens=4000, logprobs=20)
        await until(lambda: h.router.metrics.total(SLOW_CONSUMERS_CUT) == 1, 5)
        await h.until_quiescent()
        await channel.close()


async def test_an_http_client_that_stops_reading_is_cut() -> None:
    """CASES G10."""
    worker = decode(round_tokens=16)
    limits = replace(QUICK_REQUESTS, write_timeout_s=0.2)
    async with harness(prefill(), worker, requests=limits, http_listen="127.0.0.1:0") as h:
        assert h.router.http_address is not None
        host, port = h.router.http_address.split(":")
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect((host, int(port)))
        body = b'{"messages": [{"role": "user", "content": "x"}], "stream": true, "max_tokens": 4000, "logprobs": true,'
        body += b'"top_logprobs": 20, "ignore_eos": true}'
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        raw.sendall(head + body)
        await until(lambda: h.router.metrics.total(SLOW_CONSUMERS_CUT) == 1, 5)
        await h.until_quiescent()
        raw.close()


@pytest.mark.parametrize("num_calls", [200, pytest.param(4000, marks=pytest.mark.slow)])
async def test_many_simultaneous_calls_are_all_answered(num_calls: int) -> None:
    """Also more calls than gRPC lets wait by default; the books balance at the end (CASES X03)."""
    # Everything shares one event loop here, which the storm keeps busy for seconds.
    health = replace(QUICK_HEALTH, hang_timeout_s=60, stall_timeout_s=60, connect_timeout_s=60)
    async with harness(prefill(), decode(round_tokens=4), decode(round_tokens=4), health=health) as h:
        channels = [open_channel(h.router.address) for _ in range(4)]
        stubs = [RouterServiceStub(channel) for channel in channels]

        async def one(number: int) -> None:
            ids: list[int] = []
            call = stubs[number % 4].Generate(request(text=PROMPT, seed=number, max_tokens=5), timeout=250)
            async for message in call:
                ids += message.token_ids
            assert ids == reference_ids(IDS, 5, number)

        await asyncio.gather(*(one(number) for number in range(num_calls)))
        for channel in channels:
            await channel.close()
        await h.until_quiescent()
        metrics = h.router.metrics
        assert metrics.total(REQUESTS_STARTED) == metrics.total(REQUESTS_ENDED) == num_calls


async def test_a_storm_of_cancels_leaves_nothing_behind() -> None:
    """CASES G02, G06: nothing is sent that nobody waits for; tasks return to their number."""
    worker = decode()
    async with harness(prefill(), worker) as h:
        await h.answer(text=PROMPT, max_tokens=1)
        worker.first_delay_s = 5
        num_tasks = len(asyncio.all_tasks())
        calls = [h.generate(text=PROMPT) for _ in range(200)]
        await until(lambda: worker.num_running == 200, 10)
        for call in calls:
            call.cancel()
        await until(lambda: worker.num_running == 0, 5)
        await h.until_quiescent()
        await until(lambda: len(asyncio.all_tasks()) <= num_tasks + 2, 5)


async def test_a_draining_router_refuses_new_requests_and_finishes_open_ones() -> None:
    worker = decode(token_delay_s=0.01)
    async with harness(prefill(), worker) as h:
        answer = asyncio.create_task(h.answer(text=PROMPT, seed=1, max_tokens=30))
        await worker.first_token_sent.wait()
        await h.router.drain()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await h.answer(text=PROMPT)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert (await answer).token_ids == reference_ids(IDS, 30, 1)


async def test_what_no_prefill_would_take_is_refused_before_it_reaches_one() -> None:
    """However many come at once, workers see no more than they can take."""
    worker = decode(always=Fault(0, hang=True))
    full = prefill(limits=Limits(max_request_tokens=4096, max_running=1, max_queued=6))
    async with harness(full, worker) as h:
        calls = [asyncio.ensure_future(h.answer(text=PROMPT, seed=n, max_tokens=20)) for n in range(40)]
        await until(lambda: sum(call.done() for call in calls) == 32, 10)
        assert len(worker.requests) == 8, "what waits, and twice what runs"
        for call in calls:
            if call.done():
                refusal = call.exception()
                assert isinstance(refusal, grpc.aio.AioRpcError)
                error = error_from_rpc(refusal)
                assert isinstance(error, OutOfCapacityError)
                assert error.retry_after_s == RequestConfig().retry_after_s
                assert "8 requests are at prefills already" in str(error)
            call.cancel()
        await h.until_quiescent()
        worker.always = None
        assert (await h.answer(text=PROMPT, seed=1, max_tokens=5)).token_ids == reference_ids(IDS, 5, 1)


async def test_a_full_prefill_leaves_requests_to_others() -> None:
    worker = decode(first_delay_s=1.0)  # until then all have come
    limits = Limits(max_request_tokens=4096, max_running=1, max_queued=2)
    first, second = prefill(limits=limits), prefill()
    async with harness(first, second, worker) as h:
        await until(lambda: all(known.is_available for known in h.router.registry.workers))
        await asyncio.gather(*(h.answer(text=PROMPT, seed=n, max_tokens=3) for n in range(20)))
        assert sum(request.prefill_address == first.address for request in worker.requests) <= 4
        assert len(worker.requests) == 20
