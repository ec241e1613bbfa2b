"""A connection of the HTTP server: what uvicorn's own leaves open, which callers without a token can use up.

Heads that never become whole, requests that say their length in two ways, and peers that are gone without a word.
"""

import asyncio
import socket
from typing import Any

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from graftline.errors import InvalidRequestError
from graftline.router.openai.errors import error_body

# Proxies keep idle connections for 60 s (nginx, most cloud balancers) or 90 s (Go) and send the next request into one;
# whoever closes first must not be the server.
KEEP_ALIVE_S = 120
# From a connection's begin, or the first byte of a further request, to the end of that request's head.
HEAD_TIMEOUT_S = 30.0
# A peer that went away without a word: probes after so many seconds of silence, and so many of them.
_PROBE_AFTER_S, _PROBE_INTERVAL_S, _NUM_PROBES = 15, 5, 3
_UNACKNOWLEDGED_MS = 30_000

_BOTH_LENGTHS = InvalidRequestError("transfer-encoding", "comes with a content-length")


class HttpConnection(H11Protocol):
    """Gives a connection up on which no head becomes whole in time."""

    head_timeout_s = HEAD_TIMEOUT_S
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A peer has connected."""
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        """Bytes of a request."""
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        super().connection_lost(exc)
        self._forget_head()

    def _watch_head(self) -> None:
        """Starts the clock where a request is wanted, and stops it where one is being served."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget_head()
        elif self._head_timer is None and self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._give_up)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


def one_length(app: ASGIApp) -> ASGIApp:
    """Refuses requests with both a transfer encoding and a length, and ends their connection: a proxy in front that
    counts by the other one would take the rest of a body for somebody else's request (RFC 9112, 6.3).
    """

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope["headers"]} if scope["type"] == "http" else set()
        if not {b"content-length", b"transfer-encoding"} <= names:
            await app(scope, receive, send)
            return
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 400, "headers": headers})
        await send({"type": "http.response.body", "body": msgspec.json.encode(error_body(_BOTH_LENGTHS))})

    return checked


def notice_lost_peers(listening: socket.socket) -> None:
    """Lets the system end accepted connections whose peer answers nothing any more."""
    options: dict[str, Any] = {
        "TCP_KEEPIDLE": _PROBE_AFTER_S,
        "TCP_KEEPINTVL": _PROBE_INTERVAL_S,
        "TCP_KEEPCNT": _NUM_PROBES,
        "TCP_USER_TIMEOUT": _UNACKNOWLEDGED_MS,
    }
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if hasattr(socket, name):  # where it is not, the system's own patience holds
            listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
