"""A stage's transfer port: the engine's orders become checked one-sided writes of a transport.

An order for pages becomes one job for every stage of the peer that owns some of them; the jobs run beside each
other, and their outcomes are reported as one.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from graftline.engine.kv_pool import KvPool
from graftline.engine.plan import SendDone, SendOrder, SentPool
from graftline.engine.pool_memory import shares_gpu_memory
from graftline.engine.state_pool import StatePool
from graftline.engine.transfer_port import Sending, StagePools
from graftline.errors import GraftlineError, IncompatibleError, InvalidRequestError, PeerUnavailableError
from graftline.kv_transfer.copy_plan import CopyPlanner
from graftline.kv_transfer.digest import EMPTY, combined, digest_units
from graftline.kv_transfer.fault_transport import FaultPlan, FaultTransport
from graftline.kv_transfer.in_process import InProcessHub
from graftline.kv_transfer.layout import BufferKey, BufferKind, BufferLayout, StageLayout, WorkerLayout
from graftline.kv_transfer.mooncake_engine import (
    MooncakeConfig,
    has_intra_node,
    installed_versions,
    intra_node_config,
)
from graftline.kv_transfer.mooncake_transport import MooncakeTransport
from graftline.kv_transfer.protocol_choice import TransferPath, host_id, rdma_devices
from graftline.kv_transfer.routed_transport import RoutedTransport
from graftline.kv_transfer.transfer_job import Gather, TransferJob, TransferOutcome
from graftline.kv_transfer.transfer_worker import TransferWorker
from graftline.kv_transfer.transport import Transport
from graftline.worker.config import TransferConfig, TransferProtocol, TransportName
from graftline.worker.facts import decode_peer

logger = logging.getLogger(__name__)

TARGET_KINDS = frozenset({BufferKind.K, BufferKind.V})
DRAFT_KINDS = frozenset({BufferKind.DRAFT_K, BufferKind.DRAFT_V})
STATE_KINDS = frozenset({BufferKind.CONV, BufferKind.SSM})
_KINDS = {SentPool.TARGET: TARGET_KINDS, SentPool.DRAFT: DRAFT_KINDS, SentPool.STATE: STATE_KINDS}
_JOIN_S = 5.0


class StagePort:
    """See `graftline.engine.transfer_port.TransferPort`.

    Args:
        connect: the transport of this process, once it is known whether pools lie on GPUs.
        order_timeout_s: an order that is not acknowledged so long after it was given has failed, and nothing of it
            is written later: an order outlives no quarantine, even if this process was stopped in between.
        kv_digest: answers carry a digest of what was written.
    """

    def __init__(
        self,
        stage: int,
        connect: Callable[[bool], RoutedTransport],
        order_timeout_s: float,
        on_close: Callable[[], None],
        kv_digest: bool = False,
    ) -> None:
        self._stage = stage
        self._connect = connect
        self._order_timeout_s = order_timeout_s
        self._on_close = on_close
        self._kv_digest = kv_digest
        self._transport: RoutedTransport | None = None
        self._worker: TransferWorker | None = None
        self._layout: StageLayout | None = None
        self._peers: dict[str, tuple[CopyPlanner | None, IncompatibleError | None]] = {}  # the latter: there is no way
        self._lock = threading.Lock()  # guards changes of _peers

    def open(self, pools: StagePools) -> bytes:
        """Registers the pools; a serialized `StageLayout` says where they lie.

        Raises:
            InvalidRequestError: the transport's settings cannot work.
            PeerUnavailableError: the transport did not start.
        """
        device = pools.target.data.device
        is_cuda = device.type == "cuda"
        if is_cuda and self._kv_digest:
            raise InvalidRequestError("kv_digest", "reads host memory, and the pools are on a GPU")
        if is_cuda:
            torch.cuda.synchronize(device)  # what fills the pools must not overtake what peers write
        transport = self._transport = self._connect(is_cuda)
        self._worker = TransferWorker(transport, enter_thread=partial(_enter, device))
        buffers = pool_buffers(pools.target, BufferKind.K, BufferKind.V)
        registered: list[KvPool | StatePool] = [pools.target] if buffers else []
        if pools.draft is not None:
            buffers += pool_buffers(pools.draft, BufferKind.DRAFT_K, BufferKind.DRAFT_V)
            registered.append(pools.draft)
        if pools.states is not None:
            buffers += state_buffers(pools.states)
            registered.append(pools.states)
        for pool in registered:
            transport.register(pool.data.data_ptr(), pool.num_bytes)
        self._layout = StageLayout(
            self._stage, transport.session_id, tuple(buffers), transport.host_id, transport.endpoints
        )
        return self._layout.to_proto().SerializeToString()

    def pair(self, peer: str, layout: bytes) -> None:
        """Learns where a peer's pools lie, and settles how each of its stages is written to.

        The service has checked that layouts match and that there is a way; were there none, that would be the answer to
        the peer's orders.
        """
        assert self._layout is not None, "opened before"
        assert self._transport is not None, "opened before"
        try:
            reached = self._transport.reached(WorkerLayout.from_proto(decode_peer(layout)))
        except IncompatibleError as error:
            with self._lock:
                planner, _ = self._peers.get(peer, (None, None))
                self._peers[peer] = planner, error
            return
        planner = CopyPlanner(self._layout, reached)
        with self._lock:
            _, refused = self._peers.get(peer, (None, None))
            self._peers[peer] = planner, refused

    def forget(self, peer: str) -> None:
        """Drops a peer and what is queued for it."""
        with self._lock:
            planner, _ = self._peers.pop(peer, (None, None))
        if planner is not None and self._worker is not None:
            for session_id in planner.session_ids:
                self._worker.forget_peer(session_id)

    def send(self, sendings: Sequence[Sending]) -> None:
        """See `TransferPort`."""
        deadline_s = time.monotonic() + self._order_timeout_s
        together: list[TransferJob] = []
        waiting: list[Sending] = []
        for sending in sendings:
            if jobs := self._jobs(sending, deadline_s):
                together += jobs
                waiting.append(sending)
        try:
            if together and self._worker is not None:
                self._worker.submit(*together)
        except GraftlineError as error:
            if len(waiting) == 1:
                self._refuse(waiting[0], error)
            else:  # some may fit
                for sending in waiting:
                    self.send([sending])

    def _jobs(self, sending: Sending, deadline_s: float) -> list[TransferJob]:
        """One for every session that an order concerns; without any the order is answered here."""
        order = sending.order
        planner, refused = self._peers.get(order.peer, (None, None))
        if refused is not None or planner is None:
            self._refuse(sending, refused or InvalidRequestError("peer", f"{order.peer} is not paired"))
            return []
        plans = planner.plans(_KINDS[order.pool]) if order.runs else {}
        if not plans:  # a stage without layers of this kind
            self._end(sending, TransferOutcome(None, drained=True))
            return []
        done: Callable[[TransferOutcome], None] = partial(self._end, sending)
        if len(plans) > 1:
            done = Gather(len(plans), done)
        return [
            TransferJob(order.owner, session_id, partial(plan.copies, order.runs), deadline_s, done, sending.ready)
            for session_id, plan in plans.items()
        ]

    def _refuse(self, sending: Sending, error: GraftlineError) -> None:
        self._end(sending, TransferOutcome(error, drained=True))

    def _end(self, sending: Sending, outcome: TransferOutcome) -> None:
        order, error = sending.order, outcome.error
        sending.done(
            SendDone(
                order.order,
                self._stage,
                outcome.num_bytes,
                outcome.seconds,
                error="" if error is None else str(error) or type(error).__name__,
                drained=outcome.drained,
                digest=self._digest_of(order) if self._kv_digest and error is None else b"",
            )
        )

    def cancel(self, owner: str) -> None:
        """Drops what an owner has queued."""
        if self._worker is not None:
            self._worker.cancel(owner, _nobody_waits)

    def digest(self, units: Sequence[tuple[SentPool, Sequence[int]]]) -> bytes:
        """Of what lies in these pages and slots here."""
        assert self._layout is not None, "opened before"
        total = EMPTY
        for pool, ids in units:
            total = combined(total, digest_units(self._layout, _KINDS[pool], [(unit, unit) for unit in ids]))
        return total

    def close(self) -> None:
        """Answers what is queued, waits (bounded) for the writes under way, lets go of the transport."""
        if self._worker is not None and not self._worker.close(_JOIN_S):
            logger.warning("stage %d: writes are still under way after %.0f s", self._stage, _JOIN_S)
        self._on_close()

    def _digest_of(self, order: SendOrder) -> bytes:
        assert self._layout is not None, "opened before"
        units = [(src + step, dst + step) for src, dst, length in order.runs for step in range(length)]
        return digest_units(self._layout, _KINDS[order.pool], units)


def _enter(device: torch.device) -> None:
    """A transfer thread's first act: the engine copies on the thread's current GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _nobody_waits(drained: bool) -> None:
    """The end of an owner's jobs reaches the engine as the answers of its orders."""


