"""Workers come and go: discovery, restarts, hangs, breakers, compatibility."""

import asyncio
import json
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from router_fakes import Fault, decode, model_card, next_token, prefill, reference_ids, started
from router_harness import QUICK_HEALTH, QUICK_REQUESTS, config_for, harness, request, until

from graftline.errors import InternalError, InvalidRequestError, PeerUnavailableError
from graftline.metrics import WORKER_LOST
from graftline.proto.channel import open_channel
from graftline.proto.status import Leg, error_from_rpc
from graftline.proto.v1.router_pb2 import GetStatusRequest, ListModelsRequest
from graftline.proto.v1.router_pb2_grpc import RouterServiceStub
from graftline.proto.v1.worker_pb2 import DrainRequest, Limits, WatchResponse, WorkerState
from graftline.proto.v1.worker_pb2_grpc import WorkerServiceStub
from graftline.router.config import PolicyName, RouterConfig, WorkerLists
from graftline.router.server import running_router
from graftline.router.sources import FileSource, ListSource, read_worker_lists

PROMPT = "once upon a time"
IDS = list(PROMPT.encode())


async def test_status_and_models_tell_what_workers_said() -> None:
    async with harness(prefill(), decode(round_tokens=2)) as h:
        status = await h.stub.GetStatus(GetStatusRequest())
        assert sorted((w.identity.role, w.available, w.num_stages) for w in status.workers) == [
            (1, True, 2),
            (2, True, 2),
        ]
        assert status.workers[0].fingerprint.fields["model_hash"] == "m"
        models = await h.stub.ListModels(ListModelsRequest())
        assert [(m.model_id, m.context_length, m.vocab_size) for m in models.models] == [("tiny", 4096, 260)]


async def test_without_workers_a_request_fails_at_once_and_any_start_order_works() -> None:
    """CASES F10, F11: decode and router first, prefill later."""
    late, worker = prefill(), decode()
    async with started(late):
        pass
    late_address = late.address
    async with started(worker):
        config = config_for(worker)
        config = replace(config, workers=WorkerLists((late_address,), config.workers.decode))
        async with running_router(config) as router, open_channel(router.address) as channel:
            stub = RouterServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                _ = [m async for m in stub.Generate(request(text=PROMPT), timeout=5)]
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            await late.start(late_address)
            await router.wait_until_usable(5)
            assert [m async for m in stub.Generate(request(text=PROMPT, max_tokens=2), timeout=5)]
        await late.stop()


async def test_a_restarted_worker_is_forgotten_described_anew_and_serves_soon() -> None:
    """CASES F01: restart at the same address; nothing of the old incarnation counts."""
    worker = decode()
    async with harness(prefill(), worker) as h:
        await h.answer(text=PROMPT, max_tokens=2)
        began = time.monotonic()
        await worker.restart("two")
        known = next(w for w in h.router.registry.workers if w.address == worker.address)
        await until(lambda: known.incarnation == "two" and known.is_available, 5)
        assert time.monotonic() - began < 5
        for n in range(10):
            assert (await h.answer(text=PROMPT, max_tokens=3, seed=n)).token_ids == reference_ids(IDS, 3, n)
        assert worker.known_hashes[-1] == worker.card.card_hash, "the card is not sent twice"


async def test_a_restart_may_bring_another_model() -> None:
    """What is remembered for every request is forgotten with the worker that said it."""
    worker = decode()
    async with harness(prefill(), worker) as h:
        await h.answer(text=PROMPT, max_tokens=4)
        assert h.router.registry.models() is h.router.registry.models(), "asked for by every request"
        worker.card = model_card(model_id="other", context_length=100)
        await worker.restart("two")
        await until(lambda: [model.model_id for model in h.router.generator.models()] == ["other"], 5)
        await until(h.router.registry.has_pair, 5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await h.answer(text=PROMPT, model="tiny")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError, match="100 tokens"):
            await h.answer(text="x" * 200)
        assert (await h.answer(text=PROMPT, max_tokens=4, model="other")).token_ids


def other_token(token_ids: Sequence[int], seed: int) -> int:
    """What other weights make of the same."""
    return next_token(token_ids, seed + 1)


