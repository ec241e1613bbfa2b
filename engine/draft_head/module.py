"""The draft head as it is trained: dense, batched, unrolled over its own outputs.

Level 0 reads the target's features at every position; level k reads the output that level k-1 gave one position
earlier, as in serving where a draft follows a draft ("training-time test", EAGLE-3, Li et al. 2025, section 3.2).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from graftline.engine.draft_head.config import DraftHeadConfig, DraftHeadKind
from graftline.engine.draft_head.spread import FeatureSpread
from graftline.engine.draft_head.target import fixed_shape_compiler, rms_norm, rotary_tables, rotate


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """A head's own weights in one compute dtype, ready for a forward; matrices are [out, in]."""

    fc: Tensor  # [h, n * target_h], or [h, h + target_h] for EAGLE
    fc_bias: Tensor | None  # [h]
    input_norm: Tensor | None  # [h]; of the embedding (EAGLE-3) or of the layer's input (EAGLE)
    hidden_norm: Tensor | None  # [h], EAGLE-3 only
    qkv: Tensor  # [(heads + 2 kv) * d, 2 h or h]
    out: Tensor  # [h, heads * d]
    post_norm: Tensor  # [h]
    gate_up: Tensor  # [2 i, h]
    down: Tensor  # [h, i]
    norm: Tensor | None  # [h], EAGLE-3 only

    @classmethod
    def from_tensors(cls, config: DraftHeadConfig, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> "HeadWeights":
        """Gather from tensors under the file's names; gradients flow through."""
        at = layer_prefix(config)

        def maybe(name: str) -> Tensor | None:
            return tensors[name].to(dtype) if name in tensors else None

        return cls(
            fc=tensors["fc.weight"].to(dtype),
            fc_bias=maybe("fc.bias"),
            input_norm=maybe(f"{at}input_layernorm.weight"),
            hidden_norm=maybe(f"{at}hidden_norm.weight"),
            qkv=torch.cat([tensors[f"{at}self_attn.{x}_proj.weight"] for x in "qkv"]).to(dtype),
            out=tensors[f"{at}self_attn.o_proj.weight"].to(dtype),
            post_norm=tensors[f"{at}post_attention_layernorm.weight"].to(dtype),
            gate_up=torch.cat([tensors[f"{at}mlp.{x}_proj.weight"] for x in ("gate", "up")]).to(dtype),
            down=tensors[f"{at}mlp.down_proj.weight"].to(dtype),
            norm=maybe("norm.weight"),
        )


class DraftHeadModule(nn.Module):
    """Trainable float32 weights of a head under the file's names, "." spelled "/" inside torch."""

    def __init__(self, config: DraftHeadConfig, num_features: int, *, seed: int) -> None:
        super().__init__()
        self.config = config
        generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterDict()
        for name, size in tensor_sizes(config, num_features).items():
            if len(size) == 2:
                scale = 0.1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                value = torch.randn(size, generator=generator) * scale / size[1] ** 0.5
            else:
                value = torch.zeros(size) if name.endswith("bias") else torch.ones(size)
            self.weights[_inner(name)] = nn.Parameter(value)

    def tensors(self) -> dict[str, Tensor]:
        """The parameters under the file's names."""
        return {name.replace("/", "."): value for name, value in self.weights.items()}

    def cast(self, dtype: torch.dtype, spread: FeatureSpread | None = None) -> HeadWeights:
        """Weights for a forward in `dtype`; gradients reach the float32 parameters.

        Args:
            spread: given, the weights read raw features, and the parameters are those for standardised ones.
        """
        tensors = self.tensors()
        if spread is not None:
            columns = feature_columns(self.config)
            whole = tensors["fc.weight"]
            folded = whole[:, columns] * spread.inverse_deviation
            tensors["fc.bias"] = tensors["fc.bias"] - folded @ spread.mean
            tensors["fc.weight"] = torch.cat([whole[:, : columns.start or 0], folded], dim=1)
        return HeadWeights.from_tensors(self.config, tensors, dtype)


class Unroller:
    """Runs a head densely over whole rows."""

    def __init__(self, config: DraftHeadConfig, *, compiled: bool = False) -> None:
        self.config = config
        wrap = fixed_shape_compiler(compiled)
        self._before = wrap(before_attention)
        self._after = wrap(after_attention)
        self._eagle3 = config.kind is DraftHeadKind.EAGLE3

    def unroll(self, weights: HeadWeights, embeddings: Tensor, features: Tensor, num_levels: int) -> Iterator[Tensor]:
        """Yield each level's outputs h' [B, N, h]; row p of level k is only meaningful for p >= k.

        Args:
            embeddings: [B, N, h], row p holds the embedding of the token at p + 1.
            features: [B, N, n * target_h], of the target at p.
        """
        config, length = self.config, embeddings.shape[1]
        cos, sin = rope_of(config, config.position_offset, length, embeddings)
        state = fuse(config, weights, embeddings, features)
        all_keys: list[Tensor] = []
        all_values: list[Tensor] = []
        groups = config.num_heads // config.num_kv_heads
        for level in range(num_levels):
            q, k, v = self._before(weights, embeddings, state, cos, sin, config)
            all_keys.append(k.repeat_interleave(groups, 1))
            all_values.append(v.repeat_interleave(groups, 1))
            if level:
                mask = unroll_mask(length, level, q.device, q.dtype)
                mixed = functional.scaled_dot_product_attention(
                    q, torch.cat(all_keys, 2), torch.cat(all_values, 2), mask
                )
            else:
                mixed = functional.scaled_dot_product_attention(q, all_keys[0], all_values[0], is_causal=True)
            output = self._after(weights, state, mixed, config)
            yield output
            earlier = torch.cat([output[:, :1], output[:, :-1]], dim=1)
            state = earlier if self._eagle3 else fuse(config, weights, embeddings, earlier)


def fuse(config: DraftHeadConfig, weights: HeadWeights, embeddings: Tensor, features: Tensor) -> Tensor:
    """What enters the decoder layer's residual stream: fc of the features, for EAGLE of [embedding, feature]."""
    if config.kind is DraftHeadKind.EAGLE:
        features = torch.cat([embeddings, features], dim=-1)
    return functional.linear(features, weights.fc, weights.fc_bias)


def before_attention(
    weights: HeadWeights, embeddings: Tensor, state: Tensor, cos: Tensor, sin: Tensor, config: DraftHeadConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Norms, projections, rotation: [B, N, h] twice -> q [B, heads, N, d], k and v [B, kv heads, N, d]."""
    eps = config.rms_norm_eps
    if config.kind is DraftHeadKind.EAGLE3:
        assert weights.input_norm is not None, "EAGLE-3 weights without input_layernorm"
        assert weights.hidden_norm is not None, "EAGLE-3 weights without hidden_norm"
        entering = torch.cat(
            [rms_norm(embeddings, weights.input_norm, eps), rms_norm(state, weights.hidden_norm, eps)], dim=-1
        )
    else:
        entering = state if weights.input_norm is None else rms_norm(state, weights.input_norm, eps)
    batch, length, _ = state.shape
    heads = functional.linear(entering, weights.qkv).view(batch, length, -1, config.head_dim).transpose(1, 2)
    q, k, v = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def after_attention(weights: HeadWeights, state: Tensor, mixed: Tensor, config: DraftHeadConfig) -> Tensor:
    """Output projection and MLP: state [B, N, h], mixed [B, heads, N, d] -> h' [B, N, h]."""
    batch, length, _ = state.shape
    x = state + functional.linear(mixed.transpose(1, 2).reshape(batch, length, -1), weights.out)
    gate, up = functional.linear(rms_norm(x, weights.post_norm, config.rms_norm_eps), weights.gate_up).chunk(2, dim=-1)
    return x + functional.linear(functional.silu(gate) * up, weights.down)


def to_logit_space(config: DraftHeadConfig, weights: HeadWeights, output: Tensor) -> Tensor:
    """What the output head multiplies: norm(h'), or h' itself where the head has no norm."""
    return output if weights.norm is None else rms_norm(output, weights.norm, config.rms_norm_eps)


def rope_of(config: DraftHeadConfig, start: int, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary tables [length, d] on the device and in the type of `like`."""
    exponents = torch.arange(0, config.head_dim, 2, device=like.device, dtype=torch.float32) / config.head_dim
    return rotary_tables(config.rope_theta**-exponents, start, length, like.dtype)


def unroll_mask(length: int, level: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """What row p of `level` > 0 may attend to: additive [length, (level + 1) * length].

    A draft `level` steps deep at p follows real rows up to p - level, then one row of each level in between.
    """
    rows = torch.arange(length, device=device)[:, None]
    columns = torch.arange(length, device=device)[None]
    blocks = [columns <= rows - level, *(columns == rows - level + above for above in range(1, level + 1))]
    return torch.zeros(length, (level + 1) * length, device=device, dtype=dtype).masked_fill(
        ~torch.cat(blocks, dim=1), float("-inf")
    )


def feature_columns(config: DraftHeadConfig) -> slice:
    """Columns of `fc.weight` that read features of the target; those before read the embedding."""
    return slice(config.hidden_size if config.kind is DraftHeadKind.EAGLE else 0, None)


def layer_prefix(config: DraftHeadConfig) -> str:
    """How the file names the decoder layer's tensors."""
    return "midlayer." if config.kind is DraftHeadKind.EAGLE3 else "layers.0."


def tensor_sizes(config: DraftHeadConfig, num_features: int) -> dict[str, tuple[int, ...]]:
    """Name and size of every tensor a head of this config is trained with."""
    at, h, i = layer_prefix(config), config.hidden_size, config.intermediate_size
    eagle3 = config.kind is DraftHeadKind.EAGLE3
    fused = num_features * config.target_hidden_size if eagle3 else h + config.target_hidden_size
    entering = 2 * h if eagle3 else h
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, fused),
        "fc.bias": (h,),
        f"{at}self_attn.q_proj.weight": (q_size, entering),
        f"{at}self_attn.k_proj.weight": (kv_size, entering),
        f"{at}self_attn.v_proj.weight": (kv_size, entering),
        f"{at}self_attn.o_proj.weight": (h, q_size),
        f"{at}mlp.gate_proj.weight": (i, h),
        f"{at}mlp.up_proj.weight": (i, h),
        f"{at}mlp.down_proj.weight": (h, i),
        f"{at}post_attention_layernorm.weight": (h,),
    }
    if eagle3:
        sizes[f"{at}hidden_norm.weight"] = (h,)
    if eagle3 or config.input_norm:
        sizes[f"{at}input_layernorm.weight"] = (h,)
    if config.norm_output:
        sizes["norm.weight"] = (h,)
    return sizes


def _inner(name: str) -> str:
    return name.replace(".", "/")
