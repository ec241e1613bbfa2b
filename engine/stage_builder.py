"""Builds one stage from a worker's configuration: weights, pools, and on the last stage head and drafter."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from graftline.engine.config import MTP_HEAD, EngineConfig, Role
from graftline.engine.device_rounds import DeviceRounds, round_sizes
from graftline.engine.draft_choice import chosen_head, head_named
from graftline.engine.draft_layer import DraftLayer, TargetHead
from graftline.engine.draft_module import DraftModule
from graftline.engine.drafter import Drafter
from graftline.engine.kv_pool import KvPool
from graftline.engine.last_stage import LastStage
from graftline.engine.links_payload import Payloads
from graftline.engine.memory_plan import (
    DTYPES,
    draft_geometry,
    draft_scratch_pages,
    keeps_nodes,
    plan_memory,
    state_geometry,
    target_geometry,
)
from graftline.engine.models.checkpoint import Checkpoint, open_checkpoint
from graftline.engine.models.config import ModelConfig
from graftline.engine.models.load import load_model
from graftline.engine.models.qwen3_next_mtp import MtpModule
from graftline.engine.models.target_model import TargetModel
from graftline.engine.pages import num_pages_for
from graftline.engine.prompt_graphs import PromptGraphs, most_rows, prompt_sizes
from graftline.engine.round_state import RoundState
from graftline.engine.stage import Stage
from graftline.engine.stage_states import StageStates
from graftline.engine.state_pool import StatePool
from graftline.engine.step_gate import StepGate
from graftline.engine.transfer_port import StagePools
from graftline.engine.verify_state import build_verify_state
from graftline.engine.warm_up import warm_up
from graftline.errors import InvalidRequestError
from graftline.kernels.attention_backend import Attention, choose_attention
from graftline.kernels.attention_kind import AttentionBackend

logger = logging.getLogger(__name__)

# Prompts that end in one step of a prefill: more of them grow op by op.
_GRAPH_TREES = 8


@dataclass(frozen=True, slots=True)
class BuiltStage:
    """A stage ready to run, and the memory it owns."""

    stage: Stage
    pools: StagePools
    gate: StepGate
    graph_bytes: int


def shared_round_state(config: EngineConfig) -> RoundState | None:
    """What the stages of a worker share of their rounds of fixed shape: None unless they all are on one device."""
    if not config.device_rounds or config.num_stages == 1 or len(set(config.devices)) > 1:
        return None
    device = torch.device(config.stage_device(0))
    state = _round_state(config, open_checkpoint(Path(config.model)).config, device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # every stage has a stream of its own
    return state


def _round_state(config: EngineConfig, target: ModelConfig, device: torch.device) -> RoundState:
    longest = min(target.context_length, config.num_pages * config.page_size)
    return RoundState(config.max_running, longest, config.tree, config.page_size, device)


def build_stage(
    config: EngineConfig,
    index: int,
    round_state: RoundState | None = None,
    returns: Sequence[Payloads] = (),
    *,
    by_memory: bool = False,
) -> BuiltStage:
    """Loads what stage `index` owns.

    Args:
        round_state: what stages on one device share of their rounds; None: the stage's own.
        returns: see `DeviceRounds`.
        by_memory: how the stage is joined to those on other devices, see `StageEnds`.

    Raises:
        InvalidRequestError: the split does not fit the model, or the draft head does not fit the target.
    """
    checkpoint = open_checkpoint(Path(config.model))
    target = checkpoint.config
    if sum(config.layer_split) != target.num_layers:
        raise InvalidRequestError("layer_split", f"{config.layer_split} for a model of {target.num_layers} layers")
    device, dtype = torch.device(config.stage_device(index)), DTYPES[config.dtype]
    is_first, is_last = index == 0, index == config.num_stages - 1
    drafts = config.tree.speculates and config.draft_head is not None
    layers = config.stage_layers(index)
    backend, attention = choose_attention(config.attention_backend, device, dtype, target.head_dim)
    model = load_model(
        checkpoint,
        layers,
        dtype,
        device,
        with_embedding=is_first or (is_last and drafts),
        with_head=is_last,
        attention=attention,
        may_reside=config.is_on_one_device or by_memory,
    )
    geometry = target_geometry(config, target, index)
    pool = KvPool(geometry, config.num_pages, layers=target.attention_layers(layers), device=device)
    states = _build_states(config, target, index)
    gate = StepGate(device)
    drafter, draft_pool = None, None
    if is_last and drafts:
        drafter, draft_pool = _build_drafter(config, checkpoint, model, attention)
    rounds, prompts, graph_bytes = None, None, 0
    if config.device_rounds:
        state = round_state or _round_state(config, target, device)
        shares_state = round_state is not None
        rounds, taken = _build_rounds(config, index, model, pool, drafter, state, returns, shares_state=shares_state)
        graph_bytes += taken
    if drafter is not None and config.role is Role.PREFILL and config.cuda_graphs and device.type == "cuda":
        graph_bytes += drafter.capture_growth(min(config.max_running, _GRAPH_TREES), dtype, device)
    if captures_prompts(config, target, backend):
        extended = drafter if drafter is not None and drafter.grows_unseen and config.launch_drafts_early else None
        prompts, taken = _build_prompts(config, index, model, pool, extended)
        graph_bytes += taken
    if graph_bytes:
        logger.info("stage %d: captured graphs take %.0f MiB", index, graph_bytes / (1 << 20))
    stage = Stage(
        model,
        pool,
        is_first=is_first,
        capture=captured_layers(config, target, index),
        last=LastStage(model, drafter, config.page_size, device, config.launch_drafts_early) if is_last else None,
        gate=gate,
        device=device,
        states=states,
        rounds=rounds,
        prompts=prompts,
    )
    pools = StagePools(index, pool, draft_pool, None if states is None else states.pool)
    _check_planned(config, target, pools, states)
    if device.type == "cuda":
        warm_up(stage, pools, config, target.context_length, payload_columns(config, target, index))
    return BuiltStage(stage, pools, gate, graph_bytes)


def captures_prompts(config: EngineConfig, target: ModelConfig, backend: AttentionBackend) -> bool:
    """Whether a worker's steps of prompts are captured: a prefill's, on a GPU, of dense models. Layers of hybrid ones,
    also where a stage has none with recurrent state, write the KV of padding rows and route them to experts.
    """
    is_wanted = config.role is Role.PREFILL and config.cuda_graphs and config.device_type == "cuda"
    return is_wanted and target.hybrid is None and backend is not AttentionBackend.TORCH


def _build_rounds(
    config: EngineConfig,
    index: int,
    model: TargetModel,
    pool: KvPool,
    drafter: Drafter | None,
    state: RoundState,
    returns: Sequence[Payloads],
    *,
    shares_state: bool,
) -> tuple[DeviceRounds, int]:
    """A stage's part of decode rounds, and the bytes of device memory that their graphs took."""
    rounds = DeviceRounds(
        model,
        pool,
        state,
        is_first=index == 0,
        is_last=index == config.num_stages - 1,
        capture=captured_layers(config, model.config, index),
        num_earlier_features=num_earlier_features(config, model.config, index),
        drafter=None if drafter is None else drafter.for_rounds,
        nodes_of=config.round_nodes,
        graphs=config.cuda_graphs,
        max_graph_batch=config.max_graph_batch,
        shares_state=shares_state,
        returns=returns,
    )
    is_cuda = config.device_type == "cuda"
    return rounds, rounds.capture(round_sizes(config.max_running)) if is_cuda else 0


