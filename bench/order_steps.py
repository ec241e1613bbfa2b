"""Where the time of a transfer order goes, besides the bytes: an engine that copies nothing stands in for Mooncake.

`python -m graftline.bench.order_steps --out results/order_steps.json` needs no GPU and takes some seconds. Medians, in
microseconds: from the command to the engine (planning and what leads there), from the end of the copy to the answer,
all of it, and processor time of this process for every order. Stand-ins answer at once, after a stated time, or when a
GPU's stream would be empty.
"""

import argparse
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from graftline.engine.kv_pool import KvGeometry, KvPool
from graftline.engine.plan import SendDone, SendOrder, SentPool
from graftline.engine.transfer_port import Sending, StagePools, page_runs
from graftline.kv_transfer.layout import StageLayout
from graftline.kv_transfer.mooncake_engine import MooncakeConfig, intra_node_config
from graftline.kv_transfer.mooncake_transport import MooncakeTransport
from graftline.kv_transfer.protocol_choice import Endpoint, TransferPath, host_id
from graftline.kv_transfer.routed_transport import RoutedTransport
from graftline.proto.v1 import common_pb2
from graftline.worker.facts import encode_peer
from graftline.worker.transfer import StagePort

_GEOMETRY = KvGeometry(4, 16, 2, 16, torch.float32)
_HOST, _PEER = "127.0.0.1", "peer"
_SESSIONS = (f"{_HOST}:15998", f"{_HOST}:15999")
_TIMEOUT_S = 30.0
# A call of the engine, a copy besides its bytes, and these: about what an H200 and its host take.
_GPU_CALL_S, _GPU_COPY_S, _GPU_BYTES_PER_S = 12e-6, 6e-6, 2e12


class StandIn:
    """An engine whose copies take a stated time and move nothing.

    Attributes:
        first_s, last_s: when it was given the first batch and last asked about one.
        num_batches: that it was given.
    """

    def __init__(self, copy_s: float) -> None:
        self._copy_s = copy_s
        self._ends: dict[int, float] = {}
        self.first_s = self.last_s = 0.0
        self.num_batches = 0

    def get_rpc_port(self) -> int:
        """See `Engine`."""
        return 15000

    def register_memory(self, buffer_addr: int, capacity: int) -> int:
        """See `Engine`."""
        return 0

    def unregister_memory(self, buffer_addr: int) -> int:
        """See `Engine`."""
        return 0

    def transfer_submit_write(self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int) -> int:
        """See `Engine`."""
        return self._submit([length])

    def batch_transfer_async_write(
        self, target_hostname: str, buffers: list[int], peer_buffer_addresses: list[int], lengths: list[int]
    ) -> int:
        """See `Engine`."""
        return self._submit(lengths)

    def transfer_check_status(self, batch_id: int) -> int:
        """See `Engine`."""
        self.last_s = time.perf_counter()
        return int(self.last_s >= self._ends[batch_id])

    def send_probe(self, peer_server_name: str) -> int:
        """See `Engine`."""
        return 0

    def _submit(self, lengths: Sequence[int]) -> int:
        now_s = time.perf_counter()
        self.first_s = self.first_s or now_s
        self.num_batches += 1
        self._ends[self.num_batches] = now_s + self._copy_s
        return self.num_batches


class GpuStandIn(StandIn):
    """An engine that takes its time to queue copies on a stream, where they follow each other; a batch counts as done
    when the stream is empty.
    """

    def __init__(self) -> None:
        super().__init__(0.0)
        self._empty_s = 0.0

    def transfer_check_status(self, batch_id: int) -> int:
        """See `Engine`."""
        self.last_s = time.perf_counter()
        return int(self.last_s >= self._empty_s)

    def _submit(self, lengths: Sequence[int]) -> int:
        batch_id = super()._submit(lengths)
        queued_s = time.perf_counter() + _GPU_CALL_S
        while time.perf_counter() < queued_s:
            pass
        self._empty_s = max(queued_s, self._empty_s) + len(lengths) * _GPU_COPY_S + sum(lengths) / _GPU_BYTES_PER_S
        return batch_id


@dataclass(frozen=True, slots=True)
class Case:
    """Orders that are given together.

    Attributes:
        scattered: no two pages are neighbours.
        late: the data are said to be there only after the orders were given.
        gpu: copies take what they take on a GPU; a page has 16 KiB.
    """

    name: str
    num_orders: int = 1
    num_pages: int = 8
    copy_us: float = 0.0
    scattered: bool = False
    late: bool = False
    gpu: bool = False


