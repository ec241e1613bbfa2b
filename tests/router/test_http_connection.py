"""Connections of the HTTP server as callers may misuse them, and as proxies use them."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
from router_fakes import decode, prefill
from router_harness import harness

from graftline.proto.address import parse_address
from graftline.router.http_connection import KEEP_ALIVE_S, HttpConnection, notice_lost_peers

BODY = b'{"prompt":"a","max_tokens":1}'
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def completion(headers: bytes = LENGTH, body: bytes = BODY) -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n" + body


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[Streams]:
    async with harness(prefill(), decode(), http_listen="127.0.0.1:0") as h:
        reader, writer = await asyncio.open_connection(*parse_address(str(h.router.http_address)))
        yield reader, writer
        writer.close()


async def everything(reader: asyncio.StreamReader, timeout_s: float = 5) -> bytes:
    """What comes until the server closes."""
    async with asyncio.timeout(timeout_s):
        return await reader.read()


async def test_a_request_with_two_lengths_is_refused_and_nothing_behind_it_served() -> None:
    """CASES Z51: what follows would be another caller's request to one of the two that read the connection."""
    async with connected() as (reader, writer):
        headers = LENGTH + b"Transfer-Encoding: chunked\r\n"
        writer.write(completion(headers, b"0\r\n\r\nGET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"))
        answered = await everything(reader)
        assert answered.startswith(b"HTTP/1.1 400 ")
        assert b'"param":"transfer-encoding"' in answered
        assert answered.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    "head",
    [
        LENGTH + b"Content-Length: 5\r\n",
        b"Content-Length: -1\r\n",
        b"Content-Length: +29\r\n",
        b"Content Length: 5\r\n",
    ],
)
async def test_a_malformed_head_ends_the_connection(head: bytes) -> None:
    """CASES Z51: no request is made of what cannot be read in one way only."""
    async with connected() as (reader, writer):
        writer.write(completion(head) * 2)
        answered = await everything(reader)
        assert answered.startswith(b"HTTP/1.1 400 ")
        assert answered.count(b"HTTP/1.1") == 1


async def test_a_head_that_does_not_become_whole_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES Z52: idle connections, dripped heads, and heads behind a served request; a slow answer is none of them."""
    monkeypatch.setattr(HttpConnection, "head_timeout_s", 0.3)
    async with connected() as (reader, _):
        assert await everything(reader) == b""
    async with connected() as (reader, writer):
        writer.write(completion())
        assert (await reader.readuntil(b"\r\n")).endswith(b"200 OK\r\n")
        await asyncio.sleep(0.5)
        writer.write(completion())  # idle for longer than a head may take is what proxies are
        await reader.readuntil(b"200 OK\r\n")
        for byte in b"POST /v1":
            writer.write(bytes([byte]))
            await asyncio.sleep(0.02)
        await everything(reader)


async def test_a_served_request_takes_as_long_as_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES Z52: the clock is that of heads alone."""
    monkeypatch.setattr(HttpConnection, "head_timeout_s", 0.1)
    async with harness(prefill(), decode(token_delay_s=0.1), http_listen="127.0.0.1:0") as h:
        reader, writer = await asyncio.open_connection(*parse_address(str(h.router.http_address)))
        body = b'{"prompt":"a","max_tokens":5}'
        writer.write(completion(LENGTH, body))
        answered = await reader.readuntil(b'"finish_reason":"length"')
        assert answered.startswith(b"HTTP/1.1 200")
        writer.close()


async def test_an_unread_body_ends_the_connection() -> None:
    """CASES Z52: a refused caller cannot go on sending."""
    async with harness(prefill(), decode(), http_listen="127.0.0.1:0", tokens=("secret",)) as h:
        reader, writer = await asyncio.open_connection(*parse_address(str(h.router.http_address)))
        writer.write(completion(b"Content-Length: 1000000000\r\n"))
        answered = await everything(reader)
        assert answered.startswith(b"HTTP/1.1 401 ")
        writer.close()


def test_the_server_keeps_connections_longer_than_proxies_do() -> None:
    """CASES G51: a request that a proxy sends into a connection just closed is a 502 of its."""
    assert KEEP_ALIVE_S > 90


async def test_connections_stay_open_and_lost_peers_are_noticed() -> None:
    """CASES G51, G52: a second request a while later is served on the same connection; the system probes its peer."""
    with socket.socket() as listening:
        notice_lost_peers(listening)
        assert listening.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 15
        assert listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
    async with connected() as (reader, writer):
        for _ in range(2):
            writer.write(completion())
            assert (await reader.readuntil(b"\r\n")).endswith(b"200 OK\r\n")
            await reader.readuntil(b"}}}")
