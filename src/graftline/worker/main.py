"""The life of a worker's process: start, say that it is ready, serve until told to stop or the engine fails."""

import asyncio
import logging
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Protocol

import uvloop

from graftline.garbage import keep_what_is_there
from graftline.worker.host import WorkerHost
from graftline.worker.process import announce_ready, first_of, stop_signals

logger = logging.getLogger(__name__)


class Hosted(Protocol):
    """A running worker of either role."""

    @property
    def host(self) -> WorkerHost:
        """What it runs in."""


def run_worker(running: Callable[[], AbstractAsyncContextManager[Hosted]]) -> int:
    """Runs a worker's process.

    Returns:
        The exit status: 0 after SIGTERM or SIGINT, 1 when the engine failed.
    """
    # Until it serves there is nothing to drain: signals end the process at once, and its stages follow.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(running))


async def _serve(running: Callable[[], AbstractAsyncContextManager[Hosted]]) -> int:
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(running())
        host = worker.host
        keep_what_is_there()
        with stop_signals() as stop:
            announce_ready(address=host.address, metrics=host.metrics_address, incarnation=host.identity.incarnation)
            await first_of(stop, host.failed)
            logger.info("stopping: %s", host.failure or "told to")
            await stack.aclose()
        return 0 if host.failure is None else 1
