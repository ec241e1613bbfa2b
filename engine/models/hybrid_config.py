"""What a hybrid model has beyond a dense one: kinds of layers, the shapes of linear attention, a mixture of experts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from graftline.errors import InvalidRequestError


class LayerKind(Enum):
    """What mixes the tokens of a layer; the value is Hugging Face's `layer_types`."""

    FULL = "full_attention"
    LINEAR = "linear_attention"


@dataclass(frozen=True, slots=True)
class LinearShape:
    """Shapes of a gated delta net layer.

    Attributes:
        num_key_heads: each serves num_value_heads / num_key_heads neighbouring value heads.
        key_dim, value_dim: of one head.
        conv_width: taps of the causal convolution, the current token's included.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    def __post_init__(self) -> None:
        for name in ("num_key_heads", "num_value_heads", "key_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise InvalidRequestError(f"linear_{name}", f"{getattr(self, name)} is not a positive number")
        if self.num_value_heads % self.num_key_heads:
            raise InvalidRequestError(
                "linear_num_value_heads", f"{self.num_value_heads} heads for {self.num_key_heads} key heads"
            )
        if not 2 <= self.conv_width <= 8:
            raise InvalidRequestError("linear_conv_kernel_dim", f"{self.conv_width} is not in 2..8")
        if max(self.key_dim, self.value_dim) > 256:
            raise InvalidRequestError("linear_key_head_dim", f"heads of {self.key_dim} x {self.value_dim} exceed 256")

    @property
    def key_size(self) -> int:
        """Keys of one token."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Values of one token."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """Inputs of the convolution: q, k and v."""
        return 2 * self.key_size + self.value_size

    @property
    def window_elements(self) -> int:
        """Inputs that the convolution remembers."""
        return (self.conv_width - 1) * self.conv_channels

    @property
    def state_elements(self) -> int:
        """Numbers of the recurrent state."""
        return self.num_value_heads * self.key_dim * self.value_dim


@dataclass(frozen=True, slots=True)
class MoeShape:
    """Shapes of a mixture of experts.

    Attributes:
        num_chosen: experts that a token passes.
        shared_size: inner size of the expert that every token passes.
        normalise: the weights of the chosen experts sum to 1.
    """

    num_experts: int
    num_chosen: int
    expert_size: int
    shared_size: int
    normalise: bool

    def __post_init__(self) -> None:
        for name in ("num_experts", "expert_size", "shared_size"):
            if getattr(self, name) < 1:
                raise InvalidRequestError(name, f"{getattr(self, name)} is not a positive number")
        if not 1 <= self.num_chosen <= self.num_experts:
            raise InvalidRequestError("num_experts_per_tok", f"{self.num_chosen} of {self.num_experts} experts")


@dataclass(frozen=True, slots=True)
class Hybrid:
    """What makes a model hybrid.

    Attributes:
        layer_kinds: of every layer.
        moe_layers: which layers have a mixture of experts in place of one block.
        rotary_dim: leading dimensions of a head that RoPE turns.
    """

    layer_kinds: tuple[LayerKind, ...]
    moe_layers: tuple[bool, ...]
    linear: LinearShape
    moe: MoeShape
    rotary_dim: int


def hybrid_from_dict(raw: Mapping[str, Any], head_dim: int) -> Hybrid:
    """The hybrid part of a Qwen3-Next `config.json`; what it leaves out is as transformers has it.

    Raises:
        InvalidRequestError: a value that is not supported or out of range; names it.
    """
    num_layers = _integer(raw, "num_hidden_layers", 48)
    linear = LinearShape(
        num_key_heads=_integer(raw, "linear_num_key_heads", 16),
        num_value_heads=_integer(raw, "linear_num_value_heads", 32),
        key_dim=_integer(raw, "linear_key_head_dim", 128),
        value_dim=_integer(raw, "linear_value_head_dim", 128),
        conv_width=_integer(raw, "linear_conv_kernel_dim", 4),
    )
    num_experts = _integer(raw, "num_experts", 512)
    moe = MoeShape(
        num_experts=num_experts,
        num_chosen=_integer(raw, "num_experts_per_tok", 10),
        expert_size=_integer(raw, "moe_intermediate_size", 512),
        shared_size=_integer(raw, "shared_expert_intermediate_size", 512),
        normalise=bool(raw.get("norm_topk_prob", True)),
    )
    step, dense = _integer(raw, "decoder_sparse_step", 1), set(raw.get("mlp_only_layers") or ())
    return Hybrid(
        layer_kinds=_layer_kinds(raw, num_layers),
        moe_layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
        linear=linear,
        moe=moe,
        rotary_dim=_rotary_dim(raw, head_dim),
    )


def _layer_kinds(raw: Mapping[str, Any], num_layers: int) -> tuple[LayerKind, ...]:
    names: Sequence[str] | None = raw.get("layer_types")
    if names is None:
        interval = _integer(raw, "full_attention_interval", 4)
        return tuple(LayerKind.LINEAR if (layer + 1) % interval else LayerKind.FULL for layer in range(num_layers))
    known = {kind.value: kind for kind in LayerKind}
    foreign = [name for name in names if name not in known]
    if foreign or len(names) != num_layers:
        raise InvalidRequestError("layer_types", f"{foreign or len(names)} for {num_layers} layers")
    return tuple(known[name] for name in names)


def _rotary_dim(raw: Mapping[str, Any], head_dim: int) -> int:
    values = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    part = float(values.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 0.25)
    rotary_dim = int(head_dim * part)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise InvalidRequestError("partial_rotary_factor", f"{part} of heads of {head_dim}")
    return rotary_dim


def _integer(raw: Mapping[str, Any], name: str, default: int) -> int:
    value = raw.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(name, f"{value!r} is not an integer")
    return value
