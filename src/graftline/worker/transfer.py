"""A stage's transfer port: the engine's orders become checked one-sided writes of a transport.

Every peer has a queue and a thread of its own, so that a peer that stalls delays nobody else.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from graftline.engine.kv_pool import KvPool
from graftline.engine.plan import SendDone, SendOrder
from graftline.engine.transfer_port import StagePools
from graftline.errors import GraftlineError, InvalidRequestError, TransferFailedError
from graftline.kv_transfer.copy_plan import CopyPlanner
from graftline.kv_transfer.in_process import InProcessHub
from graftline.kv_transfer.layout import BufferKey, BufferKind, BufferLayout, StageLayout, WorkerLayout
from graftline.kv_transfer.mooncake_engine import MooncakeConfig
from graftline.kv_transfer.mooncake_transport import MooncakeTransport
from graftline.kv_transfer.transport import Transport
from graftline.worker.config import TransferConfig, TransportName
from graftline.worker.facts import decode_peer

logger = logging.getLogger(__name__)

TARGET_KINDS = frozenset({BufferKind.K, BufferKind.V})
DRAFT_KINDS = frozenset({BufferKind.DRAFT_K, BufferKind.DRAFT_V})
_READY_POLL_S = 0.2
_SPIN_GUARD_S = 0.001
_JOIN_S = 5.0


@dataclass(slots=True)
class _Entry:
    """An order in a peer's queue."""

    order: SendOrder
    ready: Callable[[float], bool]
    done: Callable[[SendDone], None]
    cancelled: bool = False


class PeerWriter:
    """Writes to one peer, order by order, in a thread of its own."""

    def __init__(self, stage: int, planner: CopyPlanner, transport: Transport, write_timeout_s: float) -> None:
        self.planner = planner
        self._stage = stage
        self._transport = transport
        self._write_timeout_s = write_timeout_s
        self._entries: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._waiting: list[_Entry] = []
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"stage-{stage}-writer", daemon=True)
        self._thread.start()

    def put(self, entry: _Entry) -> None:
        """Queues an order; answers it at once when the writer is closed."""
        with self._lock:
            closed = self._closed
            if not closed:
                self._waiting.append(entry)
                self._entries.put(entry)
        if closed:
            entry.done(self._failed(entry, "the peer was forgotten"))

    def cancel(self, owner: str) -> None:
        """Orders of that owner that have not begun are answered without being done."""
        with self._lock:
            for entry in self._waiting:
                entry.cancelled |= entry.order.owner == owner

    def close(self) -> None:
        """Answers what is queued and ends the thread after the write under way."""
        with self._lock:
            self._closed = True
            for entry in self._waiting:
                entry.cancelled = True
            self._entries.put(None)

    def join(self, timeout_s: float) -> None:
        """Waits for the thread, after `close`."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (entry := self._entries.get()) is not None:
            answer = self._handle(entry)
            with self._lock:
                self._waiting.remove(entry)
            entry.done(answer)

    def _handle(self, entry: _Entry) -> SendDone:
        while not entry.cancelled and not entry.ready(_READY_POLL_S):
            # A stage that ended answers at once, and cancels soon after.
            time.sleep(_SPIN_GUARD_S)
        if entry.cancelled:
            return self._failed(entry, "cancelled")
        try:
            return self._write(entry.order)
        except TransferFailedError as error:
            return self._failed(entry, str(error), drained=error.drained)
        except GraftlineError as error:
            return self._failed(entry, str(error))
        except Exception as error:
            logger.exception("a write failed unexpectedly")
            return self._failed(entry, f"{type(error).__name__}: {error}", drained=False)

    def _write(self, order: SendOrder) -> SendDone:
        begin_s = time.monotonic()
        by_session = self.planner.plan(DRAFT_KINDS if order.drafter else TARGET_KINDS, order.pages)
        num_bytes = 0
        for number, (session_id, copies) in enumerate(by_session.items()):
            try:
                self._transport.write(session_id, copies, time.monotonic() + self._write_timeout_s)
            except TransferFailedError as error:
                # What earlier sessions took was acknowledged, so only this one's bytes can be late.
                raise TransferFailedError(f"session {number + 1}: {error}", drained=error.drained) from error
            num_bytes += sum(copy.num_bytes for copy in copies)
        return SendDone(order.order, self._stage, num_bytes, time.monotonic() - begin_s)

    def _failed(self, entry: _Entry, reason: str, *, drained: bool = True) -> SendDone:
        return SendDone(entry.order.order, self._stage, 0, 0.0, error=reason, drained=drained)


class StagePort:
    """See `graftline.engine.transfer_port.TransferPort`."""

    def __init__(self, stage: int, transport: Transport, write_timeout_s: float, on_close: Callable[[], None]) -> None:
        self._stage = stage
        self._transport = transport
        self._write_timeout_s = write_timeout_s
        self._on_close = on_close
        self._layout: StageLayout | None = None
        self._writers: dict[str, PeerWriter] = {}
        self._lock = threading.Lock()

    def open(self, pools: StagePools) -> bytes:
        """Registers the pools; a serialized `StageLayout` says where they lie."""
        buffers = pool_buffers(pools.target, BufferKind.K, BufferKind.V)
        registered = [pools.target]
        if pools.draft is not None:
            buffers += pool_buffers(pools.draft, BufferKind.DRAFT_K, BufferKind.DRAFT_V)
            registered.append(pools.draft)
        for pool in registered:
            self._transport.register(pool.data.data_ptr(), pool.num_bytes)
        self._layout = StageLayout(self._stage, self._transport.session_id, tuple(buffers))
        return self._layout.to_proto().SerializeToString()

    def pair(self, peer: str, layout: bytes) -> None:
        """Learns where a peer's pools lie. The service has checked that they match."""
        assert self._layout is not None, "opened before"
        planner = CopyPlanner(self._layout, WorkerLayout.from_proto(decode_peer(layout)))
        writer = PeerWriter(self._stage, planner, self._transport, self._write_timeout_s)
        with self._lock:
            old = self._writers.get(peer)
            self._writers[peer] = writer
        if old is not None:
            old.close()

    def forget(self, peer: str) -> None:
        """Drops a peer and what is queued for it."""
        with self._lock:
            writer = self._writers.pop(peer, None)
        if writer is not None:
            writer.close()
            for session_id in writer.planner.session_ids:
                self._transport.forget(session_id)

    def send(self, order: SendOrder, ready: Callable[[float], bool], done: Callable[[SendDone], None]) -> None:
        """Queues an order."""
        with self._lock:
            writer = self._writers.get(order.peer)
        if writer is None:
            done(SendDone(order.order, self._stage, 0, 0.0, error=f"{order.peer} is not paired", drained=True))
        else:
            writer.put(_Entry(order, ready, done))

    def cancel(self, owner: str) -> None:
        """Drops what an owner has queued."""
        with self._lock:
            writers = list(self._writers.values())
        for writer in writers:
            writer.cancel(owner)

    def close(self) -> None:
        """Answers what is queued, waits (bounded) for the writes under way, lets go of the transport."""
        with self._lock:
            writers = list(self._writers.values())
            self._writers.clear()
        for writer in writers:
            writer.close()
        for writer in writers:
            writer.join(_JOIN_S)
        self._on_close()


