"""The other end of links under test: a process that echoes what it hears until told to stop."""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from shared_peer_memory import SharedPeerMemory
from torch._C._distributed_c10d import TCPStore

from graftline.engine.config import StageChannel
from graftline.engine.links_distributed import connect_stages
from graftline.engine.plan import StageReady, StepPlan, Stop

TIMEOUT = timedelta(seconds=60)


def join(rank: int, port: int, *, is_master: bool = False) -> TCPStore:
    """Makes this process rank `rank` of two; port 0 lets the system choose one."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    return TCPStore("127.0.0.1", port, 2, is_master=is_master, wait_for_workers=False, timeout=TIMEOUT)


def enter(rank: int, store: TCPStore) -> None:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=TIMEOUT)


def memory_named(name: str) -> SharedPeerMemory | None:
    """ "none", "well", or memory with a fault of that name."""
    return None if name == "none" else SharedPeerMemory("" if name == "well" else name)


def main(port: int, flood: int, channel: StageChannel, memory_name: str) -> None:
    """Sends `flood` megabytes before it receives anything, then echoes plans with their payload doubled.

    Args:
        memory_name: see `memory_named`.
    """
    enter(1, join(1, port))
    memory = memory_named(memory_name)
    ends = connect_stages(2, 1, torch.device("cpu"), channel, memory=memory)
    upstream, star = ends.upstream, ends.stars[0]
    assert upstream is not None
    assert star.control is not None
    assert star.results is not None
    for index in range(flood):
        star.results.send(StageReady(index, b"x" * (1 << 20)))
    while True:
        message, payload = upstream.receive()
        if isinstance(message, Stop):
            break
        assert isinstance(message, StepPlan)
        star.results.send(
            StageReady(message.step, str(message.num_rows).encode()), None if payload is None else payload * 2
        )
    message, payload = star.control.receive()
    assert isinstance(message, Stop)
    assert payload is None
    dist.destroy_process_group()
    if memory is not None:
        memory.close()


if __name__ == "__main__":
    with torch.inference_mode():
        main(int(sys.argv[1]), int(sys.argv[2]), StageChannel(sys.argv[3]), sys.argv[4])
