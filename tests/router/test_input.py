"""Bad input through gRPC: each is refused with the right code and field, at once, before any worker sees it, and the
next request is served."""

import asyncio
import math
import re
import threading
import time
from collections import deque
from dataclasses import replace
from typing import Any

import grpc
import pytest
from router_fakes import CONTEXT_LENGTH, VOCAB_SIZE, Fault, decode, model_card, prefill, reference_ids
from router_harness import QUICK_REQUESTS, harness, until

from graftline.errors import InternalError, InvalidRequestError, OutOfCapacityError
from graftline.proto.status import Leg, error_from_rpc
from graftline.proto.v1.common_pb2 import SamplingDefaults
from graftline.proto.v1.worker_pb2 import Limits
from graftline.router.generation import INLINE_PROMPT_CHARS
from graftline.router.text.tokenizer import TextTokenizer

V = VOCAB_SIZE
CHAT = [("user", "Hi")]

MATRIX: list[tuple[dict[str, Any], str]] = [
    # I01: empty prompts.
    ({"text": ""}, "text"),
    ({"ids": []}, "tokens.token_ids"),
    ({}, "prompt"),
    ({"chat": []}, "messages"),
    # I03: ids outside the vocabulary.
    ({"ids": [V]}, "tokens.token_ids[0]"),
    ({"ids": [1, 2, 2**31]}, "tokens.token_ids[2]"),
    ({"ids": [2**32 - 1]}, "tokens.token_ids[0]"),
    # I04: stop ids outside the vocabulary.
    ({"text": "x", "stop_token_ids": [V + 100], "min_tokens": 2}, "stop_token_ids"),
    ({"text": "x", "stop_token_ids": [-1]}, "stop_token_ids"),
    ({"text": "x", "stop_token_ids": [1] * 2000}, "stop_token_ids"),
    # I05: logit bias.
    ({"text": "x", "logit_bias": {V + 1: -100}}, "logit_bias"),
    ({"text": "x", "logit_bias": {1: math.nan}}, "logit_bias"),
    ({"text": "x", "logit_bias": {1: math.inf}}, "logit_bias"),
    ({"text": "x", "logit_bias": {1: 101}}, "logit_bias"),
    ({"text": "x", "logit_bias": dict.fromkeys(range(2000), 1.0)}, "logit_bias"),
    # I06: not a number, infinite, huge; for every float.
    *(
        ({"text": "x", name: value}, name)
        for name in ("temperature", "top_p", "min_p")
        for value in (math.nan, math.inf, -math.inf, 1e30, -1e-30)
    ),
    # I07: ranges.
    ({"text": "x", "temperature": -1}, "temperature"),
    ({"text": "x", "top_p": 0}, "top_p"),
    ({"text": "x", "top_p": 1.001}, "top_p"),
    ({"text": "x", "top_p": -0.0}, "top_p"),
    ({"text": "x", "min_p": 1.5}, "min_p"),
    ({"text": "x", "top_k": -2}, "top_k"),
    ({"text": "x", "n": 0}, "n"),
    ({"text": "x", "n": -1}, "n"),
    ({"text": "x", "n": 10_000}, "n"),
    ({"text": "x", "max_tokens": 0}, "max_tokens"),
    ({"text": "x", "max_tokens": -1}, "max_tokens"),
    ({"text": "x", "max_tokens": 2**31}, "max_tokens"),
    ({"text": "x", "max_tokens": 2**62}, "max_tokens"),
    ({"text": "x", "min_tokens": -1}, "min_tokens"),
    ({"text": "x", "min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    ({"text": "x", "min_tokens": CONTEXT_LENGTH}, "min_tokens"),
    ({"text": "x", "logprobs": -1}, "logprobs"),
    ({"text": "x", "logprobs": V + 1}, "logprobs"),
    ({"text": "x", "stop": [""]}, "stop[0]"),
    ({"text": "x", "stop": ["a", "b" * 2000]}, "stop[1]"),
    ({"text": "x", "stop": [str(i) for i in range(10_000)]}, "stop"),
    # A05: over-long prompts.
    ({"text": "x" * CONTEXT_LENGTH}, "text"),
    ({"ids": [1] * (CONTEXT_LENGTH + 1)}, "tokens.token_ids"),
    ({"chat": [("user", "x" * 5000)]}, "chat"),
    # I16: chats.
    ({"chat": [("assistant", "x")]}, "messages"),
    ({"chat": [("robot", "x")]}, "messages[0].role"),
    # Names and labels.
    ({"text": "x", "model": "other"}, "model"),
    ({"text": "x", "request_id": "a" * 1000}, "request_id"),
    ({"text": "x", "request_id": "a\nb"}, "request_id"),
]


async def test_every_bad_value_is_refused_by_name_and_the_next_request_is_served() -> None:
    """CASES A05, I01, I03, I04, I05, I06, I07, I16, I17."""
    worker = decode()
    async with harness(prefill(), worker) as h:
        for fields, field in MATRIX:
            started = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await h.answer(**fields)
            assert time.monotonic() - started < 1, fields
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, (fields, caught.value)
            error = error_from_rpc(caught.value)
            assert isinstance(error, InvalidRequestError)
            assert error.field == field, (fields, error)
            assert len(error.problem) > 5
        assert worker.requests == [], "no worker sees a refused request"
        answer = await h.answer(text="x", max_tokens=3, seed=1)
        assert answer.token_ids == reference_ids(b"x", 3, 1)
        h.assert_quiescent()


@pytest.mark.parametrize(
    ("fields", "sent"),
    [
        ({"temperature": -0.0}, {"temperature": 0.0}),
        ({"temperature": 1e-30}, {"temperature": 0.0}),
        ({"top_k": V}, {"top_k": V}),
        ({"top_k": V + 1}, {"top_k": V}),
        ({"top_k": 2**31 - 1}, {"top_k": V}),
        ({"top_k": -1}, {"top_k": 0}),
        ({}, {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}),
    ],
)
async def test_edge_values_are_brought_into_the_workers_range(fields: dict[str, Any], sent: dict[str, Any]) -> None:
    """CASES I06, I09: what means the same is accepted."""
    worker = decode()
    async with harness(prefill(), worker) as h:
        await h.answer(text=" ", max_tokens=1, **fields)
        sampling = worker.requests[0].sampling
        assert {name: getattr(sampling, name) for name in sent} == sent


async def test_a_prompt_that_no_pool_holds_is_refused_and_output_is_limited_to_the_pool() -> None:
    """CASES A05, S31: pools smaller than the context."""
    worker = decode(limits=Limits(max_request_tokens=64, max_running=2))
    async with harness(prefill(limits=Limits(max_request_tokens=50)), worker) as h:
        for length in (50, 51, 64, 65, 80):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await h.answer(ids=[1] * length)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "50 tokens" in caught.value.details()
        answer = await h.answer(ids=[1] * 30, max_tokens=200, ignore_eos=True)
        assert answer.finish.usage.completion_tokens == 34


# Its decode dies; or its pages were taken, and the prefill refuses to compute again what is too long for it by now.
OUTGROWN = [
    Fault(25, InternalError("gone")),
    Fault(25, InvalidRequestError("token_ids", "55 tokens leave no room in 50"), Leg.PREFILL),
]


@pytest.mark.parametrize("fault", OUTGROWN)
async def test_an_output_that_outgrew_all_prefills_ends_at_once_and_says_why(fault: Fault) -> None:
    """CASES S31: 30 tokens of prompt and 25 of output are more than a prefill of 50 can compute again, ever."""
    worker = decode(limits=Limits(max_request_tokens=64, max_running=2), faults=deque([fault]))
    small = prefill(limits=Limits(max_request_tokens=50))
    others = decode(card=model_card(model_id="other"), limits=Limits(max_request_tokens=40, max_running=2))
    async with harness(small, worker, others, requests=replace(QUICK_REQUESTS, resume_wait_s=600)) as h:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await h.answer(model="tiny", ids=[1] * 30, max_tokens=34, ignore_eos=True)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "no prefill can hold what there is so far" in caught.value.details()
        told = f"too small for the 55 tokens there are, or 64 in the end: {small.address}; the last attempt"
        assert told in caught.value.details(), "another model's workers are of no interest"
        assert f"failed with: {fault.error}" in caught.value.details()


@pytest.mark.parametrize("fault", OUTGROWN)
async def test_an_output_waits_for_a_prefill_that_is_down_and_could_hold_it(fault: Fault) -> None:
    worker = decode(limits=Limits(max_request_tokens=64, max_running=2), faults=deque([fault]))
    small, large = prefill(limits=Limits(max_request_tokens=50)), prefill(limits=Limits(max_request_tokens=56))
    async with harness(small, worker, large, requests=replace(QUICK_REQUESTS, resume_wait_s=600)) as h:
        await until(lambda: all(known.is_available for known in h.router.registry.workers))
        await large.stop()
        await until(lambda: sum(known.is_available for known in h.router.registry.workers) == 2)
        waiting = asyncio.create_task(h.answer(ids=[1] * 30, max_tokens=34, ignore_eos=True))
        await until(lambda: len(worker.requests) == 1 and worker.num_running == 0)
        await large.start(large.address)
        assert len((await waiting).token_ids) == 34
        assert [request.prefill_address for request in worker.requests] == [small.address, large.address]


async def test_the_label_of_an_open_request_cannot_be_used_twice() -> None:
    worker = decode(token_delay_s=0.02)
    async with harness(prefill(), worker) as h:
        first = h.generate(text="x", request_id="mine", max_tokens=500)
        await first.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await h.answer(text="x", request_id="mine")
        error = error_from_rpc(caught.value)
        assert isinstance(error, InvalidRequestError)
        assert (error.field, "mine" in error.problem) == ("request_id", True)
        first.cancel()
        await h.until_quiescent()
        assert (await h.answer(text="x", request_id="mine", max_tokens=2)).finish is not None
        assert len({r.request_id for r in worker.requests} & {"mine"}) == 0, "a client's id is a label alone"


async def test_beyond_the_bound_requests_are_refused_with_a_hint() -> None:
    limits = replace(QUICK_REQUESTS, max_open_requests=2, retry_after_s=1.5)
    async with harness(prefill(), decode(token_delay_s=0.02), requests=limits) as h:
        open_calls = [h.generate(text="x", max_tokens=1000) for _ in range(2)]
        for call in open_calls:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await h.answer(text="x")
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        error = error_from_rpc(caught.value)
        assert isinstance(error, OutOfCapacityError)
        assert error.retry_after_s == 1.5
        for call in open_calls:
            call.cancel()
        await h.until_quiescent()
        assert (await h.answer(text="x", max_tokens=1)).finish is not None


async def test_a_text_of_a_megabyte_and_a_million_ids_are_refused_and_one_that_fits_is_served() -> None:
    """CASES G09: sizes beyond gRPC's 4 MiB default pass every hop."""
    worker = decode()
    worker.card.context_length = 2_000_000
    worker.card.card_hash = "large"
    worker.limits = Limits()
    async with harness(prefill(limits=Limits()), worker) as h:
        answer = await h.answer(text="x" * 1_000_000, max_tokens=2, timeout=60)
        assert answer.finish.usage.prompt_tokens == 1_000_000
        ids = [200] * 1_900_000
        answer = await h.answer(ids=ids, max_tokens=2, timeout=60)
        assert answer.finish.usage.prompt_tokens == len(ids)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await h.answer(ids=[200] * 2_000_000, timeout=60)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_logprobs_reach_the_client_and_are_large_if_need_be() -> None:
    """CASES G09: responses too."""
    async with harness(prefill(), decode(round_tokens=3000)) as h:
        answer = await h.answer(text="x", max_tokens=3001, logprobs=20)
        assert len(answer.logprobs) == 3001
        assert len(answer.logprobs[0].top) == 20
        none = await h.answer(text="x", max_tokens=3)
        assert none.logprobs == []
        own = await h.answer(text="x", max_tokens=3, logprobs=0)
        assert [entry.logprob for entry in own.logprobs] == [-0.5] * 3


@pytest.mark.parametrize(("num_chars", "is_here"), [(INLINE_PROMPT_CHARS, True), (INLINE_PROMPT_CHARS + 1, False)])
async def test_long_prompts_are_encoded_off_the_event_loop(
    num_chars: int, is_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    encode = TextTokenizer.encode_text

    def noting(tokenizer: TextTokenizer, text: str) -> list[int]:
        threads.append(threading.get_ident())
        return encode(tokenizer, text)

    monkeypatch.setattr(TextTokenizer, "encode_text", noting)
    async with harness(prefill(), decode()) as h:
        await h.answer(text="x" * num_chars, max_tokens=1)
    assert [thread == threading.get_ident() for thread in threads] == [is_here]


async def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES I51: two such texts kept the tokenizer's threads from everybody else's prompts for ten seconds."""
    encoded: list[int] = []
    encode = TextTokenizer.encode_text

    def noting(tokenizer: TextTokenizer, text: str) -> list[int]:
        encoded.append(len(text))
        return encode(tokenizer, text)

    monkeypatch.setattr(TextTokenizer, "encode_text", noting)
    # The longest token, <|im_start|>, has twelve characters.
    most = 12 * CONTEXT_LENGTH
    async with harness(prefill(), decode()) as h:
        for fields in ({"text": "x" * (most + 1)}, {"chat": [("user", "x" * (most + 1))]}):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await h.answer(**fields)
            assert re.search(r"are at least (4097|4101) tokens and leave no room", str(caught.value.details()))
        assert encoded == []
        for text in ("x" * most, "<|im_start|>" * CONTEXT_LENGTH):
            with pytest.raises(grpc.aio.AioRpcError, match="leave no room"):
                await h.answer(text=text)
        assert encoded == [most, most]
        assert (await h.answer(text="<|im_start|>" * (CONTEXT_LENGTH - 1), max_tokens=1)).finish is not None


async def test_what_a_request_leaves_open_is_as_the_models_makers_say() -> None:
    """CASES I59: and what it says counts, no limit included."""
    card = model_card(sampling_defaults=SamplingDefaults(temperature=0.5, top_k=20, top_p=0.75))
    worker = decode(card=card)
    async with harness(prefill(card=card), worker) as h:
        await h.answer(text="x", max_tokens=1)
        await h.answer(text="x", max_tokens=1, temperature=0, top_p=1.0, min_p=0.25)
        await h.answer(text="x", max_tokens=1, top_k=0)
        await h.answer(text="x", max_tokens=1, top_k=-1)
        drawn = [
            (r.sampling.temperature, r.sampling.top_k, r.sampling.top_p, r.sampling.min_p) for r in worker.requests
        ]
        assert drawn == [(0.5, 20, 0.75, 0), (0, 20, 1, 0.25), (0.5, 0, 0.75, 0), (0.5, 0, 0.75, 0)]
    async with harness(prefill(), decode()) as h:
        assert (await h.answer(text="x", max_tokens=1)).finish is not None