def _build_prompts(
    config: EngineConfig, index: int, model: TargetModel, pool: KvPool, drafter: Drafter | None
) -> tuple[PromptGraphs, int]:
    """A stage's captured steps of prompts, and the bytes of device memory that they took."""
    device, target = torch.device(config.stage_device(index)), model.config
    longest = min(target.context_length, config.num_pages * config.page_size)
    max_pages = num_pages_for(longest, config.page_size)
    prompts = PromptGraphs(
        model,
        pool,
        captured_layers(config, target, index),
        target.hidden_size,
        model.dtype,
        max_pages,
        device,
        drafter=drafter,
    )
    most = min(config.chunk_tokens, most_rows(target))
    return prompts, prompts.capture(prompt_sizes(most, config.max_running))


def payload_columns(config: EngineConfig, target: ModelConfig, stage: int) -> int | None:
    """Columns of the hidden states, with the features beside them, that a stage gets; None for the first."""
    if stage == 0:
        return None
    return target.hidden_size * (1 + num_earlier_features(config, target, stage))


def num_earlier_features(config: EngineConfig, target: ModelConfig, stage: int) -> int:
    """Features that the stages before one take."""
    return sum(len(captured_layers(config, target, before)) for before in range(stage))


def captured_layers(config: EngineConfig, target: ModelConfig, stage: int) -> tuple[int, ...]:
    """Features that a stage takes, ascending: layer counts reached within it (0 belongs to the first stage)."""
    head = chosen_head(config, target)
    if head is None:
        return ()
    wanted = head.features_of(target.num_layers)
    layers = config.stage_layers(stage)
    lowest = 0 if stage == 0 else layers.start + 1
    return tuple(sorted({layer for layer in wanted if lowest <= layer <= layers.stop}))


