"""A request through both real services over gRPC, with scripted engines."""

import asyncio
import time
from dataclasses import replace

import grpc
import pytest
from eventually import eventually
from fake_engines import VOCAB_SIZE, FakeDecodeEngine, FakePrefillEngine, Points, failure, token_at
from service_pair import EOS, QUICK, collect, decode_side, expected_ids, prefill_side, request_message

from graftline.decode_server.peers import MAX_OPENING
from graftline.decode_server.settings import ServiceSettings
from graftline.engine.request import DraftTree
from graftline.engine.service_api import Drained, PrefillFailure, Scheduled
from graftline.errors import (
    IncompatibleError,
    InvalidRequestError,
    OutOfCapacityError,
    PeerUnavailableError,
    PreemptedError,
    TransferFailedError,
)
from graftline.prefill_server.settings import ServiceSettings as PrefillSettings
from graftline.proto.status import Leg, failure_from_rpc
from graftline.proto.v1 import common_pb2
from graftline.proto.v1.decode_pb2_grpc import DecodeServiceStub
from graftline.proto.validation import ModelLimits


async def failed(call: object) -> tuple[Exception, Leg | None]:
    with pytest.raises(grpc.RpcError) as raised:
        await collect(call)
    said = failure_from_rpc(raised.value)
    return said.error, said.leg


async def test_a_request_is_prefilled_handed_over_and_decoded() -> None:
    async with prefill_side() as prefill, decode_side() as decode:
        ids, finished = await collect(decode.call(prefill.address))
        assert ids == expected_ids()
        assert finished.reason == common_pb2.FINISH_REASON_LENGTH
        assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (5, 8)
        assert finished.usage.cached_tokens == 1
        assert finished.speculation.rounds == 4
        assert finished.speculation.first_round_accepted == 1
        assert finished.speculation.tree_origin == common_pb2.TREE_ORIGIN_REAL
        assert (finished.handoff.bytes, finished.handoff.chunks) == (1000, 2)
        assert decode.engine.trees == [DraftTree((token_at(5), token_at(5) + 1), (-1, 0))]
        await decode.whole()
        assert prefill.service.num_open == 0


@pytest.mark.parametrize("max_tokens", range(1, 18))
async def test_exactly_max_tokens(max_tokens: int) -> None:
    """CASES A01, A03: the handed-over token counts once."""
    async with prefill_side() as prefill, decode_side() as decode:
        ids, finished = await collect(decode.call(prefill.address, max_tokens=max_tokens))
        assert ids == expected_ids(max_tokens)
        assert finished.usage.completion_tokens == max_tokens
        assert len(decode.engine.trees) == (max_tokens > 1)
        await decode.whole()


async def test_one_token_reserves_nothing() -> None:
    """CASES A01: max_tokens = 1 takes no page and no round of the decode."""
    engine = FakeDecodeEngine(points=Points("line"))
    async with prefill_side() as prefill, decode_side(engine) as decode:
        ids, finished = await collect(decode.call(prefill.address, max_tokens=1))
        assert ids == expected_ids(1)
        assert finished.reason == common_pb2.FINISH_REASON_LENGTH
        assert prefill.engine.destinations == []
        await decode.whole()


@pytest.mark.parametrize("held", ["draining", "line"])
async def test_a_first_token_that_is_the_end_of_sequence(held: str) -> None:
    """CASES A01: the caller has its answer at once; the reservation waits for the prefill's word."""
    prefill_engine = FakePrefillEngine(held)
    prefill_engine.first_token = lambda _: EOS
    decode_engine = FakeDecodeEngine(points=Points(held))
    async with prefill_side(engine=prefill_engine) as prefill, decode_side(decode_engine) as decode:
        ids, finished = await collect(decode.call(prefill.address))
        assert ids == [EOS]
        assert finished.reason == common_pb2.FINISH_REASON_STOP
        assert finished.stop_token_id == EOS
        assert decode.engine.trees == []
        prefill.engine.let_go("draining")
        await decode.whole()


