"""A tiny hybrid model on disk whose MTP module drafts what often holds, and what the plain model answers."""

from functools import cached_property
from pathlib import Path

import torch
from tiny_world import PlainModel

from graftline.engine.models.qwen3_next_random import write_tiny_qwen3_next

MTP = Path("mtp")
NUM_LAYERS = 4


class HybridWorld:
    """Written on first use; three linear layers, then one of full attention."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def plain(self) -> PlainModel:
        return PlainModel(write_tiny_qwen3_next(self._folder / "hybrid"))

    @cached_property
    def plain_bf16(self) -> PlainModel:
        """The same weights in bfloat16."""
        return PlainModel(self.plain.path, torch.bfloat16)
