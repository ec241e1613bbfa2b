"""A `ModelConfig` from the metadata of a GGUF file, and GGUF's names for the tensors."""

from collections.abc import Mapping
from typing import Any

from graftline.engine.models.config import Family, ModelConfig
from graftline.engine.models.gguf_file import GgufFile
from graftline.engine.models.rope import DivisorScaling, LinearScaling, Rope, RopeScaling, YarnScaling
from graftline.engine.models.rope import yarn_attention_factor as default_yarn_attention_factor
from graftline.errors import InvalidRequestError

# Mistral's dense models are converted as "llama".
_FAMILIES: Mapping[str, Family] = {"llama": Family.LLAMA, "qwen2": Family.QWEN2, "qwen3": Family.QWEN3}

_TOP_NAMES: Mapping[str, str] = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_NAMES: Mapping[str, str] = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """GGUF's name of the tensor that Hugging Face calls `name`.

    Raises:
        KeyError: not a tensor of a dense model.
    """
    module, _, suffix = name.rpartition(".")
    if module in _TOP_NAMES:
        return f"{_TOP_NAMES[module]}.{suffix}"
    prefix, layer, rest = module.removeprefix("model.").split(".", 2) if module.count(".") > 2 else ("", "", "")
    if prefix != "layers" or rest not in _LAYER_NAMES:
        raise KeyError(name)
    return f"blk.{layer}.{_LAYER_NAMES[rest]}.{suffix}"


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """Shapes and constants of the model in `file`.

    Raises:
        InvalidRequestError: an architecture or feature that is not supported, or metadata that lacks a value.
    """
    architecture = str(file.metadata.get("general.architecture"))
    if architecture not in _FAMILIES:
        raise InvalidRequestError(
            "general.architecture", f"{architecture!r} is not supported; supported: {', '.join(_FAMILIES)}"
        )
    family = _FAMILIES[architecture]
    fields = _Fields(file.metadata, architecture)
    if fields.get("expert_count", 0):
        raise InvalidRequestError(f"{architecture}.expert_count", "mixtures of experts are not supported")
    hidden_size, num_heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = int(fields.get("attention.key_length", hidden_size // num_heads))
    for name in ("attention.value_length", "rope.dimension_count"):
        if (other := fields.get(name, head_dim)) != head_dim:
            raise InvalidRequestError(f"{architecture}.{name}", f"{other} differs from the head size {head_dim}")
    window = fields.get("attention.sliding_window", None) or None
    context_length = fields.integer("context_length")
    return ModelConfig(
        family=family,
        num_layers=fields.integer("block_count"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=int(fields.get("attention.head_count_kv", num_heads)),
        head_dim=head_dim,
        vocab_size=_vocab_size(file),
        context_length=context_length if window is None else min(context_length, int(window)),
        rms_norm_eps=_round_trip(fields.number("attention.layer_norm_rms_epsilon")),
        rope=Rope(_round_trip(float(fields.get("rope.freq_base", 10000.0))), _scaling(fields, file)),
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        qk_norm=family is Family.QWEN3,
        tie_embeddings="output.weight" not in file.tensors,
        eos_token_ids=_eos_ids(file.metadata),
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        sliding_window=int(window) if window is not None and window < context_length else None,
    )


class _Fields:
    """The metadata under one architecture's prefix."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self._metadata = metadata
        self._prefix = architecture

    def get(self, name: str, default: Any) -> Any:
        return self._metadata.get(f"{self._prefix}.{name}", default)

    def integer(self, name: str) -> int:
        value = self.get(name, None)
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidRequestError(f"{self._prefix}.{name}", f"{value!r} is not an integer")
        return value

    def number(self, name: str) -> float:
        value = self.get(name, None)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise InvalidRequestError(f"{self._prefix}.{name}", f"{value!r} is not a positive number")
        return float(value)


def _round_trip(value: float) -> float:
    """The short decimal that a float32 in the file stands for: 9.999999747378752e-06 -> 1e-05."""
    return float(f"{value:.7g}")


def _vocab_size(file: GgufFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise InvalidRequestError("model", f"{file.path} has no tensor token_embd.weight")
    return file.tensors["token_embd.weight"].shape[0]


def _scaling(fields: _Fields, file: GgufFile) -> RopeScaling | None:
    if "rope_freqs.weight" in file.tensors:
        return DivisorScaling(tuple(file.tensor("rope_freqs.weight").tolist()))
    kind = fields.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    factor = fields.number("rope.scaling.factor")
    if kind == "linear":
        return LinearScaling(factor)
    if kind == "yarn":
        # GGUF's attn_factor multiplies the default temperature (ggml's rope does); Hugging Face's replaces it.
        own = float(fields.get("rope.scaling.attn_factor", 1.0))
        return YarnScaling(
            factor=factor,
            original_context=int(fields.get("rope.scaling.original_context_length", 0))
            or int(fields.integer("context_length") / factor),
            beta_fast=float(fields.get("rope.scaling.yarn_beta_fast", 32.0)),
            beta_slow=float(fields.get("rope.scaling.yarn_beta_slow", 1.0)),
            attention_factor=own * default_yarn_attention_factor(factor, None, None),
            truncate=True,
        )
    raise InvalidRequestError("rope.scaling.type", f"{kind!r} is not supported; supported: none, linear, yarn")


def _eos_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = (metadata.get(f"tokenizer.ggml.{name}") for name in names)
    return tuple(dict.fromkeys(token_id for token_id in found if token_id is not None))
