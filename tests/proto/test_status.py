"""The error table: every class crosses a real RPC and comes back as itself."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from graftline.errors import (
    CancelledRequestError,
    GraftlineError,
    IncompatibleError,
    InternalError,
    InvalidRequestError,
    OutOfCapacityError,
    PeerUnavailableError,
    PreemptedError,
    TransferFailedError,
    UnauthenticatedError,
)
from graftline.proto.channel import open_channel, open_sync_channel
from graftline.proto.server import RpcServer
from graftline.proto.status import (
    MAX_MESSAGE_CHARS,
    TABLE,
    Leg,
    abort_with,
    error_from_rpc,
    failure_from_rpc,
    rpc_border,
)
from graftline.proto.v1.common_pb2 import SpeculationStats
from graftline.proto.v1.worker_pb2 import DescribeRequest, DrainRequest, WatchRequest
from graftline.proto.v1.worker_pb2_grpc import (
    WorkerServiceServicer,
    WorkerServiceStub,
    add_WorkerServiceServicer_to_server,
)

ERRORS: list[tuple[GraftlineError, grpc.StatusCode]] = [
    (InvalidRequestError("top_p", "7 is not in (0, 1]"), grpc.StatusCode.INVALID_ARGUMENT),
    (OutOfCapacityError("full", retry_after_s=1.25), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (OutOfCapacityError("full"), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (PeerUnavailableError("gone"), grpc.StatusCode.UNAVAILABLE),
    (PreemptedError("no pages"), grpc.StatusCode.ABORTED),
    (TransferFailedError("lost", drained=True), grpc.StatusCode.ABORTED),
    (TransferFailedError("lost"), grpc.StatusCode.ABORTED),
    (IncompatibleError(("dtype", "page_size"), "they differ"), grpc.StatusCode.FAILED_PRECONDITION),
    (CancelledRequestError("bye"), grpc.StatusCode.CANCELLED),
    (UnauthenticatedError("who?"), grpc.StatusCode.UNAUTHENTICATED),
    (InternalError("broken — ünïcode"), grpc.StatusCode.INTERNAL),
]


class Raising(WorkerServiceServicer):
    """Raises what it was given: Describe aborts itself, Watch and Drain leave it to the border."""

    def __init__(self) -> None:
        self.error: Exception = InternalError("unset")
        self.options: dict[str, Any] = {}

    async def Describe(self, request: Any, context: Any) -> Any:
        assert isinstance(self.error, GraftlineError)
        await abort_with(context, self.error, **self.options)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async with rpc_border(context, leg=self.options.get("leg")):
            raise self.error
        yield

    async def Drain(self, request: Any, context: Any) -> Any:
        async with rpc_border(context):
            raise self.error


@pytest.fixture
async def raising() -> AsyncIterator[tuple[Raising, Any, str]]:
    servicer = Raising()
    server = RpcServer("127.0.0.1:0")
    server.add(add_WorkerServiceServicer_to_server, servicer, "graftline.v1.WorkerService")
    await server.start()
    async with open_channel(server.address) as channel:
        yield servicer, WorkerServiceStub(channel), server.address
    await server.stop(0)


def test_every_class_has_a_row() -> None:
    assert {type(error) for error, _ in ERRORS} == set(TABLE) == set(GraftlineError.__subclasses__())


@pytest.mark.parametrize(("error", "code"), ERRORS, ids=lambda value: getattr(type(value), "__name__", ""))
async def test_an_error_comes_back_as_itself(raising: Any, error: GraftlineError, code: grpc.StatusCode) -> None:
    """CASES I17: the message is never empty at the client."""
    servicer, stub, _ = raising
    servicer.error, servicer.options = error, {"leg": Leg.PREFILL}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Describe(DescribeRequest())
    failure = failure_from_rpc(caught.value)
    assert failure.code is code is caught.value.code()
    assert failure.leg is Leg.PREFILL
    assert type(failure.error) is type(error)
    assert vars(failure.error) == vars(error)
    assert str(failure.error) == str(error) == caught.value.details()
    with pytest.raises(grpc.aio.AioRpcError) as streamed:
        _ = [message async for message in stub.Watch(WatchRequest())]
    assert type(error_from_rpc(streamed.value)) is type(error)


async def test_figures_of_a_failed_attempt_travel_along(raising: Any) -> None:
    servicer, stub, _ = raising
    stats = SpeculationStats(rounds=3, drafted=9, accepted=4)
    servicer.error, servicer.options = PreemptedError("pages"), {"speculation": stats, "leg": Leg.DECODE}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Describe(DescribeRequest())
    assert failure_from_rpc(caught.value).speculation == stats
    assert failure_from_rpc(caught.value).leg is Leg.DECODE


async def test_an_unexpected_exception_becomes_internal_with_its_text(raising: Any) -> None:
    servicer, stub, _ = raising
    servicer.error = ZeroDivisionError("by zero")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Drain(DrainRequest())
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "ZeroDivisionError: by zero" in caught.value.details()


async def test_huge_messages_are_shortened_so_that_they_arrive(raising: Any) -> None:
    servicer, stub, _ = raising
    servicer.error = InvalidRequestError("stop", "é" * 1_000_000)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Describe(DescribeRequest())
    error = error_from_rpc(caught.value)
    assert isinstance(error, InvalidRequestError)
    assert len(error.problem) == MAX_MESSAGE_CHARS


async def test_statuses_of_grpc_itself_are_typed_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and says nothing
        async with open_channel(f"127.0.0.1:{silent.getsockname()[1]}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await WorkerServiceStub(channel).Describe(DescribeRequest(), timeout=0.2)
    assert isinstance(error_from_rpc(caught.value), CancelledRequestError)
    async with open_channel("127.0.0.1:1") as closed:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await WorkerServiceStub(closed).Describe(DescribeRequest(), timeout=5)
    assert isinstance(error_from_rpc(refused.value), PeerUnavailableError)


async def test_blocking_callers_get_the_same(raising: Any) -> None:
    servicer, _, address = raising
    servicer.error, servicer.options = OutOfCapacityError("full", retry_after_s=2), {}

    def call() -> GraftlineError:
        with open_sync_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
            WorkerServiceStub(channel).Describe(DescribeRequest(), timeout=5)
        return error_from_rpc(caught.value)

    error = await asyncio.to_thread(call)
    assert isinstance(error, OutOfCapacityError)
    assert error.retry_after_s == 2
