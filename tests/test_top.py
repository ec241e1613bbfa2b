"""`graftline top`: what it makes of a router's answers, and the command against a real router over fake workers."""

import asyncio
import json
import sys

import pytest
from rich.console import Console
from router_fakes import decode, prefill
from router_harness import harness, until

from graftline.metrics import (
    ATTEMPTS_FAILED,
    COMPLETION_TOKENS,
    REQUESTS_ENDED,
    SPECULATION_ACCEPTED,
    SPECULATION_ROUNDS,
    TIME_TO_FIRST_TOKEN,
    Metrics,
    ProcessRole,
)
from graftline.proto.v1.common_pb2 import Fingerprint, WorkerIdentity, WorkerRole
from graftline.proto.v1.router_pb2 import GetStatusResponse, WorkerStatus
from graftline.proto.v1.worker_pb2 import WatchResponse, WorkerState
from graftline.top_sample import Counts, Look, Traffic, quantile
from graftline.top_view import MAX_PAIR_ROWS, view

INFINITE = float("inf")


def shown(look: Look, width: int = 140) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(view(look))
    return console.export_text()


def worker(role: "WorkerRole.ValueType", address: str, page_size: str = "16", reason: str = "") -> WorkerStatus:
    return WorkerStatus(
        identity=WorkerIdentity(role=role, address=address),
        available=not reason,
        reason=reason,
        num_stages=2,
        fingerprint=Fingerprint(fields={"page_size": page_size, "dtype": "float32"}),
        load=WatchResponse(
            state=WorkerState.WORKER_STATE_SERVING,
            queued=3,
            queued_tokens=700,
            running=5,
            pages_total=64,
            pages_free=16,
            pages_quarantined=2,
            tokens_per_s=81.25,
            accept_length=2.75 if role == WorkerRole.WORKER_ROLE_DECODE else 0.0,
        ),
        open_requests=8,
    )


P, D = WorkerRole.WORKER_ROLE_PREFILL, WorkerRole.WORKER_ROLE_DECODE


def exposition(requests: int, failed: int = 0) -> str:
    """A router's real metrics after so many requests of 10 tokens in 4 rounds, first tokens after 30 ms."""
    metrics = Metrics(ProcessRole.ROUTER)
    for _ in range(requests):
        metrics.counter(REQUESTS_ENDED).labels("m", "length").inc()
        metrics.counter(COMPLETION_TOKENS).labels("m").inc(10)
        metrics.counter(SPECULATION_ROUNDS).labels("m").inc(4)
        metrics.counter(SPECULATION_ACCEPTED).labels("m").inc(5)
        metrics.histogram(TIME_TO_FIRST_TOKEN).labels("m").observe(0.03)
    for _ in range(failed):
        metrics.counter(REQUESTS_ENDED).labels("m", "PeerUnavailableError").inc()
        metrics.counter(ATTEMPTS_FAILED).labels("decode", "PeerUnavailableError").inc()
    return metrics.exposition().decode()


def test_traffic_is_what_happened_between_two_looks() -> None:
    before, after = Counts.of(exposition(10)), Counts.of(exposition(30, failed=2))
    traffic = Traffic.between(before, after, 4.0)
    assert (traffic.finished, traffic.failed, traffic.attempts_failed) == (20, 2, 2)
    assert (traffic.requests_per_s, traffic.tokens_per_s) == (5.5, 50.0)
    assert traffic.accept_length == pytest.approx(9 / 4)
    # All 20 lie in the bucket from 25 to 50 ms.
    assert traffic.first_token_p50_s == pytest.approx(0.0375)
    assert traffic.inter_token_p50_s is None


def test_the_first_look_and_a_restarted_router_count_from_the_start() -> None:
    after = Counts.of(exposition(3))
    for before in (None, Counts.of(exposition(7))):
        traffic = Traffic.between(before, after, 1.0)
        assert (traffic.finished, traffic.requests_per_s, traffic.seconds) == (3, None, None)


