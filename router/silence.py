"""Ends an attempt whose decode says nothing for long, though the worker as a whole looks well."""

import asyncio
from types import TracebackType
from typing import Self

from graftline.router.pairing import Claim


class SilenceTimer:
    """Around an attempt; `heard()` on every message. Acts between one and two timeouts after the last one.

    Args:
        timeout_s: seconds of silence.
        claim: revoked then, to the decode's account.
    """

    def __init__(self, timeout_s: float, claim: Claim) -> None:
        self._timeout_s = timeout_s
        self._claim = claim
        self._loop = asyncio.get_running_loop()
        self._was_heard = False
        self._timer: asyncio.TimerHandle | None = None

    def heard(self) -> None:
        """A message came."""
        self._was_heard = True

    def __enter__(self) -> Self:
        self._timer = self._loop.call_later(self._timeout_s, self._look)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        if not self._was_heard:
            self._claim.revoke(self._claim.pair.decode, f"said nothing about a request for {self._timeout_s:g} s")
            return
        self._was_heard = False
        self._timer = self._loop.call_later(self._timeout_s, self._look)
