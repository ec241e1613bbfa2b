"""Requests through a real router over fake workers: streams, failures, resume, cancel."""

import asyncio
import time
from collections import deque
from dataclasses import replace

import grpc
import pytest
from router_fakes import EOS, Fault, byte_fallback_tokenizer, decode, model_card, prefill, reference_ids
from router_harness import QUICK_HEALTH, QUICK_REQUESTS, harness, until

from graftline.errors import (
    CancelledRequestError,
    InternalError,
    InvalidRequestError,
    OutOfCapacityError,
    PeerUnavailableError,
    PreemptedError,
    TransferFailedError,
)
from graftline.proto.status import Leg, error_from_rpc
from graftline.proto.v1.common_pb2 import FinishReason, SpeculationStats, TreeOrigin
from graftline.router.config import PolicyName
from graftline.router.parameters import choice_seed

PROMPT = "once upon a time"
IDS = list(PROMPT.encode())


async def test_a_text_prompt_streams_text_ids_and_usage() -> None:
    async with harness(prefill(), decode()) as h:
        answer = await h.answer(text=PROMPT, seed=5, max_tokens=11)
        expected = reference_ids(IDS, 11, 5)
        assert answer.token_ids == expected
        assert answer.text == bytes(expected).decode()
        finish = answer.finish
        assert finish is not None
        assert finish.reason == FinishReason.FINISH_REASON_LENGTH
        assert (finish.usage.prompt_tokens, finish.usage.completion_tokens, finish.attempts) == (len(IDS), 11, 1)
        assert finish.speculation.rounds == 4
        assert finish.speculation.tree_origin == TreeOrigin.TREE_ORIGIN_REAL
        h.assert_quiescent()


async def test_exactly_max_tokens_are_generated() -> None:
    """CASES A01, A03: the first token is counted once."""
    async with harness(prefill(), decode()) as h:
        for max_tokens in range(1, 18):
            answer = await h.answer(text=PROMPT, seed=1, max_tokens=max_tokens, ignore_eos=True)
            assert len(answer.token_ids) == answer.finish.usage.completion_tokens == max_tokens
            assert answer.finish.reason == FinishReason.FINISH_REASON_LENGTH


async def test_min_tokens_travels_to_the_decode_unchanged() -> None:
    """CASES A07: the router never rewrites stopping parameters for one leg alone."""
    worker = decode()
    async with harness(prefill(), worker) as h:
        await h.answer(text=PROMPT, min_tokens=5, max_tokens=10)
        assert (worker.requests[0].stopping.min_tokens, worker.requests[0].stopping.max_tokens) == (5, 10)


async def test_max_tokens_defaults_to_what_the_context_leaves_and_is_clamped_to_it() -> None:
    """CASES S28: generation ends with LENGTH exactly at the context's end."""
    worker = decode(round_tokens=500)
    async with harness(prefill(), worker) as h:
        for wanted in (None, 100_000):
            answer = await h.answer(text=PROMPT, seed=1, **({} if wanted is None else {"max_tokens": wanted}))
            assert answer.finish.usage.completion_tokens == 4096 - len(IDS)
            assert answer.finish.reason == FinishReason.FINISH_REASON_LENGTH


async def test_eos_ends_the_choice_and_is_no_text() -> None:
    worker = decode(forced_ids=[*b"ab", EOS, *b"cd"])
    async with harness(prefill(), worker) as h:
        answer = await h.answer(text=PROMPT)
        assert (answer.text, answer.token_ids) == ("ab", [*b"ab", EOS])
        assert (answer.finish.reason, answer.finish.stop_token_id) == (FinishReason.FINISH_REASON_STOP, EOS)
        kept = await h.answer(text=PROMPT, keep_special_tokens=True)
        assert kept.text == "ab<|im_end|>"


async def test_tokens_after_an_ending_token_in_one_round_are_dropped() -> None:
    """CASES S03: whatever a worker sends after the first end is not emitted."""
    worker = decode(forced_ids=[*b"abcX", *b"defg"], round_tokens=8)
    async with harness(prefill(), worker) as h:
        answer = await h.answer(text=PROMPT, stop_token_ids=[ord("X")], max_tokens=9)
        assert (answer.text, answer.token_ids) == ("abc", list(b"abcX"))
        assert answer.finish.stop_token_id == ord("X")


