"""Bytes of every pool of a worker, from (model, role, split, speculation, limits) alone, without weights.

The one source: pools are built with these sizes, budgets are solved with them, start-up checks that what was
allocated is what was planned, and `graftline plan` prints them. docs/memory.md has the formulas.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from graftline.engine.config import EngineConfig, Role
from graftline.engine.draft_head.config import DraftHeadConfig, DraftHeadKind
from graftline.engine.draft_scratch import scratch_pages_for
from graftline.engine.kv_pool import KvGeometry
from graftline.engine.models.config import ModelConfig
from graftline.engine.models.hybrid_figures import hybrid_layer_bytes, mtp_bytes
from graftline.engine.models.memory_figures import memory_figures
from graftline.engine.state_pool import StateGeometry
from graftline.engine.verify_state import verify_state_bytes
from graftline.errors import OutOfCapacityError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_UNBOUNDED_PAGES = 1 << 30
# A sampled row's logits, and the copies that a sampler makes of them.
_LOGIT_BYTES = 16


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Bytes of one stage.

    Attributes:
        layers: target layers it owns.
        weight_bytes: weights of the target, without the draft head's own.
        target_kv_bytes: pages of the target's layers.
        draft_kv_bytes: pages of the drafter.
        draft_scratch_bytes: pages that only growth writes.
        draft_weight_bytes: weights of the target's MTP module, if it drafts (a head in a directory of its own is not
            counted).
        state_bytes: recurrent state of every request slot and the padding slot.
        verify_state_bytes: what a verify keeps of draft nodes, for the same slots; 0 for a prefill.
        graph_bytes: GPU memory that captured graphs took, known once the stage has started; 0 before.
        ring_bytes: GPU memory that stages on other GPUs write to, known likewise.
    """

    stage: int
    layers: range
    weight_bytes: int
    target_kv_bytes: int
    draft_kv_bytes: int
    draft_scratch_bytes: int
    draft_weight_bytes: int = 0
    state_bytes: int = 0
    verify_state_bytes: int = 0
    graph_bytes: int = 0
    ring_bytes: int = 0

    @property
    def pool_bytes(self) -> int:
        """Everything but weights, graphs and rings."""
        pages = self.target_kv_bytes + self.draft_kv_bytes + self.draft_scratch_bytes
        return pages + self.state_bytes + self.verify_state_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of a worker.

    Attributes:
        skips_verify: a prefill never verifies: no verify graphs, no warm-up of a verify, no verify state.
        skipped_stage_bytes: verify state of every stage that a decode of the same settings would take on top.
    """

    role: Role
    num_pages: int
    page_size: int
    stages: tuple[StagePlan, ...]
    skips_verify: bool
    skipped_stage_bytes: tuple[int, ...] = ()

    def started(self, graph_bytes: Sequence[int], ring_bytes: Sequence[int]) -> "MemoryPlan":
        """The plan of a running worker, whose stages' graphs and rings took this much."""
        taken = zip(self.stages, graph_bytes, ring_bytes, strict=True)
        stages = (replace(stage, graph_bytes=graphs, ring_bytes=rings) for stage, graphs, rings in taken)
        return replace(self, stages=tuple(stages))

    @property
    def num_tokens(self) -> int:
        """Tokens of KV that the pools hold."""
        return self.num_pages * self.page_size

    @property
    def pool_bytes(self) -> int:
        """Pools of all stages."""
        return sum(stage.pool_bytes for stage in self.stages)

    @property
    def skipped_bytes(self) -> int:
        """What a decode of the same settings would take on top."""
        return sum(self.skipped_stage_bytes)


def target_geometry(config: EngineConfig, model: ModelConfig, stage: int) -> KvGeometry:
    """A stage's target pages."""
    num_layers = len(model.attention_layers(config.stage_layers(stage)))
    return KvGeometry(num_layers, config.page_size, model.num_kv_heads, model.head_dim, DTYPES[config.dtype])


def draft_geometry(config: EngineConfig, head: DraftHeadConfig) -> KvGeometry:
    """The drafter's pages."""
    return KvGeometry(1, config.page_size, head.num_kv_heads, head.head_dim, DTYPES[config.dtype])


def draft_scratch_pages(config: EngineConfig) -> int:
    """Scratch pages behind the drafter's: enough to grow trees for every running request at once."""
    return scratch_pages_for(config.grown_tree, config.page_size, config.max_running)


def state_geometry(config: EngineConfig, model: ModelConfig, stage: int) -> StateGeometry | None:
    """A stage's recurrent state; None without linear layers."""
    layers = model.linear_layers(config.stage_layers(stage))
    if model.hybrid is None or not layers:
        return None
    return StateGeometry(layers, model.hybrid.linear, DTYPES[config.dtype])


def keeps_nodes(config: EngineConfig) -> bool:
    """Whether the state behind draft nodes is kept: a prefill never verifies, and a lone root always holds."""
    return config.role is Role.DECODE and config.tree.speculates


