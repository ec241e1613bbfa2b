"""Waiting for what no event tells."""

import asyncio
import time
from collections.abc import Callable

POLL_S = 0.02


async def eventually(check: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Until `check()` holds; it may block, and runs in a thread. Fails after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not await asyncio.to_thread(check):
        assert time.monotonic() < deadline_s, f"not in {timeout_s} s: {what}"
        await asyncio.sleep(POLL_S)