@pytest.mark.parametrize("point", ["queued", "computing", "writing"])
async def test_cancel_while_the_prefill_has_it(point: str) -> None:
    """CASES B01, B03, B09, B10: a cancel reaches the prefill in every phase, and everything comes back."""
    async with prefill_side(point) as prefill, decode_side() as decode:
        call = decode.call(prefill.address)
        await prefill.engine.points.reached(point)
        call.cancel()
        await decode.whole()
        await asyncio.wait_for(prefill.service.wait_idle(), 5)
        assert len(prefill.engine.cancels) == 1
        assert not prefill.engine.jobs


async def test_cancel_while_in_the_decodes_line() -> None:
    engine = FakeDecodeEngine(points=Points("line"))
    async with prefill_side() as prefill, decode_side(engine) as decode:
        call = decode.call(prefill.address)
        await engine.points.reached("line")
        call.cancel()
        await decode.whole()


async def test_cancel_while_decoding() -> None:
    engine = FakeDecodeEngine(points=Points("running"))
    async with prefill_side() as prefill, decode_side(engine) as decode:
        call = decode.call(prefill.address)
        await engine.points.reached("running")
        call.cancel()
        await decode.whole()
        assert prefill.engine.cancels == []


async def test_pages_wait_for_the_drain_of_a_cancelled_request() -> None:
    """CASES B01: while a write is under way a cancelled request's page goes to nobody else."""
    engine = FakeDecodeEngine(num_pages=1)
    async with prefill_side("writing", "draining") as prefill, decode_side(engine) as decode:
        first = decode.call(prefill.address)
        await prefill.engine.points.reached("destination")
        first.cancel()
        await prefill.engine.points.reached("draining")
        second = asyncio.ensure_future(collect(decode.call(prefill.address)))
        await engine.points.reached("reserve", 2)
        assert engine.free == []
        assert len(prefill.engine.destinations) == 1
        prefill.engine.let_go("draining")
        prefill.engine.let_go("writing")
        ids, _ = await second
        assert ids == expected_ids()
        await decode.whole()


async def test_a_deadline_is_a_cancel() -> None:
    async with prefill_side("writing") as prefill, decode_side() as decode:
        call = decode.stub.Generate(request_message(prefill.address), timeout=0.3)
        with pytest.raises(grpc.RpcError) as raised:
            await collect(call)
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await decode.whole()
        assert len(prefill.engine.cancels) == 1


async def test_a_cancel_that_is_never_answered_ends_in_quarantine() -> None:
    """CASES B11: no reservation waits for a signal that never comes."""
    settings = ServiceSettings(drain_timeout_s=0.3)
    async with prefill_side("writing", "draining") as prefill, decode_side(settings=settings) as decode:
        call = decode.call(prefill.address)
        await prefill.engine.points.reached("destination")
        call.cancel()
        await decode.whole(quarantined=1)
        prefill.engine.let_go("draining")
        await asyncio.wait_for(prefill.service.wait_idle(), 5)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (PrefillFailure.INVALID_REQUEST, InvalidRequestError),
        (PrefillFailure.OUT_OF_CAPACITY, OutOfCapacityError),
        (PrefillFailure.TRANSFER_FAILED, TransferFailedError),
        (PrefillFailure.DRAINING, PeerUnavailableError),
    ],
)
@pytest.mark.parametrize("drained", [True, False])
async def test_a_prefills_failure_reaches_the_caller(
    code: PrefillFailure, error: type[Exception], drained: bool
) -> None:
    """CASES A16, B02, B15: at once, typed, blamed on the prefill; what may still be written to stays out of use."""
    engine = FakePrefillEngine()
    engine.fail_at["writing"] = failure(code, drained=drained, reason="token_ids: injected")
    # With the line held open the failure finds no page; without it a destination may be out.
    async with prefill_side(engine=engine) as prefill, decode_side() as decode:
        said, leg = await failed(decode.call(prefill.address))
        assert isinstance(said, error)
        assert "injected" in str(said)
        assert leg is Leg.PREFILL
        await asyncio.wait_for(decode.service.wait_idle(), 5)


