"""How many bytes the weights of a Qwen3-Next model take, layer by layer. Arithmetic on the config alone."""

import torch

from graftline.engine.models.config import ModelConfig
from graftline.engine.models.hybrid_config import Hybrid, LayerKind

_WIDE = torch.float32.itemsize


def hybrid_layer_bytes(config: ModelConfig, layer: int, dtype: torch.dtype, activations: torch.dtype) -> int:
    """Weights of one decoder layer whose matrices are of `dtype`, its norms and convolution of `activations`."""
    hybrid = _hybrid(config)
    kind, has_experts = hybrid.layer_kinds[layer], hybrid.moe_layers[layer]
    return _block_bytes(config, kind, has_experts, dtype, activations)


def mtp_bytes(config: ModelConfig, dtype: torch.dtype, activations: torch.dtype) -> int:
    """Weights of the MTP module, without the embedding and the head that it shares with the target."""
    hidden = config.hidden_size
    block = _block_bytes(config, LayerKind.FULL, True, dtype, activations)
    return block + 2 * hidden * hidden * dtype.itemsize + 3 * hidden * activations.itemsize


def active_layer_weights(config: ModelConfig, rows: int = 1) -> float:
    """Weights that rows read in a layer, on average over the layers: of its experts only those that a row passes, taken
    as chosen at random by every row.
    """
    hybrid = _hybrid(config)
    moe, hidden = hybrid.moe, config.hidden_size
    one = torch.int8
    read = moe.num_experts * (1 - (1 - moe.num_chosen / moe.num_experts) ** rows)
    total = 0.0
    for layer in range(config.num_layers):
        total += hybrid_layer_bytes(config, layer, one, one)
        if hybrid.moe_layers[layer]:
            total -= 3 * hidden * moe.expert_size * (moe.num_experts - read)
    return total / config.num_layers


def _block_bytes(
    config: ModelConfig, kind: LayerKind, has_experts: bool, dtype: torch.dtype, activations: torch.dtype
) -> int:
    hidden, hybrid = config.hidden_size, _hybrid(config)
    shape, moe = hybrid.linear, hybrid.moe
    if kind is LayerKind.FULL:
        matrices = hidden * (2 * config.q_size + 2 * config.kv_size) + config.q_size * hidden
        small = 2 * config.head_dim * activations.itemsize
    else:
        made = 2 * shape.key_size + 2 * shape.value_size + 2 * shape.num_value_heads
        matrices = hidden * made + shape.value_size * hidden
        small = (shape.conv_width * shape.conv_channels + shape.value_dim) * activations.itemsize
        small += 2 * shape.num_value_heads * _WIDE
    if has_experts:
        matrices += hidden * (3 * moe.num_experts * moe.expert_size + moe.num_experts + 3 * moe.shared_size + 1)
    else:
        matrices += 3 * hidden * config.intermediate_size
    return matrices * dtype.itemsize + small + 2 * hidden * activations.itemsize


def _hybrid(config: ModelConfig) -> Hybrid:
    assert config.hybrid is not None, "a dense model"
    return config.hybrid
