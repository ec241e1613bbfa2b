"""Processes of later stages, forked once the libraries are imported and before anything runs.

Importing takes most of the seconds that a worker needs to start, and a fork takes none of them. It is only safe while
there is one thread and no GPU, port or transfer engine in use: so it comes first, and the forked processes wait until
the pipeline has a place for them.
"""

import contextlib
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection

from graftline.engine.pipeline import StageProcess
from graftline.worker.process import READY_FD_VARIABLE


class EarlyStage:
    """A forked process that waits for its orders; it ends when this process does."""

    def __init__(self, run: Callable[[], None]) -> None:
        context = multiprocessing.get_context("fork")
        theirs, self._orders = context.Pipe(duplex=False)
        # A daemon: an interpreter that ends waits for its other children, and these wait for its orders.
        self._process = context.Process(target=_wait_and_run, args=(theirs, self._orders, run), daemon=True)
        self._process.start()
        theirs.close()

    def order(self, environment: Mapping[str, str]) -> None:
        """Says what to do, as variables. A process that is gone is noticed by who waits for its stage."""
        with contextlib.suppress(BrokenPipeError):
            self._orders.send_bytes(json.dumps(dict(environment)).encode())
        self._orders.close()

    def poll(self) -> int | None:
        """See `StageProcess`."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """See `StageProcess`."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError
        return self._process.exitcode

    def kill(self) -> None:
        """See `StageProcess`."""
        self._process.kill()


def fork_stages(count: int, run: Callable[[], None]) -> tuple[EarlyStage, ...]:
    """Forks `count` processes that will call `run`, which must not return."""
    sys.stdout.flush()
    sys.stderr.flush()
    return tuple(EarlyStage(run) for _ in range(count))


def orders_taken_by(early: tuple[EarlyStage, ...]) -> Callable[[Mapping[str, str]], StageProcess]:
    """Gives each call's variables to another one of the processes."""
    waiting = list(early)

    def start(environment: Mapping[str, str]) -> StageProcess:
        stage = waiting.pop()
        stage.order(environment)
        return stage

    return start


def _wait_and_run(orders: Connection, writer: Connection, run: Callable[[], None]) -> None:
    """In the forked process."""
    # The parent's end: as long as this process had it too, the parent's death would not show.
    writer.close()
    # The launcher waits for this descriptor's end to learn of the worker's death.
    ready = os.environ.pop(READY_FD_VARIABLE, None)
    if ready is not None:
        os.close(int(ready))
    try:
        environment = json.loads(orders.recv_bytes())
    except EOFError:
        os._exit(0)
    os.environ.update(environment)
    run()
