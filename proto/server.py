"""An aio gRPC server as every Graftline process runs it: health, reflection, shared options, TLS, bearer tokens.

server = RpcServer("127.0.0.1:0", tokens=[token])
server.add(add_WorkerServiceServicer_to_server, servicer, "graftline.v1.WorkerService")
await server.start()          # server.port, server.address
await server.set_serving(True)
await server.stop(grace_s=5)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from graftline.errors import PeerUnavailableError, UnauthenticatedError
from graftline.proto.address import advertised_address, parse_address
from graftline.proto.bearer import BearerTokens
from graftline.proto.channel_options import PEER_SILENCE_S, server_options
from graftline.proto.status import abort_with

S = TypeVar("S")
_OPEN_TO_ALL = "/grpc.health.v1.Health/"


@dataclass(frozen=True, slots=True)
class ServerTls:
    """PEM files. With `client_ca` callers must show a certificate of that authority (mutual TLS)."""

    certificate: Path
    private_key: Path
    client_ca: Path | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """Reads the files."""
        pair = (self.private_key.read_bytes(), self.certificate.read_bytes())
        if self.client_ca is None:
            return grpc.ssl_server_credentials([pair])
        return grpc.ssl_server_credentials(
            [pair], root_certificates=self.client_ca.read_bytes(), require_client_auth=True
        )


class BearerTokenInterceptor(aio.ServerInterceptor):
    """Refuses calls without an accepted bearer token. Health checks stay open: probes carry none."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._accepted = BearerTokens(tokens)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Passes accepted calls on; answers others with UNAUTHENTICATED in the method's own shape."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_OPEN_TO_ALL):
            return handler
        return handler if self._accepts(handler_call_details.invocation_metadata) else _refusing(handler)

    def _accepts(self, metadata: Sequence[tuple[str, str | bytes]]) -> bool:
        shown = next((value for key, value in metadata if key == "authorization"), "")
        shown_bytes = shown if isinstance(shown, bytes) else shown.encode("utf-8", "replace")
        return self._accepted.accept(shown_bytes)


class RpcServer:
    """Owns one aio server, its port and its health answers."""

    def __init__(
        self,
        listen: str,
        *,
        advertise: str | None = None,
        tls: ServerTls | None = None,
        tokens: Sequence[str] = (),
        peer_silence_s: float = PEER_SILENCE_S,
        interceptors: Sequence[aio.ServerInterceptor] = (),
    ) -> None:
        """Raises InvalidRequestError for an address that cannot be parsed; see `start` for the rest."""
        parse_address(listen, field="listen")
        guards = [BearerTokenInterceptor(tokens)] if tokens else []
        self.server = aio.server(options=server_options(peer_silence_s), interceptors=[*guards, *interceptors])
        self.port = 0
        self.address = ""
        self._listen = listen
        self._advertise = advertise
        self._tls = tls
        self._service_names: list[str] = []
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)

    def add(self, adder: Callable[[S, Any], None], servicer: S, service_name: str) -> None:
        """Adds a service: its generated `add_…Servicer_to_server`, the servicer, and its full proto name."""
        adder(servicer, self.server)
        self._service_names.append(service_name)

    def bind(self) -> int:
        """Opens the port (the OS chooses for port 0) and settles `port` and `address`.

        Raises:
            InvalidRequestError: the advertised address would be a wildcard.
            PeerUnavailableError: the port cannot be opened.
        """
        if self.port:
            return self.port
        host, _ = parse_address(self._listen, field="listen")
        advertised_address(self._listen, 1, self._advertise)
        try:
            if self._tls is None:
                self.port = self.server.add_insecure_port(self._listen)
            else:
                self.port = self.server.add_secure_port(self._listen, self._tls.credentials())
        except RuntimeError as error:
            raise PeerUnavailableError(f"cannot listen on {self._listen}: {error}") from error
        if self.port == 0:
            raise PeerUnavailableError(f"cannot listen on {self._listen}")
        self.address = advertised_address(f"{host}:{self.port}", self.port, self._advertise)
        return self.port

    async def start(self) -> None:
        """Binds when needed and starts; health says NOT_SERVING until `set_serving(True)`. Raises as `bind`."""
        self.bind()
        names = (*self._service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.server)
        await self.set_serving(False)
        await self.server.start()

    async def set_serving(self, serving: bool) -> None:
        """What health answers for the whole server ("") and each of its services."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._service_names):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, lets open ones run for `grace_s` seconds, then cancels them."""
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)

    async def wait(self) -> None:
        """Until the server has stopped."""
        await self.server.wait_for_termination()


def _refusing(handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(_: Any, context: Any) -> None:
        await abort_with(context, UnauthenticatedError("a bearer token is required in the authorization metadata"))

    async def refuse_stream(_: Any, context: Any) -> Any:
        await refuse(_, context)
        yield

    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse_stream)
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler(refuse)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse_stream)
    return grpc.unary_unary_rpc_method_handler(refuse)
