"""The process of a stage behind the first: joins its pipeline, runs its stage, ends with it.

Rank and rendezvous come from torchrun's variables, so that stages may live on other hosts.
"""

import logging
import os
import threading
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from graftline.engine.config import EngineConfig
from graftline.engine.links import StageLinks, connect_gloo_stages
from graftline.engine.pipeline import STAGE_CONFIG_VARIABLE, joined_key
from graftline.engine.plan import StageFailed, StageReady
from graftline.engine.stage_builder import build_stage
from graftline.engine.stage_worker import StageWorker
from graftline.engine.transfer_port import TransferPort

logger = logging.getLogger(__name__)

JOIN_TIMEOUT = timedelta(seconds=300)


def config_from_environment() -> EngineConfig:
    """The worker's configuration as stage 0 handed it down."""
    return EngineConfig.from_json(os.environ[STAGE_CONFIG_VARIABLE])


def run_stage(config: EngineConfig, make_port: Callable[[int], TransferPort]) -> int:
    """Runs the stage of this process until stage 0 says stop or is gone.

    Returns:
        The exit status: 0 after a stop.
    """
    stage = int(os.environ["RANK"])
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
    upstream, downstream, stars = connect_gloo_stages(config.num_stages, stage)
    star = stars[stage - 1]
    assert upstream is not None
    assert star.control is not None
    assert star.results is not None
    assert star.reports is not None
    try:
        built = build_stage(config, stage)
        port = make_port(stage)
        layout = port.open(built.pools)
    except Exception as error:
        star.reports.send(StageFailed(stage, f"{type(error).__name__}: {error}"))
        raise
    ended = threading.Event()
    reasons: list[str] = []

    def on_end(reason: str | None) -> None:
        if reason is not None:
            reasons.append(reason)
            ended.set()

    links = StageLinks(upstream, downstream, star.control, star.results, star.reports)
    worker = StageWorker(stage, built.stage, links, port, built.gate, config.threads, on_end)
    star.reports.send(StageReady(stage, layout))
    worker.start()
    while not ended.wait(0.2):
        if worker.join(0.0):
            break
    if reasons:
        logger.error("stage %d ends: %s", stage, reasons[0])
        # A blocked receive of another thread cannot be woken: leave without waiting for it.
        logging.shutdown()
        os._exit(1)
    dist.destroy_process_group()
    return 0
