"""Sends requests to a target, closed loop or at Poisson times, and records what arrives when."""

import asyncio
import hashlib
import random
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import grpc

from graftline.bench.records import Arrival, RequestRecord
from graftline.bench.target import BenchRequest, Finish, Target
from graftline.errors import GraftlineError
from graftline.proto.status import status_of


@dataclass(frozen=True, slots=True)
class Concurrency:
    """Closed loop: `num_open` requests are open at any time, a new one follows each that ends."""

    num_open: int

    @property
    def label(self) -> str:
        """As it stands in results."""
        return f"concurrency {self.num_open}"


@dataclass(frozen=True, slots=True)
class PoissonRate:
    """Open loop: requests fall due at random times, whatever the system does with the earlier ones.

    Attributes:
        per_s: mean rate.
        seed: equal seeds give equal times, for every variant.
        max_open: a request due while this many are open is not sent and counts as failed, so that a system
            which cannot keep up shows it without taking the machine down.
    """

    per_s: float
    seed: int
    max_open: int = 512

    @property
    def label(self) -> str:
        """As it stands in results."""
        return f"rate {self.per_s:g}/s"

    def due_times_s(self, count: int) -> list[float]:
        """When each of `count` requests is due, counted from the start; the first one at once."""
        generator = random.Random(self.seed)
        times = [0.0]
        while len(times) < count:
            times.append(times[-1] + generator.expovariate(self.per_s))
        return times[:count]


Load = Concurrency | PoissonRate


async def send_all(
    target: Target,
    requests: Sequence[BenchRequest],
    load: Load,
    *,
    timeout_s: float,
    on_done: Callable[[RequestRecord], None] = lambda _record: None,
) -> list[RequestRecord]:
    """Sends every request under `load` and waits for all of them.

    Args:
        timeout_s: bound of each single request.
        on_done: told of each request as it ends.

    Returns:
        One record per request, in the order of `requests`; failures are records too.
    """
    start = time.monotonic()
    records: dict[int, RequestRecord] = {}

    async def send(index: int, due_s: float) -> None:
        records[index] = await _send_one(target, requests[index], index, start, due_s, timeout_s)
        on_done(records[index])

    if isinstance(load, Concurrency):
        waiting = iter(range(len(requests)))

        async def worker() -> None:
            for index in waiting:
                await send(index, time.monotonic() - start)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(load.num_open, len(requests))):
                group.create_task(worker())
    else:
        num_open = 0

        async def send_counted(index: int, due_s: float) -> None:
            nonlocal num_open
            num_open += 1
            try:
                await send(index, due_s)
            finally:
                num_open -= 1

        async with asyncio.TaskGroup() as group:
            for index, due_s in enumerate(load.due_times_s(len(requests))):
                await asyncio.sleep(max(0.0, start + due_s - time.monotonic()))
                if num_open >= load.max_open:
                    records[index] = _not_sent(requests[index], index, due_s, load.max_open)
                    on_done(records[index])
                else:
                    group.create_task(send_counted(index, due_s))
    return [records[index] for index in range(len(requests))]


def code_name(error: GraftlineError) -> str:
    """The gRPC code name of an error."""
    number = status_of(error).code
    return next(code.name for code in grpc.StatusCode if code.value[0] == number)


async def _send_one(
    target: Target, request: BenchRequest, index: int, start: float, due_s: float, timeout_s: float
) -> RequestRecord:
    due = start + due_s
    sent_s = _rounded(time.monotonic() - due)
    arrivals: list[Arrival] = []
    digest = hashlib.sha256()
    finish: Finish | None = None
    failure: GraftlineError | None = None
    try:
        async with aclosing(target.stream(request, timeout_s)) as messages:
            async for message in messages:
                if message.token_ids:
                    arrivals.append(Arrival(_rounded(time.monotonic() - due), len(message.token_ids)))
                    digest.update(b"".join(token_id.to_bytes(4, "little") for token_id in message.token_ids))
                finish = message.finish or finish
    except GraftlineError as error:
        failure = error
    end_s = _rounded(time.monotonic() - due)
    code = code_name(failure) if failure else ("" if finish else "INCOMPLETE")
    return RequestRecord(
        index=index,
        prompt_id=request.prompt.id,
        kind=request.prompt.kind,
        due_s=_rounded(due_s),
        sent_s=sent_s,
        end_s=end_s,
        arrivals=tuple(arrivals),
        output_hash=digest.hexdigest()[:16],
        num_prompt_tokens=finish.num_prompt_tokens if finish else 0,
        num_cached_tokens=finish.num_cached_tokens if finish else 0,
        finish_reason=finish.reason if finish else "",
        attempts=finish.attempts if finish else 0,
        speculation=finish.speculation if finish else None,
        handoff=finish.handoff if finish else None,
        error=code,
        error_message=str(failure) if failure else ("" if finish else "the stream ended without a finish"),
    )


def _rounded(seconds: float) -> float:
    """To microseconds: more digits are noise, and results are files."""
    return round(seconds, 6)


def _not_sent(request: BenchRequest, index: int, due_s: float, max_open: int) -> RequestRecord:
    return RequestRecord(
        index=index,
        prompt_id=request.prompt.id,
        kind=request.prompt.kind,
        due_s=_rounded(due_s),
        sent_s=0.0,
        end_s=0.0,
        arrivals=(),
        error="NOT_SENT",
        error_message=f"{max_open} requests were open when it fell due",
    )