async def test_an_undrained_failure_quarantines() -> None:
    engine = FakePrefillEngine("writing")
    async with prefill_side(engine=engine) as prefill, decode_side() as decode:
        call = decode.call(prefill.address)
        await engine.points.reached("writing")
        await engine.points.reached("destination")
        engine.fail_at["writing"] = failure(PrefillFailure.TRANSFER_FAILED, drained=False)
        engine.let_go("writing")
        said, _ = await failed(call)
        assert isinstance(said, TransferFailedError)
        assert not said.drained
        await decode.whole(quarantined=1)


async def test_a_refusal_of_the_decode_engine_lets_the_prefill_go() -> None:
    """CASES B13: valid for the prefill, refused by the decode."""
    engine = FakeDecodeEngine(refusal=InvalidRequestError("max_tokens", "never fits"))
    async with prefill_side("writing") as prefill, decode_side(engine) as decode:
        said, leg = await failed(decode.call(prefill.address))
        assert isinstance(said, InvalidRequestError)
        assert (said.field, leg) == ("max_tokens", Leg.DECODE)
        await decode.whole()
        await asyncio.wait_for(prefill.service.wait_idle(), 5)
        assert len(prefill.engine.cancels) == 1


async def test_a_killed_prefill_fails_the_request_and_keeps_the_pages_back() -> None:
    """CASES B11, F04: the stream breaks mid-transfer; a new incarnation at the address frees the pages."""
    async with decode_side() as decode:
        async with prefill_side("writing", incarnation="old") as prefill:
            call = decode.call(prefill.address)
            await prefill.engine.points.reached("writing")
            await prefill.engine.points.reached("destination")
            address = prefill.address
            await prefill.kill()
            said, leg = await failed(call)
            assert isinstance(said, PeerUnavailableError)
            assert leg is Leg.PREFILL
            await decode.whole(quarantined=1)
        async with prefill_side(listen=address, incarnation="new") as prefill:
            ids, _ = await collect(decode.call(address))
            assert ids == expected_ids()
            assert decode.engine.forgotten == ["old"]
            await decode.whole()


async def test_a_restarted_prefill_needs_no_restart_of_the_decode() -> None:
    """CASES F01: at the same address, unnoticed until the next request; no request fails."""
    async with decode_side() as decode:
        async with prefill_side() as prefill:
            address = prefill.address
            await collect(decode.call(address))
        async with prefill_side(listen=address):
            for _ in range(10):
                ids, _ = await collect(decode.call(address))
                assert ids == expected_ids()
        await decode.whole()


async def test_a_prefill_that_forgot_the_decode_is_paired_again() -> None:
    """CASES F01: NOT_PAIRED is repaired in place."""
    async with prefill_side() as prefill, decode_side() as decode:
        await collect(decode.call(prefill.address))
        prefill.directory.paired.clear()
        ids, _ = await collect(decode.call(prefill.address))
        assert ids == expected_ids()
        await decode.whole()


async def test_no_prefill_at_the_address() -> None:
    """CASES F10: the request fails, the decode lives."""
    async with decode_side() as decode:
        said, leg = await failed(decode.call("127.0.0.1:1"))
        assert isinstance(said, PeerUnavailableError)
        assert leg is Leg.PREFILL
        async with prefill_side() as prefill:
            await collect(decode.call(prefill.address))


async def test_more_prefills_than_are_remembered_take_turns() -> None:
    """CASES F54: one that is in use is not forgotten for another, who is refused at once; idle ones are."""
    settings = replace(QUICK, max_peers=1)
    async with prefill_side() as first, prefill_side() as second, decode_side(settings=settings) as decode:
        both = (first.address, second.address)
        calls = [collect(decode.call(both[index % 2], max_tokens=5)) for index in range(12)]
        refused = 0
        for done in await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20):
            if isinstance(done, grpc.RpcError):
                assert isinstance(failure_from_rpc(done).error, OutOfCapacityError)
                refused += 1
            else:
                assert done[0] == expected_ids(5)
        assert refused < len(calls)
        for index in range(4):
            assert (await collect(decode.call(both[index % 2], max_tokens=5)))[0] == expected_ids(5)
        await decode.whole()


async def test_an_incompatible_prefill_is_named() -> None:
    other = common_pb2.Fingerprint(fields={"model_hash": "abc", "page_size": "32"})
    async with prefill_side(fingerprint=other) as prefill, decode_side() as decode:
        said, leg = await failed(decode.call(prefill.address))
        assert isinstance(said, IncompatibleError)
        assert said.fields == ("page_size",)
        assert leg is Leg.PREFILL
        await decode.whole()


