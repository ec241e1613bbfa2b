"""The server builder and the channel: health, reflection, tokens, TLS, keepalive, sizes, addresses."""

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from graftline.errors import InvalidRequestError, PeerUnavailableError, UnauthenticatedError
from graftline.proto.address import advertised_address, is_wildcard, parse_address
from graftline.proto.channel import ANONYMOUS, Access, ClientTls, open_channel
from graftline.proto.server import RpcServer, ServerTls
from graftline.proto.status import error_from_rpc
from graftline.proto.v1.worker_pb2 import (
    DescribeRequest,
    DescribeResponse,
    DrainRequest,
    DrainResponse,
    WatchRequest,
    WatchResponse,
)
from graftline.proto.v1.worker_pb2_grpc import (
    WorkerServiceServicer,
    WorkerServiceStub,
    add_WorkerServiceServicer_to_server,
)

NAME = "graftline.v1.WorkerService"


class Echo(WorkerServiceServicer):
    async def Describe(self, request: Any, context: Any) -> DescribeResponse:
        return DescribeResponse(version=request.known_card_hash)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[WatchResponse]:
        await asyncio.sleep(request.interval_s)
        yield WatchResponse(incarnation="x")

    async def Drain(self, request: Any, context: Any) -> DrainResponse:
        return DrainResponse()


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[RpcServer]:
    server = RpcServer(options.pop("listen", "127.0.0.1:0"), **options)
    server.add(add_WorkerServiceServicer_to_server, Echo(), NAME)
    await server.start()
    await server.set_serving(True)
    try:
        yield server
    finally:
        await server.stop(0)


@asynccontextmanager
async def stub(server: RpcServer, access: Access = ANONYMOUS) -> AsyncIterator[Any]:
    async with open_channel(server.address, access) as channel:
        yield WorkerServiceStub(channel)


async def test_health_follows_set_serving_for_the_server_and_its_services() -> None:
    async with serving() as server, open_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for serving_now, status in ((True, "SERVING"), (False, "NOT_SERVING")):
            await server.set_serving(serving_now)
            for name in ("", NAME):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
                assert health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status) == status


async def test_reflection_lists_the_services() -> None:
    async with serving() as server, open_channel(server.address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        answer = await call.read()
        names = {service.name for service in answer.list_services_response.service}
        assert {NAME, "grpc.health.v1.Health"} <= names


async def test_tokens_are_required_in_every_kind_of_call_but_health() -> None:
    async with serving(tokens=("old", "new")) as server:
        for access in (ANONYMOUS, Access(token="wrong"), Access(token="Bearer old")):
            async with stub(server) as worker:
                with pytest.raises(grpc.aio.AioRpcError) as unary:
                    await worker.Describe(DescribeRequest(), metadata=access.metadata)
                assert isinstance(error_from_rpc(unary.value), UnauthenticatedError)
                with pytest.raises(grpc.aio.AioRpcError) as streamed:
                    _ = [m async for m in worker.Watch(WatchRequest(), metadata=access.metadata)]
                assert isinstance(error_from_rpc(streamed.value), UnauthenticatedError)
        for token in ("old", "new"):
            async with stub(server) as worker:
                answer = await worker.Describe(
                    DescribeRequest(known_card_hash="h"), metadata=Access(token=token).metadata
                )
                assert answer.version == "h"
        async with open_channel(server.address) as channel:
            assert await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())


