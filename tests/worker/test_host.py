"""Both workers as their processes run them, over scripted engines: ports, health, watch, drain, metrics, failure."""

import asyncio
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from fake_engines import FakeDecodeEngine, FakePrefillEngine, FakeWorkerEngine, Points
from grpc_health.v1 import health_pb2, health_pb2_grpc
from service_pair import collect, expected_ids, request_message

import graftline
from graftline.decode_server.server import Decode, DecodeConfig, running_decode
from graftline.engine.config import EngineConfig, Role
from graftline.engine.tree_shape import NO_SPECULATION
from graftline.errors import InvalidRequestError, PeerUnavailableError
from graftline.prefill_server.server import Prefill, PrefillConfig, running_prefill
from graftline.proto.channel import open_channel
from graftline.proto.status import error_from_rpc
from graftline.proto.v1 import worker_pb2
from graftline.proto.v1.decode_pb2 import CarriedCall, GenerateManyRequest
from graftline.proto.v1.decode_pb2_grpc import DecodeServiceStub
from graftline.proto.v1.worker_pb2_grpc import WorkerServiceStub
from graftline.worker.config import WorkerConfig
from graftline.worker.host import EngineWatch

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
WORKER = WorkerConfig(metrics_listen="127.0.0.1:0", drain_grace_s=2.0, stop_timeout_s=2.0)


def engine_config(role: Role) -> EngineConfig:
    return EngineConfig(model="fake", role=role, layer_split=(1,), tree=NO_SPECULATION)


@asynccontextmanager
async def prefill_worker(*held: str, worker: WorkerConfig = WORKER) -> AsyncIterator[tuple[Prefill, FakePrefillEngine]]:
    engine = FakePrefillEngine(*held)
    config = PrefillConfig(engine_config(Role.PREFILL), worker)
    async with running_prefill(config, lambda _: FakeWorkerEngine(engine)) as running:
        yield running, engine


@asynccontextmanager
async def decode_worker(
    engine: FakeDecodeEngine | None = None, worker: WorkerConfig = WORKER
) -> AsyncIterator[tuple[Decode, FakeDecodeEngine]]:
    scripted = engine or FakeDecodeEngine()
    config = DecodeConfig(engine_config(Role.DECODE), worker)
    async with running_decode(config, lambda _: FakeWorkerEngine(scripted)) as running:
        yield running, scripted


