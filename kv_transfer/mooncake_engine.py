"""The few calls of Mooncake's transfer engine that are used here, typed, and how the engine is started.

The engine reads environment variables, some at import and some later, answers with bare integers and crashes the
process when it is called before it is initialised. All of that ends in this file.
"""

import importlib
import importlib.metadata
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Protocol, cast

from graftline.errors import InvalidRequestError, PeerUnavailableError

_DISTRIBUTIONS = (
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine",
)
_FIRST_ACKNOWLEDGING = (0, 3, 13, 1)  # 0.3.13.post1; older ones report success when the bytes have left
_CUDA_DISTRIBUTIONS = ("mooncake-transfer-engine-cuda13", "mooncake-transfer-engine")
_PROTOCOLS = ("tcp", "rdma")
_INTRA_NODE = "MC_INTRANODE_NVLINK"
_IPV6 = "MC_USE_IPV6"
_WILDCARD_NAMES = ("", "*")


class Engine(Protocol):
    """An initialised engine. Every method answers an integer; see `mooncake_transport` for what they mean."""

    def get_rpc_port(self) -> int:
        """The port under which peers make contact."""

    def register_memory(self, buffer_addr: int, capacity: int) -> int:
        """0 when done."""

    def unregister_memory(self, buffer_addr: int) -> int:
        """0 when done."""

    def transfer_submit_write(self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int) -> int:
        """A batch id; 0 or -1 (signed or not) when nothing was submitted."""

    def batch_transfer_async_write(
        self, target_hostname: str, buffers: list[int], peer_buffer_addresses: list[int], lengths: list[int]
    ) -> int:
        """The same for several copies at once."""

    def transfer_check_status(self, batch_id: int) -> int:
        """0 under way, 1 done, anything else failed; of a batch of several copies, how it stands with the first. A real
        batch id only, and never again after its end.
        """

    def send_probe(self, peer_server_name: str) -> int:
        """0 when the peer answered. Blocks for a minute when the peer accepts and stays silent."""


class _RawEngine(Engine, Protocol):
    def initialize(self, local_hostname: str, metadata_server: str, protocol: str, device_name: str) -> int: ...


@dataclass(frozen=True, slots=True)
class MooncakeConfig:
    """How one process takes part in transfers.

    Args:
        host: the address or name under which peers reach this process; a wildcard is refused. With an IPv6 address
            the engine speaks IPv6 and nothing else, so all workers must have one then.
        protocol: tcp or rdma.
        device: RDMA devices, comma-separated; empty: the engine picks.
        stall_timeout_s: a TCP write without any progress for this long has failed. Late bytes of a failed write can
            land until the peer has read what its kernel holds: see `docs/transfer.md`.
        contact_timeout_s: how long a peer may take to answer before anything is sent to it.
        max_in_flight: batches that are under way to one peer at a time.
        max_copy_bytes: longer copies are cut, so that several connections carry them.
        copies_per_batch: copies that are handed over in one call; more than one only where they end together.
        spin_s: how long the end of a write is waited for without pauses.
        min_port: lowest port of the control listener, together with `max_port`.
        max_port: one past its highest port.
        intra_node_nvlink: GPU memory goes over NVLink or peer copies, to peers of this host only (CUDA builds).

    Raises:
        InvalidRequestError: a value that cannot work.
    """

    host: str
    protocol: str = "tcp"
    device: str = ""
    stall_timeout_s: int = 2
    contact_timeout_s: float = 2.0
    max_in_flight: int = 16
    max_copy_bytes: int = 4 << 20
    copies_per_batch: int = 1
    spin_s: float = 0.0
    min_port: int = 15000
    max_port: int = 17000
    intra_node_nvlink: bool = False

    def __post_init__(self) -> None:
        _require_host(self.host)
        _require("protocol", self.protocol in _PROTOCOLS, f"{self.protocol!r} is none of {', '.join(_PROTOCOLS)}")
        _require("device", not self.device or self.protocol == "rdma", f"{self.device!r} needs protocol rdma")
        _require("stall_timeout_s", self.stall_timeout_s >= 1, f"{self.stall_timeout_s} is below 1")
        _require("contact_timeout_s", self.contact_timeout_s > 0, f"{self.contact_timeout_s} is not positive")
        _require("max_in_flight", 1 <= self.max_in_flight <= 512, f"{self.max_in_flight} is outside [1, 512]")
        _require(
            "copies_per_batch",
            self.copies_per_batch == 1 or (self.copies_per_batch > 1 and self.intra_node_nvlink),
            f"{self.copies_per_batch} is not 1",
        )
        _require("spin_s", self.spin_s >= 0, f"{self.spin_s} is negative")
        _require("max_copy_bytes", self.max_copy_bytes >= 4096, f"{self.max_copy_bytes} is below 4096")
        ports = f"[{self.min_port}, {self.max_port})"
        _require("min_port", 1024 <= self.min_port < self.max_port <= 65535, f"{ports} is no port range")

    def environment(self) -> dict[str, str]:
        """The engine's settings as it wants them: environment variables."""
        stall_s = str(self.stall_timeout_s)
        settings = {
            "MC_LOG_LEVEL": "ERROR",
            "MC_TCP_PROGRESS_TIMEOUT_SEC": stall_s,
            "MC_TCP_STATUS_TIMEOUT_SEC": stall_s,
            "MC_TCP_ENABLE_CONNECTION_POOL": "1",
            "MC_TCP_ADMISSION_TIMEOUT_MS": str(self.stall_timeout_s * 1000),
            "MC_HANDSHAKE_LISTEN_BACKLOG": "1024",
            "MC_MIN_RPC_PORT": str(self.min_port),
            "MC_MAX_RPC_PORT": str(self.max_port),
        }
        if self.intra_node_nvlink:
            settings[_INTRA_NODE] = "1"
        if self.is_ipv6:
            settings[_IPV6] = "1"
        return settings

    @property
    def is_ipv6(self) -> bool:
        """Whether `host` is an IPv6 address, with or without brackets."""
        try:
            return isinstance(ip_address(self.host.strip("[]")), IPv6Address)
        except ValueError:
            return False

    def session_id(self, port: int) -> str:
        """What peers call an engine that listens on `port`: `host:port`, `[address]:port` for IPv6."""
        return f"[{self.host.strip('[]')}]:{port}" if self.is_ipv6 else f"{self.host}:{port}"