def plan_memory(config: EngineConfig, model: ModelConfig, head: DraftHeadConfig | None) -> MemoryPlan:
    """The plan of a worker.

    Args:
        head: of the draft head, None when speculation is off.
    """
    stages = tuple(_plan_stage(config, model, head, stage) for stage in range(config.num_stages))
    is_prefill = config.role is Role.PREFILL
    skipped = tuple(_state_bytes(config, model, stage)[1] if is_prefill else 0 for stage in range(config.num_stages))
    return MemoryPlan(config.role, config.num_pages, config.page_size, stages, is_prefill, skipped)


def _plan_stage(config: EngineConfig, model: ModelConfig, head: DraftHeadConfig | None, stage: int) -> StagePlan:
    is_last = stage == config.num_stages - 1
    own_head = head if is_last else None
    page_bytes = 0 if own_head is None else draft_geometry(config, own_head).page_bytes
    state, verify = _state_bytes(config, model, stage)
    activations = _activations(config)
    has_mtp = own_head is not None and own_head.kind is DraftHeadKind.MTP
    return StagePlan(
        stage=stage,
        layers=config.stage_layers(stage),
        weight_bytes=_weight_bytes(config, model, stage, drafts=own_head is not None),
        target_kv_bytes=config.num_pages * target_geometry(config, model, stage).page_bytes,
        draft_kv_bytes=config.num_pages * page_bytes,
        draft_scratch_bytes=draft_scratch_pages(config) * page_bytes,
        draft_weight_bytes=mtp_bytes(model, DTYPES[config.dtype], activations) if has_mtp else 0,
        state_bytes=state,
        verify_state_bytes=verify if keeps_nodes(config) else 0,
    )


def _state_bytes(config: EngineConfig, model: ModelConfig, stage: int) -> tuple[int, int]:
    """Recurrent state of a stage, and what a decode keeps of draft nodes on it."""
    geometry = state_geometry(config, model, stage)
    if geometry is None:
        return 0, 0
    verify = verify_state_bytes(geometry, config.verify_state, config.max_running, config.tree.nodes)
    return (config.max_running + 1) * geometry.slot_bytes, verify


def _weight_bytes(config: EngineConfig, model: ModelConfig, stage: int, *, drafts: bool) -> int:
    dtype, activations, layers = DTYPES[config.dtype], _activations(config), config.stage_layers(stage)
    figures = memory_figures(model, dtype, activations)
    ends = figures.weight_bytes(0, with_embedding=stage == 0 or drafts, with_head=stage == config.num_stages - 1)
    if model.hybrid is None:
        return ends + len(layers) * figures.layer_bytes
    return ends + sum(hybrid_layer_bytes(model, layer, dtype, activations) for layer in layers)


def _activations(config: EngineConfig) -> torch.dtype:
    return torch.float32 if config.device_type == "cpu" else DTYPES[config.dtype]


def taken_bytes(config: EngineConfig, model: ModelConfig, head: DraftHeadConfig | None) -> list[int]:
    """What every stage takes besides its pools: weights, and the rows that it computes at a time.

    A head in a directory of its own counts as one decoder layer and its output rows.
    """
    memory = plan_memory(config, model, head)
    item = _activations(config).itemsize
    rows = config.max_running * config.tree.nodes
    if config.role is Role.PREFILL:  # a decode computes no prompts
        rows = max(rows, config.chunk_tokens)
    row_values = 8 * model.hidden_size + 2 * (model.q_size + 2 * model.kv_size) + 3 * model.intermediate_size
    sampled = config.max_running * (config.tree.nodes if config.role is Role.DECODE else 1)
    taken = [stage.weight_bytes + stage.draft_weight_bytes + rows * row_values * item for stage in memory.stages]
    taken[-1] += sampled * model.vocab_size * _LOGIT_BYTES
    if head is not None and head.kind is not DraftHeadKind.MTP:
        layer = head.hidden_size * (4 * head.hidden_size + 3 * head.intermediate_size)
        taken[-1] += (layer + 4 * head.hidden_size**2 + head.draft_vocab_size * head.hidden_size) * item
    return taken


def pages_within(
    config: EngineConfig, model: ModelConfig, head: DraftHeadConfig | None, budget_bytes: int | Sequence[int]
) -> int:
    """Most pages with which every stage's pools stay within its budget.

    What a role does not take (a prefill's verify state) is room for pages.

    Args:
        budget_bytes: for the pools of every stage, or one figure for each of them.

    Raises:
        OutOfCapacityError: not even one page fits.
    """
    budgets = [budget_bytes] * config.num_stages if isinstance(budget_bytes, int) else list(budget_bytes)
    pages = _UNBOUNDED_PAGES
    for stage, budget in enumerate(budgets):
        state, verify = _state_bytes(config, model, stage)
        fixed = state + (verify if keeps_nodes(config) else 0)
        page_bytes = target_geometry(config, model, stage).page_bytes
        if head is not None and stage == config.num_stages - 1:
            draft_page_bytes = draft_geometry(config, head).page_bytes
            fixed, page_bytes = fixed + draft_scratch_pages(config) * draft_page_bytes, page_bytes + draft_page_bytes
        if page_bytes:
            pages = min(pages, (budget - fixed) // page_bytes)
        elif fixed > budget:
            pages = 0
    if pages < 1:
        raise OutOfCapacityError(f"{min(budgets)} bytes hold no page of every pool")
    return pages
