"""Bodies and lists of a size that no request needs: refused, and no other client waits for it."""

import asyncio
import gzip
import json
import time
from typing import Any

import grpc
import httpx
import pytest
from router_fakes import Limits, decode, prefill
from router_harness import Harness, harness, request
from starlette.requests import Request

from graftline.errors import InvalidRequestError, OutOfCapacityError
from graftline.proto.v1.router_pb2 import ChatMessage, ChatPrompt, GenerateRequest
from graftline.proto.validation import MAX_MESSAGES
from graftline.router.http_body import MAX_BODY_BYTES, Bodies
from graftline.router.openai import request as openai_request

CHAT = [{"role": "user", "content": "Hi"}]
# The longest that the event loop may be held up here, by far less than a worker's silence that counts.
PATIENCE_S = 2.0


class Lateness:
    """How late the event loop turned, at worst."""

    def __init__(self) -> None:
        self.worst_s = 0.0

    async def watch(self) -> None:
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(0.01)
            self.worst_s = max(self.worst_s, time.monotonic() - before_s)


async def post(h: Harness, path: str, content: bytes) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=f"http://{h.router.http_address}", trust_env=False, timeout=60) as client:
        response = await client.post(path, content=content)
        assert response.status_code == 400, response.text
        found: dict[str, Any] = response.json()["error"]
        return found


LARGE = {
    "prompt": ("/v1/completions", lambda: b'{"prompt":[' + b"1," * (MAX_BODY_BYTES // 2 - 10) + b"1]}", "prompt"),
    "messages": ("/v1/chat/completions", lambda: json.dumps({"messages": CHAT * 300_000}).encode(), "messages"),
    "stop_token_ids": (
        "/v1/completions",
        lambda: json.dumps({"prompt": "a", "stop_token_ids": [1] * 3_000_000}).encode(),
        "stop_token_ids",
    ),
    "logit_bias": (
        "/v1/completions",
        lambda: json.dumps({"prompt": "a", "logit_bias": {str(index): 1 for index in range(1_000_000)}}).encode(),
        "logit_bias",
    ),
    "body": ("/v1/completions", lambda: b'{"prompt":"' + b"a" * 2 * MAX_BODY_BYTES + b'"}', "body"),
}


@pytest.mark.parametrize("name", LARGE)
async def test_a_body_of_millions_of_entries_holds_nobody_up(name: str) -> None:
    """CASES I51: refused by name; meanwhile the event loop turns."""
    path, content, param = LARGE[name]
    body = content()
    async with harness(prefill(limits=Limits()), decode(), http_listen="127.0.0.1:0") as h:
        late = Lateness()
        watching = asyncio.ensure_future(late.watch())
        error = await post(h, path, body)
        watching.cancel()
        assert error["param"] == param
        assert "more than" in error["message"] or "leave no room" in error["message"] or "longer" in error["message"]
        assert late.worst_s < PATIENCE_S


async def test_a_message_of_millions_of_entries_holds_nobody_up() -> None:
    """CASES I51: over gRPC an empty chat message is two bytes."""
    worker = decode()
    async with harness(prefill(), worker) as h:
        for made in (
            GenerateRequest(chat=ChatPrompt(messages=[ChatMessage()] * (MAX_MESSAGES + 1))),
            request(ids=[1] * 2_000_000),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=r"more than|leave no room"):
                await h.stub.Generate(made, timeout=30).read()
        assert worker.requests == []
        assert (await h.answer(text="x", max_tokens=1)).finish is not None


async def test_token_ids_of_any_number_of_digits_are_refused_by_name() -> None:
    """CASES I52: Python's int() raises on thousands of digits."""
    for digits in ("9" * 5000, "٣", "1" * 11, "", "-1", "1.0"):
        with pytest.raises(InvalidRequestError) as caught:
            openai_request.completion_request(json.dumps({"prompt": "a", "logit_bias": {digits: 1}}).encode())
        assert caught.value.field == "logit_bias"


async def test_a_fault_of_ours_has_openais_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES I52: whatever nobody thought of is an error that clients can read, and the next request is served."""
    async with (
        harness(prefill(), decode(), http_listen="127.0.0.1:0") as h,
        httpx.AsyncClient(base_url=f"http://{h.router.http_address}", trust_env=False) as client,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(openai_request, "_finished", None)
            response = await client.post("/v1/chat/completions", json={"messages": CHAT})
        assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
        answered = await client.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 1})
        assert answered.status_code == 200


def arriving(*pieces: bytes | None) -> Request:
    """A request whose body comes in pieces; None: nothing comes any more."""
    waiting = list(pieces)

    async def receive() -> dict[str, Any]:
        piece = waiting.pop(0)
        if piece is None:
            await asyncio.sleep(60)
        return {"type": "http.request", "body": piece, "more_body": bool(waiting)}

    return Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)


async def test_bodies_are_bounded_in_time_and_together() -> None:
    """CASES I51: what is sent slowly, or by many at once, ends too, and holds nothing afterwards."""
    bodies = Bodies(timeout_s=0.05, max_held_bytes=10)
    with pytest.raises(InvalidRequestError, match="did not arrive"):
        async with bodies.read(arriving(b"12345", None)):
            pass
    async with bodies.read(arriving(b"123", b"456")) as body:
        assert (body, bodies.held_bytes) == (b"123456", 6)
        with pytest.raises(OutOfCapacityError):
            async with bodies.read(arriving(b"12345")):
                pass
        assert bodies.held_bytes == 6
    assert bodies.held_bytes == 0


async def test_a_compressed_body_is_refused_as_such() -> None:
    """CASES I61."""
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    async with (
        harness(prefill(), decode(), http_listen="127.0.0.1:0") as h,
        httpx.AsyncClient(base_url=f"http://{h.router.http_address}", trust_env=False) as client,
    ):
        headers = {"content-encoding": "gzip"}
        refused = await client.post("/v1/completions", content=gzip.compress(body), headers=headers)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "content-encoding")
        assert "'gzip' is not supported" in refused.json()["error"]["message"]
        plain = await client.post("/v1/completions", content=body, headers={"content-encoding": "Identity"})
        assert plain.status_code == 200
