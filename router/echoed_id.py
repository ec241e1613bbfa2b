"""`x-request-id`: goes back as it came, so that clients and proxies find their requests again.

It names nothing here. One id is sent along with every call that a request of the client's own leads to, and with
retries, so that several of one id may be open.
"""

import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graftline.proto.validation import MAX_REQUEST_ID_CHARS

_NAME = b"x-request-id"


class EchoedId:
    """Middleware: a response has the id of its request, or a drawn one where that has none that is fit to be sent."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        shown = next((value for name, value in scope["headers"] if name == _NAME), b"")
        is_fit = 0 < len(shown) <= MAX_REQUEST_ID_CHARS and all(0x20 <= byte < 0x7F for byte in shown)
        echoed = (_NAME, shown if is_fit else secrets.token_hex(16).encode())

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), echoed]}
            await send(message)

        await self._app(scope, receive, named)
