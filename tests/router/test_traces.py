"""A router's spans: the request, its tokenizing, an attempt for every try, and the caller's context on both faces."""

from collections import deque

import httpx
import pytest
from opentelemetry.trace import StatusCode
from router_fakes import Fault, decode, prefill
from router_harness import harness, request, until
from trace_collector import MemoryTraces, is_child

from graftline.errors import GraftlineError, PeerUnavailableError
from graftline.proto.status import Leg, error_from_rpc

PROMPT = "once upon a time"
CALLER = f"00-{'ab' * 16}-{'cd' * 8}-01"
CALLER_SPAN = int("cd" * 8, 16)


async def test_a_request_is_one_trace_that_goes_on_from_its_callers() -> None:
    traces = MemoryTraces()
    async with harness(prefill(), decode(), tracer=traces.tracer) as h:
        call = h.stub.Generate(request(text=PROMPT, max_tokens=9), metadata=[("traceparent", CALLER)])
        messages = [message async for message in call]
    whole, attempt = traces.one("graftline.request"), traces.one("graftline.attempt")
    assert whole.parent is not None
    assert whole.parent.span_id == CALLER_SPAN
    assert is_child(traces.one("graftline.tokenize"), whole)
    assert is_child(attempt, whole)
    assert dict(whole.attributes or {}) == {
        "gen_ai.request.model": "tiny",
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.usage.input_tokens": len(PROMPT),
        "graftline.request_id": messages[0].request_id,
    }
    told = attempt.attributes or {}
    # 9 tokens: the first, then rounds of 3, 3 and 2.
    assert (told["gen_ai.usage.output_tokens"], told["graftline.rounds"]) == (9, 3)
    assert told["graftline.accept_length"] == pytest.approx(8 / 3)
    assert [event.name for event in attempt.events] == ["first token"]


async def test_http_headers_carry_the_context_too() -> None:
    traces = MemoryTraces()
    async with (
        harness(prefill(), decode(), tracer=traces.tracer, http_listen="127.0.0.1:0") as h,
        httpx.AsyncClient(base_url=f"http://{h.router.http_address}", trust_env=False) as client,
    ):
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3, "n": 2}
        answered = await client.post("/v1/completions", json=body, headers={"Traceparent": CALLER})
        assert answered.status_code == 200
    whole = traces.one("graftline.request")
    assert whole.parent is not None
    assert whole.parent.span_id == CALLER_SPAN
    attempts = traces.named("graftline.attempt")
    assert {(span.attributes or {})["graftline.choice"] for span in attempts} == {0, 1}
    assert all(is_child(span, whole) for span in attempts)


async def test_a_failed_try_and_the_one_after_it_are_spans_of_their_own() -> None:
    traces = MemoryTraces()
    broken = decode(faults=deque([Fault(4, PeerUnavailableError("broke"), Leg.DECODE)]))
    async with harness(prefill(), broken, tracer=traces.tracer) as h:
        await h.answer(text=PROMPT, max_tokens=9)
    first, second = sorted(traces.named("graftline.attempt"), key=lambda span: span.start_time or 0)
    assert first.status.status_code is StatusCode.ERROR
    assert (first.attributes or {})["error.type"] == "PeerUnavailableError"
    assert second.status.status_code is StatusCode.UNSET
    assert traces.one("graftline.request").status.status_code is StatusCode.UNSET


async def test_refused_and_left_requests_end_their_spans() -> None:
    traces = MemoryTraces()
    async with harness(prefill(), decode(token_delay_s=0.05), tracer=traces.tracer) as h:
        with pytest.raises(Exception, match="max_tokens") as refusal:
            await h.answer(text=PROMPT, max_tokens=0)
        assert isinstance(error_from_rpc(refusal.value), GraftlineError)  # type: ignore[arg-type]
        (refused,) = traces.named("graftline.request")
        assert refused.status.status_code is StatusCode.ERROR
        call = h.generate(text=PROMPT, max_tokens=500)
        await call.read()
        call.cancel()
        await until(lambda: len(traces.named("graftline.request")) == 2)
        left = traces.named("graftline.request")[1]
        assert (left.attributes or {})["graftline.cancelled"] is True
        assert left.status.status_code is StatusCode.UNSET
        assert (traces.one("graftline.attempt").attributes or {})["graftline.cancelled"] is True
