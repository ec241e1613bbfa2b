"""Other ways to generate, measured beside ours: each in a process of its own, so that threads and memory stay apart.

Between its turns such a process waits on its input and uses no processor. It serves one request at a time; further
ones queue, and their waiting counts, as it would for their users.
"""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from graftline.bench.baseline_protocol import (
    BaselineSettings,
    DoneReply,
    FailedReply,
    GenerateCommand,
    ReadyReply,
    Reply,
    TokensReply,
)
from graftline.bench.target import BenchRequest, Finish, Message
from graftline.errors import CancelledRequestError, GraftlineError, InternalError, InvalidRequestError

_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 10.0
_LINE_BYTES = 16 << 20


class BaselineTarget:
    """A running baseline; see `running_baseline`."""

    def __init__(self, process: Process, threads: int) -> None:
        self.threads = threads
        self._process = process
        self._turn = asyncio.Lock()

    async def stream(self, request: BenchRequest, timeout_s: float) -> AsyncGenerator[Message, None]:
        """See `target.Target`. A request that is given up ends the process: it cannot be cancelled."""
        if request.temperature:
            raise InvalidRequestError("temperature", f"{request.temperature:g}: baselines generate greedily only")
        command = GenerateCommand(prompt=request.prompt, max_tokens=request.max_tokens, ignore_eos=request.ignore_eos)
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                await self._turn.acquire()
        except TimeoutError:
            raise CancelledRequestError(f"the baseline was busy for {timeout_s:g} s") from None
        complete = False
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(msgspec.json.encode(command) + b"\n")
            while not complete:
                reply = await _next_reply(self._process, deadline)
                if isinstance(reply, TokensReply):
                    yield Message(reply.token_ids)
                    continue
                complete = True
                if isinstance(reply, DoneReply):
                    yield Message(finish=Finish(reply.reason, reply.num_prompt_tokens))
                else:
                    raise _error_of(reply)
        finally:
            if not complete and self._process.returncode is None:
                self._process.kill()
            self._turn.release()


@asynccontextmanager
async def running_baseline(settings: BaselineSettings) -> AsyncIterator[BaselineTarget]:
    """Starts a baseline's process, waits until its model is loaded, and ends it.

    Raises:
        GraftlineError: it could not load its model.
    """
    threads = settings.threads or len(os.sched_getaffinity(0))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "graftline.bench.baseline_worker",
        msgspec.json.encode(settings).decode(),
        stdin=PIPE,
        stdout=PIPE,
        limit=_LINE_BYTES,
        env={**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)},
    )
    try:
        reply = await _next_reply(process, asyncio.get_running_loop().time() + _START_TIMEOUT_S)
        if not isinstance(reply, ReadyReply):
            raise _error_of(reply)
        yield BaselineTarget(process, reply.threads)
    finally:
        await _end(process)


async def _next_reply(process: Process, deadline: float) -> Reply:
    """The next line of the process.

    Raises:
        CancelledRequestError: none by `deadline`.
        InternalError: the process ended, or said something else.
    """
    assert process.stdout is not None
    try:
        async with asyncio.timeout_at(deadline):
            line = await process.stdout.readline()
    except TimeoutError:
        raise CancelledRequestError("the baseline did not answer in time") from None
    if not line:
        raise InternalError(f"the baseline's process ended with code {await process.wait()}")
    try:
        return msgspec.json.decode(line, type=Reply)
    except msgspec.DecodeError as error:
        raise InternalError(f"the baseline's process said {line[:200]!r}") from error


def _error_of(reply: Reply) -> GraftlineError:
    if isinstance(reply, FailedReply):
        return InvalidRequestError(reply.field, reply.message) if reply.field else InternalError(reply.message)
    return InternalError(f"the baseline's process said {type(reply).__name__} out of turn")


async def _end(process: Process) -> None:
    if process.returncode is not None:
        return
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