def intra_node_config(host: str, stall_timeout_s: int = 2) -> MooncakeConfig:
    """For GPU pools and peers on this host. The engine copies on a CUDA stream of the calling thread: copies of one
    batch end together, need not be cut, and are over in microseconds to milliseconds.
    """
    return MooncakeConfig(
        host,
        stall_timeout_s=stall_timeout_s,
        max_copy_bytes=1 << 30,
        copies_per_batch=1024,
        spin_s=0.001,
        intra_node_nvlink=True,
    )


def has_intra_node(versions: Mapping[str, str]) -> bool:
    """Whether an installed build knows the intra-node way: those for CUDA do."""
    return any(name in versions for name in _CUDA_DISTRIBUTIONS)


def start_engine(config: MooncakeConfig) -> Engine:
    """An initialised engine; the only place that makes one.

    Raises:
        InvalidRequestError: the environment turns acknowledgements off, or the engine is too old to have them.
        PeerUnavailableError: Mooncake is not installed or did not start.
    """
    _refuse_unacknowledged_writes(os.environ, installed_versions())
    os.environ.pop(_INTRA_NODE, None)  # an engine of this process that was started before may have wanted it
    os.environ.update(config.environment())
    try:
        raw = cast(_RawEngine, importlib.import_module("mooncake.engine").TransferEngine())
    except ImportError as error:
        raise PeerUnavailableError(f"the Mooncake transfer engine cannot be loaded: {error}") from error
    if raw.initialize(config.host, "P2PHANDSHAKE", config.protocol, config.device) != 0:
        raise PeerUnavailableError(f"the Mooncake transfer engine did not start on {config.host} ({config.protocol})")
    return raw


def installed_versions() -> dict[str, str]:
    """The installed builds of the engine; all of them bring the same module, so there should be one."""
    versions: dict[str, str] = {}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _refuse_unacknowledged_writes(environment: Mapping[str, str], versions: Mapping[str, str]) -> None:
    """Without acknowledgements a write succeeds when its bytes have left, not when they have arrived."""
    if environment.get("MC_TCP_PROTO") == "1":
        raise InvalidRequestError("MC_TCP_PROTO", "1 turns acknowledgements off; unset it")
    for name, version in versions.items():
        if tuple(map(int, re.findall(r"\d+", version))) < _FIRST_ACKNOWLEDGING:
            raise InvalidRequestError(name, f"{version} does not acknowledge writes; 0.3.13.post1 or later does")


def _require_host(host: str) -> None:
    try:
        wildcard = ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        wildcard = host in _WILDCARD_NAMES
    _require("host", not wildcard, f"{host!r} is a wildcard; name an address that peers can reach")


def _require(field: str, holds: bool, problem: str) -> None:
    if not holds:
        raise InvalidRequestError(f"transfer {field}", problem)
