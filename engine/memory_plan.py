"""Bytes of every pool of a worker, from (model, role, split, speculation, limits) alone, without weights.

The one source: pools are built with these sizes, budgets are solved with them, start-up checks that what was
allocated is what was planned, and `graftline plan` prints them.
"""

from dataclasses import dataclass

import torch

from graftline.engine.config import EngineConfig, Role
from graftline.engine.draft_head.config import DraftHeadConfig
from graftline.engine.drafter import scratch_pages_for
from graftline.engine.kv_pool import KvGeometry
from graftline.engine.models.config import ModelConfig
from graftline.engine.models.memory_figures import memory_figures
from graftline.errors import OutOfCapacityError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Bytes of one stage.

    Attributes:
        layers: target layers it owns.
        weight_bytes: weights of the target, without the draft head's own.
        target_kv_bytes: pages of the target's layers.
        draft_kv_bytes: pages of the drafter.
        draft_scratch_bytes: pages that only growth writes.
    """

    stage: int
    layers: range
    weight_bytes: int
    target_kv_bytes: int
    draft_kv_bytes: int
    draft_scratch_bytes: int

    @property
    def pool_bytes(self) -> int:
        """Everything but weights."""
        return self.target_kv_bytes + self.draft_kv_bytes + self.draft_scratch_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of a worker.

    Attributes:
        skips_verify: a prefill never verifies: no verify graphs, no warm-up of a verify, no verify state.
    """

    role: Role
    num_pages: int
    page_size: int
    stages: tuple[StagePlan, ...]
    skips_verify: bool

    @property
    def num_tokens(self) -> int:
        """Tokens of KV that the pools hold."""
        return self.num_pages * self.page_size

    @property
    def pool_bytes(self) -> int:
        """Pools of all stages."""
        return sum(stage.pool_bytes for stage in self.stages)


def target_geometry(config: EngineConfig, model: ModelConfig, stage: int) -> KvGeometry:
    """A stage's target pages."""
    return KvGeometry(
        len(config.stage_layers(stage)), config.page_size, model.num_kv_heads, model.head_dim, DTYPES[config.dtype]
    )


def draft_geometry(config: EngineConfig, head: DraftHeadConfig) -> KvGeometry:
    """The drafter's pages."""
    return KvGeometry(1, config.page_size, head.num_kv_heads, head.head_dim, DTYPES[config.dtype])


def draft_scratch_pages(config: EngineConfig) -> int:
    """Scratch pages behind the drafter's: enough to grow trees for every running request at once."""
    return scratch_pages_for(config.tree, config.page_size, config.max_running)


def plan_memory(config: EngineConfig, model: ModelConfig, head: DraftHeadConfig | None) -> MemoryPlan:
    """The plan of a worker.

    Args:
        head: of the draft head, None when speculation is off.
    """
    activations = torch.float32 if config.device == "cpu" else DTYPES[config.dtype]
    figures = memory_figures(model, DTYPES[config.dtype], activations)
    stages = []
    for stage in range(config.num_stages):
        is_last = stage == config.num_stages - 1
        drafts = is_last and head is not None
        layers = config.stage_layers(stage)
        page_bytes = draft_geometry(config, head).page_bytes if drafts and head is not None else 0
        stages.append(
            StagePlan(
                stage=stage,
                layers=layers,
                weight_bytes=figures.weight_bytes(len(layers), with_embedding=stage == 0 or drafts, with_head=is_last),
                target_kv_bytes=config.num_pages * target_geometry(config, model, stage).page_bytes,
                draft_kv_bytes=config.num_pages * page_bytes,
                draft_scratch_bytes=draft_scratch_pages(config) * page_bytes if drafts else 0,
            )
        )
    return MemoryPlan(config.role, config.num_pages, config.page_size, tuple(stages), config.role is Role.PREFILL)


def pages_within(config: EngineConfig, model: ModelConfig, head: DraftHeadConfig | None, budget_bytes: int) -> int:
    """Most pages with which the largest stage's pools stay within `budget_bytes`.

    Raises:
        OutOfCapacityError: not even one page fits.
    """
    pages = 0
    for stage in range(config.num_stages):
        fixed, page_bytes = 0, target_geometry(config, model, stage).page_bytes
        if head is not None and stage == config.num_stages - 1:
            draft_page_bytes = draft_geometry(config, head).page_bytes
            fixed, page_bytes = draft_scratch_pages(config) * draft_page_bytes, page_bytes + draft_page_bytes
        fitting = (budget_bytes - fixed) // page_bytes
        pages = fitting if stage == 0 else min(pages, fitting)
    if pages < 1:
        raise OutOfCapacityError(f"{budget_bytes} bytes hold no page of every pool")
    return pages