async def test_a_silent_prefill_is_noticed() -> None:
    """CASES B17: a prefill that only queues is alive; one that says nothing is not."""
    settings = ServiceSettings(peer_silence_s=0.4)
    mute = PrefillSettings(first_alive_s=60.0, alive_interval_s=60.0)
    async with prefill_side("queued", settings=mute) as prefill, decode_side(settings=settings) as decode:
        call = decode.call(prefill.address)
        said, leg = await failed(call)
        assert isinstance(said, PeerUnavailableError)
        assert "nothing heard" in str(said)
        assert leg is Leg.PREFILL
        await decode.whole()


async def test_a_prefill_that_others_hear_is_not_silent() -> None:
    """It has yet to take a handoff up, as when thousands come at once: only what it has lost is given up, and later."""
    settings = ServiceSettings(peer_silence_s=0.4)
    quiet = PrefillSettings(first_alive_s=60.0, alive_interval_s=60.0)
    async with prefill_side("queued", settings=quiet) as prefill, decode_side(settings=settings) as decode:
        begun_s = time.monotonic()
        waiting = asyncio.ensure_future(failed(decode.call(prefill.address)))
        await prefill.engine.points.reached("queued")
        prefill.engine.points.drop("queued")
        while not waiting.done():
            ids, _ = await collect(decode.call(prefill.address))
            assert ids == expected_ids()
        said, leg = await waiting
        assert "nothing heard for 1.6 s" in str(said)
        assert leg is Leg.PREFILL
        assert time.monotonic() - begun_s > 1.6
        await decode.whole()


async def test_a_flood_waits_in_the_decode_until_the_prefill_takes_it_up() -> None:
    """CASES B17: a prefill that had to take up thousands of handoffs at once had no time for signs of life."""
    quiet = PrefillSettings(first_alive_s=60.0)
    settings = ServiceSettings(peer_silence_s=60.0)
    async with prefill_side("queued", settings=quiet) as prefill, decode_side(settings=settings) as decode:
        calls = [asyncio.ensure_future(collect(decode.call(prefill.address))) for _ in range(3 * MAX_OPENING)]
        await eventually(lambda: decode.service.num_open == len(calls), "all are there")
        await prefill.engine.points.reached("queued", MAX_OPENING)
        await asyncio.sleep(0.3)  # for more of them, which do not come
        assert len(prefill.engine.submitted) == MAX_OPENING
        for call in calls[:MAX_OPENING:2]:
            call.cancel()
        prefill.engine.let_go("queued")
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, asyncio.CancelledError) or outcome[0] == expected_ids()
        await decode.whole()