async def test_models_that_differ_in_name_and_weights_alone_are_told_apart() -> None:
    """CASES F56: of one tokenizer, template and context, as models are that were trained from one another."""
    one, two = {"model_hash": "one"}, {"model_hash": "two"}
    cards = [model_card(model_id=name) for name in ("one", "two")]
    assert cards[0].card_hash == cards[1].card_hash, "a name does not change the hash"
    workers = [
        prefill(card=cards[0], fingerprint=one),
        decode(card=cards[0], fingerprint=one),
        prefill(card=cards[1], fingerprint=two, limits=Limits(max_request_tokens=30)),
        decode(card=cards[1], fingerprint=two, model=other_token),
    ]
    async with harness(*workers) as h:
        await until(lambda: all(worker.is_available for worker in h.router.registry.workers))
        listed = await h.stub.ListModels(ListModelsRequest())
        assert sorted(model.model_id for model in listed.models) == ["one", "two"]
        for seed in range(4):
            for name, shift in (("one", 0), ("two", 1)):
                answer = await h.answer(text=PROMPT, model=name, max_tokens=5, seed=seed)
                assert answer.token_ids == reference_ids(IDS, 5, seed + shift)
        with pytest.raises(grpc.aio.AioRpcError, match="several models are served"):
            await h.answer(text=PROMPT)
        assert (await h.answer(text="x" * 40, model="one", max_tokens=5)).token_ids
        with pytest.raises(grpc.aio.AioRpcError, match="leave no room") as caught:
            await h.answer(text="x" * 40, model="two", max_tokens=5)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, "the limit of its own prefill"


@pytest.mark.parametrize("end", ["fails", "restarts"])
async def test_a_stream_goes_on_with_the_weights_it_began_with(end: str) -> None:
    """CASES F57: beside its worker, or in its worker's place, there is a newer model of the same name."""
    old, new = {"model_hash": "old", "dtype": "float32"}, {"model_hash": "new", "dtype": "float32"}
    first = decode(fingerprint=old, token_delay_s=0.005)
    newer = decode(fingerprint=new, model=other_token, load=WatchResponse(state=WorkerState.WORKER_STATE_DRAINING))
    workers = [prefill(fingerprint=old), first, prefill(fingerprint=new), newer]
    async with harness(*workers, requests=replace(QUICK_REQUESTS, resume_wait_s=0.6)) as h:
        known = {worker.address: worker for worker in h.router.registry.workers}
        if end == "fails":
            first.faults.append(Fault(10, PeerUnavailableError("gone"), Leg.DECODE))
        received: list[int] = []

        async def read() -> None:
            async for message in h.generate(text=PROMPT, max_tokens=100, seed=5):
                received.extend(message.token_ids)

        reading = asyncio.create_task(read())
        await until(lambda: received)
        newer.load.state = WorkerState.WORKER_STATE_SERVING
        newer.changed.set()
        await until(lambda: known[newer.address].is_available)
        if end == "fails":
            await reading
            assert len(received) == 100
        else:
            await first.stop()
            first.fingerprint, first.model, first.incarnation = new, other_token, "two"
            await first.start(first.address)
            with pytest.raises(grpc.aio.AioRpcError, match="goes on with the weights it began with") as caught:
                await reading
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert received == reference_ids(IDS, len(received), 5), "nothing of the newer model"
        assert not newer.requests
        first.load.state = WorkerState.WORKER_STATE_DRAINING
        first.changed.set()
        await until(lambda: not known[first.address].is_available)
        fresh = await h.answer(text=PROMPT, max_tokens=9, seed=5)
        assert fresh.token_ids == reference_ids(IDS, 9, 6), "what comes new may take either"


