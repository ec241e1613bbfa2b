"""What both kinds of workers are told about their surroundings, frozen at start."""

from dataclasses import dataclass, field
from enum import Enum

from graftline.errors import InvalidRequestError
from graftline.proto.address import parse_address
from graftline.proto.channel import ANONYMOUS, Access
from graftline.proto.channel_options import PEER_SILENCE_S
from graftline.proto.server import ServerTls
from graftline.tracing import NO_TRACER, Tracer


class TransportName(Enum):
    """How KV moves to other workers."""

    MOONCAKE = "mooncake"
    # Copies within one process: for tests and for several workers in one process.
    IN_PROCESS = "in-process"


class TransferProtocol(Enum):
    """What carries the writes of the transfer engine between hosts."""

    AUTO = "auto"
    """RDMA where both sides have a device, else TCP."""
    TCP = "tcp"
    RDMA = "rdma"


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """How a worker's stages reach other workers' memory.

    Attributes:
        host: the name or address under which peers reach this host's transfer ports; never a wildcard.
        stall_timeout_s: a write without any progress for this long has failed.
        order_timeout_s: an order whose last byte is not acknowledged so long after it was given has failed. Must stay
            below the quarantine of the decodes, so that no write of a forgotten order can meet a reused page.
        protocol: between hosts.
        rdma_devices: comma-separated; empty: the engine picks.
        intra_node_gpu: between GPUs of one host, copies over NVLink or PCIe, or inside one GPU.
        kv_digest: send a digest of all that is written, which decodes compare with what they find (host memory only).
        faults: a `kv_transfer.fault_transport.FaultPlan` that chaos runs carry out on writes; empty: none.
    """

    transport: TransportName = TransportName.MOONCAKE
    host: str = "127.0.0.1"
    stall_timeout_s: float = 2.0
    order_timeout_s: float = 30.0
    protocol: TransferProtocol = TransferProtocol.AUTO
    rdma_devices: str = ""
    intra_node_gpu: bool = True
    faults: str = ""
    kv_digest: bool = False


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """A worker's surroundings.

    Attributes:
        listen: gRPC address; port 0 lets the OS choose.
        advertise: the address peers are told, when it is not the one listened on.
        metrics_listen: Prometheus over HTTP; None: no metrics port.
        peer_access: token and TLS shown to other workers.
        tokens: bearer tokens accepted from callers; empty: everybody may call.
        start_timeout_s: for every stage to build its pools.
        drain_grace_s: after SIGTERM, for what runs to finish before it is cancelled.
        stop_timeout_s: for stages and writes to end after that.
        engine_silence_s: an engine loop that has not turned for so long is hung.
        watch_interval_s: between two load reports, unless the caller asks for another.
        peer_silence_s: a caller that gives no sign of life for so long is gone.
        tracer: where requests' spans go; whoever made it closes it.
    """

    listen: str = "127.0.0.1:0"
    advertise: str | None = None
    metrics_listen: str | None = None
    transfer: TransferConfig = field(default_factory=TransferConfig)
    tls: ServerTls | None = None
    tokens: tuple[str, ...] = field(default=(), repr=False)
    peer_access: Access = ANONYMOUS
    start_timeout_s: float = 300.0
    drain_grace_s: float = 30.0
    stop_timeout_s: float = 15.0
    engine_silence_s: float = 2.5
    watch_interval_s: float = 0.5
    peer_silence_s: float = PEER_SILENCE_S
    tracer: Tracer = NO_TRACER

    def __post_init__(self) -> None:
        parse_address(self.listen, field="listen")
        if self.metrics_listen is not None:
            parse_address(self.metrics_listen, field="metrics_listen")
        for name in ("start_timeout_s", "stop_timeout_s", "engine_silence_s", "watch_interval_s", "peer_silence_s"):
            if getattr(self, name) <= 0:
                raise InvalidRequestError(name, f"{getattr(self, name)} is not positive")
        if self.drain_grace_s < 0:
            raise InvalidRequestError("drain_grace_s", f"{self.drain_grace_s} is negative")
