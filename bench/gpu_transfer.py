"""Handoffs from GPU memory to GPU memory: the transfer engine's own calls, whole orders, and what compute hides.

`python -m graftline.bench.gpu_transfer --out results/gpu_transfer.json` takes a minute and a half on one GPU, which
both processes share; `--devices cuda:0,cuda:1` measures between two, `--devices cpu` tries the logic.
"""

import argparse
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from graftline.engine.pipeline import on_device
from graftline.engine.plan import SendDone, SendOrder, SentPool
from graftline.engine.transfer_port import StagePools
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
_REPEATS = 9
_SECONDS_A_SIZE = 1.0
# The KV of 16 tokens of Llama-3.1-8B in bfloat16: 2 MiB.
PAGE = KvGeometry(32, 16, 8, 128, torch.bfloat16)
PROMPT_TOKENS, CHUNK_TOKENS = 4096, 512


class _RawEngine(Engine, Protocol):
    def transfer_sync_write(self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int) -> int: ...


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


def _be_peer(channel: Connection, device: str, num_pages: int, geometry: KvGeometry) -> None:
    die_with_parent(last_words_s=0)
    with on_device(device):
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
        with on_device(devices[0]):
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


def raw_write(side: Side, peer: Peer, path: TransferPath, num_bytes: int) -> Callable[[], None]:
    """The engine's own blocking call, one piece."""
    sessions = {endpoint.path: endpoint.session_id for endpoint in peer.layout.endpoints}
    engine = cast(_RawEngine, side.engines[path])
    source, target = side.pool.data.data_ptr(), min(buffer.base_address for buffer in peer.layout.buffers)

    def write() -> None:
        code = engine.transfer_sync_write(sessions[path], source, target, num_bytes)
        if code != 0:
            raise RuntimeError(f"the engine answered {code}")

    return write


def order_write(side: Side, num_pages: int) -> Callable[[], None]:
    """A whole order of neighbouring pages, from the engine's command to its answer."""
    port = side.port
    assert port is not None

    def write() -> None:
        answered = threading.Event()
        answers: list[SendDone] = []

        def done(answer: SendDone) -> None:
            answers.append(answer)
            answered.set()

        units = [(page, page) for page in range(num_pages)]
        port.send(SendOrder(0, "bench", _PEER, 0, SentPool.TARGET, units), lambda timeout_s: True, done)
        if not answered.wait(_WRITE_TIMEOUT_S) or answers[0].error:
            raise RuntimeError(answers[0].error if answers else "an order was not answered")

    return write


def rate(write: Callable[[], None], num_bytes: int) -> dict[str, float]:
    """Median seconds of a write, and what that makes."""
    write()
    times: list[float] = []
    started = time.monotonic()
    while len(times) < _REPEATS and (not times or time.monotonic() - started < _SECONDS_A_SIZE):
        begin = time.perf_counter()
        write()
        times.append(time.perf_counter() - begin)
    seconds = median(times)
    return {"seconds": seconds, "gb_per_s": num_bytes / seconds / 1e9, "writes": len(times)}


def measure_writes(
    steps: Steps, devices: Sequence[str], sizes_mib: Sequence[int] = SIZES_MIB, geometry: KvGeometry = PAGE
) -> None:
    """Notes, by size: the engine's own call by every way, whole orders by the way chosen, and their quotient."""
    pages = [max(1, size * MIB // geometry.page_bytes) for size in sizes_mib]
    with two_sides(devices, max(pages), geometry) as (side, peer):
        best = next(iter(side.ways))
        steps.note("orders go by", best.value)
        for num_pages in pages:
            num_bytes = num_pages * geometry.page_bytes
            size = f"{num_bytes / MIB:g} MiB"
            found: dict[str, Any] = {}
            for path in side.ways:
                raw = steps.step(f"{size}, raw {path.value}", partial(_rate_of, side, peer, path, num_bytes))
                found[path.value] = raw
            order = steps.step(f"{size}, order", partial(_order_rate, side, num_pages, num_bytes))
            raw = found[best.value]
            if order and raw:
                steps.note(f"{size}, order over raw", order["gb_per_s"] / raw["gb_per_s"])
        steps.step("bytes arrived", lambda: _compare(side, peer, max(pages)))


def _rate_of(side: Side, peer: Peer, path: TransferPath, num_bytes: int) -> dict[str, float]:
    return rate(raw_write(side, peer, path, num_bytes), num_bytes)


def _order_rate(side: Side, num_pages: int, num_bytes: int) -> dict[str, float]:
    return rate(order_write(side, num_pages), num_bytes)


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
    parser.add_argument("--seconds", type=float, default=85.0)
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
