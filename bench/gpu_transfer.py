"""Handoffs from GPU memory to GPU memory: the transfer engine's own calls, whole orders, and what compute hides.

`python -m graftline.bench.gpu_transfer --out results/gpu_transfer.json` ends within 80 s on one GPU, which both
processes share; `--devices cuda:0,cuda:1` measures between two, `--devices cpu` tries the logic.

Orders are measured one at a time, beside the engine's own call for the same block, and several in flight, beside one
call of the engine for all their blocks. The time of an order ends with its answer, in whatever thread that comes.
"""

import argparse
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Protocol, cast

import torch

from graftline.bench.gpu_configs import Setting
from graftline.bench.gpu_models import LLAMA_8B, write_dummy_model
from graftline.bench.gpu_rates import timed_s
from graftline.bench.gpu_steps import Steps
from graftline.bench.gpu_workers import PairAnswer, WorkerPair, worker_pair
from graftline.bench.multi_gpu_configs import TINY, decode_over, prefill_over
from graftline.engine.kv_pool import KvGeometry, KvPool
from graftline.engine.plan import SendDone, SendOrder, SentPool
from graftline.engine.transfer_port import Sending, StagePools
from graftline.kv_transfer.layout import StageLayout
from graftline.kv_transfer.mooncake_engine import (
    Engine,
    MooncakeConfig,
    has_intra_node,
    installed_versions,
    intra_node_config,
    start_engine,
)
from graftline.kv_transfer.mooncake_transport import MooncakeTransport
from graftline.kv_transfer.protocol_choice import TransferPath, host_id
from graftline.kv_transfer.routed_transport import RoutedTransport
from graftline.kv_transfer.transport import Transport
from graftline.proto.v1 import common_pb2
from graftline.worker.facts import encode_peer
from graftline.worker.process import die_with_parent, end_process
from graftline.worker.transfer import StagePort

MIB = 1 << 20
SIZES_MIB = (1, 4, 16, 64, 256, 1024)
_HOST = "127.0.0.1"
_PEER = "peer"
_START_TIMEOUT_S = 60.0
_WRITE_TIMEOUT_S = 30.0
_REPEATS = 15
_SECONDS_A_SIZE = 0.5
_WARM_UP_S = 0.05
_IN_FLIGHT = 8  # a prompt of 4k tokens in chunks of 512
_MOST_IN_FLIGHT_BYTES = 16 << 30
_MOST_SLOW_BYTES = 256 << 20  # of ways other than the best
# The KV of 8 tokens of Llama-3.1-8B in bfloat16: 1 MiB.
PAGE = KvGeometry(32, 8, 8, 128, torch.bfloat16)
PROMPT_TOKENS, CHUNK_TOKENS = 4096, 512


class _RawEngine(Engine, Protocol):
    def transfer_sync_write(self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int) -> int: ...

    def batch_transfer_sync_write(
        self, target_hostname: str, buffers: list[int], peer_buffer_addresses: list[int], lengths: list[int]
    ) -> int: ...


@dataclass(slots=True)
class Side:
    """One of two processes: a pool on a device, and every way into it.

    Attributes:
        engines: the transfer engine's own object of every way.
    """

    device: torch.device
    pool: KvPool
    ways: dict[TransferPath, Transport] = field(default_factory=dict)
    engines: dict[TransferPath, Engine] = field(default_factory=dict)
    port: StagePort | None = None
    layout: StageLayout | None = None

    @classmethod
    def open(cls, device: str, num_pages: int, geometry: KvGeometry = PAGE) -> "Side":
        """Allocates, starts and registers."""
        side = cls(torch.device(device), KvPool(geometry, num_pages, layers=range(geometry.num_layers), device=device))
        if side.device.type == "cuda" and has_intra_node(installed_versions()):
            side._start(TransferPath.INTRA_NODE_GPU, intra_node_config(_HOST))
        side._start(TransferPath.TCP, MooncakeConfig(_HOST))
        routed = RoutedTransport(side.ways, host_id())
        side.port = StagePort(0, lambda _: routed, _WRITE_TIMEOUT_S, routed.close)
        message = common_pb2.StageLayout.FromString(side.port.open(StagePools(0, side.pool, None)))
        side.layout = StageLayout.from_proto(message)
        return side

    def _start(self, path: TransferPath, config: MooncakeConfig) -> None:
        def start(config: MooncakeConfig) -> Engine:
            self.engines[path] = start_engine(config)
            return self.engines[path]

        self.ways[path] = MooncakeTransport(config, start)

    def checksum(self, num_pages: int) -> int:
        """Of the first pages; equal bytes give equal sums."""
        flat = self.pool.data[:num_pages].view(torch.uint8).view(-1).view(torch.int32)
        return int(flat.sum(dtype=torch.int64).item())


