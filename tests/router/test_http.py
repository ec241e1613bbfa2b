"""OpenAI's HTTP interface: raw bodies through httpx, and the unmodified `openai` client."""

import asyncio
import json
import socket
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from router_fakes import (
    EOS,
    FakeWorker,
    Fault,
    byte_fallback_tokenizer,
    decode,
    model_card,
    prefill,
    reference_ids,
)
from router_harness import QUICK_HEALTH, QUICK_REQUESTS, Harness, harness, until

from graftline.errors import InternalError, PeerUnavailableError
from graftline.router import server
from graftline.router.config import RouterConfig
from graftline.router.server import running_router

PROMPT = "once upon a time"
IDS = list(PROMPT.encode())
# What Prometheus 2 asks for.
PROMETHEUS_ACCEPT = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


@asynccontextmanager
async def http(*workers: FakeWorker, **changes: Any) -> AsyncIterator[tuple[Harness, httpx.AsyncClient]]:
    workers = workers or (prefill(), decode())
    async with (
        harness(*workers, http_listen="127.0.0.1:0", **changes) as h,
        httpx.AsyncClient(base_url=f"http://{h.router.http_address}", trust_env=False) as client,
    ):
        yield h, client


def official(h: Harness, **options: Any) -> openai.AsyncOpenAI:
    client = httpx.AsyncClient(trust_env=False)
    base_url = f"http://{h.router.http_address}/v1"
    return openai.AsyncOpenAI(base_url=base_url, max_retries=0, http_client=client, **{"api_key": "none", **options})


async def test_a_chat_is_answered_whole() -> None:
    worker = decode()
    async with http(prefill(), worker) as (_, client):
        response = await client.post(
            "/v1/chat/completions", json={"model": "tiny", "messages": CHAT, "max_tokens": 10, "seed": 3}
        )
        body = response.json()
        assert response.status_code == 200
        prompt = list(worker.requests[0].token_ids)
        expected = reference_ids(prompt, 10, 3)
        assert body["object"] == "chat.completion"
        assert body["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": bytes(expected).decode(), "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ]
        assert body["usage"] == {
            "prompt_tokens": len(prompt),
            "completion_tokens": 10,
            "total_tokens": len(prompt) + 10,
            "prompt_tokens_details": {"cached_tokens": 2},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "accepted_prediction_tokens": 6,
                "rejected_prediction_tokens": 3,
            },
        }


async def test_a_stream_carries_role_text_finish_usage_and_done() -> None:
    async with http() as (_, client):
        body = {
            "messages": CHAT,
            "max_tokens": 10,
            "seed": 3,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        response = await client.post("/v1/chat/completions", json=body)
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in events[:-1]]
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == 10
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]][-1] == "length"
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1])
        assert len(text) == 10
        assert len({chunk["id"] for chunk in chunks}) == 1


async def test_usage_of_every_chunk_counts_the_prompt() -> None:
    """CASES X52: not from the end of a choice on only."""
    async with http() as (_, client):
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {"prompt": [PROMPT, "x"], "n": 2, "max_tokens": 5, "stream": True, "stream_options": options}
        response = await client.post("/v1/completions", json=body)
        events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        usages = [json.loads(event)["usage"] for event in events[:-1]]
        assert {usage["prompt_tokens"] for usage in usages} == {len(IDS) + 1}
        counts = [usage["completion_tokens"] for usage in usages]
        assert counts == sorted(counts)
        assert counts[-1] == 20
        assert all(usage["total_tokens"] == len(IDS) + 1 + usage["completion_tokens"] for usage in usages)


async def test_several_prompts_and_choices_are_numbered_through() -> None:
    async with http() as (h, client):
        body = {"prompt": [PROMPT, [1, 2, 3]], "n": 2, "max_tokens": 5, "seed": 1}
        answer = (await client.post("/v1/completions", json=body)).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert answer["choices"][0]["text"] == bytes(reference_ids(IDS, 5, 1)).decode()
        assert answer["choices"][2]["text"] == bytes(reference_ids([1, 2, 3], 5, 1)).decode()
        assert answer["usage"]["prompt_tokens"] == len(IDS) + 3
        assert answer["usage"]["completion_tokens"] == 20
        h.assert_quiescent()


