"""Tensors of a Qwen3-Next checkpoint, rearranged and packed for its layers.

Hugging Face interleaves what one matrix makes, head by head: a head's query and its gate, a key head's q, k, v and z.
Here every kind comes in one block, so that the parts of a row are slices.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from graftline.engine.models.checkpoint import Checkpoint
from graftline.engine.models.hybrid_config import Hybrid, LayerKind
from graftline.engine.models.moe import GatedBlock, MoeBlock
from graftline.engine.models.weight_loader import WeightLoader
from graftline.kernels.linear import LinearWeight, pack_linear


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Parameters of gated full attention."""

    inputs: LinearWeight  # hidden -> q, k, v, gate
    q_norm: Tensor  # [head_dim]
    k_norm: Tensor  # [head_dim]
    output: LinearWeight  # q_size -> hidden


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """Parameters of a gated delta net."""

    inputs: LinearWeight  # hidden -> q, k, v, z, beta, alpha
    conv: Tensor  # [conv_width, channels], the oldest tap first
    decay_rate: Tensor  # [value_heads] float32
    time_bias: Tensor  # [value_heads] float32
    norm: Tensor  # [value_dim]
    output: LinearWeight  # value_size -> hidden


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """Parameters of one decoder layer."""

    input_norm: Tensor  # [hidden]
    mixer: AttentionWeights | DeltaWeights
    post_norm: Tensor  # [hidden]
    feed_forward: GatedBlock | MoeBlock


class Qwen3NextLoader(WeightLoader):
    """Reads layers of a checkpoint.

    Attributes:
        hybrid: what the config says of layers beyond a dense model's.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__(checkpoint, dtype, device)
        assert self.config.hybrid is not None, "a dense model"
        self.hybrid: Hybrid = self.config.hybrid

    def layer(self, layer: int) -> BlockWeights:
        """A decoder layer of the model."""
        hybrid = self.hybrid
        return self.block(f"model.layers.{layer}", hybrid.layer_kinds[layer], hybrid.moe_layers[layer])

    def block(self, prefix: str, kind: LayerKind, has_experts: bool) -> BlockWeights:
        """The decoder layer whose tensors' names start with `prefix`."""
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        is_full = kind is LayerKind.FULL
        return BlockWeights(
            input_norm=self.norm(f"{prefix}.input_layernorm", hidden),
            mixer=self._attention(f"{prefix}.self_attn") if is_full else self._delta(f"{prefix}.linear_attn"),
            post_norm=self.norm(f"{prefix}.post_attention_layernorm", hidden),
            feed_forward=self._experts(f"{prefix}.mlp") if has_experts else self._gated(f"{prefix}.mlp", inner),
        )

    def norm(self, module: str, size: int) -> Tensor:
        """The scale of a norm, which is stored as its distance from 1."""
        return (self.tensor(f"{module}.weight", size).float() + 1.0).to(self.device, self.activation_dtype)

    def matrix(self, module: str, rows: int, columns: int) -> LinearWeight:
        """One packed matrix."""
        return self._packed(self.tensor(f"{module}.weight", rows, columns))

    def _attention(self, prefix: str) -> AttentionWeights:
        config = self.config
        hidden, head_dim = config.hidden_size, config.head_dim
        queries = self.tensor(f"{prefix}.q_proj.weight", 2 * config.q_size, hidden)
        queries = queries.view(config.num_heads, 2, head_dim, hidden)  # per head: the query, then its gate
        k, v = (self.tensor(f"{prefix}.{name}_proj.weight", config.kv_size, hidden) for name in "kv")
        parts = (queries[:, 0].flatten(0, 1), k, v, queries[:, 1].flatten(0, 1))
        return AttentionWeights(
            inputs=self._packed(torch.cat(parts)),
            q_norm=self.norm(f"{prefix}.q_norm", head_dim),
            k_norm=self.norm(f"{prefix}.k_norm", head_dim),
            output=self.matrix(f"{prefix}.o_proj", hidden, config.q_size),
        )

    def _delta(self, prefix: str) -> DeltaWeights:
        shape, hidden = self.hybrid.linear, self.config.hidden_size
        groups, key_dim = shape.num_key_heads, shape.key_dim
        values = shape.value_size // groups  # values of the value heads that share a key head
        mixed = self.tensor(f"{prefix}.in_proj_qkvz.weight", 2 * shape.key_size + 2 * shape.value_size, hidden).view(
            groups, -1, hidden
        )
        gates = self.tensor(f"{prefix}.in_proj_ba.weight", 2 * shape.num_value_heads, hidden).view(groups, -1, hidden)
        heads = shape.num_value_heads // groups
        parts = (
            *torch.split(mixed, [key_dim, key_dim, values, values], dim=1),
            *torch.split(gates, [heads, heads], dim=1),
        )
        conv = self.tensor(f"{prefix}.conv1d.weight", shape.conv_channels, 1, shape.conv_width)
        rate = self.tensor(f"{prefix}.A_log", shape.num_value_heads).float().exp()
        return DeltaWeights(
            inputs=self._packed(torch.cat([part.flatten(0, 1) for part in parts])),
            conv=conv.squeeze(1).t().to(self.device, self.activation_dtype, copy=True).contiguous(),
            decay_rate=rate.to(self.device),
            time_bias=self.tensor(f"{prefix}.dt_bias", shape.num_value_heads).to(self.device, torch.float32, copy=True),
            norm=self.tensor(f"{prefix}.norm.weight", shape.value_dim).to(
                self.device, self.activation_dtype, copy=True
            ),
            output=self.matrix(f"{prefix}.out_proj", hidden, shape.value_size),
        )

    def _experts(self, prefix: str) -> MoeBlock:
        moe, hidden = self.hybrid.moe, self.config.hidden_size
        return MoeBlock(
            router=self.matrix(f"{prefix}.gate", moe.num_experts, hidden),
            experts=[self._gated(f"{prefix}.experts.{n}", moe.expert_size) for n in range(moe.num_experts)],
            shared=self._gated(f"{prefix}.shared_expert", moe.shared_size),
            shared_gate=self.matrix(f"{prefix}.shared_expert_gate", 1, hidden),
            num_chosen=moe.num_chosen,
            normalise=moe.normalise,
        )

    def _gated(self, prefix: str, inner: int) -> GatedBlock:
        hidden = self.config.hidden_size
        gate, up = (self.tensor(f"{prefix}.{name}_proj.weight", inner, hidden) for name in ("gate", "up"))
        return GatedBlock(self._packed(torch.cat((gate, up))), self.matrix(f"{prefix}.down_proj", hidden, inner))

    def _packed(self, weight: Tensor) -> LinearWeight:
        return pack_linear(weight.to(self.device, self.dtype))