async def test_what_has_no_token_yet_may_go_to_other_weights() -> None:
    """CASES F57: only what was said binds."""
    old, new = {"model_hash": "old"}, {"model_hash": "new"}
    first = decode(fingerprint=old, always=Fault(0, PeerUnavailableError("gone"), Leg.DECODE))
    workers = [prefill(fingerprint=old), first, prefill(fingerprint=new), decode(fingerprint=new, model=other_token)]
    async with harness(*workers, policy=PolicyName.ROUND_ROBIN) as h:
        await until(lambda: all(worker.is_available for worker in h.router.registry.workers))
        for _ in range(3):
            assert (await h.answer(text=PROMPT, max_tokens=5, seed=5)).token_ids == reference_ids(IDS, 5, 6)
        assert first.requests


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_frozen_worker_is_noticed_and_its_requests_move(role: str) -> None:
    """A worker that says nothing is hung: noticed within hang_timeout_s, its open requests go on elsewhere."""
    workers = [prefill(), prefill(), decode(first_delay_s=0), decode()]
    async with harness(*workers) as h:
        decodes = workers[2:]
        for worker in decodes:
            worker.faults = deque([Fault(4 if role == "decode" else 0, hang=True)])
        call = asyncio.create_task(h.answer(text=PROMPT, max_tokens=10, seed=2))
        await until(lambda: decodes[0].requests or decodes[1].requests)
        first = decodes[0] if decodes[0].requests else decodes[1]
        for worker in decodes:
            if worker is not first:
                worker.faults.clear()
        if role == "decode":
            await first.first_token_sent.wait()
            victim = first
        else:
            victim = next(w for w in workers[:2] if w.address == first.requests[0].prefill_address)
            first.faults.clear()
        began = time.monotonic()
        victim.frozen.set()
        victim.changed.set()
        answer = await call
        assert time.monotonic() - began < QUICK_HEALTH.hang_timeout_s + 1
        assert answer.token_ids == reference_ids(IDS, 10, 2)
        assert answer.finish.attempts == 2
        known = next(w for w in h.router.registry.workers if w.address == victim.address)
        assert not known.is_available
        h.assert_quiescent()
        victim.frozen.clear()
        await until(lambda: known.is_available, 5)


async def test_a_worker_that_answers_but_makes_no_progress_is_hung() -> None:
    stuck = decode(load=WatchResponse(state=WorkerState.WORKER_STATE_SERVING, running=1, progress=7))
    async with harness(prefill(), stuck, decode()) as h:
        known = next(w for w in h.router.registry.workers if w.address == stuck.address)
        await until(lambda: "no progress" in known.reason, 3)
        assert (await h.answer(text=PROMPT, max_tokens=2)).finish.decode_address != stuck.address
        told = known.reason
        await until(lambda: known.reason != told, 3)
        assert h.router.metrics.total(WORKER_LOST) == 1, "it is lost once, however long it stands still"
        stuck.load.progress = 8
        stuck.changed.set()
        await until(lambda: known.is_available, 3)


async def test_an_idle_worker_is_never_hung() -> None:
    async with harness(prefill(), decode()) as h:
        await asyncio.sleep(QUICK_HEALTH.hang_timeout_s * 1.5)
        assert all(w.is_available for w in h.router.registry.workers)
        assert h.router.metrics.total(WORKER_LOST) == 0


async def test_a_draining_worker_gets_nothing_new_and_finishes_what_it_has() -> None:
    one, two = decode(token_delay_s=0.01), decode(token_delay_s=0.01)
    async with harness(prefill(), one, two) as h:
        call = asyncio.create_task(h.answer(text=PROMPT, max_tokens=60, seed=1))
        await until(lambda: one.requests or two.requests)
        busy, other = (one, two) if one.requests else (two, one)
        async with open_channel(busy.address) as channel:
            await WorkerServiceStub(channel).Drain(DrainRequest())
        known = next(w for w in h.router.registry.workers if w.address == busy.address)
        await until(lambda: not known.is_available)
        assert known.reason == "draining"
        for _ in range(4):
            assert (await h.answer(text=PROMPT, max_tokens=2)).finish.decode_address == other.address
        answer = await call
        assert (answer.token_ids, answer.finish.attempts) == (reference_ids(IDS, 60, 1), 1)


