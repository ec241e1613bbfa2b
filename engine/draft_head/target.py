"""The target model as the trainer sees it: whole sequences in, features out, and a batched decode step.

Plain dense attention over equal-length rows, for throughput on one device; serving has its own forward.
Knows Llama-like dense models (optional q/k/v bias and q/k norms), nothing of files or chat.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from graftline.engine.draft_head.config import FINAL_NORM
from graftline.engine.models.checkpoint import Checkpoint
from graftline.engine.models.config import ModelConfig
from graftline.engine.models.rope import inverse_frequencies


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; matrices are [out, in]."""

    input_norm: Tensor  # [h]
    qkv: Tensor  # [(heads + 2 kv) * d, h]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [d]
    k_norm: Tensor | None  # [d]
    out: Tensor  # [h, heads * d]
    out_bias: Tensor | None
    post_norm: Tensor  # [h]
    gate_up: Tensor  # [2 i, h]
    down: Tensor  # [h, i]


@dataclass(frozen=True, slots=True)
class Target:
    """A frozen target on one device in one dtype.

    Attributes:
        inv_freq: [d / 2] float32 rotary frequencies.
    """

    shape: ModelConfig
    embed: Tensor  # [vocab, h]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [h]
    lm_head: Tensor  # [vocab, h]
    inv_freq: Tensor

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed.device

    @classmethod
    def load(cls, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> "Target":
        """Read every layer of a checkpoint."""
        config = checkpoint.config

        def get(name: str) -> Tensor:
            return checkpoint.tensor(name).to(device=device, dtype=dtype)

        def layer(index: int) -> LayerWeights:
            attn, mlp = f"model.layers.{index}.self_attn.", f"model.layers.{index}.mlp."
            return LayerWeights(
                input_norm=get(f"model.layers.{index}.input_layernorm.weight"),
                qkv=torch.cat([get(f"{attn}{x}_proj.weight") for x in "qkv"]),
                qkv_bias=torch.cat([get(f"{attn}{x}_proj.bias") for x in "qkv"]) if config.attention_bias else None,
                q_norm=get(f"{attn}q_norm.weight") if config.qk_norm else None,
                k_norm=get(f"{attn}k_norm.weight") if config.qk_norm else None,
                out=get(f"{attn}o_proj.weight"),
                out_bias=get(f"{attn}o_proj.bias") if config.output_bias else None,
                post_norm=get(f"model.layers.{index}.post_attention_layernorm.weight"),
                gate_up=torch.cat([get(f"{mlp}gate_proj.weight"), get(f"{mlp}up_proj.weight")]),
                down=get(f"{mlp}down_proj.weight"),
            )

        embed = get("model.embed_tokens.weight")
        return cls(
            shape=config,
            embed=embed,
            layers=tuple(layer(index) for index in range(config.num_layers)),
            final_norm=get("model.norm.weight"),
            lm_head=embed if config.tie_embeddings else get("lm_head.weight"),
            inv_freq=inverse_frequencies(config.rope, config.head_dim).to(device),
        )


@dataclass(frozen=True, slots=True)
class Hidden:
    """What one forward yields: fused features [B, T, n * h] and the final-normed hidden state [B, T, h]."""

    features: Tensor
    final: Tensor


class TargetRunner:
    """Runs a target forward; with `compiled`, equal shapes call after call are fastest."""

    def __init__(self, target: Target, *, compiled: bool) -> None:
        self.target = target
        wrap = fixed_shape_compiler(compiled)
        self._layer = wrap(_layer)
        self._step_before = wrap(_before_attention)
        self._step_after = wrap(_after_attention)

    def _tables(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        target = self.target
        return rotary_tables(target.inv_freq, start, length, target.embed.dtype, target.shape.rope.attention_factor)

    @torch.no_grad()
    def features(self, tokens: Tensor, feature_layers: Sequence[int]) -> Hidden:
        """Forward whole rows of tokens [B, T] from position 0.

        Args:
            feature_layers: as in `DraftHeadConfig.feature_layers`.
        """
        target, eps = self.target, self.target.shape.rms_norm_eps
        cos, sin = self._tables(0, tokens.shape[1])
        x = functional.embedding(tokens, target.embed)
        taken = {0: x} if 0 in feature_layers else {}
        for index, weights in enumerate(target.layers, start=1):
            x = self._layer(x, weights, cos, sin, target.shape)
            if index in feature_layers:
                taken[index] = x
        final = rms_norm(x, target.final_norm, eps)
        taken[FINAL_NORM] = final
        return Hidden(torch.cat([taken[layer] for layer in feature_layers], dim=-1), final)

    @torch.no_grad()
    def fill(self, tokens: Tensor, cache: "StaticCache", rows: slice) -> Tensor:
        """Forward tokens [b, T] from position 0 into `rows` of the cache; returns final hidden of the last [b, h]."""
        target = self.target
        length = tokens.shape[1]
        cos, sin = self._tables(0, length)
        x = functional.embedding(tokens, target.embed)
        for index, weights in enumerate(target.layers):
            q, k, v = _before_attention(x, weights, cos, sin, target.shape)
            cache.keys[index][rows, :, :length] = k
            cache.values[index][rows, :, :length] = v
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = _after_attention(x, mixed, weights, target.shape)
        return rms_norm(x[:, -1], target.final_norm, target.shape.rms_norm_eps)

    @torch.no_grad()
    def step(self, tokens: Tensor, position: int, cache: "StaticCache") -> Tensor:
        """Decode one token [B] of every row at the same position; returns the final-normed hidden state [B, h]."""
        target, shape = self.target, self.target.shape
        batch, groups = tokens.shape[0], shape.num_heads // shape.num_kv_heads
        cos, sin = self._tables(position, 1)
        x = functional.embedding(tokens, target.embed)[:, None]
        for index, weights in enumerate(target.layers):
            q, k, v = self._step_before(x, weights, cos, sin, shape)
            keys, values = cache.keys[index], cache.values[index]
            keys[:, :, position] = k[:, :, 0]
            values[:, :, position] = v[:, :, 0]
            # The query heads of one KV head become query rows, so that K and V are read once and no mask is needed.
            rows = q.reshape(batch, shape.num_kv_heads, groups, shape.head_dim)
            mixed = functional.scaled_dot_product_attention(
                rows, keys[:, :, : position + 1], values[:, :, : position + 1]
            )
            x = self._step_after(x, mixed.reshape(batch, shape.num_heads, 1, shape.head_dim), weights, shape)
        return rms_norm(x[:, 0], target.final_norm, shape.rms_norm_eps)


class StaticCache:
    """Keys and values of `num_rows` rows of equal length: one [num_rows, kv heads, length, d] tensor a layer."""

    def __init__(self, target: Target, num_rows: int, length: int) -> None:
        shape = target.shape
        size = (num_rows, shape.num_kv_heads, length, shape.head_dim)
        self.keys = [torch.empty(size, device=target.device, dtype=target.embed.dtype) for _ in target.layers]
        self.values = [torch.empty(size, device=target.device, dtype=target.embed.dtype) for _ in target.layers]


def rotary_tables(
    inv_freq: Tensor, start: int, length: int, dtype: torch.dtype, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, d] of positions start, start + 1, ..., both halves alike, times `scale`."""
    positions = torch.arange(start, start + length, device=inv_freq.device, dtype=torch.float32)
    angles = torch.outer(positions, inv_freq)
    angles = torch.cat([angles, angles], dim=-1)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [..., T, d], pairs being (i, i + d / 2)."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos + turned * sin


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension, computed in float32."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (scaled * weight.float()).to(x.dtype)


def varying_lengths() -> AbstractContextManager[None]:
    """Attention while lengths change from call to call: without cuDNN, which would plan anew for each of them."""
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(backends)  # type: ignore[no-any-return, no-untyped-call, unused-ignore]


def fixed_shape_compiler(compiled: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What wraps a function that always sees the same shapes: `torch.compile`, or nothing."""
    if not compiled:
        return lambda function: function
    return lambda function: torch.compile(function, dynamic=False)


def _before_attention(
    x: Tensor, weights: LayerWeights, cos: Tensor, sin: Tensor, shape: ModelConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, projections, rotation: x [B, T, h] -> q [B, heads, T, d], k and v [B, kv heads, T, d]."""
    batch, length, _ = x.shape
    mixed = functional.linear(rms_norm(x, weights.input_norm, shape.rms_norm_eps), weights.qkv, weights.qkv_bias)
    heads = mixed.view(batch, length, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim).transpose(1, 2)
    q, k, v = torch.split(heads, [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
    if weights.q_norm is not None and weights.k_norm is not None:
        q = rms_norm(q, weights.q_norm, shape.rms_norm_eps)
        k = rms_norm(k, weights.k_norm, shape.rms_norm_eps)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def _after_attention(x: Tensor, mixed: Tensor, weights: LayerWeights, shape: ModelConfig) -> Tensor:
    """Output projection and MLP: x [B, T, h], mixed [B, heads, T, d] -> [B, T, h]."""
    batch, length, _ = x.shape
    x = x + functional.linear(mixed.transpose(1, 2).reshape(batch, length, -1), weights.out, weights.out_bias)
    gate, up = functional.linear(rms_norm(x, weights.post_norm, shape.rms_norm_eps), weights.gate_up).chunk(2, dim=-1)
    return x + functional.linear(functional.silu(gate) * up, weights.down)


def _layer(x: Tensor, weights: LayerWeights, cos: Tensor, sin: Tensor, shape: ModelConfig) -> Tensor:
    q, k, v = _before_attention(x, weights, cos, sin, shape)
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return _after_attention(x, mixed, weights, shape)
