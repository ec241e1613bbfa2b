"""A child process of a launcher: started in a group of its own, asked for readiness, watched, ended for certain."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from graftline.errors import InternalError
from graftline.worker.process import PARENT_VARIABLE, READY_FD_VARIABLE

TAIL_LINES = 15
_TAIL_BYTES = 16_384


class ChildDiedError(InternalError):
    """A child ended by itself; the message carries the end of its log."""


class Child:
    """One process that runs `graftline ARGUMENTS`.

    Attributes:
        name: what it is called in messages.
        ready: what it said once it could be reached: its addresses.
    """

    def __init__(self, name: str, arguments: Sequence[str], log_path: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.arguments = tuple(arguments)
        self.log_path = log_path
        self.ready: dict[str, str | None] = {}
        self._environment = dict(environment)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Its process id, which is its group's as well."""
        return self._running().pid

    @property
    def returncode(self) -> int | None:
        """None while it runs, and before it was started."""
        return None if self._process is None else self._process.returncode

    @property
    def address(self) -> str:
        """host:port of its gRPC services."""
        address = self.ready["address"]
        assert address is not None, f"{self.name} has no address"
        return address

    async def start(self, timeout_s: float) -> None:
        """Starts it and waits until it is ready.

        Raises:
            ChildDiedError: it ended instead.
            InternalError: it was not ready in time; it has been ended.
            OSError: its log cannot be written.
        """
        read_end, write_end = os.pipe()
        try:
            await self._spawn(write_end)
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        try:
            async with asyncio.timeout(timeout_s):
                line = await _read_line(read_end)
        except TimeoutError as error:
            await self.stop(0)
            raise InternalError(f"{self.name} was not ready within {timeout_s:g} s\n{self.tail()}") from error
        if not line:
            await self._running().wait()
            raise self.death()
        self.ready = json.loads(line)

    async def wait(self) -> int:
        """Until it ended; its exit status, negative for a signal."""
        return await self._running().wait()

    def death(self) -> ChildDiedError:
        """The error that tells how it ended."""
        return ChildDiedError(f"{self.name} {_describe(self.returncode)}\n{self.tail()}")

    def send_signal(self, number: signal.Signals) -> None:
        """Signals the process alone, not its stages. One that is gone is left alone."""
        with contextlib.suppress(ProcessLookupError):
            self._running().send_signal(number)

    def kill_group(self) -> None:
        """Kills the process and all its stages at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def stop(self, grace_s: float) -> int:
        """SIGTERM, then after `grace_s` a kill; nothing of its group is left afterwards. The exit status."""
        if self._process is None:
            return 0
        if self.returncode is None and grace_s > 0:
            self.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._running().wait()
        self.kill_group()
        return await self._running().wait()

    def tail(self, num_lines: int = TAIL_LINES) -> str:
        """The last lines it logged."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                lines = log.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return "(no log)"
        return "\n".join(f"  {self.name}: {line}" for line in lines[-num_lines:])

    async def _spawn(self, ready_fd: int) -> None:
        environment = {
            **os.environ,
            **self._environment,
            READY_FD_VARIABLE: str(ready_fd),
            PARENT_VARIABLE: str(os.getpid()),
        }
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "graftline",
                *self.arguments,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(ready_fd,),
                start_new_session=True,
            )

    def _running(self) -> asyncio.subprocess.Process:
        assert self._process is not None, f"{self.name} was not started"
        return self._process


async def _read_line(descriptor: int) -> bytes:
    """The first line that comes out of a pipe; empty at its end."""
    reader = asyncio.StreamReader()
    pipe = os.fdopen(descriptor, "rb", buffering=0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        return await reader.readline()
    finally:
        transport.close()


def _describe(returncode: int | None) -> str:
    if returncode is None:
        return "is running"
    if returncode < 0:
        return f"was ended by {signal.Signals(-returncode).name}"
    return f"ended with status {returncode}"
