"""Times a few layers, and head and drafter, on the device that runs them, and splits the layers by that.

Two small stages are built one after the other as `engine/stage_builder.py` builds the real ones: the model's first
layers alone, and its last ones with head and drafter. The steps they are timed with are those of the worker's role.
"""

import gc
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
import torch
from torch import Tensor

from graftline.engine.busy_clock import BusyClock
from graftline.engine.config import EngineConfig, Role, StageChannel
from graftline.engine.device_rounds import round_size
from graftline.engine.layer_split import automatic_split
from graftline.engine.models.checkpoint import read_model_config
from graftline.engine.models.config import ModelConfig
from graftline.engine.pages import num_pages_for
from graftline.engine.plan import PageChange, Segment, SlotOpening, StepPlan, StepReport
from graftline.engine.stage_builder import build_stage, payload_columns
from graftline.engine.stage_stream import StageStream

logger = logging.getLogger(__name__)

_MOST_REQUESTS = 16
_CONTEXT = 256
_WARM_UPS = 2
_SECONDS = 0.3
_MOST_TIMES = 20
_STEPS_TOGETHER = 8  # on a GPU
_HEAD_START = 1.5  # of what it took to launch the steps before
_MOST_SLEEP_S = 0.05
_CYCLES_A_SECOND = 2e9
_LAYERS = 4  # of models whose layers are all of one kind


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one step.

    Attributes:
        layer_s: that one layer more takes, on average over the kinds of layers that the model has.
        last_s: of what only the last stage does.
    """

    layer_s: float
    last_s: float

    @property
    def last_stage_cost(self) -> float:
        """What only the last stage does, in layers."""
        return self.last_s / self.layer_s


def measured_split(config: EngineConfig) -> tuple[int, ...]:
    """Layers of every stage, so that the slowest one is as fast as it can be.

    Args:
        config: with any split; stages, tree, threads, type and device of its first stage count.

    Raises:
        InvalidRequestError: more stages than layers.
    """
    model = read_model_config(Path(config.model))
    if model.num_layers < 2:
        return automatic_split(model.num_layers, config.num_stages, 0.0)
    times = measure_stages(config, model)
    split = automatic_split(model.num_layers, config.num_stages, times.last_stage_cost)
    logger.info(
        "layers are split %s: one takes %.3f ms a step, head and drafter take %.3f ms",
        ",".join(map(str, split)),
        1e3 * times.layer_s,
        1e3 * times.last_s,
    )
    return split


def measure_stages(config: EngineConfig, model: ModelConfig) -> StageTimes:
    """Times a layer and what only the last stage does.

    Every stage has work besides its layers, which must not pass for theirs: a layer is what a stage of twice as many
    takes longer, unless the model is too small for such a stage.
    """
    count = min(_layers_of_every_kind(model), model.num_layers - 1)
    more = min(2 * count, model.num_layers - 1)
    rest = model.num_layers - count
    # As stages will be joined on one host; see `StageEnds`.
    by_memory = config.returns_rounds and config.stage_channel is not StageChannel.NCCL
    before = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        first_s = _time_stage(_small(config, (count, rest)), 0, model, by_memory)
        last_s = _time_stage(_small(config, (rest, count)), 1, model, by_memory)
        layer_s = first_s / count
        if more > count:
            longer = _small(config, (more, model.num_layers - more))
            longer_s = _time_stage(longer, 0, model, by_memory) - first_s
            # Where other work of the machine made the short stage the slower one, nothing is known of the layers alone.
            layer_s = longer_s / (more - count) if longer_s > 0 else layer_s
    finally:
        torch.set_num_threads(before)
    return StageTimes(layer_s, max(0.0, last_s - first_s))


def _layers_of_every_kind(model: ModelConfig) -> int:
    """Layers from either end on that hold every kind as often as the model does."""
    linear = len(model.linear_layers(range(model.num_layers)))
    attention = model.num_layers - linear
    return _LAYERS if not linear else -(-model.num_layers // max(1, attention))


def _small(config: EngineConfig, split: tuple[int, int]) -> EngineConfig:
    batch = _requests_of_step(config)
    rows = config.chunk_tokens if config.role is Role.PREFILL else _CONTEXT + config.tree.nodes
    return msgspec.structs.replace(
        config,
        layer_split=split,
        devices=(config.stage_device(0),),
        max_running=batch,
        num_pages=(batch + 1) * num_pages_for(rows, config.page_size),
    )


def _requests_of_step(config: EngineConfig) -> int:
    """Of a full microbatch, since a split counts where all stages have work; prompts come one at a time."""
    if config.role is Role.PREFILL:
        return 1
    return min(_MOST_REQUESTS, -(-config.max_running // config.num_stages))


def _time_stage(config: EngineConfig, index: int, model: ModelConfig, by_memory: bool) -> float:
    """Median seconds of a step on a stage that is built for this alone.

    Steps follow each other without a pause, and what is taken is the device's time: a stage that always has work does
    not wait for its host, and in a stage of a few layers that wait would pass for layers. So the device sleeps first
    for as long as it takes to launch them all.
    """
    device = torch.device(config.stage_device(index))
    plan = _plan(config, model)
    steps = 1 if device.type == "cpu" else _STEPS_TOGETHER
    # As stages do: kernels are launched on the thread's current GPU, whatever GPU their tensors are on.
    with StageStream(device, urgent=config.role is Role.PREFILL).entered(), torch.inference_mode():
        stage = build_stage(config, index, by_memory=by_memory).stage
        payload = _payload(config, index, model, plan, device)
        times: list[float] = []
        launch_s = 0.0
        started = time.monotonic()
        while len(times) < _WARM_UPS + 3 or (time.monotonic() - started < _SECONDS and len(times) < _MOST_TIMES):
            clock = BusyClock(device)
            begun = time.monotonic()
            if device.type == "cuda":
                _sleep(_HEAD_START * launch_s)
            for _ in range(steps):
                with clock.step():
                    stage.execute(plan, payload, _ignore)
            launch_s = time.monotonic() - begun
            _settle(device)
            times.append(clock.seconds / steps)
        stage.close()
        del stage
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return median(times[_WARM_UPS:])


def _plan(config: EngineConfig, model: ModelConfig) -> StepPlan:
    """A chunk of a prompt for a prefill, trees of several requests for a decode."""
    generator = torch.Generator().manual_seed(1)

    def ids(count: int) -> list[int]:
        return torch.randint(0, model.vocab_size, (count,), generator=generator).tolist()

    if config.role is Role.PREFILL:
        rows = min(config.chunk_tokens, model.context_length - 1)
        segments = [Segment(0, 0, ids(rows), None, rows, 0, [], False)]
    else:
        nodes, grow = config.tree.nodes, config.tree.speculates
        if config.device_rounds:
            nodes = config.round_nodes(round_size(config.max_running, config.max_running))
        start = max(1, min(_CONTEXT, model.context_length - 2 * nodes - config.tree.depth))
        chain = list(range(-1, nodes - 1))
        segments = [Segment(slot, start, ids(nodes), chain, 0, -1, [], grow) for slot in range(config.max_running)]
    end = segments[0].start + segments[0].num_rows
    each = num_pages_for(end, config.page_size)
    pages = [PageChange(one.slot, 0, list(range(one.slot * each, (one.slot + 1) * each))) for one in segments]
    openings = [SlotOpening(one.slot, 0.0, 0, 1.0, 0.0, 0, {}, [], 0, -1) for one in segments]
    size = round_size(len(segments), config.max_running) if config.device_rounds else 0
    return StepPlan(0, 0, openings, pages, segments, False, size)


def _payload(
    config: EngineConfig, index: int, model: ModelConfig, plan: StepPlan, device: torch.device
) -> Tensor | None:
    columns = payload_columns(config, model, index)
    if columns is None:
        return None
    dtype = torch.float32 if device.type == "cpu" or config.dtype == "float32" else torch.bfloat16
    generator = torch.Generator(device).manual_seed(2)
    rows = plan.round_size * config.round_nodes(plan.round_size) if plan.round_size else plan.num_rows
    return torch.randn((rows, columns), generator=generator, device=device).to(dtype)


def _sleep(seconds: float) -> None:
    torch.cuda._sleep(round(min(seconds, _MOST_SLEEP_S) * _CYCLES_A_SECOND))  # type: ignore[no-untyped-call]


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _ignore(message: StepReport) -> None:
    """Nobody waits for results."""
