"""Writes tiny Qwen3-Next models with random weights, complete with tokenizer and an MTP module, for tests and trials.

The MTP module passes the embedding through and shares the head, and layers add less than the embedding brings: so its
drafts are often, but not always, what the target says.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from graftline.engine.models.random import SPECIAL_TOKENS, write_tiny_card

LAYER_TYPES = ("linear_attention", "linear_attention", "linear_attention", "full_attention")


def write_tiny_qwen3_next(
    path: Path,
    *,
    layer_types: Sequence[str] = LAYER_TYPES,
    hidden: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    key_heads: int = 2,
    value_heads: int = 4,
    linear_dim: int = 8,
    conv_width: int = 4,
    experts: int = 4,
    chosen: int = 2,
    expert_size: int = 16,
    vocab: int = 256 + len(SPECIAL_TOKENS),
    context: int = 512,
    seed: int = 0,
    scale: float = 0.15,
    mtp: bool = True,
) -> Path:
    """Writes a Hugging Face directory at `path` and returns `path`; equal arguments give equal bytes.

    Args:
        linear_dim: of key heads; value heads are twice as wide.
        scale: what a layer adds to the residual stream, beside an embedding of size 1: small values make drafts of the
            MTP module hold.
        mtp: write an MTP module.
    """
    path.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": len(layer_types),
        "layer_types": list(layer_types),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "partial_rotary_factor": 0.25 if head_dim % 8 == 0 else 1.0,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": linear_dim,
        "linear_value_head_dim": 2 * linear_dim,
        "linear_conv_kernel_dim": conv_width,
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": expert_size,
        "shared_expert_intermediate_size": expert_size,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": vocab - 3,
        "eos_token_id": vocab - 1,
        "torch_dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    write_tiny_card(path, vocab)
    weights = _Weights(config, seed, scale)
    weights.add_top()
    for layer, kind in enumerate(layer_types):
        weights.add_block(f"model.layers.{layer}", kind)
    if mtp:
        weights.add_mtp()
    save_file(weights.tensors, path / "model.safetensors")
    return path


class _Weights:
    """Parameters drawn one after the other from one generator."""

    def __init__(self, config: dict[str, Any], seed: int, scale: float) -> None:
        self._config = config
        self._generator = torch.Generator().manual_seed(seed)
        self._scale = scale
        self.tensors: dict[str, Tensor] = {}

    def add_top(self) -> None:
        vocab, hidden = self._config["vocab_size"], self._config["hidden_size"]
        self._normal("model.embed_tokens.weight", vocab, hidden)
        self._normal("model.norm.weight", hidden, std=0.1)
        self._projection("lm_head", vocab, hidden, 3.0)

    def add_block(self, prefix: str, kind: str) -> None:
        hidden = self._config["hidden_size"]
        self._normal(f"{prefix}.input_layernorm.weight", hidden, std=0.1)
        self._normal(f"{prefix}.post_attention_layernorm.weight", hidden, std=0.1)
        if kind == "full_attention":
            self._add_attention(f"{prefix}.self_attn")
        else:
            self._add_delta(f"{prefix}.linear_attn")
        self._add_experts(f"{prefix}.mlp")

    def add_mtp(self) -> None:
        hidden = self._config["hidden_size"]
        self.add_block("mtp.layers.0", "full_attention")
        for name in ("mtp.layers.0.self_attn.o_proj.weight", "mtp.layers.0.mlp.shared_expert.down_proj.weight"):
            self.tensors[name] *= 0.2  # present, but quiet
        for expert in range(self._config["num_experts"]):
            self.tensors[f"mtp.layers.0.mlp.experts.{expert}.down_proj.weight"] *= 0.2
        through = torch.cat((torch.eye(hidden), 0.02 * torch.randn(hidden, hidden, generator=self._generator)), dim=1)
        self.tensors["mtp.fc.weight"] = through
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            self._normal(f"mtp.{name}.weight", hidden, std=0.05)
        self.tensors["mtp.norm.weight"] = self.tensors["model.norm.weight"].clone()

    def _add_attention(self, prefix: str) -> None:
        config = self._config
        hidden, head_dim = config["hidden_size"], config["head_dim"]
        q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
        self._projection(f"{prefix}.q_proj", 2 * q_size, hidden, 1.5)
        self._projection(f"{prefix}.k_proj", kv_size, hidden, 1.5)
        self._projection(f"{prefix}.v_proj", kv_size, hidden, 1.5)
        self._projection(f"{prefix}.o_proj", hidden, q_size, 2 * self._scale)
        for name in ("q_norm", "k_norm"):
            self._normal(f"{prefix}.{name}.weight", head_dim, std=0.1)

    def _add_delta(self, prefix: str) -> None:
        config = self._config
        hidden, key_heads = config["hidden_size"], config["linear_num_key_heads"]
        value_heads, width = config["linear_num_value_heads"], config["linear_conv_kernel_dim"]
        keys = key_heads * config["linear_key_head_dim"]
        values = value_heads * config["linear_value_head_dim"]
        self._projection(f"{prefix}.in_proj_qkvz", 2 * keys + 2 * values, hidden, 1.5)
        self._projection(f"{prefix}.in_proj_ba", 2 * value_heads, hidden, 1.0)
        self._normal(f"{prefix}.conv1d.weight", 2 * keys + values, 1, width, std=1.5 / width**0.5)
        self._normal(f"{prefix}.A_log", value_heads, std=1.0)
        self._normal(f"{prefix}.dt_bias", value_heads, std=0.5)
        self.tensors[f"{prefix}.dt_bias"] -= 2.0  # slow decay: far tokens matter
        self._normal(f"{prefix}.norm.weight", config["linear_value_head_dim"], std=0.1, mean=1.0)
        self._projection(f"{prefix}.out_proj", hidden, values, self._scale)

    def _add_experts(self, prefix: str) -> None:
        config = self._config
        hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
        self._projection(f"{prefix}.gate", config["num_experts"], hidden, 1.0)
        self._projection(f"{prefix}.shared_expert_gate", 1, hidden, 1.0)
        for expert in (*(f"experts.{n}" for n in range(config["num_experts"])), "shared_expert"):
            for name in ("gate", "up"):
                self._projection(f"{prefix}.{expert}.{name}_proj", inner, hidden, 1.5)
            self._projection(f"{prefix}.{expert}.down_proj", hidden, inner, self._scale)

    def _normal(self, name: str, *shape: int, std: float = 1.0, mean: float = 0.0) -> None:
        self.tensors[name] = torch.randn(*shape, generator=self._generator) * std + mean

    def _projection(self, module: str, rows: int, columns: int, scale: float) -> None:
        self._normal(f"{module}.weight", rows, columns, std=scale / columns**0.5)
