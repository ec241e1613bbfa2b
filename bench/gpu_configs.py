"""Engine configurations of the measurements: stages as threads on one device, pools as large as asked for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from graftline.engine.config import EngineConfig, Role, StageMode
from graftline.engine.layer_split import automatic_split
from graftline.engine.models.checkpoint import read_model_config
from graftline.engine.tree_shape import NO_SPECULATION, TreeShape
from graftline.worker.options import CPU_TREE, GPU_TREE, MAX_VERIFY_ROWS

CHAIN = TreeShape(3, 1, 4)
"""Small enough for any model and head."""
TREES = (CHAIN, TreeShape(5, 1, 6), TreeShape(4, 2, 8), TreeShape(5, 4, 16), GPU_TREE, TreeShape(6, 8, 32))


@dataclass(frozen=True, slots=True)
class Setting:
    """What the engines of a measurement have in common.

    Attributes:
        head: draft head, None for none.
    """

    model: Path
    head: Path | None
    device: str
    dtype: str = "bfloat16"
    page_size: int = 16
    num_pages: int = 1024
    max_running: int = 4
    chunk_tokens: int = 512
    threads: int = 4

    def prefill(self, tree: TreeShape | None = None, **others: Any) -> EngineConfig:
        """A prefill worker of one stage; no tree: no speculation."""
        return self._config(
            Role.PREFILL, tree, 1, {"prefix_cache": False, "launch_drafts_early": self.device != "cpu"} | others
        )

    def decode(self, tree: TreeShape | None = None, stages: int = 1, **others: Any) -> EngineConfig:
        """A decode worker with rounds of fixed shape, unless `others` say otherwise."""
        return self._config(Role.DECODE, tree, stages, {"device_rounds": True} | others)

    def _config(self, role: Role, tree: TreeShape | None, stages: int, others: dict[str, Any]) -> EngineConfig:
        model = read_model_config(self.model)
        config = EngineConfig(
            model=str(self.model),
            role=role,
            draft_head=None if tree is None or self.head is None else str(self.head),
            dtype=self.dtype,
            devices=(self.device,),
            layer_split=automatic_split(model.num_layers, stages, 0.0),
            stage_mode=StageMode.THREADS,
            page_size=self.page_size,
            num_pages=self.num_pages,
            max_running=self.max_running,
            chunk_tokens=self.chunk_tokens,
            tree=tree or NO_SPECULATION,
            max_verify_rows=MAX_VERIFY_ROWS,
            threads=self.threads,
            stage_timeout_s=120.0,
            step_timeout_s=120.0,
        )
        return msgspec.structs.replace(config, **others)


def usual_tree(device: str) -> TreeShape:
    """What workers on such a device draft without being told."""
    return CPU_TREE if device.startswith("cpu") else GPU_TREE


def shape_name(tree: TreeShape | None) -> str:
    """Such as "S4 K2 V8", or "S5 K4 V16, initial S7"; "plain" without a tree."""
    if tree is None:
        return "plain"
    name = f"S{tree.depth} K{tree.branching} V{tree.nodes}"
    return name if tree.initial_depth is None else f"{name}, initial S{tree.initial_depth}"
