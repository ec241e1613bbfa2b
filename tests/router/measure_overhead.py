"""What the router adds to a request: time to first token and to the end, over a direct call of the same decode.

Worker, router and caller are processes of their own on loopback; the decode is a stand-in that computes nothing, with
rounds of 3 tokens `--round-ms` apart. Calls of all kinds take turns of a few, so that they meet the same machine.
`bare_call` and `bare_stream` (`bare_proxies.py`) are the floor: the least that a Python proxy adds. `cpu_us` is the
processor time of the process that a call goes to, for one request: unlike latencies it hardly depends on what else the
machine does. Run:

    python tests/router/measure_overhead.py [--requests 2000] [--concurrency 1] [--prompt-chars 200] [--tokens 4]

With `--beside CHECKOUT` the router of another checkout takes its turns as well: the only way to compare two of them on
a machine that changes its speed.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

import uvloop
from bare_proxies import Kind, bare_call, bare_stream, running_proxy
from router_fakes import decode, prefill, started

from graftline.proto.channel import open_channel
from graftline.proto.v1.common_pb2 import SamplingParams, StoppingParams
from graftline.proto.v1.decode_pb2 import DecodeServiceGenerateRequest
from graftline.proto.v1.decode_pb2_grpc import DecodeServiceStub
from graftline.proto.v1.router_pb2 import GenerateRequest
from graftline.proto.v1.router_pb2_grpc import RouterServiceStub
from graftline.worker.process import READY_FD_VARIABLE

Sample = tuple[float, float]
SPAWN = multiprocessing.get_context("spawn")
SOURCES = Path(__file__).resolve().parents[2]
# Calls of one kind in a row.
TURN = 20
WARM_UP_TURNS = 5


@dataclass(frozen=True)
class Target:
    """A process that calls go to."""

    address: str
    pid: int


def run_workers(pipe: Connection) -> None:
    async def main() -> None:
        workers = prefill(), decode(token_delay_s=pipe.recv())
        async with started(*workers):
            pipe.send([worker.address for worker in workers])
            await asyncio.to_thread(pipe.recv)

    run_like_the_command(main())


class RouterProcess:
    """`graftline router` of a checkout, as its users run it."""

    def __init__(self, checkout: Path, prefill_address: str, decode_address: str) -> None:
        read_end, write_end = os.pipe()
        environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), READY_FD_VARIABLE: str(write_end)}
        listening = ["--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--drain-grace-s", "0"]
        workers = ["--prefill", prefill_address, "--decode", decode_address]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "graftline", "router", *listening, *workers], env=environment, pass_fds=(write_end,)
        )
        os.close(write_end)
        with os.fdopen(read_end) as ready:
            self.target = Target(json.loads(ready.readline())["address"], self._process.pid)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(10)


def run_bare_call(pipe: Connection) -> None:
    run_like_the_command(proxy(pipe, bare_call))


def run_bare_stream(pipe: Connection) -> None:
    run_like_the_command(proxy(pipe, bare_stream))


async def proxy(pipe: Connection, kind: Kind) -> None:
    async with running_proxy(kind, pipe.recv()[1]) as address:
        pipe.send(address)
        await asyncio.to_thread(pipe.recv)


def run_like_the_command(main: Coroutine[object, object, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


async def measure(arguments: argparse.Namespace, targets: dict[str, Target]) -> dict[str, object]:
    async with AsyncExitStack() as stack:
        calls: dict[str, Callable[[], Awaitable[Sample]]] = {}
        for kind, target in targets.items():
            channel = await stack.enter_async_context(open_channel(target.address))
            if kind in {"routed", "beside"}:
                calls[kind] = partial(call, RouterServiceStub(channel).Generate, routed_request(arguments))
            else:
                calls[kind] = partial(call, DecodeServiceStub(channel).Generate, direct_request(arguments))
        rounds_a_turn = max(1, TURN // arguments.concurrency)
        num_turns = max(1, arguments.requests // (rounds_a_turn * arguments.concurrency))
        samples: dict[str, list[Sample]] = {kind: [] for kind in calls}
        cpu_s = dict.fromkeys(calls, 0.0)
        kinds = list(calls)
        for number in range(-WARM_UP_TURNS, num_turns):
            # Forwards and backwards, with another first one each time: who comes behind whom counts for a few percent.
            kinds = [*kinds[1:], kinds[0]]
            for kind in kinds if number % 2 else kinds[::-1]:
                before_s = used_cpu_s(targets[kind].pid)
                taken: list[Sample] = []
                for _ in range(rounds_a_turn):
                    taken += await asyncio.gather(*(calls[kind]() for _ in range(arguments.concurrency)))
                if number >= 0:
                    samples[kind] += taken
                    cpu_s[kind] += used_cpu_s(targets[kind].pid) - before_s
    cpu_us = {kind: round(cpu_s[kind] * 1e6 / len(taken), 1) for kind, taken in samples.items()}
    return {"measured": len(samples["routed"]), **summary(samples), "cpu_us": cpu_us}


def prompt_of(arguments: argparse.Namespace) -> str:
    text = "the quick brown fox jumps over the lazy dog. " * 1000
    return text[: arguments.prompt_chars]


def direct_request(arguments: argparse.Namespace) -> DecodeServiceGenerateRequest:
    prompt = prompt_of(arguments)
    return DecodeServiceGenerateRequest(
        request_id="direct",
        attempt=1,
        prefill_address="127.0.0.1:1",
        token_ids=prompt.encode(),
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(top_p=1, seed=1),
        stopping=StoppingParams(max_tokens=arguments.tokens, ignore_eos=True),
    )


def routed_request(arguments: argparse.Namespace) -> GenerateRequest:
    return GenerateRequest(text=prompt_of(arguments), seed=1, max_tokens=arguments.tokens, ignore_eos=True)


async def call(generate: Callable[[Any], AsyncIterator[object]], request: object) -> Sample:
    began = time.perf_counter()
    first_s = 0.0
    async for _ in generate(request):
        first_s = first_s or time.perf_counter() - began
    return first_s, time.perf_counter() - began


def used_cpu_s(pid: int) -> float:
    """Processor time of all threads of a process, to the nanosecond."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def summary(samples: dict[str, list[Sample]]) -> dict[str, object]:
    figures: dict[str, object] = {}
    for index, name in enumerate(("first_token_us", "end_us")):
        for p in (50, 99):
            at_p = {kind: percentile([sample[index] for sample in taken], p) for kind, taken in samples.items()}
            figures[f"{name}_p{p}"] = at_p
            figures[f"{name}_added_p{p}"] = {
                kind: round(value - at_p["direct"], 1) for kind, value in at_p.items() if kind != "direct"
            }
    return figures


