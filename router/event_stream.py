"""A stream of server-sent events: begun with its first one, and never silent for long."""

import asyncio

from starlette.types import Message, Send

from graftline.write_guard import WriteGuard

_START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}
# Readers of events skip comments (HTML standard, 9.2.6); proxies and clients that end what is silent see bytes.
_COMMENT = b": waiting\n\n"


class EventStream:
    """One response. Whoever writes to it and `keep_alive` may be different tasks.

    Attributes:
        has_started: the status is out: errors are events from now on.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._turn = asyncio.Lock()
        self._is_quiet = True
        self._has_ended = False
        self.has_started = False

    async def write(self, events: bytes, guard: WriteGuard | None = None, *, more: bool = True) -> None:
        """Sends events; without `more` they are the last ones."""
        if guard is not None:
            guard.writing()
        async with self._turn:
            if not self._has_ended:
                self._has_ended = not more
                await self._put(events, more=more)
        if guard is not None:
            guard.written()

    def end(self) -> None:
        """Nothing is to be sent any more."""
        self._has_ended = True

    async def keep_alive(self, interval_s: float) -> None:
        """Sends a comment whenever nothing was sent for `interval_s` (at most twice as long), until cancelled."""
        while True:
            self._is_quiet = True
            await asyncio.sleep(interval_s)
            if self._is_quiet:
                await self.write(_COMMENT)

    async def _put(self, data: bytes, *, more: bool) -> None:
        self._is_quiet = False
        if not self.has_started:
            self.has_started = True
            await self._send(_START)
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
