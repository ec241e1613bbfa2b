"""Runs a new stage's planned steps once in every kind of shape, so that no kernel is compiled while somebody waits.

Only for GPUs, where kernels are compiled (Triton, flashinfer) or chosen (cuBLAS) by shape at first use. A prefill runs
prompt chunks and nothing else: it never verifies. A decode runs trees; its rounds of fixed shape are captured where
they are built.
"""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from graftline.engine.config import EngineConfig, Role
from graftline.engine.graph_capture import sizes_up_to
from graftline.engine.pages import num_pages_for
from graftline.engine.plan import PageChange, Segment, SlotOpening, StepPlan, StepReport
from graftline.engine.stage import Stage
from graftline.engine.transfer_port import StagePools

logger = logging.getLogger(__name__)

# Steps that nobody planned: no wait for a real one ends at their marks.
_NO_STEP = -1
# Rows of a segment around which kernels choose other tiles.
_FEW_ROWS = (1, 8, 32, 64)


@dataclass(frozen=True, slots=True)
class WarmUpStep:
    """Segments of equal shape.

    Attributes:
        start: committed length of each.
        rows: of each.
        is_tree: the rows are a tree to verify; else a chunk of a prompt.
        is_sampled: drawn with temperature, and with logprobs; else greedy.
        is_final: the last rows are sampled, drafts grown; always so for trees.
    """

    segments: int
    start: int
    rows: int
    is_tree: bool
    is_sampled: bool
    is_final: bool


def warm_up_steps(config: EngineConfig, context_length: int) -> Iterator[WarmUpStep]:
    """What a worker of this role will meet, within what its pools and its model hold; large steps first.

    Args:
        context_length: of the model.
    """
    page_size = config.page_size
    longest = min(config.num_pages * page_size, context_length)
    is_prefill = config.role is Role.PREFILL
    chunk = min(config.chunk_tokens, longest)
    nodes = config.tree.nodes
    for segments in sizes_up_to(min(config.max_running, config.num_pages, chunk if is_prefill else config.num_pages)):
        room = min(config.num_pages // segments * page_size, longest)
        sizes = [chunk // segments, *_FEW_ROWS] if is_prefill else [nodes, 1]
        for rows in dict.fromkeys(size for size in sizes if 0 < size <= room):
            if is_prefill and rows * segments > chunk:
                continue
            for is_sampled in (False, True):
                yield WarmUpStep(segments, 0, rows, not is_prefill, is_sampled, is_final=True)
            if is_prefill:
                yield WarmUpStep(segments, 0, rows, False, False, is_final=False)
        rows = 1 if is_prefill else min(nodes, room)
        yield WarmUpStep(segments, min(chunk, room - rows), rows, not is_prefill, False, is_final=True)


def warm_up(
    stage: Stage, pools: StagePools, config: EngineConfig, context_length: int, payload_columns: int | None
) -> int:
    """Runs the steps, then leaves stage and pools as they were: no slot is open, all memory is zero.

    Args:
        payload_columns: of the hidden states that the stage before sends; None for the first stage.

    Returns:
        Steps run.
    """
    started = time.monotonic()
    count = 0
    with torch.inference_mode():
        for step in warm_up_steps(config, context_length):
            plan = _plan(step, config)
            stage.execute(plan, _payload(plan, pools, payload_columns), _ignore)
            count += 1
        for slot in range(config.max_running):
            stage.forget(slot)
        for pool in (pools.target, pools.draft, pools.states):
            if pool is not None:
                pool.data.zero_()
    device = pools.target.data.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.monotonic() - started
    logger.info("stage %d: %d kinds of steps warmed up in %.1f s", pools.stage, count, seconds)
    return count


def _plan(step: WarmUpStep, config: EngineConfig) -> StepPlan:
    pages_each = num_pages_for(step.start + step.rows, config.page_size)
    grow = config.tree.speculates and step.is_final and (step.is_tree or config.real_trees)
    slots = range(step.segments)
    pages = [PageChange(slot, 0, list(range(slot * pages_each, (slot + 1) * pages_each))) for slot in slots]
    segments = [_segment(step, slot, grow=grow) for slot in slots]
    openings = [_opening(slot, step.is_sampled) for slot in slots]
    return StepPlan(_NO_STEP, 0, openings, pages, segments, early_tokens=config.role is Role.PREFILL)


def _opening(slot: int, is_sampled: bool) -> SlotOpening:
    if is_sampled:
        return SlotOpening(slot, 1.0, 8, 0.9, 0.05, 1, {}, [], 0, 1)
    return SlotOpening(slot, 0.0, 0, 1.0, 0.0, 0, {}, [], 0, -1)


def _segment(step: WarmUpStep, slot: int, *, grow: bool) -> Segment:
    tokens = [0] * step.rows
    if step.is_tree:
        return Segment(slot, step.start, tokens, _bushy(step.rows), 0, -1, [], grow)
    first_sampled = step.rows - 1 if step.is_final else step.rows
    return Segment(slot, step.start, tokens, None, first_sampled, -1 if step.is_final else 0, [], grow)


def _bushy(nodes: int) -> list[int]:
    """Parents of a tree that is no chain, if it has nodes enough."""
    return [(node - 1) // 2 for node in range(nodes)] if nodes > 1 else [-1]


def _payload(plan: StepPlan, pools: StagePools, columns: int | None) -> Tensor | None:
    if columns is None:
        return None
    data = pools.target.data
    dtype = torch.float32 if data.device.type == "cpu" else data.dtype
    return torch.zeros(plan.num_rows, columns, dtype=dtype, device=data.device)


def _ignore(message: StepReport) -> None:
    """Nobody waits for results of a warm-up."""