@dataclass(slots=True)
class PortFactory:
    """Makes the ports of the stages of one process, which share one transport.

    Attributes:
        hub: where transports of one process meet; for in-process transfers only.
    """

    config: TransferConfig
    hub: InProcessHub | None = None
    _transport: RoutedTransport | None = None
    _num_open: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, stage: int) -> StagePort:
        """The port of a stage."""
        with self._lock:
            self._num_open += 1
        config = self.config
        return StagePort(stage, self._connected, config.order_timeout_s, self._on_port_closed, config.kv_digest)

    def _connected(self, pools_on_gpu: bool) -> RoutedTransport:
        """The process's transport; started by its first stage.

        Raises:
            InvalidRequestError: the transport's settings cannot work.
            PeerUnavailableError: the transport did not start.
        """
        with self._lock:
            if self._transport is None:
                plan = FaultPlan.parse(self.config.faults)
                ways = self._start(pools_on_gpu)
                if plan.faults:
                    ways = {path: FaultTransport(way, plan) for path, way in ways.items()}
                self._transport = RoutedTransport(ways, host_id())
            return self._transport

    def _start(self, pools_on_gpu: bool) -> dict[TransferPath, Transport]:
        if self.config.transport is TransportName.MOONCAKE:
            return mooncake_ways(self.config, pools_on_gpu)
        if self.hub is None:
            raise InvalidRequestError("transport", "in-process transfers need all workers in one process")
        return {TransferPath.TCP: self.hub.join()}

    def _on_port_closed(self) -> None:
        with self._lock:
            self._num_open -= 1
            last, transport = self._num_open == 0, self._transport
            if last:
                self._transport = None
        if last and transport is not None:
            transport.close()


