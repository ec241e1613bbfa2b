"""What SGLang's public gateways add to a request, beside what our router adds, in one run.

The worker computes nothing, so that differences are the gateways' alone: one token at once, then rounds of three
`--round-ms` apart. Its ways in take turns of a few calls, each from the same callers with the same prompt:

    direct             the decode itself, token ids over gRPC
    router-grpc        our router over gRPC
    router-http        our router's OpenAI HTTP
    NAME               a gateway's OpenAI HTTP, our router's SGLang service behind it

`cpu_us` is the processor time a request takes in the process that is called. Every process is on loopback. Run:

    python -m venv gateways && gateways/bin/pip install smg sglang-router
    python tests/router/measure_gateways.py --gateways gateways/bin/python [--requests 1000] [--callers 1 8]

Without internet `TIKTOKEN_ENCODINGS_BASE` must name a directory with `o200k_base.tiktoken` (docs/clients.md).
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

import uvloop
from measure_overhead import SPAWN, TURN, WARM_UP_TURNS, Sample, percentile, run_like_the_command, used_cpu_s
from router_fakes import decode, model_card, prefill, started
from tokenizers import Tokenizer

from graftline.proto.channel import open_channel
from graftline.proto.v1.common_pb2 import SamplingParams, StoppingParams
from graftline.proto.v1.decode_pb2 import DecodeServiceGenerateRequest
from graftline.proto.v1.decode_pb2_grpc import DecodeServiceStub
from graftline.proto.v1.router_pb2 import ChatMessage, ChatPrompt, GenerateRequest
from graftline.proto.v1.router_pb2_grpc import RouterServiceStub
from graftline.router.config import RouterConfig, WorkerLists
from graftline.router.server import running_router
from graftline.router.sglang.tokenizer_files import tokenizer_files, write_missing

MODULES = {"smg": "smg.launch_router", "sglang-router": "sglang_router.launch_router"}
START_S, CALL_S = 60.0, 30.0
Call = Callable[[], Awaitable[Sample]]


def run_workers(pipe: Connection, round_s: float) -> None:
    async def main() -> None:
        workers = prefill(), decode(token_delay_s=round_s)
        async with started(*workers):
            pipe.send([worker.address for worker in workers])
            await asyncio.to_thread(pipe.recv)

    run_like_the_command(main())


def run_router(pipe: Connection, addresses: list[str], tokenizer: str) -> None:
    async def main() -> None:
        config = RouterConfig(
            http_listen="127.0.0.1:0",
            workers=WorkerLists((addresses[0],), (addresses[1],)),
            drain_grace_s=0,
            answers_sglang=True,
            sglang_tokenizer_dir=Path(tokenizer),
        )
        async with running_router(config) as router:
            await router.wait_until_usable(10)
            pipe.send((router.address, router.http_address))
            await asyncio.to_thread(pipe.recv)

    run_like_the_command(main())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@contextlib.contextmanager
def gateway(name: str, arguments: argparse.Namespace, worker: str, folder: Path) -> Iterator["Gateway"]:
    """Runs a gateway over one worker."""
    port = free_port()
    command = [arguments.gateways, "-m", MODULES[name], "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", f"grpc://{worker}", "--model-path", str(folder), "--log-level", "warn"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    log_path = folder / f"{name}-{port}.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield Gateway(port, process, log_path)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Gateway:
    port: int
    process: subprocess.Popen[bytes]
    log_path: Path


def wait_until_it_answers(one: Gateway) -> None:
    body = json.dumps({**http_body("hello", 2), "stream": False}).encode()
    headers = {"content-type": "application/json"}
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and one.process.poll() is None:
        request = urllib.request.Request(f"http://127.0.0.1:{one.port}/v1/chat/completions", body, headers)
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5) as answer:
            if json.load(answer)["choices"][0]["message"]["content"]:
                return
        time.sleep(0.2)
    raise RuntimeError(f"no answer from the gateway:\n{one.log_path.read_text(errors='replace')[-3000:]}")


def http_body(prompt: str, num_tokens: int) -> dict[str, Any]:
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
    }


class HttpCaller:
    """One connection that is kept: a streamed chat completion after the other, by no more than a socket's streams."""

    def __init__(self, address: str, body: dict[str, Any], num_characters: int) -> None:
        self._host, _, self._port = address.partition(":")
        content = json.dumps(body).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\n\r\n"
        )
        self._request = head.encode() + content
        self._num_characters = num_characters
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def call(self) -> Sample:
        # A server may have closed what was idle.
        if self._streams is None or self._streams[0].at_eof():
            self._streams = await asyncio.open_connection(self._host, int(self._port))
        reader, writer = self._streams
        began = time.perf_counter()
        writer.write(self._request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        first_s, text = 0.0, b""
        async for event in events(reader):
            content = json.loads(event)["choices"][0]["delta"].get("content") if event != b"[DONE]" else None
            if content:
                first_s = first_s or time.perf_counter() - began
                text += content.encode()
        taken = first_s, time.perf_counter() - began
        assert len(text) == self._num_characters, text
        return taken

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


async def events(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The data of server-sent events in a chunked body, to the body's end."""
    left = b""
    while size := int(await reader.readline(), 16):
        left += (await reader.readexactly(size + 2))[:-2]
        *whole, left = left.replace(b"\r\n", b"\n").split(b"\n\n")
        for event in whole:
            if event.startswith(b"data:"):
                yield event.removeprefix(b"data:").strip()
    await reader.readline()


async def timed(stream: Any, has_token: Callable[[Any], bool]) -> Sample:
    began = time.perf_counter()
    first_s = 0.0
    async for message in stream:
        if not first_s and has_token(message):
            first_s = time.perf_counter() - began
    return first_s, time.perf_counter() - began


def grpc_calls(
    arguments: argparse.Namespace, stack: contextlib.AsyncExitStack, ids: list[int], prompt: str
) -> Callable[[str, str], Any]:
    """Opens the gRPC ways in."""
    direct_request = DecodeServiceGenerateRequest(
        request_id="direct",
        attempt=1,
        prefill_address="127.0.0.1:1",
        token_ids=ids,
        num_prompt_tokens=len(ids),
        sampling=SamplingParams(top_p=1, seed=1),
        stopping=StoppingParams(max_tokens=arguments.tokens, ignore_eos=True),
    )
    chat = ChatPrompt(messages=[ChatMessage(role="user", content=prompt)])
    routed_request = GenerateRequest(chat=chat, seed=1, max_tokens=arguments.tokens, ignore_eos=True)

    async def opened(decode_address: str, router_address: str) -> dict[str, Call]:
        channels = [
            await stack.enter_async_context(open_channel(address)) for address in (decode_address, router_address)
        ]
        direct = DecodeServiceStub(channels[0])
        routed = RouterServiceStub(channels[1])
        return {
            "direct": lambda: timed(direct.Generate(direct_request), lambda message: message.HasField("tokens")),
            "router-grpc": lambda: timed(routed.Generate(routed_request), lambda message: bool(message.token_ids)),
        }

    return opened


async def measure(
    arguments: argparse.Namespace,
    num_callers: int,
    addresses: list[str],
    router: tuple[str, str],
    https: dict[str, str],
    pids: dict[str, int],
) -> dict[str, Any]:
    prompt = ("the quick brown fox jumps over the lazy dog. " * 1000)[: arguments.prompt_chars]
    # What the stand-in's template makes of it.
    card_text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    tokenizer = Tokenizer.from_str(model_card().tokenizer_json.decode())
    ids = tokenizer.encode(card_text, add_special_tokens=False).ids
    async with contextlib.AsyncExitStack() as stack:
        ways = await grpc_calls(arguments, stack, ids, prompt)(addresses[1], router[0])
        callers: dict[str, list[Call]] = {name: [call] * num_callers for name, call in ways.items()}
        for name, address in {"router-http": router[1], **https}.items():
            body = http_body(prompt, arguments.tokens)
            connections = [HttpCaller(address, body, arguments.tokens) for _ in range(num_callers)]
            for connection in connections:
                stack.callback(connection.close)
            callers[name] = [connection.call for connection in connections]
        return await taken_in_turns(callers, arguments.requests, pids)


async def taken_in_turns(callers: dict[str, list[Call]], num_requests: int, pids: dict[str, int]) -> dict[str, Any]:
    num_callers = len(callers["direct"])
    rounds_a_turn = max(1, TURN // num_callers)
    num_turns = max(1, num_requests // (rounds_a_turn * num_callers))
    samples: dict[str, list[Sample]] = {name: [] for name in callers}
    cpu_s = dict.fromkeys(callers, 0.0)
    for number in range(-WARM_UP_TURNS, num_turns):
        for name, calls in callers.items():
            before_s = used_cpu_s(pids[name])
            taken: list[Sample] = []
            for _ in range(rounds_a_turn):
                async with asyncio.timeout(CALL_S):
                    taken += await asyncio.gather(*(call() for call in calls))
            if number >= 0:
                samples[name] += taken
                cpu_s[name] += used_cpu_s(pids[name]) - before_s
    return summary(samples, cpu_s)


def summary(samples: dict[str, list[Sample]], cpu_s: dict[str, float]) -> dict[str, Any]:
    """By way, in microseconds; `added` is over the direct call."""
    figures: dict[str, Any] = {}
    for name, taken in samples.items():
        figures[name] = {"requests": len(taken), "cpu_us": round(cpu_s[name] * 1e6 / len(taken))}
        for index, what in enumerate(("first_token", "whole_call")):
            for percent in (50, 99):
                own_us, base_us = (
                    percentile([sample[index] for sample in of], percent) for of in (taken, samples["direct"])
                )
                figures[name][f"{what}_p{percent}_us"] = round(own_us)
                figures[name][f"{what}_added_p{percent}_us"] = round(own_us - base_us)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gateways", help="a Python that has smg and sglang-router; none: only our own ways in")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-chars", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--round-ms", type=float, default=2.0)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="graftline-gateways-"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        write_missing(folder, tokenizer_files(model_card()))
        worker_pipe, worker_end = SPAWN.Pipe()
        workers_process = SPAWN.Process(target=run_workers, args=(worker_end, arguments.round_ms / 1000), daemon=True)
        workers_process.start()
        stack.callback(worker_pipe.send, "stop")
        addresses = worker_pipe.recv()
        router_pipe, router_end = SPAWN.Pipe()
        router_process = SPAWN.Process(target=run_router, args=(router_end, addresses, str(folder)), daemon=True)
        router_process.start()
        stack.callback(router_pipe.send, "stop")
        router = router_pipe.recv()
        assert workers_process.pid is not None
        assert router_process.pid is not None
        gateways: dict[str, Gateway] = {}
        pids = {"direct": workers_process.pid, **dict.fromkeys(("router-grpc", "router-http"), router_process.pid)}
        for name in MODULES if arguments.gateways else ():
            gateways[name] = stack.enter_context(gateway(name, arguments, router[0], folder))
        for way, one in gateways.items():
            wait_until_it_answers(one)
            pids[way] = one.process.pid
        https = {way: f"127.0.0.1:{one.port}" for way, one in gateways.items()}
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            for callers in arguments.callers:
                figures = runner.run(measure(arguments, callers, addresses, router, https, pids))
                print(json.dumps({"callers": callers, "load_average": os.getloadavg()[0], **figures}, indent=2))


if __name__ == "__main__":
    main()
