"""Which way bytes go between two processes, decided from where they run and what each of them offers."""

import os
from collections.abc import Collection, Sequence
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
class Endpoint:
    """A way into a process, with the session it has there."""

    path: TransferPath
    session_id: str


def common_paths(
    local_host_id: str, peer_host_id: str, local: Collection[TransferPath], peer: Collection[TransferPath]
) -> list[TransferPath]:
    """The ways that both have and that their places allow, fastest first."""
    same_host = bool(local_host_id) and local_host_id == peer_host_id
    return [
        path
        for path in TransferPath
        if path in local and path in peer and (same_host or path is not TransferPath.INTRA_NODE_GPU)
    ]


def host_id(proc: Path = Path("/proc")) -> str:
    """Names the place inside which processes can open each other's GPU memory handles: one boot of one kernel, and one
    IPC namespace of it. Equal addresses or host names prove neither (containers, NAT).
    """
    boot_id = (proc / "sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}/{(proc / 'self/ns/ipc').stat().st_ino}"


def rdma_devices(sysfs: Path = Path("/sys/class/infiniband")) -> Sequence[str]:
    """RDMA devices of this host."""
    return sorted(os.listdir(sysfs)) if sysfs.is_dir() else []