def percentile(seconds: list[float], p: int) -> float:
    """In microseconds."""
    return round(statistics.quantiles(seconds, n=100, method="inclusive")[p - 1] * 1e6, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--prompt-chars", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--round-ms", type=float, default=2.0)
    parser.add_argument("--beside", type=Path, help="root of another checkout")
    arguments = parser.parse_args()
    processes: list[tuple[Connection, SpawnProcess]] = []

    def start(run: Callable[[Connection], None], message: object) -> tuple[Any, int]:
        ours, theirs = SPAWN.Pipe()
        process = SPAWN.Process(target=run, args=(theirs,), daemon=True)
        process.start()
        processes.append((ours, process))
        ours.send(message)
        assert process.pid is not None
        return ours.recv(), process.pid

    addresses, worker_pid = start(run_workers, arguments.round_ms / 1000)
    targets = {"direct": Target(addresses[1], worker_pid)}
    checkouts = {"routed": SOURCES} | ({"beside": arguments.beside} if arguments.beside else {})
    routers = {kind: RouterProcess(checkout, *addresses) for kind, checkout in checkouts.items()}
    targets |= {kind: router.target for kind, router in routers.items()}
    for kind, run in (("bare_call", run_bare_call), ("bare_stream", run_bare_stream)):
        targets[kind] = Target(*start(run, addresses))
    figures = asyncio.run(measure(arguments, targets))
    for router in routers.values():
        router.stop()
    for pipe, process in reversed(processes):
        pipe.send("stop")
        process.join(10)
    print(json.dumps({**vars(arguments), **figures}, indent=2, default=str))


if __name__ == "__main__":
    main()