async def health(address: str, service: str = "") -> int:
    async with open_channel(address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
        return int(answer.status)


async def scrape(address: str | None) -> dict[str, float]:
    def read() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
            return str(answer.read().decode())

    lines = (await asyncio.to_thread(read)).splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


async def test_a_request_through_both_workers() -> None:
    async with prefill_worker() as (prefill, _), decode_worker() as (decode, engine):
        async with open_channel(decode.address) as channel:
            ids, _ = await collect(DecodeServiceStub(channel).Generate(request_message(prefill.address)))
        assert ids == expected_ids()
        await decode.service.wait_idle()
        engine.check_quiescent()
        assert list(prefill.engine.scheduler.paired) == [decode.host.identity.incarnation]


async def test_describe_and_health() -> None:
    async with prefill_worker() as (prefill, _), open_channel(prefill.address) as channel:
        stub = WorkerServiceStub(channel)
        described = await stub.Describe(worker_pb2.DescribeRequest())
        assert described.identity == prefill.host.identity
        assert described.identity.address == prefill.address
        assert described.model_card.tokenizer_json == b"{}"
        assert described.fingerprint.fields == {"model_hash": "abc"}
        assert (described.num_stages, described.limits.max_request_tokens) == (1, 128)
        assert described.version == graftline.__version__
        known = worker_pb2.DescribeRequest(known_card_hash=described.model_card.card_hash)
        assert (await stub.Describe(known)).model_card.tokenizer_json == b""
        for service in ("", "graftline.v1.PrefillService", "graftline.v1.WorkerService"):
            assert await health(prefill.address, service) == SERVING


async def test_probes_are_no_requests() -> None:
    """CASES H02: 200 probes leave no trace in the engine."""
    async with prefill_worker() as (prefill, engine):
        async with open_channel(prefill.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            await asyncio.gather(*(stub.Check(health_pb2.HealthCheckRequest()) for _ in range(200)))
        assert engine.submitted == []
        assert prefill.service.num_open == 0


async def test_watch_tells_load_and_progress() -> None:
    engine = FakeDecodeEngine(points=Points("running"))
    async with (
        prefill_worker() as (prefill, _),
        decode_worker(engine) as (decode, _),
        open_channel(decode.address) as channel,
    ):
        watch = WorkerServiceStub(channel).Watch(worker_pb2.WatchRequest(interval_s=0.02))
        first = await watch.read()
        assert first.state == worker_pb2.WORKER_STATE_SERVING
        assert (first.running, first.pages_free, first.pages_total) == (0, 4, 4)
        call = DecodeServiceStub(channel).Generate(request_message(prefill.address))
        await engine.points.reached("running")
        while (message := await watch.read()).running == 0:
            assert message.progress >= first.progress
        assert message.pages_free == 3
        engine.let_go("running")
        await collect(call)
        while (message := await watch.read()).running:
            pass
        # A loop that turns with nothing to compute is not hanging.
        assert (await watch.read()).progress > message.progress


async def test_progress_stops_when_a_stage_stands_still() -> None:
    """A worker that waits advances all the same; one with a frozen stage does not, though its loop turns."""
    async with prefill_worker("writing") as (prefill, _), open_channel(prefill.address) as channel:
        watch = WorkerServiceStub(channel).Watch(worker_pb2.WatchRequest(interval_s=0.05))
        waiting = [(await watch.read()).progress for _ in range(4)]
        assert waiting == sorted(set(waiting))
        engine: Any = prefill.engine
        engine.frozen_at = 1
        frozen = [(await watch.read()).progress for _ in range(4)]
        assert len(set(frozen[1:])) == 1


@pytest.mark.parametrize("interval_s", [-1.0, 0.001, 1e9, float("nan")])
async def test_a_silly_watch_interval(interval_s: float) -> None:
    async with prefill_worker() as (prefill, _), open_channel(prefill.address) as channel:
        with pytest.raises(grpc.RpcError) as raised:
            await WorkerServiceStub(channel).Watch(worker_pb2.WatchRequest(interval_s=interval_s)).read()
        error = error_from_rpc(raised.value)
        assert isinstance(error, InvalidRequestError)
        assert error.field == "interval_s"


async def test_metrics_follow_the_work() -> None:
    """CASES X01, X05, X06: gauges are right while idle, after cancels, and count what each role did."""
    engine = FakeDecodeEngine(points=Points("running"))
    async with prefill_worker() as (prefill, _), decode_worker(engine) as (decode, _):
        async with open_channel(decode.address) as channel:
            stub = DecodeServiceStub(channel)
            calls = [stub.Generate(request_message(prefill.address)) for _ in range(3)]
            await engine.points.reached("running", 3)
            busy = await scrape(decode.host.metrics_address)
            assert busy['graftline_worker_running_requests{role="decode"}'] == 3
            assert busy['graftline_worker_pages{role="decode",state="used"}'] == 3
            for call in calls[1:]:
                call.cancel()
            await engine.points.reached("cancelled", 2)
            engine.let_go("running")
            await collect(calls[0])
        await decode.service.wait_idle()
        idle = await scrape(decode.host.metrics_address)
        assert idle['graftline_worker_running_requests{role="decode"}'] == 0
        assert idle['graftline_worker_open_requests{role="decode"}'] == 0
        assert idle['graftline_worker_pages{role="decode",state="free"}'] == 4
        assert idle['graftline_worker_requests_started_total{role="decode"}'] == 3
        ended = 'graftline_worker_requests_ended_total{outcome="%s",role="decode"}'
        assert idle[ended % "length"] == 1
        assert idle[ended % "CancelledRequestError"] == 2
        assert idle['graftline_worker_time_to_first_token_seconds_count{role="decode"}'] == 3
        assert idle["graftline_decode_inter_token_seconds_count"] == 7
        there = await scrape(prefill.host.metrics_address)
        assert there['graftline_worker_requests_ended_total{outcome="finished",role="prefill"}'] == 3
        assert there['graftline_worker_stage_busy_seconds_total{role="prefill",stage="0"}'] == 2.5


async def test_a_request_whose_text_ended_it_is_no_cancelled_one() -> None:
    """A stop string is seen by the router alone, which ends the call and says that its answer is whole."""
    engine = FakeDecodeEngine(points=Points("running"))
    async with prefill_worker() as (prefill, _), decode_worker(engine) as (decode, _):
        async with open_channel(decode.address) as channel:
            stream = DecodeServiceStub(channel).GenerateMany()
            calls = [CarriedCall(call_id=id_, request=request_message(prefill.address)) for id_ in (1, 2)]
            await stream.write(GenerateManyRequest(calls=calls))
            await engine.points.reached("running", 2)
            await stream.write(GenerateManyRequest(cancelled_call_ids=[1, 2], answered_call_ids=[2]))
            await decode.service.wait_idle()
            stream.cancel()
        after = await scrape(decode.host.metrics_address)
        ended = 'graftline_worker_requests_ended_total{outcome="%s",role="decode"}'
        assert after[ended % "stop"] == after[ended % "CancelledRequestError"] == 1


async def test_a_failed_engine_takes_the_worker_out() -> None:
    """CASES H03: health says so at once, open requests fail, new ones are refused."""
    engine = FakeDecodeEngine(points=Points("running"))
    async with (
        prefill_worker() as (prefill, _),
        decode_worker(engine) as (decode, _),
        open_channel(decode.address) as channel,
    ):
        stub = DecodeServiceStub(channel)
        call = stub.Generate(request_message(prefill.address))
        await engine.points.reached("running")
        engine.failed = "a stage died"
        await asyncio.wait_for(decode.host.failed.wait(), 5)
        with pytest.raises(grpc.RpcError, match="a stage died"):
            await collect(call)
        assert await health(decode.address) == NOT_SERVING
        with pytest.raises(grpc.RpcError) as raised:
            await collect(stub.Generate(request_message(prefill.address)))
        assert isinstance(error_from_rpc(raised.value), PeerUnavailableError)
        watch = WorkerServiceStub(channel).Watch(worker_pb2.WatchRequest())
        assert (await watch.read()).state == worker_pb2.WORKER_STATE_FAILED
        assert (await scrape(decode.host.metrics_address))['graftline_worker_up{role="decode"}'] == 0


async def test_a_hung_engine_loop_is_noticed() -> None:
    """CASES H03: a loop that stands still is as bad as one that failed."""
    worker = WorkerConfig(engine_silence_s=0.2, drain_grace_s=0, stop_timeout_s=1)
    async with prefill_worker("writing", worker=worker) as (prefill, engine), decode_worker() as (decode, _):
        async with open_channel(decode.address) as channel:
            call = DecodeServiceStub(channel).Generate(request_message(prefill.address))
            await engine.points.reached("writing")
            real: Any = prefill.engine
            real.hung = True
            with pytest.raises(grpc.RpcError, match="has not turned"):
                await collect(call)
        assert prefill.host.failed.is_set()


def test_silence_of_an_engine_is_counted_in_looks() -> None:
    """However late a look is, it is one: a worker that stood still as a whole does not fail its engine."""
    load = replace(FakePrefillEngine().load(), taken_s=1.0)
    watch = EngineWatch(look_s=0.5, silence_s=2.0)
    assert [watch.look(load) for _ in range(4)] == [None] * 4
    assert watch.look(replace(load, taken_s=2.0)) is None
    assert [watch.look(replace(load, taken_s=2.0)) for _ in range(3)] == [None] * 3
    assert watch.look(replace(load, taken_s=2.0)) == "its loop has not turned for 2.0 s"
    assert watch.look(replace(load, taken_s=3.0, failed="out of memory")) == "out of memory"


async def test_leaving_waits_for_transfers() -> None:
    """CASES F08: a stopping prefill finishes what it writes; the request ends well."""
    stopped: asyncio.Future[None] | None = None
    async with decode_worker() as (decode, _), open_channel(decode.address) as channel:
        running = prefill_worker("writing")
        prefill, engine = await running.__aenter__()
        call = asyncio.ensure_future(collect(DecodeServiceStub(channel).Generate(request_message(prefill.address))))
        await engine.points.reached("writing")
        stopped = asyncio.ensure_future(running.__aexit__(None, None, None))
        while await health(prefill.address) != NOT_SERVING:
            pass
        engine.let_go("writing")
        ids, _ = await call
        assert ids == expected_ids()
        await stopped


async def test_leaving_cancels_what_does_not_end() -> None:
    worker = WorkerConfig(drain_grace_s=0.1, stop_timeout_s=2.0)
    async with prefill_worker() as (prefill, _):
        engine = FakeDecodeEngine(points=Points("running"))
        running = decode_worker(engine, worker)
        decode, _ = await running.__aenter__()
        async with open_channel(decode.address) as channel:
            call = DecodeServiceStub(channel).Generate(request_message(prefill.address))
            await engine.points.reached("running")
            await running.__aexit__(None, None, None)
            with pytest.raises(grpc.RpcError) as raised:
                await collect(call)
            assert isinstance(error_from_rpc(raised.value), PeerUnavailableError)
        assert not engine.jobs


async def test_drain_by_rpc() -> None:
    engine = FakeDecodeEngine(points=Points("running"))
    async with (
        prefill_worker() as (prefill, _),
        decode_worker(engine) as (decode, _),
        open_channel(decode.address) as channel,
    ):
        stub, worker = DecodeServiceStub(channel), WorkerServiceStub(channel)
        call = asyncio.ensure_future(collect(stub.Generate(request_message(prefill.address))))
        await engine.points.reached("running")
        draining = asyncio.ensure_future(worker.Drain(worker_pb2.DrainRequest(grace_s=5)))
        watch = worker.Watch(worker_pb2.WatchRequest(interval_s=0.02))
        while (await watch.read()).state != worker_pb2.WORKER_STATE_DRAINING:
            pass
        with pytest.raises(grpc.RpcError):
            await collect(stub.Generate(request_message(prefill.address)))
        assert not draining.done()
        engine.let_go("running")
        assert (await call)[0] == expected_ids()
        await draining
        with pytest.raises(grpc.RpcError) as raised:
            await worker.Drain(worker_pb2.DrainRequest(grace_s=-1))
        assert isinstance(error_from_rpc(raised.value), InvalidRequestError)


async def test_a_wildcard_is_never_advertised() -> None:
    """CASES D01."""
    with pytest.raises(InvalidRequestError, match="advertise"):
        async with prefill_worker(worker=WorkerConfig(listen="0.0.0.0:0")):
            pass


async def test_a_taken_port() -> None:
    async with prefill_worker() as (prefill, _):
        engine = FakePrefillEngine()
        taken = FakeWorkerEngine(engine)
        config = PrefillConfig(engine_config(Role.PREFILL), WorkerConfig(listen=prefill.address))
        with pytest.raises(PeerUnavailableError, match="cannot listen"):
            async with running_prefill(config, lambda _: taken):
                pass
        assert taken.stopped
