"""Builds one stage from a worker's configuration: weights, pools, and on the last stage head and drafter."""

from dataclasses import dataclass
from pathlib import Path

import torch

from graftline.engine.config import EngineConfig
from graftline.engine.draft_head.config import read_draft_head_config
from graftline.engine.draft_layer import DraftLayer, TargetHead
from graftline.engine.drafter import Drafter
from graftline.engine.kv_pool import KvPool
from graftline.engine.last_stage import LastStage
from graftline.engine.memory_plan import DTYPES, draft_geometry, draft_scratch_pages, plan_memory, target_geometry
from graftline.engine.models.checkpoint import Checkpoint, open_checkpoint
from graftline.engine.models.config import ModelConfig
from graftline.engine.models.dense import DenseModel
from graftline.engine.stage import Stage
from graftline.engine.step_gate import StepGate
from graftline.engine.transfer_port import StagePools
from graftline.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class BuiltStage:
    """A stage ready to run, and the memory it owns."""

    stage: Stage
    pools: StagePools
    gate: StepGate


def build_stage(config: EngineConfig, index: int) -> BuiltStage:
    """Loads what stage `index` owns.

    Raises:
        InvalidRequestError: the split does not fit the model, or the draft head does not fit the target.
    """
    checkpoint = open_checkpoint(Path(config.model))
    target = checkpoint.config
    if sum(config.layer_split) != target.num_layers:
        raise InvalidRequestError("layer_split", f"{config.layer_split} for a model of {target.num_layers} layers")
    device, dtype = torch.device(config.device), DTYPES[config.dtype]
    is_first, is_last = index == 0, index == config.num_stages - 1
    drafts = config.tree.speculates and config.draft_head is not None
    layers = config.stage_layers(index)
    model = DenseModel(
        checkpoint,
        layers,
        dtype,
        device,
        with_embedding=is_first or (is_last and drafts),
        with_head=is_last,
    )
    geometry = target_geometry(config, target, index)
    pool = KvPool(geometry, config.num_pages, first_layer=layers.start, device=device)
    gate = StepGate()
    drafter, draft_pool = None, None
    if is_last and drafts:
        drafter, draft_pool = _build_drafter(config, checkpoint, model)
    stage = Stage(
        model,
        pool,
        is_first=is_first,
        capture=captured_layers(config, target.num_layers, index),
        last=LastStage(model, drafter, config.page_size, device) if is_last else None,
        gate=gate,
        device=device,
    )
    pools = StagePools(index, pool, draft_pool)
    _check_planned(config, target, pools)
    return BuiltStage(stage, pools, gate)


def captured_layers(config: EngineConfig, num_layers: int, stage: int) -> tuple[int, ...]:
    """Features that a stage takes, ascending: layer counts reached within it (0 belongs to the first stage)."""
    if not config.tree.speculates or config.draft_head is None:
        return ()
    wanted = read_draft_head_config(Path(config.draft_head)).features_of(num_layers)
    layers = config.stage_layers(stage)
    lowest = 0 if stage == 0 else layers.start + 1
    return tuple(sorted({layer for layer in wanted if lowest <= layer <= layers.stop}))


def _build_drafter(config: EngineConfig, checkpoint: Checkpoint, model: DenseModel) -> tuple[Drafter, KvPool]:
    assert config.draft_head is not None
    device, dtype = torch.device(config.device), DTYPES[config.dtype]
    target = checkpoint.config
    shared = TargetHead(
        embed=model.embed,
        head_rows=model.head_rows,
        logits=model.logits,
        num_layers=target.num_layers,
        context_length=target.context_length,
    )
    layer = DraftLayer(Path(config.draft_head), shared, dtype, device)
    head = layer.config
    if head.target_hidden_size != target.hidden_size or head.vocab_size != target.vocab_size:
        raise InvalidRequestError(
            "draft_head",
            f"{config.draft_head} was made for hidden size {head.target_hidden_size} and a vocabulary of "
            f"{head.vocab_size}; the target has {target.hidden_size} and {target.vocab_size}",
        )
    pool = KvPool(
        draft_geometry(config, head),
        config.num_pages,
        first_layer=0,
        scratch_pages=draft_scratch_pages(config),
        device=device,
    )
    return Drafter(layer, pool, config.tree), pool


def _check_planned(config: EngineConfig, target: ModelConfig, pools: StagePools) -> None:
    """What was allocated must be what was planned, to the byte."""
    head = read_draft_head_config(Path(config.draft_head)) if pools.draft is not None and config.draft_head else None
    planned = plan_memory(config, target, head).stages[pools.stage].pool_bytes
    allocated = pools.target.num_bytes + (pools.draft.num_bytes if pools.draft is not None else 0)
    assert planned == allocated, f"stage {pools.stage}: {allocated} bytes of pools allocated, {planned} planned"