def _on_device(device: str) -> AbstractContextManager[object]:
    """Makes a GPU the calling thread's current one: the transfer engine copies there."""
    return torch.cuda.device(device) if torch.device(device).type == "cuda" else nullcontext()


def _be_peer(channel: Connection, device: str, num_pages: int, geometry: KvGeometry) -> None:
    die_with_parent(last_words_s=0)
    with _on_device(device):
        side = Side.open(device, num_pages, geometry)
        assert side.layout is not None
        channel.send(side.layout)
        while (wanted := channel.recv()) is not None:
            channel.send(side.checksum(wanted))
    end_process(0)


@contextmanager
def two_sides(devices: Sequence[str], num_pages: int, geometry: KvGeometry = PAGE) -> Iterator[tuple[Side, "Peer"]]:
    """This process, and another one with a pool of its own."""
    context = multiprocessing.get_context("spawn")
    channel, theirs = context.Pipe()
    process = context.Process(target=_be_peer, args=(theirs, devices[-1], num_pages, geometry))
    process.start()
    theirs.close()
    try:
        with _on_device(devices[0]):
            side = Side.open(devices[0], num_pages, geometry)
            assert side.port is not None
            side.pool.data.copy_(torch.randn(side.pool.data.shape[1:], device=devices[0]).to(geometry.dtype))
            if not channel.poll(_START_TIMEOUT_S):
                raise RuntimeError(f"the other process was not ready within {_START_TIMEOUT_S:g} s")
            layout = channel.recv()
            side.port.pair(_PEER, encode_peer([layout.to_proto()]))
            yield side, Peer(layout, channel)
            channel.send(None)
            side.port.close()
    finally:
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()


@dataclass(frozen=True, slots=True)
class Peer:
    """The other process."""

    layout: StageLayout
    channel: Connection

    def checksum(self, num_pages: int) -> int:
        """See `Side.checksum`."""
        self.channel.send(num_pages)
        return int(self.channel.recv())


def raw_write(side: Side, peer: Peer, path: TransferPath, num_bytes: int, count: int = 1) -> Callable[[], float]:
    """The engine's own blocking call for one block, or for several at once that follow each other; gives seconds."""
    sessions = {endpoint.path: endpoint.session_id for endpoint in peer.layout.endpoints}
    engine, session = cast(_RawEngine, side.engines[path]), sessions[path]
    source, target = side.pool.data.data_ptr(), min(buffer.base_address for buffer in peer.layout.buffers)
    offsets = [index * num_bytes for index in range(count)]
    sources, targets = ([base + offset for offset in offsets] for base in (source, target))
    lengths = [num_bytes] * count

    def write() -> float:
        begin_s = time.perf_counter()
        if count == 1:
            code = engine.transfer_sync_write(session, source, target, num_bytes)
        else:
            code = engine.batch_transfer_sync_write(session, sources, targets, lengths)
        seconds = time.perf_counter() - begin_s
        if code != 0:
            raise RuntimeError(f"the engine answered {code}")
        return seconds

    return write