async def test_logprobs_have_both_shapes() -> None:
    async with http(prefill(), decode(forced_ids=[*b"ab", EOS])) as (_, client):
        body = {"messages": CHAT, "logprobs": True, "top_logprobs": 2}
        chat = (await client.post("/v1/chat/completions", json=body)).json()
        content = chat["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in content] == ["a", "b", "<|im_end|>"]
        assert content[0]["bytes"] == [97]
        assert [top["logprob"] for top in content[0]["top_logprobs"]] == [0, -1]
        whole = (await client.post("/v1/completions", json={"prompt": "x", "logprobs": 1})).json()
        logprobs = whole["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["a", "b", "<|im_end|>"]
        assert logprobs["token_logprobs"] == [-0.5] * 3
        assert logprobs["text_offset"] == [0, 1, 2]


BAD = [
    ({"messages": []}, "messages"),
    ({}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content[0]"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 1e30}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 65}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 10**12}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"seed": 2**65}, "seed"),
    ({"stop": ""}, "stop[0]"),
    ({"stop": ["a"] * 10_000}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop_token_ids": [260]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"logit_bias": {"260": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1000}}, "logit_bias"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
    ({"presence_penalty": 1}, "presence_penalty"),
    ({"frequency_penalty": 100}, "frequency_penalty"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"guided_regex": "[0-9]{3}"}, "guided_regex"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
    ({"add_special_tokens": True}, "add_special_tokens"),
    ({"return_token_ids": True}, "return_token_ids"),
    ({"nonsense": 1}, "nonsense"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"magic": 1}}, "stream_options.magic"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"model": "other"}, "model"),
    ({"model": 5}, "model"),
]


async def test_bad_bodies_are_refused_with_the_field_and_the_next_request_is_served() -> None:
    """CASES I05, I07, I16, I17, S08, S34, and the refusal of fields this server does not implement."""
    worker = decode()
    async with http(prefill(), worker) as (h, client):
        for changes, param in BAD:
            base = {} if changes == {} else {"messages": CHAT, "max_tokens": 2}
            response = await client.post("/v1/chat/completions", json={**base, **changes})
            is_unknown = changes.get("model") == "other"
            assert response.status_code == (404 if is_unknown else 400), changes
            error = response.json()["error"]
            assert error["code"] in ({"model_not_found"} if is_unknown else {None, "context_length_exceeded"})
            assert error["param"] == param, (changes, error)
            assert error["type"] == "invalid_request_error"
            assert error["message"].startswith(f"{param}: ")
            assert len(error["message"]) > len(param) + 5
        assert worker.requests == []
        metrics = (await client.get("/metrics")).text
        counted = [line for line in metrics.splitlines() if line.startswith("graftline_router_requests_refused_total{")]
        assert sum(float(line.split()[-1]) for line in counted) == len(BAD)
        for body in (b"", b"[]", b"{", b'{"messages": "\xff"}', b"null", b"[" * 100_000):
            response = await client.post("/v1/chat/completions", content=body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "body")
        assert (await client.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 2})).status_code == 200
        h.assert_quiescent()


async def test_neutral_values_of_unsupported_fields_are_accepted() -> None:
    """What unmodified benchmark tools and clients that spell defaults out send along."""
    async with http() as (_, client):
        extra = {"best_of": 1, "repetition_penalty": 1.0, "echo": False, "tools": [], "logprobs": None, "user": "me"}
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "ignore_eos": True, "temperature": 0.0, **extra}
        assert (await client.post("/v1/completions", json={**body, "add_special_tokens": True})).status_code == 200
        spelled = {
            "messages": CHAT,
            "max_tokens": 2,
            "top_logprobs": 0,
            "logprobs": False,
            "add_generation_prompt": True,
        }
        assert (await client.post("/v1/chat/completions", json=spelled)).status_code == 200