async def test_incompatible_workers_are_never_paired_and_the_reason_is_told() -> None:
    strange = prefill(fingerprint={"model_hash": "other", "page_size": "32", "draft_nodes": "4"})
    worker = decode()
    async with started(strange, worker), running_router(config_for(strange, worker)) as router:
        await until(lambda: all(w.is_available for w in router.registry.workers) and list(router.registry.workers))
        assert not router.registry.has_pair()
        async with open_channel(router.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                _ = [m async for m in RouterServiceStub(channel).Generate(request(text=PROMPT), timeout=5)]
        message = str(error_from_rpc(caught.value))
        assert "model_hash" in message
        assert "page_size" in message


async def test_a_worker_of_the_wrong_role_or_with_a_bad_card_is_not_used() -> None:
    broken = decode(card=model_card(tokenizer_json=b"{}"))
    good = decode()
    async with harness(prefill(), broken, good) as h:
        known = next(w for w in h.router.registry.workers if w.address == broken.address)
        await until(lambda: "tokenizer" in known.reason)
        assert (await h.answer(text=PROMPT, max_tokens=2)).finish.decode_address == good.address


async def test_nonsense_from_a_worker_is_survived() -> None:
    nonsense = {"model_hash": "m", "page_size": "many", "draft_nodes": "-3"}
    load = WatchResponse(state=WorkerState.WORKER_STATE_SERVING, pages_total=5, pages_free=50, tokens_per_s=-1)
    odd = decode(fingerprint=nonsense, load=load)
    async with harness(prefill(fingerprint=nonsense), odd, decode()) as h:
        assert (await h.answer(text=PROMPT, max_tokens=3, seed=1)).token_ids == reference_ids(IDS, 3, 1)
        odd.card.context_length = 0
        odd.card.card_hash = "broken"
        await odd.restart("two")
        known = next(w for w in h.router.registry.workers if w.address == odd.address)
        await until(lambda: "context_length" in known.reason, 5)
        h.assert_quiescent()


async def test_a_breaker_opens_fails_fast_and_half_opens() -> None:
    """CASES F07: no dispatch while the prefill's breaker is open; it serves again later."""
    health = replace(QUICK_HEALTH, breaker_failures=3, breaker_open_s=0.4)
    worker = decode(always=Fault(0, PeerUnavailableError("prefill unreachable"), Leg.PREFILL))
    limits = replace(QUICK_REQUESTS, max_attempts=1, pair_wait_s=0.05)
    async with harness(prefill(), worker, health=health, requests=limits) as h:
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError):
                await h.answer(text=PROMPT)
        num_before = len(worker.requests)
        began = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await h.answer(text=PROMPT)
        assert time.monotonic() - began < 0.3
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "breaker" in caught.value.details()
        assert len(worker.requests) == num_before
        worker.always = None
        known = next(w for w in h.router.registry.workers if w.role.leg is Leg.PREFILL)
        await until(lambda: known.is_available)
        assert (await h.answer(text=PROMPT, max_tokens=4)).finish is not None
        assert known.breaker.retry_in_s == 0


async def test_failures_count_against_the_leg_that_failed() -> None:
    health = replace(QUICK_HEALTH, breaker_failures=1, breaker_open_s=30)
    prefills = [prefill(), prefill()]
    worker = decode(faults=deque([Fault(0, InternalError("x"), Leg.PREFILL)]))
    async with harness(*prefills, worker, health=health) as h:
        answer = await h.answer(text=PROMPT, max_tokens=3)
        assert answer.finish.attempts == 2
        open_ones = [w.address for w in h.router.registry.workers if w.breaker.is_open]
        assert open_ones == [worker.requests[0].prefill_address]


# --- sources --------------------------------------------------------------------------------------------------


async def test_a_workers_file_is_followed(tmp_path: Path) -> None:
    one, two, first = decode(), decode(), prefill()
    path = tmp_path / "workers.json"
    async with started(one, two, first):
        path.write_text(json.dumps({"prefill": [first.address], "decode": [one.address]}))
        config = replace(config_for(), workers_file=path, discovery_interval_s=0.02)
        async with running_router(config) as router:
            await router.wait_until_usable(5)
            toml = tmp_path / "next"
            toml.write_text(json.dumps({"prefill": [first.address], "decode": [two.address]}))
            toml.rename(path)
            await until(lambda: {w.address for w in router.registry.workers} == {two.address, first.address})
            path.write_text("{ not json")
            await asyncio.sleep(0.1)
            assert {w.address for w in router.registry.workers} == {two.address, first.address}


async def test_a_worker_taken_off_the_list_finishes_its_requests(tmp_path: Path) -> None:
    worker, first = decode(token_delay_s=0.01), prefill()
    path = tmp_path / "workers.json"
    async with started(worker, first):
        path.write_text(json.dumps({"prefill": [first.address], "decode": [worker.address]}))
        config = replace(config_for(), workers_file=path, discovery_interval_s=0.02)
        async with running_router(config) as router, open_channel(router.address) as channel:
            await router.wait_until_usable(5)
            call = RouterServiceStub(channel).Generate(request(text=PROMPT, max_tokens=50, seed=1), timeout=10)
            ids: list[int] = []
            async for message in call:
                ids += message.token_ids
                if path.read_text().count(worker.address):
                    path.write_text(json.dumps({"prefill": [first.address], "decode": []}))
                    await until(lambda: len(list(router.registry.workers)) == 1)
            assert ids == reference_ids(IDS, 50, 1)
            # Addresses that come and go must not pile up as labels.
            await until(lambda: worker.address not in router.metrics.exposition().decode())