async def test_a_stop_string_ends_at_its_first_match_wherever_a_round_splits_it() -> None:
    """CASES S01: stop string at each offset of an accepted run."""
    worker = decode()
    async with harness(prefill(), worker) as h:
        for worker.round_tokens in (1, 2, 3, 7):
            for offset in range(8):
                worker.forced_ids = list(b"." * offset + b"STOP" + b"tail STOP")
                answer = await h.answer(text=PROMPT, stop=["STOP", "never"])
                assert answer.text == "." * offset
                assert answer.finish.stop_string == "STOP"
                assert answer.finish.usage.completion_tokens == len(answer.token_ids) == offset + 4
        await until(lambda: worker.num_running == 0)
        h.assert_quiescent()


async def test_cached_tokens_are_told_however_a_choice_ends() -> None:
    """CASES A51: also behind a stop string, and not those that an earlier attempt of the same choice computed."""
    worker = decode(forced_ids=list(b"abSTOP tail"), round_tokens=1)
    async with harness(prefill(), worker) as h:
        assert (await h.answer(text=PROMPT, stop=["STOP"])).finish.usage.cached_tokens == 2
        worker.faults.append(Fault(3, PreemptedError("pages"), Leg.DECODE))
        resumed = (await h.answer(text=PROMPT, max_tokens=8)).finish
        assert (resumed.attempts, resumed.usage.cached_tokens) == (2, 2)


async def test_held_back_text_comes_out_when_no_stop_string_follows() -> None:
    worker = decode(forced_ids=[*b"abST", EOS])
    async with harness(prefill(), worker) as h:
        assert (await h.answer(text=PROMPT, stop=["STOP"])).text == "abST"


async def test_characters_split_over_tokens_arrive_whole() -> None:
    """CASES I13: also when the stream ends inside a character."""
    text = "a😀한é"
    for cut, expected in ((0, text), (-1, "a😀한\ufffd")):
        data = text.encode()[: cut or None]
        worker = decode(forced_ids=[*data, EOS], round_tokens=2)
        async with harness(prefill(), worker) as h:
            assert (await h.answer(text=PROMPT)).text == expected


async def test_a_continued_text_keeps_its_first_space_and_a_turn_has_none() -> None:
    """CASES I58: prompt and output together read as was meant; templates put their own space before turns."""
    source = byte_fallback_tokenizer()
    card = model_card(tokenizer_json=source.to_str().encode(), vocab_size=263, eos_token_ids=[0])
    the, b = source.token_to_id("▁the"), source.token_to_id("b")
    async with harness(prefill(card=card), decode(card=card, forced_ids=[the, b, the])) as h:
        for prompt in ({"text": "b"}, {"ids": [b]}):
            answer = await h.answer(**prompt, max_tokens=3)
            assert answer.text == " theb the"
        answer = await h.answer(chat=[("user", "b")], max_tokens=3)
        assert answer.text == "theb the"


# --- failures -------------------------------------------------------------------------------------------------


async def test_a_failed_leg_is_resumed_without_gap_or_repeat() -> None:
    """CASES R03, F06: the stream goes on elsewhere; the failing worker alone is ruled out."""
    decodes = [decode(), decode()]
    health = replace(QUICK_HEALTH, breaker_failures=1000)
    async with harness(prefill(), prefill(), *decodes, health=health) as h:
        for leg in (Leg.PREFILL, Leg.DECODE, None):
            for after in (0, 1, 2, 5, 11):
                for worker in decodes:
                    worker.requests.clear()
                    worker.faults = deque([Fault(after, PeerUnavailableError("gone"), leg)])
                answer = await h.answer(text=PROMPT, seed=9, max_tokens=12)
                assert answer.token_ids == reference_ids(IDS, 12, 9)
                assert answer.text == bytes(answer.token_ids).decode()
                usage = answer.finish.usage
                assert (usage.prompt_tokens, usage.completion_tokens) == (len(IDS), 12)
                requests = sorted((r for d in decodes for r in d.requests), key=lambda r: r.attempt)
                assert [r.attempt for r in requests] == list(range(1, answer.finish.attempts + 1))
                assert len({r.request_id for r in requests}) == 1
                assert [len(r.token_ids) - len(IDS) for r in requests][:2] == [0, after]
                assert all(r.num_prompt_tokens == len(IDS) and r.sampling.seed == 9 for r in requests)
                if leg is Leg.PREFILL:
                    assert requests[0].prefill_address != requests[1].prefill_address
                h.assert_quiescent()


