"""Measures the transports: seconds and GB/s by size and number of copies, and the CPU time of the sender.

`python -m graftline.bench.transfer --out results/transfer.json` runs Mooncake over TCP between two processes on
loopback and the in-process transport, on host memory. What is measured ends with the peer's acknowledgement.
"""

import argparse
import json
import multiprocessing
import os
import platform
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from graftline.kv_transfer.copy_plan import Copy
from graftline.kv_transfer.in_process import InProcessHub
from graftline.kv_transfer.mooncake_engine import MooncakeConfig
from graftline.kv_transfer.mooncake_transport import MooncakeTransport
from graftline.kv_transfer.transport import Transport

_POOL_BYTES = 64 << 20
_KIB = 1024
SHAPES = ((1, 4), (1, 64), (2, 184), (60, 6), (64, 184), (1000, 4), (1, 1024), (1, 12 * _KIB), (1, 64 * _KIB))
"""(number of copies, KiB each). 184 KiB is a page of 16 tokens of SmolLM2-135M on two stages, about 12 MiB a prompt."""


@dataclass(frozen=True, slots=True)
class Result:
    """One shape over one transport; `cpu_s` is the sender's process time a write, engine threads included."""

    transport: str
    num_copies: int
    copy_kib: int
    writes: int
    p50_s: float
    p90_s: float
    gb_per_s: float
    cpu_s: float


Shapes = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Route:
    """A transport, the peer's session, and the first byte of the pools on both sides."""

    transport: Transport
    session_id: str
    src: int
    dst: int

    def write(self, copies: Sequence[Copy]) -> None:
        """Writes and waits for the acknowledgement."""
        self.transport.write(self.session_id, copies, time.monotonic() + 60)


def measure(name: str, route: Route, seconds: float, shapes: Shapes) -> list[Result]:
    """Writes every shape again and again for some time; copies lie apart, as pages of scattered ids do."""
    results = []
    for num_copies, copy_kib in shapes:
        num_bytes = copy_kib * _KIB
        stride = min(_POOL_BYTES // num_copies, 2 * num_bytes)
        offsets = [index * stride for index in range(num_copies)]
        copies = [Copy(route.src + offset, route.dst + offset, num_bytes) for offset in offsets]
        times, cpu_s = _repeat(partial(route.write, copies), seconds)
        p50_s = times[len(times) // 2]
        total = num_copies * num_bytes
        p90_s = times[len(times) * 9 // 10]
        results.append(Result(name, num_copies, copy_kib, len(times), p50_s, p90_s, total / p50_s / 1e9, cpu_s))
    return results


def _repeat(write: Callable[[], None], seconds: float) -> tuple[list[float], float]:
    """Sorted seconds of every write, and CPU seconds a write."""
    write()
    times: list[float] = []
    cpu_start_s, start_s = _cpu_s(), time.perf_counter()
    while time.perf_counter() - start_s < seconds or len(times) < 5:
        write_start_s = time.perf_counter()
        write()
        times.append(time.perf_counter() - write_start_s)
    cpu_s = (_cpu_s() - cpu_start_s) / len(times)
    return sorted(times), cpu_s


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _mooncake_peer(channel: Connection) -> None:
    memory = np.zeros(_POOL_BYTES, dtype=np.uint8)
    transport = MooncakeTransport(MooncakeConfig("127.0.0.1"))
    transport.register(memory.ctypes.data, _POOL_BYTES)
    channel.send((transport.session_id, memory.ctypes.data))
    channel.recv()
    os._exit(0)


def measure_mooncake(seconds: float, shapes: Shapes = SHAPES) -> list[Result]:
    """Two processes on loopback, TCP."""
    context = multiprocessing.get_context("spawn")
    channel, other = context.Pipe()
    peer = context.Process(target=_mooncake_peer, args=(other,), daemon=True)
    peer.start()
    session_id, dst = channel.recv()
    memory = np.ones(_POOL_BYTES, dtype=np.uint8)
    transport = MooncakeTransport(MooncakeConfig("127.0.0.1"))
    transport.register(memory.ctypes.data, _POOL_BYTES)
    try:
        return measure("mooncake-tcp", Route(transport, session_id, memory.ctypes.data, dst), seconds, shapes)
    finally:
        transport.close()
        channel.send(None)
        peer.join(10)


def measure_in_process(seconds: float, shapes: Shapes = SHAPES) -> list[Result]:
    """Two transports of one process."""
    hub = InProcessHub()
    here, there = hub.join(), hub.join()
    source, target = np.ones(_POOL_BYTES, dtype=np.uint8), np.zeros(_POOL_BYTES, dtype=np.uint8)
    here.register(source.ctypes.data, _POOL_BYTES)
    there.register(target.ctypes.data, _POOL_BYTES)
    route = Route(here, there.session_id, source.ctypes.data, target.ctypes.data)
    return measure("in-process", route, seconds, shapes)


def main() -> None:
    """Runs both transports, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds to spend on every shape")
    parser.add_argument("--out", type=Path, help="where to write JSON")
    options = parser.parse_args()
    results = measure_mooncake(options.seconds) + measure_in_process(options.seconds)
    print(f"{'transport':<13} {'copies':>6} {'KiB each':>9} {'p50 ms':>9} {'p90 ms':>9} {'GB/s':>7} {'cpu ms':>8}")
    for result in results:
        print(
            f"{result.transport:<13} {result.num_copies:>6} {result.copy_kib:>9} {result.p50_s * 1e3:>9.3f} "
            f"{result.p90_s * 1e3:>9.3f} {result.gb_per_s:>7.2f} {result.cpu_s * 1e3:>8.3f}"
        )
    if options.out is not None:
        host = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"host": host, "results": [asdict(result) for result in results]}, indent=2))


if __name__ == "__main__":
    main()
