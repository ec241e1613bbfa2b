"""Models without weights on disk, for measuring shapes: a config and `dummy.json`; tensors are drawn when asked for.

Drawn on the GPU where there is one, so that a model of 16 GB takes a second. The output of such a model means nothing,
but for one kind: with `successors` n the next token is a fixed permutation of the last one, which a draft head can be
written to know, or to know so often and no oftener.
"""

import hashlib
from functools import cached_property
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from graftline.engine.models.card import ModelCardData, read_card
from graftline.engine.models.config import ModelConfig, read_config
from graftline.errors import InvalidRequestError

DUMMY_FILE = "dummy.json"
_SILENT = ("o_proj.weight", "down_proj.weight")


class DummyWeights(msgspec.Struct, frozen=True, kw_only=True):
    """What `dummy.json` holds.

    Attributes:
        seed: of everything drawn.
        successors: 0, or n: layers add nothing to the residual stream, and `successor` says what follows ids below n.
    """

    seed: int = 0
    successors: int = 0


class DummyCheckpoint:
    """See `checkpoint.Checkpoint`; of dense models.

    Raises:
        InvalidRequestError: `dummy.json` cannot be read, or the model is a hybrid one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: ModelConfig = read_config(path)
        if self.config.hybrid is not None:
            raise InvalidRequestError("model", f"{path}: only dense models come without weights")
        try:
            self._weights = msgspec.json.decode((path / DUMMY_FILE).read_bytes(), type=DummyWeights)
        except (OSError, msgspec.DecodeError) as error:
            raise InvalidRequestError("model", f"cannot read {path / DUMMY_FILE}: {error}") from error
        self._shapes = _shapes(self.config)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def model_hash(self) -> str:
        """Of the config and of what decides about the weights."""
        return hashlib.sha256(f"{self.config!r} {self._weights!r}".encode()).hexdigest()[:32]

    @cached_property
    def card(self) -> ModelCardData:
        """Tokenizer, template and ids."""
        return read_card(self.path, self.config)

    def has_tensor(self, name: str) -> bool:
        """Whether the config implies a parameter of that name."""
        return name in self._shapes

    def tensor(self, name: str) -> Tensor:
        """The same bfloat16 values whenever it is asked for on the same kind of device; norms are 1."""
        shape = self._shapes.get(name)
        if shape is None:
            raise InvalidRequestError("model", f"{self.path}: the config implies no tensor {name}")
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=torch.bfloat16, device=self._device)
        if self._weights.successors and name.endswith(_SILENT):
            return torch.zeros(shape, dtype=torch.bfloat16, device=self._device)
        if self._weights.successors and name == "lm_head.weight":
            return self._successor_head()
        return self._drawn(name, shape)

    def _drawn(self, name: str, shape: tuple[int, ...]) -> Tensor:
        number = int.from_bytes(hashlib.sha256(f"{self._weights.seed} {name}".encode()).digest()[:6], "little")
        generator = torch.Generator(self._device).manual_seed(number)
        values = torch.randn(shape, dtype=torch.bfloat16, device=self._device, generator=generator)
        is_embedding = name == "model.embed_tokens.weight" and not self.config.tie_embeddings
        return values if is_embedding else values.mul_(shape[-1] ** -0.5)

    def _successor_head(self) -> Tensor:
        """Row `successor[t]` points where the embedding of t does; rows of ids that follow none are 0."""
        config, count = self.config, self._weights.successors
        embedding = self._drawn("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        head = torch.zeros_like(embedding)
        head[successor(count, self._weights.seed).to(self._device)] = embedding[:count] / config.hidden_size**0.5
        return head


def successor(count: int, seed: int) -> Tensor:
    """[count] int64: what follows each id."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        sizes = {"q": config.q_size, "k": config.kv_size, "v": config.kv_size}
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
        }
        shapes |= {f"{attention}.{name}_proj.weight": (size, hidden) for name, size in sizes.items()}
        shapes |= {f"{attention}.o_proj.weight": (hidden, config.q_size), f"{mlp}.down_proj.weight": (hidden, inner)}
        shapes |= {f"{mlp}.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        if config.attention_bias:
            shapes |= {f"{attention}.{name}_proj.bias": (size,) for name, size in sizes.items()}
        if config.output_bias:
            shapes[f"{attention}.o_proj.bias"] = (hidden,)
        if config.qk_norm:
            shapes |= {f"{attention}.{name}_norm.weight": (head_dim,) for name in ("q", "k")}
    return shapes