def _build_states(config: EngineConfig, target: ModelConfig, stage: int) -> StageStates | None:
    geometry, slots, device = state_geometry(config, target, stage), config.max_running, config.stage_device(stage)
    if geometry is None:
        return None
    verify = None
    if keeps_nodes(config):
        verify = build_verify_state(geometry, config.verify_state, slots, config.tree.nodes, device)
    return StageStates(StatePool(geometry, slots, device), verify)


def _build_drafter(
    config: EngineConfig, checkpoint: Checkpoint, model: TargetModel, attention: Attention
) -> tuple[Drafter, KvPool]:
    assert config.draft_head is not None
    device, target = torch.device(config.stage_device(config.num_stages - 1)), checkpoint.config
    pool = KvPool(
        draft_geometry(config, head_named(config.draft_head, target)),
        config.num_pages,
        layers=(0,),
        scratch_pages=draft_scratch_pages(config),
        device=device,
    )
    return Drafter(_load_head(config, checkpoint, model, device, attention), pool, config.grown_tree), pool


def _load_head(
    config: EngineConfig, checkpoint: Checkpoint, model: TargetModel, device: torch.device, attention: Attention
) -> DraftModule:
    assert config.draft_head is not None
    dtype, target = DTYPES[config.dtype], checkpoint.config
    if config.draft_head == MTP_HEAD:
        return MtpModule(checkpoint, dtype, device, model.embed, model.logits, attention)
    shared = TargetHead(
        embed=model.embed,
        head_rows=model.head_rows,
        logits=model.logits,
        num_layers=target.num_layers,
        context_length=target.context_length,
        embedding=model.embedding,
        head=model.head,
    )
    # Drafts need not be exact. On CPU the head is most of what growing reads, and eight bits halve it; the default
    # head's accept length over 20 held-out prompts stayed at 2.58. Float32 workers keep what they were asked for.
    head_storage = torch.int8 if device.type == "cpu" and dtype == torch.bfloat16 else dtype
    layer = DraftLayer(Path(config.draft_head), shared, dtype, device, head_storage, attention)
    head = layer.config
    if head.target_hidden_size != target.hidden_size or head.vocab_size != target.vocab_size:
        raise InvalidRequestError(
            "draft_head",
            f"{config.draft_head} was made for hidden size {head.target_hidden_size} and a vocabulary of "
            f"{head.vocab_size}; the target has {target.hidden_size} and {target.vocab_size}",
        )
    return layer


def _check_planned(config: EngineConfig, target: ModelConfig, pools: StagePools, states: StageStates | None) -> None:
    """What was allocated must be what was planned, to the byte."""
    planned = plan_memory(config, target, chosen_head(config, target)).stages[pools.stage].pool_bytes
    owned = [pools.target, pools.draft, pools.states, None if states is None else states.verify]
    allocated = sum(pool.num_bytes for pool in owned if pool is not None)
    assert planned == allocated, f"stage {pools.stage}: {allocated} bytes of pools allocated, {planned} planned"
