"""Engine configurations of the measurements over two devices: stages as processes, a device each."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from graftline.bench.gpu_configs import Setting
from graftline.bench.gpu_models import LLAMA_8B
from graftline.engine.config import EngineConfig, StageChannel, StageMode
from graftline.engine.layer_split import automatic_split
from graftline.engine.models.checkpoint import read_model_config
from graftline.engine.tree_shape import TreeShape

_HEARTBEAT_S = 0.05
TINY: Mapping[str, Any] = {
    **LLAMA_8B,
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 299,
}
"""Stands for any model where only the logic is tried."""


def prefill_over(
    setting: Setting,
    tree: TreeShape | None,
    devices: Sequence[str],
    split: tuple[int, ...] = (),
    *,
    prefix_cache: bool = False,
) -> EngineConfig:
    """A prefill with a stage on every device."""
    return _over(setting, setting.prefill(tree, prefix_cache=prefix_cache), devices, split)


def decode_over(
    setting: Setting,
    tree: TreeShape | None,
    devices: Sequence[str],
    split: tuple[int, ...] = (),
    *,
    device_rounds: bool | None = None,
) -> EngineConfig:
    """A decode with a stage on every device; rounds of fixed shape on GPUs, and where asked for."""
    fixed = devices[0] != "cpu" if device_rounds is None else device_rounds
    return _over(setting, setting.decode(tree, device_rounds=fixed), devices, split)


def _over(setting: Setting, config: EngineConfig, devices: Sequence[str], split: tuple[int, ...]) -> EngineConfig:
    num_layers = read_model_config(setting.model).num_layers
    return msgspec.structs.replace(
        config,
        devices=tuple(devices),
        layer_split=split or automatic_split(num_layers, len(devices), 0.0),
        stage_mode=StageMode.PROCESSES,
        stage_channel=StageChannel.DIRECT,
        heartbeat_s=_HEARTBEAT_S,
    )
