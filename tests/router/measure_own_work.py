"""What the router itself does for a request: checks, encoding, pairing, messages. gRPC is left out on both sides.

In one process, so that figures are steadier than latencies; the tenth part of the fastest ones counts, since other work
on the machine only adds. `before_us`: from the request's bytes to those that go to the decode; `first_us`: from the
decode's first bytes to those for the client; `whole_us`: all of it, a first token and three more. `cold`: caches are
filled with other data before each request, as they are when little comes. Run, with PYTHONPATH for another checkout's:

    python tests/router/measure_own_work.py [--requests 1500] [--prompt-chars 200]
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

import uvloop
from router_fakes import decode, prefill, started

from graftline.garbage import keep_what_is_there
from graftline.proto.v1.common_pb2 import FinishReason, SpeculationStats, Usage
from graftline.proto.v1.decode_pb2 import (
    CarriedEvent,
    DecodeFinished,
    DecodeServiceGenerateResponse,
    DecodeTokens,
    GenerateManyRequest,
    GenerateManyResponse,
)
from graftline.proto.v1.router_pb2 import GenerateRequest
from graftline.router.config import RouterConfig, WorkerLists
from graftline.router.server import running_router
from graftline.router.service import RouterService
from graftline.router.worker import Role

OTHER_DATA = bytearray(24 << 20)
CACHE_LINE = 64


class Marks:
    """When a request got so far, in nanoseconds."""

    def __init__(self) -> None:
        self.written = self.answered = self.delivered = 0


class Wire:
    """The router's stream to a decode: answers every call at once."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._answers: asyncio.Queue[bytes] = asyncio.Queue()

    async def write(self, message: GenerateManyRequest) -> None:
        message.SerializeToString()
        self._marks.written = time.perf_counter_ns()
        for call in message.calls:
            for answer in answers(call.call_id):
                self._answers.put_nowait(answer)

    async def read(self) -> GenerateManyResponse:
        packed = await self._answers.get()
        self._marks.answered = self._marks.answered or time.perf_counter_ns()
        return GenerateManyResponse.FromString(packed)

    def cancel(self) -> None:
        return


def answers(call_id: int) -> Iterator[bytes]:
    for token_ids in ([100], [101, 102, 103]):
        yield packed(call_id, DecodeServiceGenerateResponse(tokens=DecodeTokens(token_ids=token_ids)))
    finished = DecodeFinished(
        reason=FinishReason.FINISH_REASON_LENGTH,
        usage=Usage(prompt_tokens=200, completion_tokens=4),
        speculation=SpeculationStats(rounds=1, drafted=3, accepted=2),
    )
    yield packed(call_id, DecodeServiceGenerateResponse(finished=finished))


def packed(call_id: int, response: DecodeServiceGenerateResponse) -> bytes:
    return GenerateManyResponse(events=[CarriedEvent(call_id=call_id, response=response)]).SerializeToString()


class Context:
    """Of a client's call."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks

    def time_remaining(self) -> None:
        return

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("user-agent", "a client"),)

    async def write(self, message: Any) -> None:
        message.SerializeToString()
        self._marks.delivered = self._marks.delivered or time.perf_counter_ns()


async def measured(service: RouterService, request: bytes, marks: Marks, count: int, *, cold: bool) -> dict[str, float]:
    """Microseconds."""
    samples: dict[str, list[int]] = {"before_us": [], "first_us": [], "whole_us": []}
    for _ in range(count):
        marks.answered = marks.delivered = 0
        if cold:
            OTHER_DATA[::CACHE_LINE] = bytes(len(OTHER_DATA) // CACHE_LINE)
        began = time.perf_counter_ns()
        await asyncio.create_task(service.Generate(GenerateRequest.FromString(request), Context(marks)))
        samples["whole_us"].append(time.perf_counter_ns() - began)
        samples["before_us"].append(marks.written - began)
        samples["first_us"].append(marks.delivered - marks.answered)
    return {name: round(sorted(taken)[count // 10] / 1000, 1) for name, taken in samples.items()}


async def measure(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    text = ("the quick brown fox jumps over the lazy dog. " * 1000)[: arguments.prompt_chars]
    request = GenerateRequest(text=text, seed=1, max_tokens=4, ignore_eos=True).SerializeToString()
    workers = prefill(), decode()
    async with started(*workers):
        lists = WorkerLists((workers[0].address,), (workers[1].address,))
        async with running_router(RouterConfig(workers=lists, drain_grace_s=0)) as router:
            await router.wait_until_usable(10)
            marks = Marks()
            (worker,) = (worker for worker in router.registry.workers if worker.role is Role.DECODE)
            stub = type("Stub", (), {"GenerateMany": lambda *_, **__: Wire(marks)})
            worker.calls._stub = stub()  # type: ignore[assignment]
            service = RouterService(router.generator, router.registry, router.admission, 30)
            keep_what_is_there()
            return {
                "warm": await measured(service, request, marks, arguments.requests, cold=False),
                "cold": await measured(service, request, marks, arguments.requests // 5, cold=True),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--prompt-chars", type=int, default=200)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