async def test_stop_strings_and_split_characters_carry_over_a_resume() -> None:
    text = "ab😀cST" + "OPxx"
    forced = list(text.encode())
    fault = Fault(forced.index(0x9F), PeerUnavailableError("gone"))
    second = Fault(len("ab😀cST".encode()) - 4, PeerUnavailableError("gone"))
    workers = [decode(forced_ids=forced, round_tokens=2) for _ in range(3)]
    workers[0].faults.append(fault)
    workers[1].faults.append(second)
    workers[2].faults.append(Fault(2, PeerUnavailableError("gone")))
    async with harness(prefill(), *workers, policy=PolicyName.ROUND_ROBIN) as h:
        answer = await h.answer(text=PROMPT, stop=["STOP"])
        assert answer.text == "ab😀c"
        assert answer.finish.stop_string == "STOP"
        assert answer.finish.attempts > 1


async def test_a_decode_killed_mid_stream_is_replaced() -> None:
    one, two = decode(token_delay_s=0.02), decode(token_delay_s=0.02)
    async with harness(prefill(), one, two) as h:
        call = asyncio.create_task(h.answer(text=PROMPT, seed=3, max_tokens=60))
        done, _ = await asyncio.wait(
            [asyncio.create_task(one.first_token_sent.wait()), asyncio.create_task(two.first_token_sent.wait())],
            return_when=asyncio.FIRST_COMPLETED,
        )
        assert done
        victim = one if one.first_token_sent.is_set() else two
        await victim.stop()
        answer = await call
        assert answer.token_ids == reference_ids(IDS, 60, 3)
        assert answer.finish.attempts == 2
        h.assert_quiescent()


async def test_a_lone_pair_that_restarts_goes_on_with_the_stream() -> None:
    """CASES F01: the restarted worker is described anew and serves within a moment."""
    worker = decode(token_delay_s=0.02)
    async with harness(prefill(), worker) as h:
        call = asyncio.create_task(h.answer(text=PROMPT, seed=3, max_tokens=60))
        await worker.first_token_sent.wait()
        await worker.restart("two")
        answer = await call
        assert answer.token_ids == reference_ids(IDS, 60, 3)
        assert worker.num_described >= 2
        assert (await h.answer(text=PROMPT, seed=3, max_tokens=5)).token_ids == reference_ids(IDS, 5, 3)


async def test_a_stream_that_ends_without_finish_counts_as_failed() -> None:
    """CASES G12: the client always sees a finish."""
    worker = decode(faults=deque([Fault(4, vanish=True)]))
    async with harness(prefill(), worker) as h:
        answer = await h.answer(text=PROMPT, seed=3, max_tokens=10)
        assert answer.token_ids == reference_ids(IDS, 10, 3)
        assert answer.finish.attempts == 2


async def test_a_decode_that_dies_after_its_last_token_costs_nothing() -> None:
    worker = decode(faults=deque([Fault(10, PeerUnavailableError("gone"))]))
    async with harness(prefill(), worker) as h:
        answer = await h.answer(text=PROMPT, seed=3, max_tokens=10)
        assert answer.token_ids == reference_ids(IDS, 10, 3)
        assert (answer.finish.attempts, answer.finish.reason) == (1, FinishReason.FINISH_REASON_LENGTH)


