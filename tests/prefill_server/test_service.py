"""The prefill service alone, driven by hand over real gRPC: every message in every state."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from fake_engines import FakePrefillEngine, failure, token_at
from service_pair import FINGERPRINT, PrefillSide, prefill_side

from graftline.engine.service_api import PrefillFailure
from graftline.errors import InvalidRequestError, OutOfCapacityError
from graftline.prefill_server.settings import ServiceSettings
from graftline.proto.channel import open_channel
from graftline.proto.status import error_from_rpc
from graftline.proto.v1 import common_pb2, prefill_pb2
from graftline.proto.v1.prefill_pb2_grpc import PrefillServiceStub

DECODE = common_pb2.WorkerIdentity(role=common_pb2.WORKER_ROLE_DECODE, incarnation="d1", address="decode:1")
CANCEL = prefill_pb2.PrefillRequest(cancel=prefill_pb2.PrefillCancel())
DESTINATION = prefill_pb2.PrefillRequest(destination=prefill_pb2.PrefillDestination(page_ids=[3, 4], slot_id=1))


def start(side: PrefillSide, request_id: str = "r", **changes: Any) -> prefill_pb2.PrefillRequest:
    fields: dict[str, Any] = {
        "request_id": request_id,
        "attempt": 1,
        "decode_incarnation": "d1",
        "prefill_incarnation": side.service.identity.incarnation,
        "token_ids": [10, 11, 12],
        "num_prompt_tokens": 3,
        "sampling": common_pb2.SamplingParams(top_p=1.0),
        "stopping": common_pb2.StoppingParams(max_tokens=4),
        "real_tree": True,
    }
    return prefill_pb2.PrefillRequest(start=prefill_pb2.PrefillStart(**{**fields, **changes}))


@asynccontextmanager
async def paired(side: PrefillSide) -> AsyncIterator[Any]:
    channel = open_channel(side.address)
    stub = PrefillServiceStub(channel)
    await stub.Pair(prefill_pb2.PairRequest(decode=DECODE, fingerprint=FINGERPRINT))
    yield stub
    await channel.close()


async def next_event(call: Any) -> tuple[str | None, prefill_pb2.PrefillResponse]:
    """The next event that is not a sign of life; (None, ...) at the end of the stream."""
    while True:
        response = await call.read()
        if response is grpc.aio.EOF:
            return None, prefill_pb2.PrefillResponse()
        if not response.HasField("alive"):
            return response.WhichOneof("event"), response


async def events(call: Any) -> list[str]:
    names = []
    while (name := (await next_event(call))[0]) is not None:
        names.append(name)
    return names


async def test_a_handoff() -> None:
    async with prefill_side() as side, paired(side) as stub:
        call = stub.Prefill()
        await call.write(start(side))
        name, response = await next_event(call)
        assert (name, response.scheduled.cached_tokens) == ("scheduled", 1)
        name, response = await next_event(call)
        assert (name, response.first_token.token_id) == ("first_token", token_at(3))
        await call.write(DESTINATION)
        name, response = await next_event(call)
        assert name == "finished"
        assert list(response.finished.tree.tokens) == [token_at(3), token_at(3) + 1]
        assert list(response.finished.tree.parents) == [-1, 0]
        assert response.finished.tree_origin == common_pb2.TREE_ORIGIN_REAL
        assert response.finished.handoff.bytes == 1000
        assert await events(call) == []
        assert side.service.num_open == 0


async def test_pairing_names_every_difference() -> None:
    async with prefill_side() as side:
        channel = open_channel(side.address)
        theirs = common_pb2.Fingerprint(fields={"model_hash": "xyz", "dtype": "float32"})
        request = prefill_pb2.PairRequest(decode=DECODE, fingerprint=theirs)
        response = await PrefillServiceStub(channel).Pair(request)
        assert list(response.mismatched_fields) == ["dtype", "model_hash", "page_size"]
        assert "model_hash: prefill has abc, decode has xyz" in response.detail
        assert not side.directory.paired
        with pytest.raises(grpc.RpcError) as raised:
            await PrefillServiceStub(channel).Pair(prefill_pb2.PairRequest(fingerprint=FINGERPRINT))
        assert isinstance(error_from_rpc(raised.value), InvalidRequestError)
        await channel.close()


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([CANCEL], "drained"),
        ([CANCEL, CANCEL, DESTINATION], "drained"),
        ([DESTINATION], "failed"),
    ],
)
async def test_before_the_start(messages: list[prefill_pb2.PrefillRequest], expected: str) -> None:
    async with prefill_side() as side, paired(side) as stub:
        call = stub.Prefill()
        for message in messages:
            await call.write(message)
        assert await events(call) == [expected]
        assert side.engine.submitted == []


@pytest.mark.parametrize("point", ["queued", "computing", "writing"])
async def test_cancel_is_answered_once_by_drained(point: str) -> None:
    """CASES B01, B19: three cancels, a late destination and a second start: one terminal event."""
    async with prefill_side(point, "draining") as side, paired(side) as stub:
        call = stub.Prefill()
        await call.write(start(side))
        await side.engine.points.reached(point)
        for message in (CANCEL, DESTINATION, CANCEL, start(side, "other"), CANCEL):
            await call.write(message)
        side.engine.let_go("draining")
        assert (await events(call))[-1] == "drained"
        assert len(side.engine.cancels) == 1
        assert [request.key.request_id for request in side.engine.submitted] == ["r"]


async def test_closing_ones_half_is_a_cancel() -> None:
    async with prefill_side("computing") as side, paired(side) as stub:
        call = stub.Prefill()
        await call.write(start(side))
        await side.engine.points.reached("computing")
        await call.done_writing()
        assert await events(call) == ["scheduled", "drained"]


async def test_a_vanished_decode_is_cancelled_and_waited_for() -> None:
    """CASES B06, B10: no cancel is sent; the service notices by itself and stays busy until the engine is done."""
    async with prefill_side("writing", "draining") as side, paired(side) as stub:
        call = stub.Prefill()
        await call.write(start(side))
        await side.engine.points.reached("writing")
        call.cancel()
        await side.engine.points.reached("draining")
        assert side.service.num_open == 1
        side.engine.let_go("draining")
        await asyncio.wait_for(side.service.wait_idle(), 5)


async def test_the_finish_that_crosses_a_cancel_counts() -> None:
    async with prefill_side("draining") as side, paired(side) as stub:
        call = stub.Prefill()
        await call.write(start(side))
        assert (await next_event(call))[0] == "scheduled"
        assert (await next_event(call))[0] == "first_token"
        key = side.engine.submitted[0].key
        await call.write(CANCEL)
        await side.engine.points.reached("draining")
        side.engine.inject(key, failure(PrefillFailure.TRANSFER_FAILED, drained=False))
        name, response = await next_event(call)
        assert (name, response.failed.drained) == ("failed", False)
        side.engine.let_go("draining")  # a second terminal event of a confused engine
        assert await events(call) == []


@pytest.mark.parametrize(
    ("changes", "code", "word"),
    [
        ({"prefill_incarnation": "older"}, prefill_pb2.PREFILL_FAILURE_NOT_PAIRED, "incarnation"),
        ({"decode_incarnation": "stranger"}, prefill_pb2.PREFILL_FAILURE_NOT_PAIRED, "stranger"),
        ({"token_ids": []}, prefill_pb2.PREFILL_FAILURE_INVALID_REQUEST, "token_ids"),
        ({"token_ids": [1 << 20]}, prefill_pb2.PREFILL_FAILURE_INVALID_REQUEST, "token_ids"),
        ({"num_prompt_tokens": 9}, prefill_pb2.PREFILL_FAILURE_INVALID_REQUEST, "num_prompt_tokens"),
    ],
)
async def test_a_start_that_cannot_be_taken(changes: dict[str, Any], code: int, word: str) -> None:
    async with prefill_side() as side, paired(side) as stub:
        call = stub.Prefill()
        await call.write(start(side, **changes))
        name, response = await next_event(call)
        assert name == "failed"
        assert (response.failed.code, response.failed.drained) == (code, True)
        assert word in response.failed.reason
        assert side.service.num_open == 0


async def test_a_refusal_of_the_engine() -> None:
    async with prefill_side() as side, paired(side) as stub:
        side.engine.refusal = OutOfCapacityError("the queue is full")
        call = stub.Prefill()
        await call.write(start(side))
        _, response = await next_event(call)
        assert response.failed.code == prefill_pb2.PREFILL_FAILURE_OUT_OF_CAPACITY
        assert "queue is full" in response.failed.reason


async def test_a_fault_of_the_engine_ends_the_handoff_alone() -> None:
    """It would stay open for ever, and the end of the worker wait for it."""
    async with prefill_side() as side, paired(side) as stub:
        side.engine.refusal = ZeroDivisionError("a fault of ours")
        call = stub.Prefill()
        await call.write(start(side))
        _, response = await next_event(call)
        assert (response.failed.code, response.failed.drained) == (prefill_pb2.PREFILL_FAILURE_INTERNAL, True)
        assert response.failed.reason == "ZeroDivisionError: a fault of ours"
        side.engine.refusal = None
        call = stub.Prefill()
        await call.write(start(side, "next"))
        await call.write(DESTINATION)
        assert (await events(call))[-1] == "finished"
        assert side.service.num_open == 0


async def test_one_attempt_is_open_once() -> None:
    async with prefill_side("computing") as side, paired(side) as stub:
        first, second = stub.Prefill(), stub.Prefill()
        await first.write(start(side))
        await side.engine.points.reached("computing")
        await second.write(start(side))
        _, response = await next_event(second)
        assert response.failed.code == prefill_pb2.PREFILL_FAILURE_INVALID_REQUEST
        await first.write(CANCEL)
        assert (await events(first))[-1] == "drained"
        third = stub.Prefill()
        await third.write(start(side))
        await side.engine.points.reached("computing", 2)
        third.cancel()


async def test_a_draining_prefill_finishes_and_refuses() -> None:
    """CASES F08: what is being written is finished first."""
    async with prefill_side("writing") as side, paired(side) as stub:
        call, late = stub.Prefill(), stub.Prefill()
        await call.write(start(side))
        await call.write(DESTINATION)
        await side.engine.points.reached("writing")
        side.service.stop_admitting()
        await late.write(start(side, "late"))
        _, response = await next_event(late)
        assert response.failed.code == prefill_pb2.PREFILL_FAILURE_DRAINING
        waiting = asyncio.ensure_future(side.service.wait_idle())
        assert not waiting.done()
        side.engine.let_go("writing")
        await asyncio.wait_for(waiting, 5)
        assert (await events(call))[-1] == "finished"


async def test_nothing_lives_for_ever() -> None:
    async with prefill_side("queued", settings=ServiceSettings(handoff_timeout_s=0.2)) as side, paired(side) as stub:
        call = stub.Prefill()
        await call.write(start(side))
        assert await events(call) == ["drained"]
        idle = stub.Prefill()
        assert await events(idle) == ["drained"]


async def test_a_waiting_decode_hears_signs_of_life() -> None:
    """CASES B17."""
    async with prefill_side("queued", settings=ServiceSettings(alive_interval_s=0.02)) as side, paired(side) as stub:
        call = stub.Prefill()
        await call.write(start(side))
        for _ in range(3):
            assert (await call.read()).HasField("alive")
        call.cancel()


async def test_a_decode_hears_soon_that_its_handoff_was_taken_up() -> None:
    """Until then it opens no more than a bounded number of them."""
    settings = ServiceSettings(first_alive_s=0.02, alive_interval_s=3600.0)
    async with prefill_side("queued", settings=settings) as side, paired(side) as stub:
        call = stub.Prefill()
        await call.write(start(side))
        assert (await call.read()).HasField("alive")
        side.engine.let_go("queued")
        assert (await call.read()).HasField("scheduled")
        call.cancel()


async def test_a_decode_that_does_not_read_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """That is the decode's doing: no fault of this worker stands in its log."""

    class Deaf:
        """A context whose writes are not taken."""

        refusal: tuple[Any, ...] = ()

        def invocation_metadata(self) -> tuple[()]:
            return ()

        async def write(self, message: object) -> None:
            await asyncio.Event().wait()

        async def abort(self, *status: Any) -> None:
            self.refusal = status
            raise grpc.aio.AbortError

    settings = ServiceSettings(first_alive_s=0.01, send_timeout_s=0.05)
    async with prefill_side("queued", settings=settings) as side, paired(side):

        async def requests() -> AsyncIterator[prefill_pb2.PrefillRequest]:
            yield start(side)
            await asyncio.Event().wait()

        context = Deaf()
        with pytest.raises(grpc.aio.AbortError):
            await asyncio.wait_for(side.service.Prefill(requests(), context), 5)
        assert context.refusal[:2] == (grpc.StatusCode.RESOURCE_EXHAUSTED, "the decode read nothing for 0.05 s")
        await asyncio.wait_for(side.service.wait_idle(), 5)
        assert len(side.engine.cancels) == 1
    ours = [record for record in caplog.records if record.name.startswith("graftline")]
    assert not [record for record in ours if record.levelno >= logging.ERROR]


async def test_a_lost_engine_fails_what_is_open() -> None:
    async with prefill_side("writing") as side, paired(side) as stub:
        call = stub.Prefill()
        await call.write(start(side))
        await side.engine.points.reached("writing")
        side.service.abandon_all("a stage died")
        name, response = (await next_event(call), await next_event(call), await next_event(call))[-1]
        assert name == "failed"
        assert (response.failed.code, response.failed.drained) == (prefill_pb2.PREFILL_FAILURE_INTERNAL, False)


async def test_too_many_handoffs() -> None:
    engine = FakePrefillEngine("queued")
    async with prefill_side(engine=engine, settings=ServiceSettings(max_handoffs=1)) as side, paired(side) as stub:
        first = stub.Prefill()
        await first.write(start(side))
        await engine.points.reached("queued")
        with pytest.raises(grpc.RpcError) as raised:
            await events(stub.Prefill())
        assert isinstance(error_from_rpc(raised.value), OutOfCapacityError)
        first.cancel()
