"""Writes tiny models with random weights, complete with tokenizer and chat template, for tests and trials.

The weights are drawn so that greedy output wanders over the vocabulary instead of settling on one token.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from graftline.engine.models.config import ARCHITECTURES, Family

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_model(
    path: Path,
    *,
    layers: int = 4,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate: int | None = None,
    vocab: int = 256 + len(SPECIAL_TOKENS),
    context: int = 512,
    seed: int = 0,
    scale: float = 3.0,
    family: Family = Family.LLAMA,
    tie: bool = False,
) -> Path:
    """Writes a Hugging Face directory at `path` and returns `path`; equal arguments give equal bytes.

    The first `vocab - 3` tokens are the bytes (as far as they reach; more are `<|extra_n|>`), the last three
    `<|endoftext|>`, `<|im_start|>`, `<|im_end|>`; the last is end-of-sequence.

    Args:
        head_dim: `hidden / heads` by default.
        intermediate: `2 * hidden` by default.
        vocab: at least 4.
        context: context length in tokens.
        scale: standard deviation of what a projection makes of normalised input; larger gives wilder output.
        tie: share embedding and output head (greedy output then likes to repeat its input).
    """
    head_dim = head_dim or hidden // heads
    intermediate = intermediate or 2 * hidden
    path.mkdir(parents=True, exist_ok=True)
    config = _config(layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, context, family, tie)
    _write_json(path / "config.json", config)
    write_tiny_card(path, vocab)
    weights = _Weights(seed, scale)
    weights.add_top(vocab, hidden, tie)
    for layer in range(layers):
        weights.add_layer(layer, hidden, heads * head_dim, kv_heads * head_dim, intermediate)
        if family is Family.QWEN2:
            weights.add_biases(layer, heads * head_dim, kv_heads * head_dim)
        if family is Family.QWEN3:
            weights.add_head_norms(layer, head_dim)
    save_file(weights.tensors, path / "model.safetensors")
    return path


def write_tiny_card(path: Path, vocab: int) -> None:
    """Writes a tokenizer of `vocab` tokens, a chat template and the end-of-sequence id into the directory `path`."""
    _write_json(path / "generation_config.json", {"eos_token_id": vocab - 1})
    _write_json(path / "tokenizer.json", _tokenizer(vocab))
    names = {"bos_token": SPECIAL_TOKENS[0], "eos_token": SPECIAL_TOKENS[2], "chat_template": CHAT_TEMPLATE}
    _write_json(path / "tokenizer_config.json", names)


class _Weights:
    """Parameters drawn one after the other from one generator."""

    def __init__(self, seed: int, scale: float) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._scale = scale
        self.tensors: dict[str, Tensor] = {}

    def _normal(self, name: str, *shape: int, std: float, mean: float = 0.0) -> None:
        self.tensors[name] = torch.randn(*shape, generator=self._generator) * std + mean

    def _projection(self, name: str, rows: int, columns: int) -> None:
        self._normal(f"{name}.weight", rows, columns, std=self._scale / columns**0.5)

    def add_top(self, vocab: int, hidden: int, tie: bool) -> None:
        self._normal("model.embed_tokens.weight", vocab, hidden, std=1.0 if not tie else self._scale / hidden**0.5)
        self._normal("model.norm.weight", hidden, std=0.1, mean=1.0)
        if not tie:
            self._projection("lm_head", vocab, hidden)

    def add_layer(self, layer: int, hidden: int, q_size: int, kv_size: int, intermediate: int) -> None:
        prefix = f"model.layers.{layer}"
        self._normal(f"{prefix}.input_layernorm.weight", hidden, std=0.1, mean=1.0)
        self._normal(f"{prefix}.post_attention_layernorm.weight", hidden, std=0.1, mean=1.0)
        for name, rows in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            self._normal(f"{prefix}.self_attn.{name}_proj.weight", rows, hidden, std=1.5 / hidden**0.5)
        self._projection(f"{prefix}.self_attn.o_proj", hidden, q_size)
        for name in ("gate", "up"):
            self._normal(f"{prefix}.mlp.{name}_proj.weight", intermediate, hidden, std=1.5 / hidden**0.5)
        self._projection(f"{prefix}.mlp.down_proj", hidden, intermediate)

    def add_biases(self, layer: int, q_size: int, kv_size: int) -> None:
        for name, rows in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            self._normal(f"model.layers.{layer}.self_attn.{name}_proj.bias", rows, std=0.5)

    def add_head_norms(self, layer: int, head_dim: int) -> None:
        for name in ("q", "k"):
            self._normal(f"model.layers.{layer}.self_attn.{name}_norm.weight", head_dim, std=0.1, mean=1.0)


def _config(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    intermediate: int,
    vocab: int,
    context: int,
    family: Family,
    tie: bool,
) -> dict[str, Any]:
    (architecture,) = (name for name, known in ARCHITECTURES.items() if known is family)
    return {
        "architectures": [architecture],
        "model_type": family.value,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": tie,
        "sliding_window": None,
        "bos_token_id": vocab - 3,
        "eos_token_id": vocab - 1,
        "torch_dtype": "float32",
    }


def _tokenizer(vocab: int) -> dict[str, Any]:
    """Byte-level BPE without merges: a token a byte."""
    plain = _byte_characters()[: vocab - len(SPECIAL_TOKENS)]
    extra = [f"<|extra_{n}|>" for n in range(vocab - len(SPECIAL_TOKENS) - len(plain))]
    tokens = [*plain, *extra, *SPECIAL_TOKENS]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    specials = enumerate(SPECIAL_TOKENS, start=vocab - len(SPECIAL_TOKENS))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": token_id, "content": token, **flags} for token_id, token in specials],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [],
        },
    }


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte 0..255 (GPT-2's mapping)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")
