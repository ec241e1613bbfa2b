"""Request bodies of HTTP: bounded in size, in time, and in what all of them hold together."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect, Request

from graftline.errors import InvalidRequestError, OutOfCapacityError

# A prompt of a million tokens fits twice. Decoding JSON holds the interpreter: half a second for this much of the
# smallest values there are, where 64 MiB of them held up every client's stream for seconds.
MAX_BODY_BYTES = 16 * 1024 * 1024
# Of all bodies that are on their way or being translated, which no admission has counted yet.
MAX_HELD_BYTES = 512 * 1024 * 1024
# A client reads the answer once it has sent everything: what is too long is read on up to here, and forgotten.
MAX_DISCARDED_BYTES = 256 * 1024 * 1024
BODY_TIMEOUT_S = 120.0


class Bodies:
    """The bodies of one server.

    Args:
        timeout_s: for a whole body to arrive.

    Attributes:
        held_bytes: of all bodies that somebody reads or translates.
    """

    def __init__(self, timeout_s: float = BODY_TIMEOUT_S, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self._timeout_s = timeout_s
        self._max_held_bytes = max_held_bytes
        self.held_bytes = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The whole body, which counts as held until the block is left.

        Raises:
            InvalidRequestError: it is too long, too slow, or compressed.
            OutOfCapacityError: too much is held.
        """
        pieces: list[bytes] = []
        held = num_bytes = 0
        try:
            async with asyncio.timeout(self._timeout_s):
                async for piece in request.stream():
                    num_bytes += len(piece)
                    if num_bytes > MAX_BODY_BYTES:
                        self.held_bytes, held = self.held_bytes - held, 0
                        pieces.clear()
                        if num_bytes > MAX_DISCARDED_BYTES:
                            break
                        continue
                    pieces.append(piece)
                    held += len(piece)
                    self.held_bytes += len(piece)
                    if self.held_bytes > self._max_held_bytes:
                        raise OutOfCapacityError(f"bodies of {self.held_bytes} bytes are being read", retry_after_s=1.0)
            if num_bytes > MAX_BODY_BYTES:
                raise InvalidRequestError("body", f"is longer than {MAX_BODY_BYTES} bytes")
            encoding = request.headers.get("content-encoding", "identity")
            if encoding.lower() != "identity":
                raise InvalidRequestError("content-encoding", f"{encoding[:80]!r} is not supported; send it as it is")
            yield b"".join(pieces)
        except TimeoutError:
            raise InvalidRequestError("body", f"did not arrive within {self._timeout_s:g} s") from None
        except ClientDisconnect:
            raise InvalidRequestError("body", "the client went away while sending it") from None
        finally:
            self.held_bytes -= held