def test_worker_files_are_checked(tmp_path: Path) -> None:
    toml = tmp_path / "w.toml"
    toml.write_text('prefill = ["a:1"]\ndecode = ["b:2", "dns:c:3"]\n')
    assert read_worker_lists(toml) == WorkerLists(("a:1",), ("b:2", "dns:c:3"))
    for content in ("[]", '{"prefill": "a:1"}', '{"prefill": ["nohost"]}', '{"other": []}', '{"decode": [1]}'):
        path = tmp_path / "w.json"
        path.write_text(content)
        with pytest.raises(InvalidRequestError):
            read_worker_lists(path)


async def test_names_are_resolved_and_keep_their_last_addresses() -> None:
    source = ListSource(WorkerLists(decode=("dns:localhost:7", "127.0.0.1:8")))
    lists = await source.workers()
    assert "127.0.0.1:7" in lists.decode
    assert lists.decode[-1] == "127.0.0.1:8"
    assert (await ListSource(WorkerLists(prefill=("dns:no-such-name.invalid:1",))).workers()).prefill == ()
    no_name = "dns:" + "a" * 70 + ".example:1"
    assert (await ListSource(WorkerLists(prefill=(no_name, "127.0.0.1:8"))).workers()).prefill == ("127.0.0.1:8",)
    assert (await FileSource(Path("/nonexistent/w.json")).workers()) == WorkerLists()


async def test_a_resolver_that_hangs_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbour of CASES M06: other addresses stay known meanwhile, and the answer counts once it comes."""
    asked, answers = threading.Semaphore(0), threading.Event()
    known = socket.getaddrinfo

    def slow(host: str, *rest: Any, **others: Any) -> Any:
        if host == "slow.example":
            asked.release()
            assert answers.wait(10)
            host = "127.0.0.1"
        return known(host, *rest, **others)

    monkeypatch.setattr("graftline.router.sources.RESOLVE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(socket, "getaddrinfo", slow)
    source = ListSource(WorkerLists(decode=("dns:slow.example:7", "127.0.0.1:8")))
    try:
        for _ in range(3):
            assert (await source.workers()).decode == ("127.0.0.1:8",)
        assert asked.acquire(blocking=False)
        assert not asked.acquire(blocking=False), "one question at a time"
    finally:
        answers.set()
    monkeypatch.setattr("graftline.router.sources.RESOLVE_TIMEOUT_S", 10.0)
    assert (await source.workers()).decode == ("127.0.0.1:7", "127.0.0.1:8")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"listen": "nowhere"}, "listen"),
        ({"http_listen": "x:y"}, "http_listen"),
        ({"workers": WorkerLists(prefill=("bad",))}, "workers.prefill"),
        ({"health": replace(QUICK_HEALTH, hang_timeout_s=0.01)}, "health.hang_timeout_s"),
        ({"requests": replace(QUICK_REQUESTS, max_attempts=0)}, "requests.max_attempts"),
    ],
)
def test_a_bad_config_names_its_field(fields: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        RouterConfig(**fields)  # type: ignore[arg-type]
    assert caught.value.field == named


async def test_a_wildcard_is_never_advertised() -> None:
    """CASES D01."""
    with pytest.raises(InvalidRequestError, match="advertise"):
        async with running_router(RouterConfig(listen="0.0.0.0:0")):
            pass
    async with running_router(RouterConfig(listen="0.0.0.0:0", advertise="localhost")) as router:
        assert router.address.startswith("localhost:")


async def test_a_source_that_stays_broken_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """CASES D53: sources are asked every second; a log that says so every second hides all else."""
    caplog.set_level("INFO", "graftline.router.sources")
    names = ListSource(WorkerLists(prefill=("dns:no-such-name.invalid:1",)))
    file = FileSource(tmp_path / "workers.json")
    for _ in range(3):
        await names.workers()
        await file.workers()
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    (tmp_path / "workers.json").write_text("{}")
    await file.workers()
    (tmp_path / "workers.json").write_text("{")
    for _ in range(2):
        await file.workers()
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2 + ["INFO", "WARNING"]
