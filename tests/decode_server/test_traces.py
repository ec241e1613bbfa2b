"""Spans of a decode and its prefill, over real gRPC with engines that stop where they are told."""

import asyncio

import pytest
from fake_engines import FakeDecodeEngine
from opentelemetry.trace import StatusCode
from service_pair import collect, decode_side, prefill_side
from trace_collector import MemoryTraces, is_child

from graftline.decode_server.traces import MAX_ROUND_SPANS
from graftline.engine.service_api import PrefillFailed, PrefillFailure


async def test_every_part_is_a_child_of_the_one_that_asked_for_it() -> None:
    traces = MemoryTraces()
    async with prefill_side(tracer=traces.tracer) as prefill, decode_side(tracer=traces.tracer) as decode:
        await collect(decode.call(prefill.address, max_tokens=8))
        await decode.whole()
        await prefill.service.wait_idle()
    parents = {
        "graftline.handoff": "graftline.decode",
        "graftline.prefill": "graftline.handoff",
        "graftline.queue": "graftline.prefill",
        "graftline.compute": "graftline.prefill",
        "graftline.transfer": "graftline.prefill",
        "graftline.rounds": "graftline.decode",
    }
    for name, parent in parents.items():
        assert is_child(traces.one(name), traces.one(parent)), name
    rounds = traces.named("graftline.round")
    assert all(is_child(span, traces.one("graftline.rounds")) for span in rounds)
    # 8 tokens: the first, then rounds of 2, the last of which has one left.
    assert [(span.attributes or {})["graftline.tokens"] for span in rounds] == [2, 2, 2, 1]
    assert [span.start_time for span in rounds[1:]] == [span.end_time for span in rounds[:-1]]
    handoff = traces.one("graftline.handoff")
    assert sorted(event.name for event in handoff.events) == ["first token", "reserved", "scheduled"]
    assert (handoff.attributes or {})["graftline.kv.bytes"] == 1000
    assert (traces.one("graftline.prefill").attributes or {})["graftline.outcome"] == "finished"


async def test_rounds_beyond_the_limit_are_counted_only() -> None:
    traces = MemoryTraces()
    engine = FakeDecodeEngine(tokens_per_round=1)
    async with prefill_side() as prefill, decode_side(engine, tracer=traces.tracer) as decode:
        await collect(decode.call(prefill.address, max_tokens=MAX_ROUND_SPANS + 20))
        await decode.whole()
    assert len(traces.named("graftline.round")) == MAX_ROUND_SPANS
    assert (traces.one("graftline.rounds").attributes or {})["graftline.rounds"] == MAX_ROUND_SPANS + 19


async def test_a_first_token_that_ends_the_request_has_no_rounds() -> None:
    traces = MemoryTraces()
    async with prefill_side(tracer=traces.tracer) as prefill, decode_side(tracer=traces.tracer) as decode:
        await collect(decode.call(prefill.address, max_tokens=1))
        await decode.whole()
    assert not traces.named("graftline.rounds")
    assert not traces.named("graftline.transfer")
    assert traces.one("graftline.decode").status.status_code is StatusCode.UNSET


async def test_a_failed_prefill_shows_on_both_sides() -> None:
    traces = MemoryTraces()
    async with prefill_side(tracer=traces.tracer) as prefill, decode_side(tracer=traces.tracer) as decode:
        prefill.engine.fail_at["computing"] = PrefillFailed(PrefillFailure.INTERNAL, "it broke", drained=True)
        with pytest.raises(Exception, match="it broke"):
            await collect(decode.call(prefill.address))
        await decode.whole()
        await asyncio.wait_for(prefill.service.wait_idle(), 10)
    for name in ("graftline.decode", "graftline.handoff", "graftline.prefill"):
        span = traces.one(name)
        assert span.status.status_code is StatusCode.ERROR, name
        assert "it broke" in (span.status.description or "")


async def test_a_caller_that_leaves_ends_every_span() -> None:
    traces = MemoryTraces()
    async with prefill_side("computing", tracer=traces.tracer) as prefill, decode_side(tracer=traces.tracer) as decode:
        call = decode.call(prefill.address)
        reading = asyncio.ensure_future(call.read())
        await prefill.engine.points.reached("computing")
        call.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await decode.whole()
        await asyncio.wait_for(prefill.service.wait_idle(), 10)
    assert (traces.one("graftline.decode").attributes or {})["graftline.cancelled"] is True
    assert traces.one("graftline.compute").end_time
    assert (traces.one("graftline.prefill").attributes or {})["graftline.outcome"] == "cancelled"