def test_a_token_is_not_shown_by_repr() -> None:
    assert "secret" not in repr(Access(token="secret"))


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, a server certificate for localhost and a client certificate."""
    folder = tmp_path_factory.mktemp("pems")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
            "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test authority")  # fmt: skip
    for name in ("server", "client"):
        openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", "/CN=localhost")  # fmt: skip
        (folder / "ext").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                "-days", "2", "-out", f"{name}.pem", "-extfile", "ext")  # fmt: skip
    return folder


async def test_tls_with_and_without_client_certificates(pems: Path) -> None:
    plain = ServerTls(pems / "server.pem", pems / "server.key")
    mutual = ServerTls(pems / "server.pem", pems / "server.key", client_ca=pems / "ca.pem")
    trusting = Access(tls=ClientTls(root_ca=pems / "ca.pem"))
    known = Access(token="t", tls=ClientTls(pems / "ca.pem", pems / "client.pem", pems / "client.key"))
    async with serving(tls=plain) as server, stub(server, trusting) as worker:
        assert await worker.Describe(DescribeRequest(), timeout=5)
    async with serving(tls=mutual, tokens=("t",)) as server:
        async with stub(server, known) as worker:
            assert await worker.Describe(DescribeRequest(), timeout=5, metadata=known.metadata)
        for access in (trusting, ANONYMOUS):
            async with stub(server, access) as worker:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await worker.Describe(DescribeRequest(), timeout=5)
                assert isinstance(error_from_rpc(caught.value), PeerUnavailableError)


async def test_frequent_pings_over_a_silent_call_do_not_end_the_channel() -> None:
    """CASES G08: matching keepalive on both ends."""
    async with serving() as server:
        eager = (("grpc.keepalive_time_ms", 300), ("grpc.http2.max_pings_without_data", 0))
        options = [*eager, ("grpc.keepalive_permit_without_calls", 1), ("grpc.keepalive_timeout_ms", 2000)]
        async with grpc.aio.insecure_channel(server.address, options=options) as channel:
            call = WorkerServiceStub(channel).Watch(WatchRequest(interval_s=4.5))
            assert (await call.read()).incarnation == "x"


async def test_messages_beyond_four_mebibytes_pass_both_ways() -> None:
    """CASES G09."""
    async with serving() as server, stub(server) as worker:
        text = "x" * (20 * 1024 * 1024)
        assert (await worker.Describe(DescribeRequest(known_card_hash=text))).version == text
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker.Describe(DescribeRequest(known_card_hash="x" * (65 * 1024 * 1024)))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await worker.Drain(DrainRequest()), "the channel still works"


async def test_a_port_in_use_is_an_error_not_a_second_listener() -> None:
    async with serving() as server:
        with pytest.raises(PeerUnavailableError, match="cannot listen"):
            RpcServer(server.address).bind()


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0"])
async def test_a_wildcard_is_refused_as_the_advertised_address(listen: str) -> None:
    """CASES D01."""
    with pytest.raises(InvalidRequestError, match="advertise"):
        RpcServer(listen).bind()
    with pytest.raises(InvalidRequestError, match="advertise"):
        RpcServer("127.0.0.1:0", advertise="0.0.0.0").bind()


def test_advertised_addresses() -> None:
    assert advertised_address("127.0.0.1:0", 5) == "127.0.0.1:5"
    assert advertised_address("0.0.0.0:0", 5, "host") == "host:5"
    assert advertised_address("0.0.0.0:0", 5, "host:7") == "host:7"
    assert advertised_address("0.0.0.0:0", 5, "host:0") == "host:5"
    assert advertised_address("[::]:0", 5, "[fd00::1]") == "[fd00::1]:5"
    assert (is_wildcard("::"), is_wildcard("[::]"), is_wildcard("host")) == (True, True, False)


@pytest.mark.parametrize("address", ["", "host", ":1", "host:", "host:x", "host:99999", "fd00::1:5", "host:-1"])
def test_bad_addresses_name_their_field(address: str) -> None:
    with pytest.raises(InvalidRequestError, match="peer"):
        parse_address(address, field="peer")


class Frozen:
    """Stands between a caller and a server, and from some moment on passes nothing more on, as a frozen peer would."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._passing = asyncio.Event()
        self._passing.set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Frozen":
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        self._server.close()

    def freeze(self) -> None:
        self._passing.clear()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        for source, sink in ((reader, to_writer), (to_reader, writer)):
            self._tasks.add(asyncio.ensure_future(self._pass_on(source, sink)))

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            await self._passing.wait()
            sink.write(data)


async def test_a_frozen_peer_is_noticed_on_both_sides() -> None:
    """Whoever waits, server or caller, learns within `peer_silence_s` that nobody is there any more."""
    silence_s = 1.0
    gone = asyncio.Event()

    class Waiting(Echo):
        async def Watch(self, request: Any, context: Any) -> AsyncIterator[WatchResponse]:
            try:
                yield WatchResponse(incarnation="x")
                await asyncio.sleep(60)
            finally:
                gone.set()

    server = RpcServer("127.0.0.1:0", peer_silence_s=silence_s)
    server.add(add_WorkerServiceServicer_to_server, Waiting(), NAME)
    await server.start()
    try:
        async with Frozen(server.port) as between:
            access = Access(peer_silence_s=silence_s)
            async with open_channel(between.address, access) as channel:
                call = WorkerServiceStub(channel).Watch(WatchRequest())
                assert (await call.read()).incarnation == "x"
                between.freeze()
                async with asyncio.timeout(10 * silence_s):
                    with pytest.raises(grpc.RpcError) as caught:
                        await call.read()
                    await gone.wait()
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        await server.stop(0)