CASES = (
    Case("one order"),
    Case("one order of 64 pages", num_pages=64),
    Case("one order of 1024 pages", num_pages=1024),
    Case("one order of 64 scattered pages", num_pages=64, scattered=True),
    Case("8 orders at once", num_orders=8),
    Case("8 orders of 1024 pages at once", num_orders=8, num_pages=1024),
    Case("one order, copies take 50 us", copy_us=50),
    Case("1024 pages, copies take 530 us", num_pages=1024, copy_us=530),
    Case("8 orders at once, copies take 50 us", num_orders=8, copy_us=50),
    Case("one order, data are there later", late=True),
    Case("one order of 16 MiB on a GPU", num_pages=1024, gpu=True),
    Case("8 orders of 1 MiB on a GPU", num_orders=8, num_pages=64, gpu=True),
    Case("8 orders of 16 MiB on a GPU", num_orders=8, num_pages=1024, gpu=True),
)


@dataclass(frozen=True, slots=True)
class Found:
    """Medians in microseconds; `cpu_us` is the mean of an order, `batches` are calls of the engine for a case."""

    to_engine_us: float
    from_engine_us: float
    answered_us: float
    cpu_us: float
    batches: float


def measure(case: Case, repeats: int) -> Found:
    """Gives the orders of a case again and again."""
    engine = GpuStandIn() if case.gpu else StandIn(case.copy_us * 1e-6)
    port = _paired_port(engine, 4 * case.num_orders * case.num_pages)
    try:
        _give(port, case)
        runs: list[tuple[float, float, float]] = []
        batches, cpu_s = engine.num_batches, time.process_time()
        for _ in range(repeats):
            engine.first_s = 0.0
            given_s, answered_s = _give(port, case)
            runs.append((engine.first_s - given_s, answered_s - engine.last_s, answered_s - given_s))
        cpu_s = time.process_time() - cpu_s
        to_engine, from_engine, answered = (1e6 * median(column) for column in zip(*runs, strict=True))
        cpu_us = 1e6 * cpu_s / repeats / case.num_orders
        return Found(to_engine, from_engine, answered, cpu_us, (engine.num_batches - batches) / repeats)
    finally:
        port.close()


def _give(port: StagePort, case: Case) -> tuple[float, float]:
    """When the orders were given, or their data were there if that is later, and when the last was answered."""
    answered, computed = threading.Event(), threading.Event()
    errors: list[str] = []
    left, end_s = case.num_orders, 0.0

    def done(answer: SendDone) -> None:
        nonlocal left, end_s
        left -= 1
        if answer.error:
            errors.append(answer.error)
        if not left:
            end_s = time.perf_counter()
            answered.set()

    orders = [
        SendOrder(index, "bench", _PEER, 0, SentPool.TARGET, _runs(case, index)) for index in range(case.num_orders)
    ]
    ready = computed.wait if case.late else lambda timeout_s: True
    given_s = time.perf_counter()
    port.send([Sending(order, ready, done) for order in orders])
    if case.late:
        time.sleep(0.0005)  # its thread waits for the data by then
        given_s = time.perf_counter()
        computed.set()
    if not answered.wait(_TIMEOUT_S) or errors:
        raise RuntimeError(errors[0] if errors else "an order was not answered")
    return given_s, end_s


def _runs(case: Case, index: int) -> list[tuple[int, int, int]]:
    """Of one of the case's orders; no two share pages."""
    step = 2 if case.scattered else 1
    pages = range(step * index * case.num_pages, step * (index + 1) * case.num_pages, step)
    return page_runs(pages, pages)


def _paired_port(engine: StandIn, num_pages: int) -> StagePort:
    """With two ways to the peer, as a stage on a GPU has to others on its host."""
    ways = {
        TransferPath.INTRA_NODE_GPU: MooncakeTransport(intra_node_config(_HOST), lambda _: engine),
        TransferPath.TCP: MooncakeTransport(MooncakeConfig(_HOST), lambda _: engine),
    }
    routed = RoutedTransport(ways, host_id())
    port = StagePort(0, lambda _: routed, _TIMEOUT_S, routed.close)
    pool = KvPool(_GEOMETRY, num_pages, layers=range(_GEOMETRY.num_layers))
    own = StageLayout.from_proto(common_pb2.StageLayout.FromString(port.open(StagePools(0, pool, None))))
    endpoints = tuple(Endpoint(path, session_id) for path, session_id in zip(ways, _SESSIONS, strict=True))
    peer = StageLayout(0, _SESSIONS[-1], own.buffers, own.host_id, endpoints)
    port.pair(_PEER, encode_peer([peer.to_proto()]))
    return port


def measure_all(repeats: int, cases: Sequence[Case] = CASES) -> dict[str, Found]:
    """By case."""
    return {case.name: measure(case, repeats) for case in cases}


def main() -> None:
    """Measures, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--out", type=Path, help="where to write JSON")
    options = parser.parse_args()
    results = measure_all(options.repeats)
    print(f"{'':<36} {'to engine':>9} {'to answer':>9} {'in all':>9} {'cpu each':>9} {'calls':>6}")
    for name, found in results.items():
        times = (found.to_engine_us, found.from_engine_us, found.answered_us, found.cpu_us)
        print(f"{name:<36} " + " ".join(f"{value:>9.1f}" for value in times) + f" {found.batches:>6.1f}")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({name: asdict(found) for name, found in results.items()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