def test_no_observations_no_quantile() -> None:
    assert quantile({}, 0.5) is None
    assert quantile({0.1: 0.0, INFINITE: 0.0}, 0.5) is None
    assert quantile({0.1: 0.0, INFINITE: 4.0}, 0.5) == 0.1
    assert quantile({0.1: 2.0, 0.2: 4.0, INFINITE: 4.0}, 0.75) == pytest.approx(0.15)


def test_tables_show_pools_and_why_pairs_do_not_fit() -> None:
    status = GetStatusResponse(
        workers=[worker(D, "d1:1"), worker(P, "p1:1"), worker(P, "p2:1", "32"), worker(D, "d2:1", reason="restarted")],
        open_requests=8,
    )
    traffic = Traffic.between(None, Counts.of(exposition(4)), None)
    text = shown(Look.of("r:7000", status, traffic))
    assert "router r:7000" in text
    assert "4 finished, 0 failed or left, 0 refused since it started" in text
    assert "accept length 2.25" in text
    assert "prefill: 2 of 2 available" in text
    assert "decode: 1 of 2 available" in text
    row = next(line for line in text.splitlines() if "d1:1" in line and "48/64" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[:6] == ["d1:1", "serving", "2", "8", "3", "5"]
    assert cells[-2:] == ["81.2", "2.75"]
    assert "2 quarantined" in row
    assert "restarted" in text
    assert "pairs: 1 of 4 usable" in text
    assert "differ in page_size" in text
    assert "one is not available" in text


def test_many_pairs_are_cut_and_those_that_do_not_work_stay() -> None:
    prefills = [worker(P, f"p{number}:1") for number in range(6)]
    decodes = [worker(D, f"d{number}:1", "32" if number == 3 else "16") for number in range(4)]
    text = shown(Look.of("r:1", GetStatusResponse(workers=[*prefills, *decodes]), None, "traffic: not asked for"))
    assert "pairs: 18 of 24 usable" in text
    assert text.count("differ in page_size") == 6
    assert f"and {24 - MAX_PAIR_ROWS} more" in text
    assert "traffic: not asked for" in text


async def run_top(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "graftline", "top", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_once_against_a_real_router() -> None:
    worker = decode()
    worker.load = replace_load(worker.load, accept_length=2.5, tokens_per_s=40.0)
    async with harness(prefill(), worker, http_listen="127.0.0.1:0") as h:
        await h.answer(text="once upon a time", max_tokens=9)
        addresses = ("--router", h.router.address, "--http", h.router.http_address or "")
        await until(lambda: any(known.load.accept_length for known in h.router.registry.workers))
        (status, table, error), (_, line, _) = await asyncio.gather(
            run_top("--once", *addresses), run_top("--once", "--json", *addresses)
        )
    assert status == 0, error
    assert "pairs: 1 of 1 usable" in table
    assert "1 finished" in table
    look = json.loads(line)
    (row,) = [row for row in look["workers"] if row["role"] == "decode"]
    assert (row["accept_length"], row["tokens_per_s"], row["num_stages"]) == (2.5, 40.0, 2)
    assert look["traffic"]["finished"] == 1
    # 9 tokens: the first, then 8 in 3 rounds.
    assert look["traffic"]["accept_length"] == pytest.approx(8 / 3)


def replace_load(load: WatchResponse, **changes: float) -> WatchResponse:
    made = WatchResponse()
    made.CopyFrom(load)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


async def test_no_router_is_one_line_and_status_1() -> None:
    status, _, error = await run_top("--once", "--router", "127.0.0.1:1")
    assert status == 1
    assert error.startswith("graftline: ")


async def test_live_goes_on_while_a_router_is_away() -> None:
    async with harness(prefill(), decode()) as h:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "graftline", "top", "--json", "--interval-s", "0.1", "--http", ""),
            *("--router", h.router.address),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        async with asyncio.timeout(60):
            first = json.loads(await process.stdout.readline())
    assert len(first["pairs"]) == 1
    try:
        async with asyncio.timeout(60):
            while not (look := json.loads(await process.stdout.readline()))["problem"].startswith("no answer"):
                pass
        assert look["workers"] == []
    finally:
        process.terminate()
        await process.wait()
