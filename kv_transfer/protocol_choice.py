"""Which way bytes go between two processes, decided from where they run and where their pools lie."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class TransferPath(Enum):
    """The ways bytes can go, fastest first."""

    INTRA_NODE_GPU = "intra-node-gpu"
    """Peer copies between GPU pools of one host (NVLink or PCIe), or inside one GPU."""
    RDMA = "rdma"
    TCP = "tcp"


@dataclass(frozen=True, slots=True)
class TransferDevices:
    """What one process has.

    Args:
        pools_on_gpu: its pools are GPU memory from plain device allocations (no expandable segments).
        rdma_devices: RDMA devices it may use.
    """

    pools_on_gpu: bool = False
    rdma_devices: tuple[str, ...] = ()


def choose_path(local_host_id: str, peer_host_id: str, local: TransferDevices, peer: TransferDevices) -> TransferPath:
    """The fastest way that works for both.

    The engine settles on the intra-node way when it starts, for all its peers: a process with peers on this host and on
    others needs a transport for each way.
    """
    if local_host_id == peer_host_id and local.pools_on_gpu and peer.pools_on_gpu:
        return TransferPath.INTRA_NODE_GPU
    if local.rdma_devices and peer.rdma_devices:
        return TransferPath.RDMA
    return TransferPath.TCP


def host_id(proc: Path = Path("/proc")) -> str:
    """Names the place inside which processes can open each other's GPU memory handles: one boot of one kernel, and one
    IPC namespace of it. Equal addresses or host names prove neither (containers, NAT).
    """
    boot_id = (proc / "sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}/{(proc / 'self/ns/ipc').stat().st_ino}"


def rdma_devices(sysfs: Path = Path("/sys/class/infiniband")) -> Sequence[str]:
    """RDMA devices of this host."""
    return sorted(os.listdir(sysfs)) if sysfs.is_dir() else []
