"""Manners of a process: it dies with its parent, logs one line an event, and stops on SIGTERM or SIGINT."""

import asyncio
import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

PARENT_VARIABLE = "GRAFTLINE_PARENT"
READY_FD_VARIABLE = "GRAFTLINE_READY_FD"
_PARENT_POLL_S = 0.5
_LAST_WORDS_S = 10.0
_STANDARD_ERROR = 2


def begin_process() -> None:
    """What comes before everything else in a process.

    The first process of a container has no default for signals: until somebody handles them, SIGTERM is ignored while
    libraries and weights load, and the container is killed at the end of its patience. And where a standard stream is
    closed, the next file or socket takes its number, and whatever is printed goes there.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STANDARD_ERROR:
        pass
    os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))  # noqa: SIM115
    if os.getpid() == 1:
        end_on_signals()


def end_on_signals() -> None:
    """SIGTERM and SIGINT end this process, with the status that a shell gives for them, until others handle them."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os._exit(128 + number))


def die_with_parent(expected_pid: int | None = None, *, last_words_s: float = _LAST_WORDS_S) -> None:
    """Ends this process when its parent dies, so that nothing is left running.

    A thread looks: the kernel's own parent-death signal goes by the parent's thread, which may end early.

    Args:
        expected_pid: notices as well a parent that died before this call.
        last_words_s: from a SIGTERM to itself, which lets it stop in order, to its exit; 0: an exit at once.
    """
    parent = os.getppid() if expected_pid is None else expected_pid
    threading.Thread(target=_watch_parent, args=(parent, last_words_s), name="parent-watch", daemon=True).start()


def outlive_signals(exit_after_s: float | None) -> None:
    """For a later stage: SIGINT and SIGTERM go to all processes of a terminal or a job, but the first stage drains
    first and then says stop.

    Args:
        exit_after_s: from a signal to an exit all the same; None: signals are ignored.
    """
    armed = threading.Event()

    def on_signal(*_: object) -> None:
        if exit_after_s is not None and not armed.is_set():
            armed.set()
            timer = threading.Timer(exit_after_s, os._exit, (0,))
            timer.daemon = True
            timer.start()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)


def die_with_launcher() -> None:
    """The same for the launcher that started this process, if one did; not inherited by processes started from here."""
    launcher = os.environ.pop(PARENT_VARIABLE, None)
    if launcher is not None:
        die_with_parent(int(launcher))


def _watch_parent(parent: int, last_words_s: float) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    if last_words_s > 0:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(last_words_s)
    os._exit(1)


def set_up_logging(name: str, level: int = logging.INFO) -> None:
    """One line an event on standard error, with the name of the process; SIGUSR1 adds the stacks of all threads."""
    faulthandler.register(signal.SIGUSR1)
    logging.basicConfig(
        level=level,
        stream=sys.stderr,
        format=f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s",
        force=True,
    )


def end_process(status: int) -> NoReturn:
    """Ends the process without taking libraries apart: a transfer engine that has peers hangs for seconds in its
    destructor. Everything of ours has been stopped before.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextmanager
def stop_signals() -> Iterator[asyncio.Event]:
    """An event that SIGTERM and SIGINT set while the block is open. A second signal of either kind ends the process."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(130)
        stop.set()

    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def is_launched() -> bool:
    """Whether a launcher waits for `announce_ready`."""
    return READY_FD_VARIABLE in os.environ


def announce_ready(**facts: str | None) -> None:
    """Tells the launcher, if there is one, under which addresses this process can be reached."""
    descriptor = os.environ.pop(READY_FD_VARIABLE, None)
    if descriptor is None:
        return
    with contextlib.suppress(BrokenPipeError), os.fdopen(int(descriptor), "w") as pipe:
        pipe.write(json.dumps(facts) + "\n")


async def first_of(*events: asyncio.Event) -> None:
    """Until one of the events is set."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for future in waiting:
            future.cancel()
