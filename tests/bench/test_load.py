"""Known delays of a real gRPC server must come out as the right figures."""

import asyncio
import hashlib

import pytest
from scripted_router import Script, ScriptedRouter

from graftline.bench.load import Concurrency, Load, PoissonRate, send_all
from graftline.bench.metrics import summarise_runs
from graftline.bench.prompt_set import ChatMessage, Prompt
from graftline.bench.records import RequestRecord, Run
from graftline.bench.stats import median
from graftline.bench.target import BenchRequest, RouterTarget
from graftline.errors import OutOfCapacityError
from graftline.proto.v1.router_pb2 import GenerateRequest

# A shared test machine may be late by this much at any one moment, never early.
LATE_S = 0.05
EARLY_S = 0.002


def requests(count: int, **changes: object) -> list[BenchRequest]:
    prompt = Prompt(id="p", kind="chat", messages=(ChatMessage("user", "hello"),))
    fields: dict[str, object] = {"max_tokens": 9, **changes}
    return [BenchRequest(prompt, seed=index, **fields) for index in range(count)]  # type: ignore[arg-type]


async def send(
    router: ScriptedRouter, sent: list[BenchRequest], load: Load, timeout_s: float = 10
) -> list[RequestRecord]:
    async with router.running(), RouterTarget(router.address) as target:
        # The first call on a channel pays for the connection.
        await send_all(target, sent[:1], Concurrency(1), timeout_s=10)
        router.requests.clear()
        router.most_open = 0
        return await send_all(target, sent, load, timeout_s=timeout_s)


async def test_scripted_delays_come_out_as_ttft_tpot_and_gaps() -> None:
    script = Script(first_s=0.1, round_s=0.04, round_tokens=2, num_tokens=9)
    records = await send(ScriptedRouter(lambda _: script), requests(5), Concurrency(1))
    summary = summarise_runs([Run(variant="v", round=0, load="l", wall_s=1.0, records=tuple(records))])
    latencies = summary.latencies
    assert -EARLY_S <= latencies["ttft_s"].p50 - 0.1 <= LATE_S
    assert latencies["tpot_s"].p50 == pytest.approx(0.02, abs=LATE_S / 8)
    assert latencies["itl_s"].count == 5 * 8
    assert latencies["pause_s"].count == 5 * 4
    assert latencies["pause_s"].p50 == pytest.approx(0.04, abs=LATE_S)
    assert -EARLY_S <= latencies["e2e_s"].p50 - 0.26 <= LATE_S
    assert summary.figures["accept_length"] == pytest.approx(2.0)
    assert summary.figures["first_round_accept_length"] == pytest.approx(3.0)
    assert summary.figures["kv_gb_per_s"] == pytest.approx(1.0)
    assert summary.tree_origins == {"real": 5}
    assert records[0].num_prompt_tokens == 11
    assert records[0].num_cached_tokens == 3
    assert records[0].finish_reason == "length"
    assert [arrival.num_tokens for arrival in records[0].arrivals] == [1, 2, 2, 2, 2]


async def test_what_was_asked_reaches_the_router() -> None:
    router = ScriptedRouter()
    await send(router, requests(2, max_tokens=5, temperature=0.5, ignore_eos=True), Concurrency(1))
    asked = router.requests[1]
    assert asked.chat.messages[0].content == "hello"
    assert (asked.max_tokens, asked.temperature, asked.seed, asked.ignore_eos) == (5, 0.5, 1, True)
    await send(router, [BenchRequest(Prompt(text="plain"), 4)], Concurrency(1))
    assert router.requests[-1].text == "plain"
    await send(router, [BenchRequest(Prompt(token_ids=(1, 2)), 4)], Concurrency(1))
    assert list(router.requests[-1].tokens.token_ids) == [1, 2]


@pytest.mark.parametrize("num_open", [1, 3])
async def test_a_closed_loop_keeps_as_many_requests_open_as_asked(num_open: int) -> None:
    router = ScriptedRouter(lambda _: Script(first_s=0.03, num_tokens=1))
    records = await send(router, requests(7), Concurrency(num_open))
    assert router.most_open == num_open
    assert [record.index for record in records] == list(range(7))
    assert all(record.ok for record in records)