async def test_a_body_has_no_more_choices_than_a_worker_lets_wait() -> None:
    worker = decode()
    async with http(prefill(), worker) as (_, client):
        response = await client.post("/v1/completions", json={"prompt": ["x"] * 64, "n": 17, "max_tokens": 1})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
        assert "17 choices of each of 64 prompts are more than 1024" in response.json()["error"]["message"]
        assert worker.requests == []


BAD_PROMPTS = [
    (None, "prompt"),
    ("", "prompt"),
    ([], "prompt"),
    (["x", ""], "prompt[1]"),
    ([[]], "prompt[0]"),
    ([[1], [2, 260]], "prompt[1][1]"),
    ([-1], "prompt[0]"),
    ([2**31], "prompt[0]"),
    ([260], "prompt[0]"),
    ([1.5], "prompt[0]"),
    ([1, "x"], "prompt[1]"),
    (5, "prompt"),
    ("x" * 5000, "prompt"),
]


@pytest.mark.parametrize(("prompt", "param"), BAD_PROMPTS)
async def test_bad_prompts_of_completions(prompt: Any, param: str) -> None:
    """CASES I01: empty prompts; errors name the prompt as the body does, of several prompts the one."""
    async with http() as (_, client):
        response = await client.post("/v1/completions", json={"prompt": prompt})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert response.json()["error"]["message"].startswith(f"{param}: ")


async def test_unknown_routes_and_methods_answer_in_openais_shape() -> None:
    async with http() as (_, client):
        for method, path, status in (("GET", "/v1/completions", 405), ("POST", "/v1/embeddings", 404)):
            response = await client.request(method, path)
            assert response.status_code == status
            assert response.json()["error"]["type"] == "invalid_request_error"
            assert f"{method} {path}" in response.json()["error"]["message"]
        assert (await client.get("/v1/completions")).headers["allow"] == "POST"


async def test_text_offsets_say_where_tokens_begin_however_characters_are_split() -> None:
    """An emoji of four tokens begins once, streamed or whole, and text that a stop string held back moves nothing."""
    ids = [*"a😀b! c".encode(), EOS]
    async with http(prefill(), decode(forced_ids=ids)) as (_, client):
        for changes in ({}, {"stop": ["! d"]}):
            body = {"prompt": "x", "logprobs": 2, "max_tokens": 20, **changes}
            whole = (await client.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]
            assert whole["text_offset"] == [0, 1, 1, 1, 1, 2, 3, 4, 5, 6]
            assert all(token in tops for token, tops in zip(whole["tokens"], whole["top_logprobs"], strict=True))
            lines = (await client.post("/v1/completions", json={**body, "stream": True})).text.split("\n\n")
            chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
            parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
            assert {name: [item for part in parts for item in part[name]] for name in whole} == whole


async def test_text_offsets_count_the_first_space_of_a_text_that_goes_on() -> None:
    """CASES I58."""
    card = model_card(tokenizer_json=byte_fallback_tokenizer().to_str().encode(), vocab_size=263, eos_token_ids=[0])
    async with http(prefill(card=card), decode(card=card, forced_ids=[262, 259, 262])) as (_, client):
        body = {"prompt": "b", "logprobs": 0, "max_tokens": 3}
        choice = (await client.post("/v1/completions", json=body)).json()["choices"][0]
        assert (choice["text"], choice["logprobs"]["text_offset"]) == (" theb the", [0, 4, 5])