async def test_an_attempt_that_cannot_begin_keeps_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places are few: a fault here must not make a prefill unreachable in the end."""
    async with prefill_side() as prefill, decode_side() as decode:
        with monkeypatch.context() as patch:
            patch.setattr("graftline.decode_server.service.start_message", lambda *_, **__: 1 / 0)
            for _ in range(MAX_OPENING + 1):
                await failed(decode.call(prefill.address))
        assert await collect(decode.call(prefill.address)) is not None


async def test_a_decode_that_stops_ends_what_waits_for_a_prefill() -> None:
    quiet = PrefillSettings(first_alive_s=60.0)
    async with prefill_side("queued", settings=quiet) as prefill, decode_side() as decode:
        calls = [asyncio.ensure_future(failed(decode.call(prefill.address))) for _ in range(MAX_OPENING + 8)]
        await eventually(lambda: decode.service.num_open == len(calls), "all are there")
        await prefill.engine.points.reached("queued", MAX_OPENING)
        decode.service.stop_admitting()
        decode.service.cancel_all()
        assert {str(error) for error, _ in await asyncio.gather(*calls)} == {"this decode stops"}
        await decode.whole()
        assert len(prefill.engine.submitted) == MAX_OPENING


async def test_a_long_queue_is_no_failure() -> None:
    """CASES B17: deadlines measure liveness; requests behind a full decode all finish."""
    settings = ServiceSettings(peer_silence_s=1.2)
    engine = FakeDecodeEngine(num_pages=2, points=Points("running"))
    async with prefill_side() as prefill, decode_side(engine, settings) as decode:
        calls = [asyncio.ensure_future(collect(decode.call(prefill.address))) for _ in range(32)]
        await engine.points.reached("running", 2)
        await asyncio.sleep(2.0)  # longer than the silence that means death
        engine.let_go("running")
        for call in calls:
            ids, _ = await call
            assert ids == expected_ids()
        await decode.whole()


@pytest.mark.parametrize("preempt_after", [0, 1, 2])
async def test_a_preempted_request_goes_on_where_it_was(preempt_after: int) -> None:
    """CASES R03: prompt and emitted tokens are prefilled again; the caller sees no gap and no repeat."""
    engine = FakeDecodeEngine(preempt_after=preempt_after)
    async with prefill_side() as prefill, decode_side(engine) as decode:
        ids, finished = await collect(decode.call(prefill.address, max_tokens=9))
        assert ids == expected_ids(9)
        assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (5, 9)
        assert len({request.key for request in prefill.engine.submitted}) == len(prefill.engine.submitted) > 1
        assert all(request.num_prompt_tokens == 5 for request in prefill.engine.submitted)
        assert finished.handoff.bytes == 1000 * len(decode.engine.trees)
        await decode.whole()


async def test_what_a_request_computed_itself_is_not_called_cached() -> None:
    """CASES A51: later attempts find in the cache what the first one put there. The caller hears with the first
    tokens, since it may end the call before its usage comes.
    """
    engine = FakeDecodeEngine(preempt_after=1)
    async with prefill_side() as prefill, decode_side(engine) as decode:
        cached = prefill.engine.cached_tokens
        prefill.engine.cached_tokens = lambda request: 5 if request.num_earlier_tokens else cached(request)
        told = []
        async for response in decode.call(prefill.address, max_tokens=9):
            told.append(response.tokens.cached_tokens)
        assert response.finished.usage.cached_tokens == 1
        assert told == [1, *[0] * (len(told) - 1)]
        assert len(prefill.engine.submitted) > 1
        await decode.whole()


async def test_preemptions_are_counted() -> None:
    engine = FakeDecodeEngine(preempt_after=0)
    settings = ServiceSettings(max_preemptions=2)
    async with prefill_side() as prefill, decode_side(engine, settings) as decode:
        said, _ = await failed(decode.call(prefill.address, max_tokens=20))
        assert isinstance(said, PreemptedError)
        assert len(prefill.engine.submitted) == 3
        await decode.whole()


async def test_an_attempt_is_open_once_whatever_prefill_it_names() -> None:
    """CASES B51: another call under a name in use is refused at once, and what becomes of it is not done to the first
    one's pages. The name is free again when all of the first is over.
    """
    async with prefill_side("writing") as first, prefill_side() as second, decode_side() as decode:
        held = asyncio.ensure_future(collect(decode.call(first.address, request_id="one")))
        await first.engine.points.reached("destination")
        for address in (second.address, first.address):
            error, _ = await failed(decode.call(address, request_id="one"))
            assert isinstance(error, InvalidRequestError)
            assert "request_id: attempt 1 of 'one' is open already" in str(error)
        assert second.engine.submitted == []
        first.engine.let_go("writing")
        ids, _ = await held
        assert ids == expected_ids()
        await decode.whole()
        assert (await collect(decode.call(second.address, request_id="one")))[0] == expected_ids()


async def test_late_and_duplicate_events_change_nothing() -> None:
    """CASES B19: whatever a confused prefill says twice or too late."""
    async with prefill_side("writing") as prefill, decode_side() as decode:
        call = asyncio.ensure_future(collect(decode.call(prefill.address)))
        await prefill.engine.points.reached("writing")
        key = next(iter(prefill.engine.jobs))
        for _ in range(3):
            prefill.engine.inject(key, Scheduled(0))
        prefill.engine.let_go("writing")
        ids, _ = await call
        assert ids == expected_ids()
        await decode.whole()


async def test_a_prefill_that_gives_up_unasked() -> None:
    async with prefill_side("writing") as prefill, decode_side() as decode:
        call = decode.call(prefill.address)
        await prefill.engine.points.reached("writing")
        prefill.engine.inject(next(iter(prefill.engine.jobs)), Drained())
        said, leg = await failed(call)
        assert isinstance(said, PeerUnavailableError)
        assert leg is Leg.PREFILL
        await decode.whole()


async def test_a_slow_caller_is_cut_and_others_are_not() -> None:
    """CASES G10: its tokens wait up to a bound; nobody else is slowed."""
    num_tokens = 400_000
    limits = ModelLimits(vocab_size=VOCAB_SIZE, context_length=2 * num_tokens)
    settings = ServiceSettings(max_unsent_tokens=10_000)
    engine = FakeDecodeEngine(tokens_per_round=1000)
    async with prefill_side(limits=limits) as prefill, decode_side(engine, settings, limits) as decode:
        narrow = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16_384))
        stub = DecodeServiceStub(grpc.aio.insecure_channel(decode.server.address, options=narrow))
        slow = stub.Generate(request_message(prefill.address, num_tokens))
        await slow.initial_metadata()
        ids, _ = await collect(decode.call(prefill.address))
        assert ids == expected_ids()
        await decode.whole()
        said, _ = await failed(slow)
        assert isinstance(said, OutOfCapacityError)
        assert "unread" in str(said)


async def test_a_dead_decode_loop_ends_its_requests() -> None:
    engine = FakeDecodeEngine(points=Points("running"))
    async with prefill_side() as prefill, decode_side(engine) as decode:
        call = decode.call(prefill.address)
        await engine.points.reached("running")
        engine.fail("injected")
        said, leg = await failed(call)
        assert "injected" in str(said)
        assert leg is Leg.DECODE


async def test_a_draining_decode_refuses_and_finishes() -> None:
    engine = FakeDecodeEngine(points=Points("running"))
    async with prefill_side() as prefill, decode_side(engine) as decode:
        running = asyncio.ensure_future(collect(decode.call(prefill.address)))
        await engine.points.reached("running")
        decode.service.stop_admitting()
        said, leg = await failed(decode.call(prefill.address))
        assert isinstance(said, PeerUnavailableError)
        assert leg is Leg.DECODE
        engine.let_go("running")
        ids, _ = await running
        assert ids == expected_ids()


async def test_shutdown_cancels_what_is_open() -> None:
    async with prefill_side("writing") as prefill, decode_side() as decode:
        call = decode.call(prefill.address)
        await prefill.engine.points.reached("writing")
        decode.service.cancel_all()
        said, leg = await failed(call)
        assert isinstance(said, PeerUnavailableError)
        assert leg is None
        await decode.whole()


@pytest.mark.parametrize(
    ("field", "value"),
    [("prefill_address", "nowhere"), ("num_prompt_tokens", 0), ("request_id", ""), ("attempt", 0)],
)
async def test_bad_requests_are_refused(field: str, value: object) -> None:
    """Named by field, before any prefill hears of it."""
    async with prefill_side() as prefill, decode_side() as decode:
        request = request_message(prefill.address)
        setattr(request, field, value)
        said, _ = await failed(decode.stub.Generate(request))
        assert isinstance(said, InvalidRequestError)
        assert said.field == field
        assert not prefill.directory.paired


async def test_two_hundred_cancels_at_random_phases() -> None:
    """CASES B03: a storm of disconnects leaves nothing behind."""
    engine = FakeDecodeEngine(num_pages=3, tokens_per_round=1)
    async with prefill_side() as prefill, decode_side(engine, QUICK) as decode:
        calls = []
        for index in range(200):
            calls.append(decode.call(prefill.address, max_tokens=20))
            for _ in range(index % 7):
                await asyncio.sleep(0)
            calls[index // 2].cancel()
        await asyncio.gather(*(collect(call) for call in calls), return_exceptions=True)
        await decode.whole()
        await asyncio.wait_for(prefill.service.wait_idle(), 10)
        assert not prefill.engine.jobs
        ids, _ = await collect(decode.call(prefill.address))
        assert ids == expected_ids()
