"""What the router adds to a request: time to first token and to the end, over a direct call of the same decode.

Worker, router and caller are processes of their own on loopback; the decode is a stand-in that answers at once, so
that the difference is the router's alone. Direct and routed calls alternate. `router_cpu_us` is the processor time that
the router spends on one request: unlike latencies it hardly depends on what else the machine does. Run:

    python tests/router/measure_overhead.py [--requests 2000] [--concurrency 1] [--prompt-chars 200] [--tokens 4]
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

import uvloop
from router_fakes import decode, prefill, started

from graftline.bench.processes import cpu_times_s
from graftline.proto.channel import open_channel
from graftline.proto.v1.common_pb2 import SamplingParams, StoppingParams
from graftline.proto.v1.decode_pb2 import DecodeServiceGenerateRequest
from graftline.proto.v1.decode_pb2_grpc import DecodeServiceStub
from graftline.proto.v1.router_pb2 import GenerateRequest
from graftline.proto.v1.router_pb2_grpc import RouterServiceStub
from graftline.router.config import RouterConfig, WorkerLists
from graftline.router.server import running_router

Sample = tuple[float, float]


def run_workers(pipe: Connection) -> None:
    async def main() -> None:
        workers = prefill(), decode()
        async with started(*workers):
            pipe.send([worker.address for worker in workers])
            await asyncio.to_thread(pipe.recv)

    asyncio.run(main())


def run_router(pipe: Connection, addresses: list[str]) -> None:
    async def main() -> None:
        lists = WorkerLists((addresses[0],), (addresses[1],))
        async with running_router(RouterConfig(workers=lists, drain_grace_s=0)) as router:
            await router.wait_until_usable(10)
            pipe.send(router.address)
            await asyncio.to_thread(pipe.recv)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as `graftline router`
        runner.run(main())


async def measure(
    arguments: argparse.Namespace, decode_address: str, router_address: str, router_pid: int
) -> dict[str, object]:
    prompt = ("the quick brown fox jumps over the lazy dog. " * 1000)[: arguments.prompt_chars]
    direct_request = DecodeServiceGenerateRequest(
        request_id="direct",
        attempt=1,
        prefill_address="127.0.0.1:1",
        token_ids=prompt.encode(),
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(top_p=1, seed=1),
        stopping=StoppingParams(max_tokens=arguments.tokens, ignore_eos=True),
    )
    routed_request = GenerateRequest(text=prompt, seed=1, max_tokens=arguments.tokens, ignore_eos=True)
    async with open_channel(decode_address) as direct_channel, open_channel(router_address) as routed_channel:
        direct, routed = DecodeServiceStub(direct_channel), RouterServiceStub(routed_channel)

        async def call(method: Callable[..., object], request: object) -> Sample:
            began = time.perf_counter()
            first_s = 0.0
            async for _ in method(request):  # type: ignore[attr-defined]
                first_s = first_s or time.perf_counter() - began
            return first_s, time.perf_counter() - began

        async def one_direct() -> Sample:
            return await call(direct.Generate, direct_request)

        async def one_routed() -> Sample:
            return await call(routed.Generate, routed_request)

        samples: dict[str, list[Sample]] = {"direct": [], "routed": []}
        calls = {"direct": one_direct, "routed": one_routed}
        await rounds(arguments, calls, samples, warm_up=max(1, 100 // arguments.concurrency))
        samples = {"direct": [], "routed": []}
        cpu_before_s = cpu_times_s([router_pid])[router_pid]
        await rounds(arguments, calls, samples, warm_up=0)
        cpu_s = cpu_times_s([router_pid])[router_pid] - cpu_before_s
    return {**summary(samples), "router_cpu_us": round(cpu_s * 1e6 / len(samples["routed"]), 1)}


async def rounds(
    arguments: argparse.Namespace,
    calls: dict[str, Callable[[], Awaitable[Sample]]],
    samples: dict[str, list[Sample]],
    warm_up: int,
) -> None:
    for _ in range(warm_up or arguments.requests // arguments.concurrency):
        for name, call in calls.items():
            taken = await asyncio.gather(*(call() for _ in range(arguments.concurrency)))
            samples[name] += taken


def summary(samples: dict[str, list[Sample]]) -> dict[str, object]:
    figures: dict[str, dict[str, float]] = {}
    for index, name in enumerate(("first_token_us", "end_us")):
        by_kind = {kind: sorted(sample[index] * 1e6 for sample in taken) for kind, taken in samples.items()}
        figures[name] = {
            f"{kind}_p{p}": round(statistics.quantiles(values, n=100, method="inclusive")[p - 1], 1)
            for kind, values in by_kind.items()
            for p in (50, 99)
        }
        for p in (50, 99):
            figures[name][f"added_p{p}"] = round(figures[name][f"routed_p{p}"] - figures[name][f"direct_p{p}"], 1)
    return {"requests": len(samples["routed"]), **figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--prompt-chars", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=4)
    arguments = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    worker_pipe, worker_end = spawn.Pipe()
    router_pipe, router_end = spawn.Pipe()
    workers = spawn.Process(target=run_workers, args=(worker_end,), daemon=True)
    workers.start()
    addresses = worker_pipe.recv()
    router = spawn.Process(target=run_router, args=(router_end, addresses), daemon=True)
    router.start()
    assert router.pid is not None
    figures = asyncio.run(measure(arguments, addresses[1], router_pipe.recv(), router.pid))
    for pipe, process in ((router_pipe, router), (worker_pipe, workers)):
        pipe.send("stop")
        process.join(10)
    print(json.dumps({**vars(arguments), **figures}, indent=2))


if __name__ == "__main__":
    main()