async def test_errors_after_the_stream_began_arrive_as_an_event() -> None:
    worker = decode(always=Fault(3, InternalError("broken")))
    async with http(prefill(), worker, health=replace(QUICK_HEALTH, breaker_failures=1000)) as (_, client):
        body = {"messages": CHAT, "max_tokens": 100, "stream": True}
        response = await client.post("/v1/chat/completions", json=body)
        last = json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))
        assert last["error"]["type"] == "server_error"
        assert "broken" in last["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_outlives_the_drain_is_told_so(stream: bool) -> None:
    """A stream that ends without a word looks like a broken network."""
    worker = decode(token_delay_s=0.02)
    async with httpx.AsyncClient(trust_env=False) as client:
        async with harness(prefill(), worker, http_listen="127.0.0.1:0", drain_grace_s=0.2) as h:
            url = f"http://{h.router.http_address}/v1/completions"
            body = {"prompt": PROMPT, "max_tokens": 3000, "ignore_eos": True, "stream": stream}
            open_request = asyncio.create_task(client.post(url, json=body))
            await until(lambda: worker.requests)
        response = await open_request
    assert response.status_code == (200 if stream else 503)
    last = json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert (last["error"]["type"], last["error"]["message"]) == ("service_unavailable_error", "this router is stopping")


async def test_errors_before_the_first_token_keep_their_status() -> None:
    worker = decode(always=Fault(0, PeerUnavailableError("gone")))
    async with http(prefill(), worker) as (_, client):
        response = await client.post("/v1/chat/completions", json={"messages": CHAT, "stream": True})
        assert response.status_code == 503
        assert "gone" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_before_the_first_token_cancels_the_decode(stream: bool) -> None:
    """CASES G01: the disconnect is noticed without sending anything."""
    worker = decode(first_delay_s=30)
    async with http(prefill(), worker) as (h, client):
        with pytest.raises(httpx.ReadTimeout):
            await client.post(
                "/v1/chat/completions", json={"messages": CHAT, "stream": stream}, timeout=httpx.Timeout(5, read=0.3)
            )
        await asyncio.wait_for(worker.cancelled.wait(), 1)
        await h.until_quiescent()


async def test_too_many_requests_answer_429_with_a_hint() -> None:
    worker = decode(first_delay_s=0.5)
    async with http(prefill(), worker, requests=replace(QUICK_REQUESTS, max_open_requests=1)) as (_, client):
        first = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}))
        await until(lambda: worker.requests)
        second = await client.post("/v1/completions", json={"prompt": "b", "max_tokens": 1})
        assert (second.status_code, second.headers["retry-after"]) == (429, "1")
        assert (await first).status_code == 200


async def test_health_ready_models_metrics_and_server_info() -> None:
    worker = prefill()
    async with http(worker, decode()) as (h, client):
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 200
        models = (await client.get("/v1/models")).json()
        assert [(m["id"], m["max_model_len"]) for m in models["data"]] == [("tiny", 4096)]
        assert (await client.get("/v1/models/tiny")).json()["id"] == "tiny"
        assert (await client.get("/v1/models/other")).status_code == 404
        await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 10})
        metrics = (await client.get("/metrics")).text
        assert 'graftline_router_requests_ended_total{model="tiny",outcome="length"} 1.0' in metrics
        assert "vllm:" not in (await client.get("/metrics", headers={"accept": PROMETHEUS_ACCEPT})).text
        spoken = {
            line.partition("{")[0]: float(line.split()[-1]) for line in metrics.splitlines() if "vllm:" in line[:5]
        }
        # 3 rounds, 3 drafts each, 6 of them accepted: what vLLM's benchmark divides to an acceptance length of 3.
        assert spoken == {
            "vllm:spec_decode_num_drafts_total": 3,
            "vllm:spec_decode_num_draft_tokens_total": 9,
            "vllm:spec_decode_num_accepted_tokens_total": 6,
        }
        info = (await client.get("/get_server_info")).json()
        assert (await client.get("/server_info")).json() == info
        assert info["internal_states"][0]["avg_spec_accept_length"] == 3
        await worker.stop()
        await until(lambda: not h.router.registry.has_pair())
        ready = await client.get("/ready")
        assert ready.status_code == 503
        assert worker.address in ready.text
        assert (await client.get("/health")).status_code == 200


