"""What a draft head is: its kind, its shapes, and where its input features come from.

Reads our own `config.json` and those of public EAGLE heads; knows no tensors.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from graftline.errors import InvalidRequestError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
FINAL_NORM = -1
"""Feature layer that stands for the target's hidden state after its final norm."""


class DraftHeadKind(Enum):
    """Which published layout the weights follow.

    EAGLE: `fc` over [embedding, last hidden state], then one decoder layer; its output stands for the target's
    final-normed hidden state. EAGLE3: `fc` over several hidden states of the target, then one decoder layer over
    [norm(embedding), norm(feature)], a final norm, and an output head over a reduced draft vocabulary. MTP: the
    module that the target's own checkpoint carries (Qwen3-Next); it has no directory of its own.
    """

    EAGLE = "eagle"
    EAGLE3 = "eagle3"
    MTP = "mtp"


@dataclass(frozen=True, slots=True)
class DraftHeadConfig:
    """Shapes and conventions of one draft head.

    The drafter's row at position p takes (target feature at p, token at p + 1) and rotates by p + `position_offset`;
    its output stands for the feature at p + 1, and its logits predict the token at p + 2.

    Attributes:
        hidden_size: width of the head's decoder layer (and of the embeddings it reads).
        target_hidden_size: width of one target feature.
        feature_layers: each n is the target's residual stream after n decoder layers; -1 is the final-normed hidden
            state. Empty in public EAGLE-3 configs that name none: see `features_of`.
        draft_vocab_size: rows of the head's logits; equals `vocab_size` when the vocabulary is not reduced.
        context_length: positions the head was made for; drafts past it may be worse but are legal.
        norm_output: logits are taken of norm(h') (EAGLE-3) rather than of h' (EAGLE).
        input_norm: the decoder layer norms its input (absent in EAGLE-1/2's layer 0).
        target_model: name of the target the head was trained for, "" when unknown.
        target_sha256: hash of the target's weight file it was trained on, "" when unknown.

    Raises:
        InvalidRequestError: a field contradicts another one.
    """

    kind: DraftHeadKind
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    feature_layers: tuple[int, ...]
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = field(default=None, hash=False)
    context_length: int = 2048
    position_offset: int = 0
    norm_output: bool = True
    input_norm: bool = True
    target_model: str = ""
    target_sha256: str = ""

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "target_hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
        for name in (*sizes, "vocab_size", "draft_vocab_size", "context_length"):
            if getattr(self, name) < 1:
                raise InvalidRequestError(name, f"{getattr(self, name)} is not positive")
        if self.num_heads % self.num_kv_heads:
            raise InvalidRequestError("num_kv_heads", f"{self.num_kv_heads} does not divide {self.num_heads} heads")
        if self.head_dim % 2:
            raise InvalidRequestError("head_dim", f"{self.head_dim} is odd")
        if self.draft_vocab_size > self.vocab_size:
            raise InvalidRequestError("draft_vocab_size", f"{self.draft_vocab_size} exceeds {self.vocab_size}")
        if self.kind is DraftHeadKind.EAGLE and self.feature_layers != (FINAL_NORM,):
            raise InvalidRequestError("feature_layers", f"EAGLE reads the last hidden state, not {self.feature_layers}")
        if any(layer < FINAL_NORM for layer in self.feature_layers):
            raise InvalidRequestError("feature_layers", f"{self.feature_layers} holds a layer below -1")

    @property
    def reduced_vocab(self) -> bool:
        """Whether draft ids differ from target ids (then the weights carry `d2t`)."""
        return self.draft_vocab_size != self.vocab_size

    def features_of(self, num_target_layers: int) -> tuple[int, ...]:
        """The feature layers for a target of that many layers; (2, n // 2, n - 3) when the config names none.

        Raises:
            InvalidRequestError: a feature layer lies beyond the target's last layer.
        """
        layers = self.feature_layers or (2, num_target_layers // 2, num_target_layers - 3)
        if max(layers) > num_target_layers:
            raise InvalidRequestError("feature_layers", f"{layers} beyond the target's {num_target_layers} layers")
        return layers

    def to_json(self) -> str:
        """The text of a `config.json` that `read_draft_head_config` reads back as an equal value."""
        fields = asdict(self)
        fields["kind"] = self.kind.value
        fields["feature_layers"] = list(self.feature_layers)
        fields["rope_scaling"] = None if self.rope_scaling is None else dict(self.rope_scaling)
        return json.dumps({"format": "graftline-draft-head/1", **fields}, indent=2) + "\n"


def read_draft_head_config(path: Path) -> DraftHeadConfig:
    """Read a head's config: `path` is the head's folder or the config file itself.

    Raises:
        InvalidRequestError: it is missing, not JSON, or not a draft head's config.
    """
    file = path / CONFIG_FILE if path.is_dir() else path
    try:
        raw = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InvalidRequestError("draft_head", f"{file} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise InvalidRequestError("draft_head", f"{file} holds no JSON object")
    try:
        return _from_ours(raw) if "kind" in raw else _from_public(raw)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequestError("draft_head", f"{file} is not a draft head's config: {error!r}") from error


def _from_ours(raw: Mapping[str, Any]) -> DraftHeadConfig:
    fields = {key: value for key, value in raw.items() if key != "format"}
    fields["kind"] = DraftHeadKind(raw["kind"])
    fields["feature_layers"] = tuple(int(layer) for layer in raw["feature_layers"])
    return DraftHeadConfig(**fields)


def _from_public(raw: Mapping[str, Any]) -> DraftHeadConfig:
    """A config of the EAGLE authors' or SpecForge's kind: a one-layer Llama's config plus a few keys."""
    layers = raw.get("num_hidden_layers", 1)
    if layers != 1:
        raise InvalidRequestError("num_hidden_layers", f"{layers}: only heads of one decoder layer are supported")
    if raw.get("norm_before_residual"):
        raise InvalidRequestError("norm_before_residual", "True is not supported")
    kind = _public_kind(raw)
    hidden_size, num_heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
    vocab_size = int(raw["vocab_size"])
    return DraftHeadConfig(
        kind=kind,
        hidden_size=hidden_size,
        target_hidden_size=int(raw.get("target_hidden_size") or hidden_size),
        intermediate_size=int(raw["intermediate_size"]),
        num_heads=num_heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
        head_dim=int(raw.get("head_dim") or hidden_size // num_heads),
        vocab_size=vocab_size,
        draft_vocab_size=int(raw.get("draft_vocab_size") or vocab_size),
        feature_layers=(FINAL_NORM,) if kind is DraftHeadKind.EAGLE else _public_feature_layers(raw),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=_public_rope_theta(raw),
        rope_scaling=raw.get("rope_scaling"),
        context_length=int(raw.get("max_position_embeddings", 2048)),
        norm_output=kind is DraftHeadKind.EAGLE3,
        input_norm=kind is DraftHeadKind.EAGLE3,
    )


def _public_kind(raw: Mapping[str, Any]) -> DraftHeadKind:
    architectures = " ".join(raw.get("architectures") or ()).lower()
    if "eagle3" in architectures or "draft_vocab_size" in raw:
        return DraftHeadKind.EAGLE3
    return DraftHeadKind.EAGLE


def _public_feature_layers(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Public configs count layers by index, and take the residual stream after that layer."""
    eagle_config = raw.get("eagle_config") or {}
    ids = eagle_config.get("eagle_aux_hidden_state_layer_ids") or raw.get("eagle_aux_hidden_state_layer_ids") or ()
    return tuple(int(layer) + 1 for layer in ids)


def _public_rope_theta(raw: Mapping[str, Any]) -> float:
    parameters = raw.get("rope_parameters") or {}
    return float(raw.get("rope_theta") or parameters.get("rope_theta") or 10000.0)