def mooncake_ways(config: TransferConfig, pools_on_gpu: bool) -> dict[TransferPath, Transport]:
    """An engine for every way that this process can have, fastest first.

    Raises:
        InvalidRequestError: settings that cannot work.
        PeerUnavailableError: the way that was asked for, or the last one that was left, did not start.
    """
    stall_s = max(1, round(config.stall_timeout_s))
    ways: dict[TransferPath, Transport] = {}
    if pools_on_gpu and config.intra_node_gpu and shares_gpu_memory() and has_intra_node(installed_versions()):
        _start_if_possible(ways, TransferPath.INTRA_NODE_GPU, intra_node_config(config.host, stall_s))
    rdma = MooncakeConfig(config.host, "rdma", config.rdma_devices, stall_s)
    if config.protocol is TransferProtocol.RDMA:
        ways[TransferPath.RDMA] = MooncakeTransport(rdma)
        return ways
    if config.protocol is TransferProtocol.AUTO and (config.rdma_devices or rdma_devices()):
        _start_if_possible(ways, TransferPath.RDMA, rdma)
    devices = config.rdma_devices if config.protocol is TransferProtocol.TCP else ""  # a contradiction is named
    ways[TransferPath.TCP] = MooncakeTransport(MooncakeConfig(config.host, "tcp", devices, stall_s))
    return ways


def _start_if_possible(ways: dict[TransferPath, Transport], path: TransferPath, config: MooncakeConfig) -> None:
    try:
        ways[path] = MooncakeTransport(config)
    except PeerUnavailableError as error:
        logger.warning("no transfers by %s: %s", path.value, error)


def pool_buffers(pool: KvPool, keys: BufferKind, values: BufferKind) -> list[BufferLayout]:
    """Keys and values of every layer of a pool, page by page; scratch pages are nobody's business."""
    geometry = pool.geometry
    base, entry = pool.data.data_ptr(), geometry.entry_bytes
    dtype = str(geometry.dtype).removeprefix("torch.")
    return [
        BufferLayout(
            key=BufferKey(kind, layer),
            dtype=dtype,
            base_address=base + (2 * index + half) * entry,
            unit_bytes=entry,
            unit_stride_bytes=geometry.page_bytes,
            num_units=pool.num_pages,
        )
        for index, layer in enumerate(pool.layers)
        for half, kind in enumerate((keys, values))
    ]


def state_buffers(pool: StatePool) -> list[BufferLayout]:
    """Conv window and recurrent state of every layer of a pool, slot by slot; the padding slot is nobody's business."""
    geometry, base = pool.geometry, pool.data.data_ptr()

    def buffer(kind: BufferKind, layer: int, dtype: str, offset: int, num_bytes: int) -> BufferLayout:
        return BufferLayout(
            key=BufferKey(kind, layer),
            dtype=dtype,
            base_address=base + offset,
            unit_bytes=num_bytes,
            unit_stride_bytes=geometry.slot_bytes,
            num_units=pool.num_slots,
        )

    window_dtype = str(geometry.dtype).removeprefix("torch.")
    found = []
    for layer in geometry.layers:
        found += [
            buffer(BufferKind.CONV, layer, window_dtype, geometry.window_offset(layer), geometry.window_bytes),
            buffer(BufferKind.SSM, layer, "float32", geometry.state_offset(layer), geometry.state_bytes),
        ]
    return found