async def test_ready_speaks_for_grpc_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for /ready may use gRPC at once: it listens before HTTP does, and stops when HTTP cannot start."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    answered: list[bool] = []

    @asynccontextmanager
    async def no_http(*_: object, **__: object) -> AsyncIterator[str]:
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            answered.append(True)
        raise PeerUnavailableError("no port for HTTP")
        yield

    monkeypatch.setattr(server, "running_http", no_http)
    with pytest.raises(PeerUnavailableError, match="no port"):
        async with running_router(RouterConfig(listen=f"127.0.0.1:{port}", http_listen="127.0.0.1:0")):
            pass
    assert answered
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


async def test_one_id_may_go_with_several_requests_and_comes_back() -> None:
    """CASES I54: clients send one along with all calls of a turn, proxies with retries; unfit ones are replaced."""
    async with http(prefill(), decode(token_delay_s=0.02)) as (h, client):
        body = {"messages": CHAT, "max_tokens": 20, "ignore_eos": True}
        same = [client.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine"}) for _ in range(3)]
        answers = await asyncio.gather(*same)
        assert [(a.status_code, a.headers["x-request-id"]) for a in answers] == [(200, "mine")] * 3
        assert len({answer.json()["id"] for answer in answers}) == 3
        for unfit in ("", "a" * 300, "a\tb"):
            answer = await client.post(
                "/v1/completions",
                json={"prompt": "x", "max_tokens": 1, "stream": True},
                headers={"x-request-id": unfit},
            )
            assert (answer.status_code, len(answer.headers["x-request-id"])) == (200, 32)
        missing = await client.get("/nowhere", headers={"x-request-id": "mine"})
        assert missing.headers["x-request-id"] == "mine"
        h.assert_quiescent()


async def test_a_conversation_that_became_too_long_has_openais_code() -> None:
    """CASES I55: agents and gateways shorten it, or take another model, by that code."""
    async with http() as (_, client):
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 5000}]}),
            ("/v1/completions", {"prompt": [1] * 5000}),
        ):
            error = (await client.post(path, json=body)).json()["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")


async def test_bearer_tokens_guard_the_api_and_leave_health_open() -> None:
    """CASES Z54: the scheme's name has no case (RFC 9110, 11.1); nothing else opens."""
    async with http(tokens=("secret", "next")) as (_, client):
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "secret"},
            {"authorization": "Basic secret"},
            {"authorization": "Bearer"},
            {"authorization": "Bearer secret next"},
        ):
            response = await client.get("/v1/models", headers=headers)
            assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")
            refused = await client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
            assert refused.status_code == 401
        for scheme in ("Bearer", "bearer", "BEARER "):
            headers = {"authorization": f"{scheme} next"}
            assert (await client.get("/v1/models", headers=headers)).status_code == 200
        assert (await client.get("/health")).status_code == 200


# --- the official client --------------------------------------------------------------------------------------


async def test_the_openai_client_chats_streams_and_counts() -> None:
    async with http() as (h, _), official(h) as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        whole = await client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=8, seed=1, n=2)
        assert [len(choice.message.content) for choice in whole.choices] == [8, 8]
        assert whole.usage.completion_tokens_details.accepted_prediction_tokens > 0
        stream = await client.chat.completions.create(
            model="tiny", messages=CHAT, max_tokens=8, seed=1, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage.completion_tokens == 8
        done = await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=3, logprobs=2, seed=1)
        assert len(done.choices[0].logprobs.tokens) == 3


async def test_the_openai_client_gets_typed_errors() -> None:
    async with http() as (h, _), official(h) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(
                model="tiny", messages=CHAT, tools=[{"type": "function", "function": {"name": "f"}}]
            )
        assert refused.value.param == "tools"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="gpt-9", messages=CHAT)


async def test_the_openai_client_sees_a_resumed_stream_as_one() -> None:
    faults = deque([Fault(4, PeerUnavailableError("gone"))])
    async with http(prefill(), decode(faults=faults), decode(faults=faults)) as (h, _), official(h) as client:
        stream = await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=20, seed=1, stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
        assert text == bytes(reference_ids(IDS, 20, 1)).decode()
        assert not faults
