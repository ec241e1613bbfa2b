"""Runs an ASGI application with uvicorn inside a running event loop; signals stay with the process's main."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp

from graftline.errors import PeerUnavailableError
from graftline.proto.address import parse_address
from graftline.proto.server import ServerTls
from graftline.router.http_connection import KEEP_ALIVE_S, HttpConnection, notice_lost_peers, one_length

BACKLOG = 4096


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.has_started = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.has_started.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def running_http(app: ASGIApp, listen: str, *, tls: ServerTls | None) -> AsyncIterator[str]:
    """Serves `app` for as long as the block is open; yields host:port. What is open at the end is cut within a second.

    Raises:
        PeerUnavailableError: the port cannot be opened.
    """
    listening = _listening_socket(listen)
    host, _ = parse_address(listen)
    config = uvicorn.Config(
        one_length(app),
        http=HttpConnection,
        ws="none",
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_S,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
        ssl_certfile=tls.certificate if tls else None,
        ssl_keyfile=tls.private_key if tls else None,
        ssl_ca_certs=str(tls.client_ca) if tls and tls.client_ca else None,
        ssl_cert_reqs=ssl.CERT_REQUIRED if tls and tls.client_ca else ssl.CERT_NONE,
    )
    server = _Server(config)
    failure: Exception | None = None
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve(sockets=[listening]), name="http")
        await server.has_started.wait()
        try:
            yield f"{host}:{listening.getsockname()[1]}"
        except Exception as error:
            # Raised again below: a task group would wrap it.
            failure = error
        finally:
            server.should_exit = True
    if failure is not None:
        raise failure


def _listening_socket(listen: str) -> socket.socket:
    host, port = parse_address(listen)
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        notice_lost_peers(listening)
        listening.bind((host.strip("[]"), port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise PeerUnavailableError(f"cannot listen on {listen}: {error}") from error
    listening.setblocking(False)
    return listening
