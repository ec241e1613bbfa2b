"""Both clients against a real router over fake workers."""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from router_fakes import EOS, Fault, decode, prefill, reference_ids
from router_harness import QUICK_REQUESTS, config_for, harness, until

from graftline.client import AsyncClient, Client, FinishReason, Message, TreeOrigin
from graftline.client.retry import RetryPolicy
from graftline.errors import (
    CancelledRequestError,
    InvalidRequestError,
    PeerUnavailableError,
    UnauthenticatedError,
)
from graftline.router.server import running_router

PROMPT = "once upon a time"
IDS = list(PROMPT.encode())


async def blocking(work: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(work)


async def test_results_are_typed_and_whole() -> None:
    async with harness(prefill(), decode()) as h, AsyncClient(h.router.address) as client:
        completion = await client.complete(PROMPT, max_tokens=10, seed=2, logprobs=2, n=2)
        first = completion.choices[0]
        assert completion.token_ids == first.token_ids == tuple(reference_ids(IDS, 10, 2))
        assert completion.text == bytes(first.token_ids).decode()
        assert completion.finish.reason is FinishReason.LENGTH
        assert completion.finish.usage.completion_tokens == 10
        assert completion.finish.speculation.tree_origin is TreeOrigin.REAL
        assert completion.finish.speculation.accept_length == pytest.approx(3)
        assert len(first.logprobs) == 10
        assert first.logprobs[0].top == ((0, 0.0), (1, -1.0))
        assert len(completion.choices) == 2
        assert completion.request_id
        (model,) = await client.models()
        assert (model.model_id, model.context_length, model.vocab_size) == ("tiny", 4096, 260)
        assert len((await client.status()).workers) == 2


async def test_prompts_may_be_text_ids_or_messages() -> None:
    worker = decode()
    async with harness(prefill(), worker) as h, AsyncClient(h.router.address) as client:
        await client.complete("hi", max_tokens=1)
        await client.complete([104, 105], max_tokens=1)
        await client.complete([Message("user", "hi")], max_tokens=1)
        assert list(worker.requests[0].token_ids) == list(worker.requests[1].token_ids) == [104, 105]
        assert b"user\nhi" in bytes(i for i in worker.requests[2].token_ids if i < 256)


async def test_every_option_reaches_the_router() -> None:
    worker = decode(forced_ids=[*b"abEND", EOS])
    async with harness(prefill(), worker) as h, AsyncClient(h.router.address) as client:
        completion = await client.complete(
            PROMPT,
            request_id="mine",
            model="tiny",
            temperature=0.5,
            top_k=3,
            top_p=0.5,
            min_p=0.25,
            seed=2**64 - 1,
            max_tokens=20,
            min_tokens=1,
            ignore_eos=True,
            stop=["END"],
            stop_token_ids=[1, 2],
            logprobs=0,
            n=1,
            logit_bias={5: -1.5},
            keep_special_tokens=True,
        )
        assert (completion.text, completion.finish.stop_string) == ("ab", "END")
        sampling, stopping = worker.requests[0].sampling, worker.requests[0].stopping
        assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 3, 0.5, 0.25)
        assert (sampling.seed, dict(sampling.logit_bias)) == (2**64 - 1, {5: -1.5})
        assert (stopping.max_tokens, stopping.min_tokens, stopping.ignore_eos) == (20, 1, True)
        assert list(stopping.stop_token_ids) == [1, 2]


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        (PROMPT, {"top_k": 2**40}, "top_k"),
        (PROMPT, {"temperature": "hot"}, "temperature"),
        (PROMPT, {"stop": [1]}, "stop"),
        (PROMPT, {"wrong": 1}, "wrong"),
        ([1, -1], {}, "prompt"),
        (["a"], {}, "prompt"),
        ([Message("user", "Hi"), {"role": "user", "content": "Hi"}], {}, "prompt"),
        (PROMPT, {"top_p": 5}, "top_p"),
        ("", {}, "text"),
    ],
)
async def test_bad_values_raise_the_same_error_whoever_finds_them(
    prompt: Any, options: dict[str, Any], field: str
) -> None:
    async with harness(prefill(), decode()) as h, AsyncClient(h.router.address) as client:
        with pytest.raises(InvalidRequestError) as caught:
            await client.complete(prompt, **options)
        assert caught.value.field == field