async def test_poisson_requests_do_not_wait_for_each_other_and_late_ones_show_it() -> None:
    load = PoissonRate(per_s=50, seed=1)
    router = ScriptedRouter(lambda _: Script(first_s=0.3, num_tokens=1))
    records = await send(router, requests(8), load)
    assert router.most_open > 4
    assert [record.due_s for record in records] == pytest.approx(load.due_times_s(8), abs=1e-6)
    late_s = [record.arrivals[0].at_s - 0.3 for record in records]
    assert min(late_s) >= -EARLY_S
    assert median(late_s) <= LATE_S


def test_poisson_times_have_their_rate_and_depend_on_the_seed_alone() -> None:
    times = PoissonRate(per_s=4, seed=2).due_times_s(4000)
    assert times[0] == 0
    assert times == sorted(times)
    # The sum of 3999 gaps has a relative standard deviation of 1.6 %.
    assert times[-1] == pytest.approx(3999 / 4, rel=0.07)
    assert times == PoissonRate(per_s=4, seed=2).due_times_s(4000)
    assert times != PoissonRate(per_s=4, seed=3).due_times_s(4000)


async def test_an_open_loop_gives_up_on_requests_beyond_its_bound() -> None:
    router = ScriptedRouter(lambda _: Script(first_s=0.2, num_tokens=1))
    records = await send(router, requests(6), PoissonRate(per_s=1000, seed=0, max_open=2))
    assert [record.ok for record in records] == [True, True, False, False, False, False]
    assert {record.error for record in records[2:]} == {"NOT_SENT"}
    assert len(router.requests) == 2


async def test_failures_are_records_with_their_code_and_the_others_go_on() -> None:
    full = OutOfCapacityError("the queue is full")

    def pick(request: GenerateRequest) -> Script:
        return Script(error=full, error_after=2) if request.seed == 1 else Script()

    records = await send(ScriptedRouter(pick), requests(3), Concurrency(1))
    assert [record.error for record in records] == ["", "RESOURCE_EXHAUSTED", ""]
    assert "the queue is full" in records[1].error_message
    assert records[1].num_output_tokens == 2


async def test_a_request_that_takes_too_long_fails_alone() -> None:
    def pick(request: GenerateRequest) -> Script:
        return Script(first_s=30.0) if request.seed == 0 else Script()

    router = ScriptedRouter(pick)
    async with router.running(), RouterTarget(router.address) as target:
        records = await send_all(target, requests(2), Concurrency(2), timeout_s=0.5)
        assert [record.ok for record in records] == [False, True]
        assert records[0].error == "CANCELLED"
        assert records[0].arrivals == ()


async def test_a_router_that_is_not_there_gives_failures_not_exceptions() -> None:
    async with RouterTarget("127.0.0.1:1") as target:
        records = await send_all(target, requests(2), Concurrency(1), timeout_s=0.2)
    assert [record.ok for record in records] == [False, False]
    assert all(record.error for record in records)


async def test_equal_outputs_have_equal_hashes() -> None:
    def pick(request: GenerateRequest) -> Script:
        return Script(token=request.seed // 2, round_tokens=1 + request.seed % 2)

    records = await send(ScriptedRouter(pick), requests(4), Concurrency(1))
    hashes = [record.output_hash for record in records]
    assert hashes[0] == hashes[1] != hashes[2] == hashes[3]
    assert hashes[0] == hashlib.sha256(bytes(4) * 9).hexdigest()[:16]


async def test_every_record_is_told_as_it_ends() -> None:
    seen: list[int] = []
    ended = asyncio.Event()

    def on_done(record: RequestRecord) -> None:
        seen.append(record.index)
        ended.set()

    def pick(request: GenerateRequest) -> Script:
        return Script(first_s=0.5 if request.seed == 0 else 0.01, num_tokens=1)

    router = ScriptedRouter(pick)
    async with router.running(), RouterTarget(router.address) as target:
        await send_all(target, requests(2), Concurrency(2), timeout_s=10, on_done=on_done)
    assert seen == [1, 0]
    assert ended.is_set()
