"""What a model looks like, read from a Hugging Face directory.

The only place that reads `config.json` and `generation_config.json`; everything else sees a `ModelConfig`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from graftline.engine.models.hybrid_config import Hybrid, LayerKind, hybrid_from_dict
from graftline.engine.models.rope import (
    LinearScaling,
    Llama3Scaling,
    Rope,
    RopeScaling,
    YarnScaling,
    yarn_attention_factor,
)
from graftline.errors import InvalidRequestError


class Family(Enum):
    """Model families; the value is Hugging Face's `model_type`. All but Qwen3-Next are dense."""

    LLAMA = "llama"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    MISTRAL = "mistral"
    QWEN3_NEXT = "qwen3_next"


ARCHITECTURES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family.LLAMA,
    "Qwen2ForCausalLM": Family.QWEN2,
    "Qwen3ForCausalLM": Family.QWEN3,
    "MistralForCausalLM": Family.MISTRAL,
    "Qwen3NextForCausalLM": Family.QWEN3_NEXT,
}
DENSE_FAMILIES = tuple(family for family in Family if family is not Family.QWEN3_NEXT)
# What Hugging Face takes when `head_dim` is not in the file (None: hidden_size / num_heads).
_DEFAULT_HEAD_DIM: Mapping[Family, int | None] = {Family.QWEN3: 128, Family.QWEN3_NEXT: 256}
_MISTRAL_WINDOW = 4096


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and constants of one decoder-only model.

    Attributes:
        context_length: longest prompt plus output in tokens, at most `sliding_window` where a model has one:
            within its window such a model attends to everything, so a shorter context is exact.
        attention_bias: the q, k and v projections have a bias.
        output_bias: the attention's output projection has one.
        qk_norm: q and k pass a RMS norm per head before RoPE.
        eos_token_ids: union of what `config.json`, `generation_config.json` and the tokenizer name, in that order.
        bos_token_id: the beginning-of-sequence token, if the model knows one (not: whether prompts get it).
        sliding_window: the window in tokens that limited `context_length`, or None.
        hybrid: what it has beyond a dense model, or None.
    """

    family: Family
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    rope: Rope
    attention_bias: bool
    output_bias: bool
    qk_norm: bool
    tie_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    sliding_window: int | None = None
    hybrid: Hybrid | None = None

    def __post_init__(self) -> None:
        counts = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
        for name in (*counts, "vocab_size", "context_length"):
            if getattr(self, name) < 1:
                raise InvalidRequestError(name, f"{getattr(self, name)} is not a positive number")
        if self.num_heads % self.num_kv_heads:
            raise InvalidRequestError(
                "num_kv_heads", f"{self.num_heads} heads do not divide into {self.num_kv_heads} KV heads"
            )
        if self.head_dim % 2:
            raise InvalidRequestError("head_dim", f"{self.head_dim} is odd, RoPE needs pairs")

    @property
    def q_size(self) -> int:
        """Rows of the q projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the k (or v) projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of a head that RoPE turns."""
        return self.head_dim if self.hybrid is None else self.hybrid.rotary_dim

    def attention_layers(self, layers: range) -> tuple[int, ...]:
        """Those of `layers` that keep KV."""
        return tuple(layer for layer in layers if self._kind(layer) is LayerKind.FULL)

    def linear_layers(self, layers: range) -> tuple[int, ...]:
        """Those of `layers` that keep recurrent state."""
        return tuple(layer for layer in layers if self._kind(layer) is LayerKind.LINEAR)

    def _kind(self, layer: int) -> LayerKind:
        return LayerKind.FULL if self.hybrid is None else self.hybrid.layer_kinds[layer]


def read_config(path: Path) -> ModelConfig:
    """Reads `config.json` (and `generation_config.json` and the tokenizer's end, if there) of the directory `path`.

    Raises:
        InvalidRequestError: no such file, not JSON, an architecture or a feature that is not supported, or a
            value out of range; names the field and the value.
    """
    config = config_from_dict(read_json(path / "config.json"), read_generation_config(path))
    end = _tokenizer_end(path)
    # What was trained to chat may end its turns with a token that the config of its base does not name.
    if end is None or end in config.eos_token_ids or not 0 <= end < config.vocab_size:
        return config
    return replace(config, eos_token_ids=(*config.eos_token_ids, end))


def read_generation_config(path: Path) -> dict[str, Any]:
    """`generation_config.json` of a Hugging Face directory; empty where there is none. Raises as `read_json`."""
    generation_path = path / "generation_config.json"
    return read_json(generation_path) if generation_path.exists() else {}


def config_from_dict(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """The same from the parsed files."""
    family = _family(raw)
    _refuse_unknown_features(raw)
    hidden_size = _integer(raw, "hidden_size")
    num_heads = _integer(raw, "num_attention_heads")
    head_dim = int(raw.get("head_dim") or _DEFAULT_HEAD_DIM.get(family) or hidden_size // num_heads)
    hybrid = None
    if family is Family.QWEN3_NEXT:
        raw, hybrid = _whole_rotation(raw), hybrid_from_dict(raw, head_dim)
    window = _sliding_window(raw, family)
    context_length = _integer(raw, "max_position_embeddings")
    bias_is_chosen = family in (Family.LLAMA, Family.QWEN3) and bool(raw.get("attention_bias"))
    return ModelConfig(
        family=family,
        num_layers=_integer(raw, "num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=_integer(raw, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
        head_dim=head_dim,
        vocab_size=_integer(raw, "vocab_size"),
        context_length=context_length if window is None else min(context_length, window),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=rope_from_dict(raw, context_length),
        attention_bias=family is Family.QWEN2 or bias_is_chosen,
        output_bias=bias_is_chosen,
        qk_norm=family in (Family.QWEN3, Family.QWEN3_NEXT),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        eos_token_ids=_eos_ids(raw, generation),
        bos_token_id=_optional_integer(raw, "bos_token_id"),
        sliding_window=window if window is not None and window < context_length else None,
        hybrid=hybrid,
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        InvalidRequestError: unreadable, or not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequestError("model", f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise InvalidRequestError("model", f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequestError("model", f"{path} holds no JSON object")
    return value


def _family(raw: Mapping[str, Any]) -> Family:
    names = raw.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    model_type = raw.get("model_type")
    if not names and model_type in {family.value for family in Family}:
        return Family(model_type)
    wanted = ", ".join(names) or str(model_type)
    raise InvalidRequestError("architectures", f"{wanted} is not supported; supported: {', '.join(ARCHITECTURES)}")


def _refuse_unknown_features(raw: Mapping[str, Any]) -> None:
    if (activation := raw.get("hidden_act", "silu")) != "silu":
        raise InvalidRequestError("hidden_act", f"{activation!r} is not supported, only 'silu'")
    if raw.get("mlp_bias"):
        raise InvalidRequestError("mlp_bias", "a bias in the MLP is not supported")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise InvalidRequestError("quantization_config", f"{method!r} weights are not supported; use GGUF")


def _whole_rotation(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same without the part of a head that is rotated, which a hybrid config keeps elsewhere."""
    if raw.get("attention_bias"):
        raise InvalidRequestError("attention_bias", "True is not supported for this family")
    rope = {
        name: {key: value for key, value in raw[name].items() if key != "partial_rotary_factor"}
        for name in ("rope_scaling", "rope_parameters")
        if raw.get(name)
    }
    return {**{name: value for name, value in raw.items() if name != "partial_rotary_factor"}, **rope}


def _sliding_window(raw: Mapping[str, Any], family: Family) -> int | None:
    # Hugging Face gives a Mistral model a window unless its config says null.
    window = _MISTRAL_WINDOW if family is Family.MISTRAL else None
    if "sliding_window" in raw:
        window = _optional_integer(raw, "sliding_window")
    if window is None:
        return None
    if window < 1:
        raise InvalidRequestError("sliding_window", f"{window} is not a positive number of tokens")
    if family is Family.MISTRAL:
        return window
    return window if raw.get("use_sliding_window") else None


def rope_from_dict(raw: Mapping[str, Any], context_length: int) -> Rope:
    """RoPE as written by today's (`rope_parameters`) or earlier (`rope_theta`, `rope_scaling`) tools.

    Args:
        raw: a `config.json`, of a model or of a draft head.
        context_length: in tokens; what scalings fall back on that do not name their original context.

    Raises:
        InvalidRequestError: a kind of scaling that is not known, or one that lacks a value.
    """
    values = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = float(values.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    partial = values.get("partial_rotary_factor", raw.get("partial_rotary_factor")) or 1.0
    if partial != 1.0:
        raise InvalidRequestError("partial_rotary_factor", f"{partial} is not supported, only 1")
    kind = values.get("rope_type") or values.get("type") or "default"
    return Rope(theta, _rope_scaling(kind, values, context_length))


def _rope_scaling(kind: str, values: Mapping[str, Any], context_length: int) -> RopeScaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(_number(values, "factor"))
    if kind == "llama3":
        return Llama3Scaling(
            factor=_number(values, "factor"),
            low_freq_factor=_number(values, "low_freq_factor"),
            high_freq_factor=_number(values, "high_freq_factor"),
            original_context=int(values.get("original_max_position_embeddings") or context_length),
        )
    if kind == "yarn":
        original = int(values.get("original_max_position_embeddings") or context_length)
        factor = float(values.get("factor") or context_length / original)
        attention = values.get("attention_factor")
        if attention is None:
            attention = yarn_attention_factor(factor, values.get("mscale"), values.get("mscale_all_dim"))
        return YarnScaling(
            factor=factor,
            original_context=original,
            beta_fast=float(values.get("beta_fast") or 32),
            beta_slow=float(values.get("beta_slow") or 1),
            attention_factor=float(attention),
            truncate=bool(values.get("truncate", True)),
        )
    raise InvalidRequestError("rope_type", f"{kind!r} is not supported; supported: default, linear, llama3, yarn")


def token_text(value: Any) -> str | None:
    """The text of a special token as configs write one: plainly, or as an object; None for anything else."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _tokenizer_end(path: Path) -> int | None:
    """The id of `eos_token` of `tokenizer_config.json`; None where no file says."""
    settings_path, tokenizer_path = path / "tokenizer_config.json", path / "tokenizer.json"
    settings = read_json(settings_path) if settings_path.exists() else {}
    end = token_text(settings.get("eos_token"))
    if end is None:
        return None
    for token_id, entry in (settings.get("added_tokens_decoder") or {}).items():
        if isinstance(entry, dict) and entry.get("content") == end:
            return int(token_id)
    entries = (read_json(tokenizer_path).get("added_tokens") or []) if tokenizer_path.exists() else []
    return next((int(entry["id"]) for entry in entries if entry.get("content") == end), None)


def _eos_ids(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    ids: dict[int, None] = {}
    for source in (raw, generation):
        value = source.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is not None:
                ids[int(token_id)] = None
    return tuple(ids)


def _integer(raw: Mapping[str, Any], name: str) -> int:
    value = raw.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(name, f"{value!r} is not an integer")
    return value


def _optional_integer(raw: Mapping[str, Any], name: str) -> int | None:
    return None if raw.get(name) is None else _integer(raw, name)


def _number(raw: Mapping[str, Any], name: str) -> float:
    value = raw.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise InvalidRequestError(name, f"{value!r} is not a positive number")
    return float(value)