@dataclass(slots=True)
class PortFactory:
    """Makes the ports of the stages of one process, which share one transport.

    Attributes:
        hub: where transports of one process meet; for in-process transfers only.
    """

    config: TransferConfig
    hub: InProcessHub | None = None
    _transport: Transport | None = None
    _num_open: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, stage: int) -> StagePort:
        """The port of a stage.

        Raises:
            InvalidRequestError: the transport's settings cannot work.
            PeerUnavailableError: the transport did not start.
        """
        with self._lock:
            if self._transport is None:
                self._transport = self._start()
            self._num_open += 1
            return StagePort(stage, self._transport, self.config.write_timeout_s, self._on_port_closed)

    def _start(self) -> Transport:
        if self.config.transport is TransportName.MOONCAKE:
            stall_s = max(1, round(self.config.write_timeout_s))
            return MooncakeTransport(MooncakeConfig(host=self.config.host, stall_timeout_s=stall_s))
        if self.hub is None:
            raise InvalidRequestError("transport", "in-process transfers need all workers in one process")
        return self.hub.join()

    def _on_port_closed(self) -> None:
        with self._lock:
            self._num_open -= 1
            last, transport = self._num_open == 0, self._transport
            if last:
                self._transport = None
        if last and transport is not None:
            transport.close()


def pool_buffers(pool: KvPool, keys: BufferKind, values: BufferKind) -> list[BufferLayout]:
    """Keys and values of every layer of a pool, page by page; scratch pages are nobody's business."""
    geometry = pool.geometry
    base, entry = pool.data.data_ptr(), geometry.entry_bytes
    dtype = str(geometry.dtype).removeprefix("torch.")
    return [
        BufferLayout(
            key=BufferKey(kind, pool.first_layer + index),
            dtype=dtype,
            base_address=base + (2 * index + half) * entry,
            unit_bytes=entry,
            unit_stride_bytes=geometry.page_bytes,
            num_units=pool.num_pages,
        )
        for index in range(geometry.num_layers)
        for half, kind in enumerate((keys, values))
    ]