async def test_leaving_a_stream_early_cancels_it() -> None:
    worker = decode(token_delay_s=0.01)
    async with harness(prefill(), worker) as h, AsyncClient(h.router.address) as client:
        async with aclosing(client.generate(PROMPT, max_tokens=2000)) as stream:
            async for delta in stream:
                assert delta.token_ids
                break
        await asyncio.wait_for(worker.cancelled.wait(), 1)
        await h.until_quiescent()


async def test_a_deadline_covers_everything() -> None:
    async with harness(prefill(), decode(first_delay_s=10)) as h, AsyncClient(h.router.address) as client:
        with pytest.raises(CancelledRequestError):
            await client.complete(PROMPT, timeout_s=0.2)
        with pytest.raises(CancelledRequestError):
            await client.complete(PROMPT, timeout_s=0)


async def test_an_unreachable_router_is_tried_again_within_bounds() -> None:
    one, two = prefill(), decode()
    async with harness(one, two) as h:
        config = replace(config_for(one, two), listen=h.router.address)
        address = h.router.address
        quick = RetryPolicy(attempts=2, first_pause_s=0.01)
        async with AsyncClient("127.0.0.1:1", retry=quick) as nowhere:
            with pytest.raises(PeerUnavailableError):
                await nowhere.complete(PROMPT)
        await h.router.rpc.stop(0)
        patient = RetryPolicy(attempts=50, first_pause_s=0.05, max_pause_s=0.1)
        async with AsyncClient(address, retry=patient) as client:
            answer = asyncio.create_task(client.complete(PROMPT, max_tokens=3, seed=1, timeout_s=10))
            await asyncio.sleep(0.1)
            async with running_router(config) as second:
                await second.wait_until_usable(5)
                assert (await answer).token_ids == tuple(reference_ids(IDS, 3, 1))


async def test_nothing_is_tried_again_after_the_first_token() -> None:
    worker = decode(always=Fault(2, PeerUnavailableError("gone")))
    limits = replace(QUICK_REQUESTS, max_attempts=1)
    async with harness(prefill(), worker, requests=limits) as h, AsyncClient(h.router.address) as client:
        with pytest.raises(PeerUnavailableError):
            await client.complete(PROMPT, max_tokens=10)
        assert len(worker.requests) == 1


async def test_a_token_is_shown_when_there_is_one() -> None:
    async with harness(prefill(), decode(), tokens=("secret",)) as h:
        async with AsyncClient(h.router.address, token="secret") as client:
            assert await client.models()
            assert (await client.complete(PROMPT, max_tokens=1)).token_ids
        async with AsyncClient(h.router.address) as stranger:
            for call in (stranger.models(), stranger.status(), stranger.complete(PROMPT)):
                with pytest.raises(UnauthenticatedError):
                    await call


async def test_the_blocking_client_does_the_same() -> None:
    worker = decode(token_delay_s=0.005, faults=deque([Fault(4, PeerUnavailableError("gone"))]))
    async with harness(prefill(), worker) as h:

        def work() -> None:
            with Client(h.router.address, timeout_s=10) as client:
                assert client.complete(PROMPT, max_tokens=10, seed=3).token_ids == tuple(reference_ids(IDS, 10, 3))
                assert [model.model_id for model in client.models()] == ["tiny"]
                assert len(client.status().workers) == 2
                with pytest.raises(InvalidRequestError, match="top_p"):
                    client.complete(PROMPT, top_p=7)
                with pytest.raises(CancelledRequestError):
                    client.complete(PROMPT, max_tokens=4000, timeout_s=0.1)
                stream = client.generate(PROMPT, max_tokens=2000)
                assert next(stream).token_ids
                stream.close()  # type: ignore[attr-defined]
            with Client("127.0.0.1:1", retry=RetryPolicy(2, 0.01)) as nowhere, pytest.raises(PeerUnavailableError):
                nowhere.complete(PROMPT)

        await blocking(work)
        await until(lambda: worker.num_running == 0)
        await h.until_quiescent()