def order_write(side: Side, num_pages: int, count: int = 1) -> Callable[[], float]:
    """Whole orders of neighbouring pages, given at once; gives seconds from the engine's command to the last answer."""
    port = side.port
    assert port is not None

    def write() -> float:
        answered = threading.Event()
        answers: list[SendDone] = []
        end_s = 0.0

        def done(answer: SendDone) -> None:
            nonlocal end_s
            answers.append(answer)
            if len(answers) == count:
                end_s = time.perf_counter()
                answered.set()

        orders = [
            SendOrder(index, "bench", _PEER, 0, SentPool.TARGET, [(index * num_pages, index * num_pages, num_pages)])
            for index in range(count)
        ]
        begin_s = time.perf_counter()
        port.send([Sending(order, lambda timeout_s: True, done) for order in orders])
        if not answered.wait(_WRITE_TIMEOUT_S):
            raise RuntimeError("an order was not answered")
        errors = [answer.error for answer in answers if answer.error]
        if errors:
            raise RuntimeError(errors[0])
        return end_s - begin_s

    return write


def rate(write: Callable[[], float], num_bytes: int) -> dict[str, float]:
    """Median seconds of a write of so many bytes in all, and what that makes; after some that the interpreter needs to
    get used to the code, as in a worker it is.
    """
    started = time.monotonic()
    write()
    while time.monotonic() - started < _WARM_UP_S:
        write()
    times: list[float] = []
    started = time.monotonic()
    while len(times) < _REPEATS and (not times or time.monotonic() - started < _SECONDS_A_SIZE):
        times.append(write())
    seconds = median(times)
    return {"seconds": seconds, "gb_per_s": num_bytes / seconds / 1e9, "writes": len(times)}


