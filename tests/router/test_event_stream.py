"""Streams of events: comments while nothing is generated, and one chunk that ends a choice."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
from router_fakes import EOS, Fault, decode, model_card, prefill
from router_harness import QUICK_REQUESTS, harness

from graftline.errors import InvalidRequestError
from graftline.proto.v1.common_pb2 import FinishReason, TokenLogprob
from graftline.proto.v1.router_pb2 import GenerateFinish
from graftline.router.event_stream import EventStream
from graftline.router.model import ServedModel
from graftline.router.openai.answer import Answer
from graftline.router.openai.request import chat_request
from graftline.router.transcript import Delta

CHAT = [{"role": "user", "content": "Hi"}]
BRISK = replace(QUICK_REQUESTS, stream_keep_alive_s=0.05)


async def streamed(body: dict[str, Any], path: str = "/v1/chat/completions", **worker: Any) -> httpx.Response:
    async with (
        harness(prefill(), decode(**worker), http_listen="127.0.0.1:0", requests=BRISK) as h,
        httpx.AsyncClient(base_url=f"http://{h.router.http_address}", trust_env=False) as client,
    ):
        response = await client.post(path, json={"stream": True, **body})
        await h.until_quiescent()
        return response


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


async def test_a_silent_stream_carries_comments() -> None:
    """CASES G53: before the first token and between tokens; readers of events skip them."""
    response = await streamed(
        {"messages": CHAT, "max_tokens": 3, "ignore_eos": True}, first_delay_s=0.2, token_delay_s=0.2
    )
    assert response.status_code == 200
    assert response.text.startswith(": waiting\n\n")
    assert response.text.count(": waiting\n\n") >= 3
    assert response.text.endswith("data: [DONE]\n\n")
    assert chunks(response)[-1]["choices"][0]["finish_reason"] == "length"


async def test_an_error_behind_a_comment_is_an_event() -> None:
    """CASES G53: the status is out by then."""
    response = await streamed({"messages": CHAT}, first_delay_s=0.2, always=Fault(0, InvalidRequestError("x", "bad")))
    comment, event = response.text.split("\n\n", 1)[0], response.text.rstrip().rsplit("\n\n", 1)[-1]
    assert (response.status_code, comment) == (200, ": waiting")
    assert json.loads(event.removeprefix("data: "))["error"]["message"] == "x: bad"


async def test_a_brisk_stream_carries_none() -> None:
    """CASES G53: they cost nothing where tokens come."""
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    events = EventStream(send)
    keeping = asyncio.ensure_future(events.keep_alive(0.2))
    for _ in range(30):
        await events.write(b"data: x\n\n")
        await asyncio.sleep(0.01)
    await events.write(b"data: [DONE]\n\n", more=False)
    await asyncio.sleep(0.5)
    keeping.cancel()
    assert b"".join(sent) == b"data: x\n\n" * 30 + b"data: [DONE]\n\n"


@pytest.mark.parametrize(("text", "ids"), [("bye", [98, 121, 101]), ("", [EOS]), ("", [])])
def test_the_chunk_that_ends_a_choice_carries_nothing_else(text: str, ids: list[int]) -> None:
    """CASES I53: clients take text that comes with a reason for the end for none. Merged deltas are such."""
    asked = chat_request(json.dumps({"messages": CHAT, "stream": True, "logprobs": True}).encode())
    answer = Answer(asked, "id", "tiny", ServedModel.load(model_card()).vocabulary, 4)
    finish = GenerateFinish(reason=FinishReason.FINISH_REASON_STOP)
    delta = Delta(0, text, ids, [TokenLogprob(logprob=-1.0) for _ in ids], finish)
    answer.add(delta)
    parts = [chunk["choices"][0] for chunk in answer.chunks(delta)]
    assert (parts[-1]["delta"], parts[-1]["finish_reason"]) == ({}, "stop")
    assert [part["finish_reason"] for part in parts[:-1]] == [None] * bool(ids)
    assert "".join(part["delta"].get("content", "") for part in parts) == text
    assert sum(len(part["logprobs"]["content"]) for part in parts if part["logprobs"]) == len(ids)


async def test_a_whole_answer_says_its_length() -> None:
    """CASES I53: so that one that was cut can be told from one that ended."""
    async with (
        harness(prefill(), decode(), http_listen="127.0.0.1:0") as h,
        httpx.AsyncClient(base_url=f"http://{h.router.http_address}", trust_env=False) as client,
    ):
        response = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
        assert int(response.headers["content-length"]) == len(response.content)
        assert response.headers["content-type"] == "application/json"
