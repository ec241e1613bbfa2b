"""The process of a stage behind the first: joins its pipeline, runs its stage, ends with it.

Rank and rendezvous come from torchrun's variables, so that stages may live on other hosts.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from graftline.engine.config import EngineConfig, Role
from graftline.engine.links import QueuedSender, StageLinks
from graftline.engine.links_distributed import connect_stages, leave_job
from graftline.engine.pipeline import STAGE_CONFIG_VARIABLE, joined_key
from graftline.engine.plan import StageFailed, StageReady
from graftline.engine.round_returns import returned_bytes
from graftline.engine.stage_builder import build_stage
from graftline.engine.stage_stream import StageStream
from graftline.engine.stage_worker import StageWorker
from graftline.engine.transfer_port import TransferPort
from graftline.garbage import keep_what_is_there

logger = logging.getLogger(__name__)

JOIN_TIMEOUT = timedelta(seconds=300)
# From the first word of an end to the end of this process, whatever its threads wait for.
_STOP_S = 20.0
_LEAVE_S = 5.0


def config_from_environment() -> EngineConfig:
    """The worker's configuration as stage 0 handed it down."""
    return EngineConfig.from_json(os.environ[STAGE_CONFIG_VARIABLE])


def run_stage(config: EngineConfig, make_port: Callable[[int], TransferPort]) -> int:
    """Runs the stage of this process until stage 0 says stop or is gone.

    Returns:
        The exit status: 0 after a stop.
    """
    stage = int(os.environ["RANK"])
    device = torch.device(config.stage_device(stage))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _join_job(config, stage)
    ends = connect_stages(config.num_stages, stage, device, config.stage_channel, return_bytes=returned_bytes(config))
    star = ends.stars[stage - 1]
    assert ends.upstream is not None
    assert star.control is not None
    assert star.results is not None
    assert star.reports is not None
    stream = StageStream(device, urgent=config.role is Role.PREFILL)
    try:
        with stream.entered():
            built = build_stage(config, stage, returns=ends.returns, by_memory=ends.by_memory)
            port = make_port(stage)
            layout = port.open(built.pools)
    except Exception as error:
        star.reports.send(StageFailed(stage, f"{type(error).__name__}: {error}"))
        raise
    end = _End()
    downstream = None
    if ends.downstream is not None:
        downstream = QueuedSender(ends.downstream, "plan-sender", end.tell)
    links = StageLinks(ends.upstream, downstream, star.control, star.results, star.reports)
    worker = StageWorker(stage, built.stage, links, port, built.gate, config.threads, stream, end.tell)
    keep_what_is_there()
    star.reports.send(StageReady(stage, layout, built.graph_bytes, ends.ring_bytes))
    worker.start()
    reason = end.wait_for(worker)
    if reason is not None:
        logger.error("stage %d ends: %s", stage, reason)
        # A blocked receive of another thread, or a GPU that waits for a dead neighbour, cannot be woken: leave without
        # waiting for it.
        logging.shutdown()
        os._exit(1)
    if downstream is not None:
        downstream.close(_LEAVE_S)
    leave_job(_LEAVE_S, abort=device.type == "cuda")
    return 0


def _join_job(config: EngineConfig, stage: int) -> None:
    """Joins the torch.distributed job of the pipeline, by the store of stage 0 if that started this process."""
    if os.environ.get("MASTER_ADDR") == "127.0.0.1":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if os.environ.get("GRAFTLINE_SPAWNED"):
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            config.num_stages,
            is_master=False,
            timeout=JOIN_TIMEOUT,
        )
        store.set(joined_key(stage), "")
        dist.init_process_group("gloo", store=store, rank=stage, world_size=config.num_stages, timeout=JOIN_TIMEOUT)
    else:
        dist.init_process_group("gloo", init_method="env://", timeout=JOIN_TIMEOUT)


class _End:
    """Hears why a stage's threads end, and decides when the process does."""

    def __init__(self) -> None:
        self._told = threading.Event()
        self._reason: str | None = None

    def tell(self, reason: str | None) -> None:
        """A thread ended, for this reason or, with None, because it was told to."""
        self._reason = self._reason or reason
        self._told.set()

    def wait_for(self, worker: StageWorker) -> str | None:
        """Until the stage has ended, or cannot go on; why it failed."""
        self._told.wait()
        deadline = time.monotonic() + _STOP_S
        while self._reason is None and not worker.join(0.1):
            if time.monotonic() > deadline:
                return f"told to stop, its threads still wait after {_STOP_S:g} s"
        return self._reason