async def test_preemptions_are_resumed_on_the_same_pair_and_their_figures_summed() -> None:
    seen = SpeculationStats(rounds=2, drafted=6, accepted=3, first_round_drafted=3, first_round_accepted=1)
    worker = decode(faults=deque([Fault(3, PreemptedError("pages"), Leg.DECODE, speculation=seen)] * 3))
    async with harness(prefill(), worker) as h:
        answer = await h.answer(text=PROMPT, seed=4, max_tokens=20)
        assert answer.token_ids == reference_ids(IDS, 20, 4)
        assert answer.finish.attempts == 4
        last_rounds = -(-(20 - 9 - 1) // 3)
        assert answer.finish.speculation.rounds == 3 * 2 + last_rounds
        assert answer.finish.speculation.drafted == 3 * 6 + 3 * last_rounds


async def test_attempts_are_bounded_and_the_last_error_is_told() -> None:
    """CASES F13: bounded retries."""
    worker = decode(always=Fault(0, TransferFailedError("write 7 not acknowledged"), Leg.PREFILL))
    async with harness(prefill(), worker) as h:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await h.answer(text=PROMPT)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "write 7 not acknowledged" in str(error_from_rpc(caught.value))
        assert len(worker.requests) == QUICK_REQUESTS.max_attempts
        h.assert_quiescent()


async def test_progress_renews_the_attempts_of_a_stream_but_not_for_ever() -> None:
    """A long stream outlives many faults; one that takes down whoever serves it comes to an end."""
    gone = PeerUnavailableError("gone")
    worker = decode(faults=deque([Fault(2, gone)] * 8))
    limits = replace(QUICK_REQUESTS, max_attempts=3)
    health = replace(QUICK_HEALTH, breaker_failures=1000)
    async with harness(prefill(), worker, decode(faults=worker.faults), requests=limits, health=health) as h:
        answer = await h.answer(text=PROMPT, seed=3, max_tokens=40)
        assert answer.token_ids == reference_ids(IDS, 40, 3)
        assert answer.finish.attempts == 9
        worker.faults.extend([Fault(2, gone)] * 50)
        worker.requests.clear()
        with pytest.raises(grpc.aio.AioRpcError, match="12 attempts failed"):
            await h.answer(text=PROMPT, seed=3, max_tokens=400)


async def test_a_stream_that_has_begun_waits_for_room() -> None:
    """No room elsewhere is no reason to lose a stream; a new request is refused at once."""
    full = OutOfCapacityError("no pages")
    worker = decode(faults=deque([Fault(4, PeerUnavailableError("gone")), *[Fault(0, full)] * 4]))
    async with harness(prefill(), worker, requests=replace(QUICK_REQUESTS, max_attempts=2)) as h:
        answer = await h.answer(text=PROMPT, seed=3, max_tokens=12)
        assert answer.token_ids == reference_ids(IDS, 12, 3)
        assert answer.finish.attempts == 6
        worker.always = Fault(0, full)
        began = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await h.answer(text=PROMPT)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert time.monotonic() - began < 1


async def test_a_decode_that_forgets_a_request_loses_it_to_another_attempt() -> None:
    worker = decode(faults=deque([Fault(4, hang=True)]))
    limits = replace(QUICK_REQUESTS, silence_timeout_s=0.2)
    health = replace(QUICK_HEALTH, stall_timeout_s=60)
    async with harness(prefill(), worker, requests=limits, health=health) as h:
        answer = await h.answer(text=PROMPT, seed=3, max_tokens=12)
        assert answer.token_ids == reference_ids(IDS, 12, 3)
        assert answer.finish.attempts == 2


async def test_a_request_that_a_worker_calls_invalid_is_not_retried() -> None:
    """CASES F13, A16: the worker's own words reach the client at once."""
    worker = decode(always=Fault(0, InvalidRequestError("token_ids", "no such thing"), Leg.PREFILL))
    async with harness(prefill(), worker) as h:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await h.answer(text=PROMPT)
        error = error_from_rpc(caught.value)
        assert isinstance(error, InvalidRequestError)
        assert (error.field, error.problem) == ("token_ids", "no such thing")
        assert len(worker.requests) == 1


async def test_an_internal_error_keeps_its_class_and_text() -> None:
    """CASES I12, R09, I17: a request that yields NaN everywhere ends with the worker's message."""
    worker = decode(always=Fault(0, InternalError("logits are NaN")))
    async with harness(prefill(), worker) as h:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await h.answer(text=PROMPT)
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "logits are NaN" in caught.value.details()


async def test_a_full_prefill_moves_the_request_and_two_full_ones_refuse_it_with_a_hint() -> None:
    full = Fault(0, OutOfCapacityError("queue is full", retry_after_s=2.5), Leg.PREFILL)
    worker = decode(faults=deque([full]))
    async with harness(prefill(), prefill(), worker) as h:
        assert (await h.answer(text=PROMPT, max_tokens=3)).finish.attempts == 2
        worker.always = full
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await h.answer(text=PROMPT)
        error = error_from_rpc(caught.value)
        assert isinstance(error, OutOfCapacityError)
        assert error.retry_after_s == 2.5


# --- cancel and deadline --------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["before the first token", "while streaming"])
async def test_a_cancel_reaches_the_decode_within_a_second(phase: str) -> None:
    """CASES G01: in any phase."""
    early = phase == "before the first token"
    worker = decode(first_delay_s=30 if early else 0, token_delay_s=0.01)
    async with harness(prefill(), worker) as h:
        call = h.generate(text=PROMPT, max_tokens=3000)
        if early:
            await until(lambda: worker.requests)
        else:
            await call.read()
        call.cancel()
        started = time.monotonic()
        await asyncio.wait_for(worker.cancelled.wait(), 1)
        assert time.monotonic() - started < 1
        await h.until_quiescent()


async def test_a_deadline_ends_the_request_everywhere() -> None:
    worker = decode(first_delay_s=30)
    async with harness(prefill(), worker) as h:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await h.answer(text=PROMPT, timeout=0.3)
        assert isinstance(error_from_rpc(caught.value), CancelledRequestError)
        await asyncio.wait_for(worker.cancelled.wait(), 1)
        await h.until_quiescent()


async def test_counters_return_to_zero_after_a_mixture_of_endings() -> None:
    """CASES G02, X05: cancels, errors and successes, then an even split over two workers."""
    faults = [Fault(n % 5, InternalError("x")) for n in range(30)]
    workers = [decode(token_delay_s=0.002, faults=deque(faults[i::2])) for i in range(2)]
    health = replace(QUICK_HEALTH, breaker_failures=1000)
    async with harness(prefill(), *workers, policy=PolicyName.ROUND_ROBIN, health=health) as h:

        async def one(number: int) -> None:
            call = h.generate(text=PROMPT, max_tokens=20, seed=number)
            try:
                async for _ in call:
                    if number % 3 == 0:
                        call.cancel()
            except (grpc.aio.AioRpcError, asyncio.CancelledError):
                pass

        await asyncio.gather(*(one(number) for number in range(100)))
        await h.until_quiescent()
        for worker in workers:
            worker.requests.clear()
            worker.faults.clear()
        await asyncio.gather(*(h.answer(text=PROMPT, max_tokens=2) for _ in range(20)))
        assert [len(worker.requests) for worker in workers] == [10, 10]


# --- several choices ------------------------------------------------------------------------------------------


async def test_choices_are_independent_and_reproducible() -> None:
    """CASES A09: n choices, distinct seeds, each with its finish."""
    worker = decode()
    async with harness(prefill(), worker) as h:
        answers = await h.answers(text=PROMPT, seed=7, n=3, max_tokens=9, temperature=0.8)
        assert [a.token_ids for a in answers] == [reference_ids(IDS, 9, choice_seed(7, c)) for c in range(3)]
        assert len({tuple(a.token_ids) for a in answers}) == 3
        assert len({r.request_id for r in worker.requests}) == 3
        h.assert_quiescent()


async def test_unseeded_requests_draw_different_seeds() -> None:
    """CASES S11: serial unseeded requests do not repeat each other."""
    worker = decode()
    async with harness(prefill(), worker) as h:
        for _ in range(5):
            await h.answer(text=PROMPT, max_tokens=1)
        assert len({r.sampling.seed for r in worker.requests}) == 5


async def test_siblings_are_cancelled_when_a_choice_fails() -> None:
    """CASES A09: siblings aborted if one fails."""
    worker = decode(
        token_delay_s=0.01, faults=deque([Fault(0, InvalidRequestError("top_k", "bad")), Fault(1, hang=True)])
    )
    async with harness(prefill(), worker) as h:
        with pytest.raises(grpc.aio.AioRpcError):
            await h.answers(text=PROMPT, n=2, max_tokens=2000)
        await asyncio.wait_for(worker.cancelled.wait(), 1)
        h.assert_quiescent()


async def test_a_hundred_requests_at_once_all_finish() -> None:
    """CASES G12: every stream ends with its finish."""
    async with harness(prefill(), decode(), decode()) as h:
        answers = await asyncio.gather(*(h.answer(text=PROMPT, seed=n, max_tokens=10) for n in range(100)))
        assert all(a.token_ids == reference_ids(IDS, 10, n) for n, a in enumerate(answers))
        h.assert_quiescent()