def measure_writes(
    steps: Steps, devices: Sequence[str], sizes_mib: Sequence[int] = SIZES_MIB, geometry: KvGeometry = PAGE
) -> None:
    """Notes, by size: the engine's own call by every way, whole orders by the way chosen, and their quotient; one at a
    time, and several in flight.
    """
    pages = [max(1, size * MIB // geometry.page_bytes) for size in sizes_mib]
    most = max(count * _in_flight(count * geometry.page_bytes) for count in pages)
    with two_sides(devices, most, geometry) as (side, peer):
        best = next(iter(side.ways))
        steps.note("orders go by", best.value)
        for num_pages in pages:
            _measure_size(steps, side, peer, num_pages)
        steps.step("bytes arrived", lambda: _compare(side, peer, most))


def _in_flight(num_bytes: int) -> int:
    """Orders of that size that are in flight together."""
    return max(1, min(_IN_FLIGHT, _MOST_IN_FLIGHT_BYTES // num_bytes))


def _measure_size(steps: Steps, side: Side, peer: Peer, num_pages: int) -> None:
    num_bytes = num_pages * side.pool.geometry.page_bytes
    size = f"{num_bytes / MIB:g} MiB"
    best, *others = side.ways
    for path in others:
        if num_bytes <= _MOST_SLOW_BYTES:
            steps.step(f"{size}, raw {path.value}", partial(_raw_rate, side, peer, path, num_bytes, 1))
    alone: dict[str, float] | None = None
    for count in sorted({1, _in_flight(num_bytes)}):
        name = size if count == 1 else f"{size}, {count} in flight"
        raw = steps.step(f"{name}, raw {best.value}", partial(_raw_rate, side, peer, best, num_bytes, count))
        order = steps.step(f"{name}, order", partial(_order_rate, side, num_pages, num_bytes, count))
        alone = raw if count == 1 else alone
        if order and raw:
            steps.note(f"{name}, order over raw", order["gb_per_s"] / raw["gb_per_s"])
        if order and alone and count > 1:
            steps.note(f"{name}, order over raw one at a time", order["gb_per_s"] / alone["gb_per_s"])


def _raw_rate(side: Side, peer: Peer, path: TransferPath, num_bytes: int, count: int) -> dict[str, float]:
    return rate(raw_write(side, peer, path, num_bytes, count), count * num_bytes)


def _order_rate(side: Side, num_pages: int, num_bytes: int, count: int) -> dict[str, float]:
    return rate(order_write(side, num_pages, count), count * num_bytes)


def _compare(side: Side, peer: Peer, num_pages: int) -> bool:
    equal = side.checksum(num_pages) == peer.checksum(num_pages)
    if not equal:
        raise RuntimeError(f"the peer's {num_pages} pages have another sum")
    return equal


def measure_device_copies(steps: Steps, devices: Sequence[str], sizes_mib: Sequence[int]) -> None:
    """Notes plain copies from one device to the other, by size: what there is at best."""
    for size in sizes_mib:
        steps.step(f"{size} MiB, plain copy", partial(_copy_rate, devices, size * MIB))


def _copy_rate(devices: Sequence[str], num_bytes: int) -> dict[str, float]:
    source = torch.ones(num_bytes, dtype=torch.uint8, device=devices[0])
    target = torch.empty(num_bytes, dtype=torch.uint8, device=devices[-1])
    seconds = timed_s(torch.device(devices[0]), lambda: target.copy_(source))
    return {"seconds": seconds, "gb_per_s": num_bytes / seconds / 1e9}


@dataclass(frozen=True, slots=True)
class PromptSizes:
    """Prompts whose handoff is measured; all in chunks of `chunk_tokens`."""

    tokens: Sequence[int] = (PROMPT_TOKENS,)
    chunk_tokens: int = CHUNK_TOKENS
    repeats: int = 3


def measure_handoffs(
    steps: Steps, model: Path, devices: Sequence[str], sizes: PromptSizes, dtype: str = "bfloat16"
) -> None:
    """Notes, by prompt: bytes and rate of a real handoff, what of it compute hides, and what it adds to latencies."""
    most = max(sizes.tokens)
    threads = 1 if devices[0] == "cpu" else 4
    setting = Setting(
        model,
        None,
        devices[0],
        dtype,
        num_pages=3 * (most // 16 + 4),
        max_running=2,
        chunk_tokens=sizes.chunk_tokens,
        threads=threads,
    )
    prefill, decode = prefill_over(setting, None, devices[:1]), decode_over(setting, None, devices[-1:])
    with worker_pair(prefill, decode) as pair:
        for tokens in sizes.tokens:
            prompt = [(7 * index) % 250 + 2 for index in range(tokens)]
            steps.step(f"handoff of {tokens} tokens", partial(_handoff, pair, prompt, sizes.repeats))


def _handoff(pair: WorkerPair, prompt: Sequence[int], repeats: int) -> dict[str, Any]:
    pair.run([prompt], 2)
    # A single token needs no handoff: the same prompt computes alone.
    alone = [pair.run([prompt], 1)[0] for _ in range(repeats)]
    moved = [pair.run([prompt], 2)[0] for _ in range(repeats)]
    counts = moved[0].handoff.counts
    ttft_s, alone_s = (median(answer.ttft_s for answer in answers) for answers in (moved, alone))
    shown_s = median(_shown_s(answer) for answer in moved)
    write_s = median(answer.handoff.counts.write_s for answer in moved)
    return {
        "bytes": counts.num_bytes,
        "write_s": write_s,
        "gb_per_s": counts.num_bytes / write_s / 1e9 if write_s else None,
        "ttft_ms": 1e3 * ttft_s,
        "ttft_added_ms": 1e3 * (ttft_s - alone_s),
        "shown_after_first_token_ms": 1e3 * shown_s,
        "hidden": min(1.0, max(0.0, 1 - shown_s / write_s)) if write_s else None,
    }


def _shown_s(answer: PairAnswer) -> float:
    """From the first token to the last acknowledgement: writing that no compute of the prefill hid."""
    return answer.handoff.finished_s - answer.arrivals[0][0]


def main() -> None:
    """Measures and prints what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=75.0)
    parser.add_argument("--devices", default="cuda:0", help="one for both processes, or two")
    options = parser.parse_args()
    devices = options.devices.split(",")
    steps = Steps(options.out, options.seconds)
    is_cpu = devices[0] == "cpu"
    sizes = (1, 4) if is_cpu else SIZES_MIB
    measure_device_copies(steps, devices, sizes)
    steps.step("writes", lambda: measure_writes(steps, devices, sizes))
    with tempfile.TemporaryDirectory(prefix="graftline-transfer-") as folder:
        model = write_dummy_model(Path(folder), TINY if is_cpu else LLAMA_8B)
        prompts = PromptSizes((128,), 64, 1) if is_cpu else PromptSizes()
        steps.step("handoffs", lambda: measure_handoffs(steps, model, devices, prompts), needs_s=20.0)
    for name, value in steps.found.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
