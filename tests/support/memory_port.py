"""A transfer port that copies KV pages by layer between pools of one process, with faults that tests choose."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from graftline.engine.kv_pool import KvPool
from graftline.engine.plan import SendDone, SendOrder
from graftline.engine.transfer_port import StagePools

READY_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Fault:
    """How a send fails. With `drained` false the bytes may still land."""

    error: str
    drained: bool = True


def no_fault(order: SendOrder, stage: int) -> Fault | None:
    """The rule of a network on which nothing goes wrong."""
    return None


class Network:
    """Pools of every stage of every worker, and what goes wrong between them. Thread-safe.

    Attributes:
        rule: asked before every write: whether, and how, it fails.
    """

    def __init__(self) -> None:
        self.rule: Callable[[SendOrder, int], Fault | None] = no_fault
        self._pools: dict[str, dict[int, StagePools]] = {}
        self._open = threading.Event()
        self._open.set()
        self._held = threading.Semaphore(0)

    def add(self, worker: str, pools: StagePools) -> None:
        self._pools.setdefault(worker, {})[pools.stage] = pools

    def pools_of(self, worker: str) -> list[StagePools]:
        return [pools for _, pools in sorted(self._pools.get(worker, {}).items())]

    def hold(self) -> None:
        """Writes that begin from now on hang in the middle, where no cancel reaches them."""
        self._open.clear()

    def let_go(self) -> None:
        """Writes that hang complete."""
        self._open.set()

    def await_held(self, timeout_s: float = 30.0) -> None:
        """Until one more write hangs."""
        assert self._held.acquire(timeout=timeout_s), "no write began"

    def pass_through(self) -> None:
        if not self._open.is_set():
            self._held.release()
        assert self._open.wait(60), "a held write was never let go"


class MemoryPort:
    """One stage's port. Orders are served one after the other by a thread of the port's own."""

    def __init__(self, network: Network, worker: str, stage: int) -> None:
        self._network = network
        self._worker = worker
        self._stage = stage
        self._peers: dict[str, str] = {}
        self._cancelled: set[str] = set()
        self._orders: queue.SimpleQueue[_Queued | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"{worker}-port-{stage}", daemon=True)

    def open(self, pools: StagePools) -> bytes:
        self._pools = pools
        self._network.add(self._worker, pools)
        self._thread.start()
        return self._worker.encode()

    def pair(self, peer: str, layout: bytes) -> None:
        self._peers[peer] = layout.decode()

    def forget(self, peer: str) -> None:
        self._peers.pop(peer, None)

    def send(self, order: SendOrder, ready: Callable[[float], bool], done: Callable[[SendDone], None]) -> None:
        self._orders.put(_Queued(order, ready, done))

    def cancel(self, owner: str) -> None:
        self._cancelled.add(owner)

    def close(self) -> None:
        self._orders.put(None)

    def _serve(self) -> None:
        while (queued := self._orders.get()) is not None:
            queued.done(self._answer(queued))

    def _answer(self, queued: "_Queued") -> SendDone:
        order = queued.order
        if order.owner in self._cancelled:
            return SendDone(order.order, self._stage, 0, 0.0, error="cancelled", drained=True)
        if not queued.ready(READY_TIMEOUT_S):
            return SendDone(order.order, self._stage, 0, 0.0, error="the data never came", drained=True)
        fault = self._network.rule(order, self._stage)
        if fault is not None:
            return SendDone(order.order, self._stage, 0, 0.0, fault.error, fault.drained)
        if order.peer not in self._peers:
            return SendDone(order.order, self._stage, 0, 0.0, error=f"{order.peer} is not paired", drained=True)
        self._network.pass_through()
        return SendDone(order.order, self._stage, self._copy(order), 0.0)

    def _copy(self, order: SendOrder) -> int:
        peers = self._network.pools_of(self._peers[order.peer])
        if order.drafter:
            assert self._pools.draft is not None, "drafter pages of a stage without drafter"
            targets = [peer.draft for peer in peers if peer.draft is not None]
            return sum(_copy_layers(self._pools.draft, target, order.pages) for target in targets)
        return sum(_copy_layers(self._pools.target, peer.target, order.pages) for peer in peers)


@dataclass(frozen=True, slots=True)
class _Queued:
    order: SendOrder
    ready: Callable[[float], bool]
    done: Callable[[SendDone], None]


def _layers(pool: KvPool) -> range:
    return range(pool.first_layer, pool.first_layer + pool.geometry.num_layers)


def _copy_layers(source: KvPool, target: KvPool, pages: list[tuple[int, int]]) -> int:
    """Copies what both pools own, layer by global id; bytes copied."""
    num_bytes = 0
    for layer in _layers(source):
        if layer in _layers(target):
            for own, theirs in pages:
                assert theirs < target.num_pages, f"page {theirs} of {target.num_pages}"
                part = source.data[own, layer - source.first_layer]
                target.data[theirs, layer - target.first_layer] = part
                num_bytes += part.numel() * part.element_size()
    return num_bytes
