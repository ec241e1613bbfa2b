"""The layers of a Llama-like dense model that one stage owns, over paged KV, made of `graftline.kernels` ops.

Knows no requests and no stages: what a forward needs is in its arguments. On CPU activations are float32 and
`dtype` is what weights and KV are stored in; on CUDA everything is of `dtype`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from graftline.engine.models.checkpoint import Checkpoint
from graftline.engine.models.config import ModelConfig
from graftline.engine.models.rope import rope_tables
from graftline.engine.models.target_model import KvViews, StateViews
from graftline.errors import InvalidRequestError
from graftline.kernels.attention import paged_attention
from graftline.kernels.attention_backend import Attention
from graftline.kernels.decoder_layer import DenseLayers, LayerPages
from graftline.kernels.layer_weights import DecoderLayerShape
from graftline.kernels.linear import LinearWeight, linear_wide, pack_linear, unpack_rows
from graftline.kernels.norm import rms_norm
from graftline.kernels.tree_batch import RowBatch
from graftline.kernels.weight_arena import WeightArena

# Draft nodes may stand past the context's end before they are cut; their rotations must exist.
_POSITIONS_PAST_CONTEXT = 256


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Parameters of one decoder layer; q, k, v and gate, up are stacked into one matrix each."""

    input_norm: Tensor  # [hidden]
    qkv: LinearWeight  # hidden -> q_size + 2 * kv_size
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    output: LinearWeight  # q_size -> hidden
    post_norm: Tensor  # [hidden]
    gate_up: LinearWeight  # hidden -> 2 * intermediate
    down: LinearWeight  # intermediate -> hidden


class DenseModel:
    """Decoder layers `layers` of a model and, where asked for, its embedding and its output head.

    Args:
        layers: contiguous global layer ids; may be empty.
        dtype: float32 or bfloat16; what weights are stored in.
        with_embedding: hold the token embedding (the first stage, and the last when its drafter needs it).
        with_head: hold the final norm and the output head. A tied head and embedding are one matrix.
        attention: how layers attend on CUDA.
        may_reside: see `DenseLayers`.

    Raises:
        InvalidRequestError: the checkpoint lacks a tensor, or one is not shaped as the config says.
        ValueError: layers that the model does not have.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        layers: range,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        with_embedding: bool = True,
        with_head: bool = True,
        attention: Attention = paged_attention,
        may_reside: bool = True,
    ) -> None:
        config = checkpoint.config
        if layers.step != 1 or not 0 <= layers.start <= layers.stop <= config.num_layers:
            raise ValueError(f"{layers} of a model with {config.num_layers} layers")
        self.config: ModelConfig = config
        self.layers = layers
        self.dtype = dtype
        self.device = torch.device(device)
        self.activation_dtype = torch.float32 if self.device.type == "cpu" else dtype
        loader = _Loader(checkpoint, dtype, self.activation_dtype, self.device)
        self._embedding, self._head = loader.top(with_embedding, with_head)
        self._norm = loader.norm("model.norm", config.hidden_size) if with_head else None
        cos, sin = rope_tables(config.rope, config.head_dim, config.context_length + _POSITIONS_PAST_CONTEXT)
        shape = DecoderLayerShape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            scale=config.head_dim**-0.5,
            cos=cos.to(self.device),
            sin=sin.to(self.device),
        )
        weights = [loader.layer(layer) for layer in layers]
        self._stack = DenseLayers(weights, shape, attention, may_reside=may_reside) if layers else None
        # Describing the pages of thirty layers takes as long as a layer; pools live as long as their model.
        self._pages: WeakKeyDictionary[KvViews, LayerPages] = WeakKeyDictionary()

    @property
    def embedding(self) -> LinearWeight | None:
        """See `TargetModel`."""
        return self._embedding

    @property
    def head(self) -> LinearWeight | None:
        """See `TargetModel`."""
        return self._head

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings of [rows] int64 ids: [rows, hidden]."""
        assert self._embedding is not None, "this stage was loaded without the embedding"
        return unpack_rows(self._embedding, token_ids)

    def run_layers(
        self,
        hidden: Tensor,
        batch: RowBatch,
        kv: KvViews,
        capture: Sequence[int] = (),
        states: StateViews | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Runs this stage's layers and writes their KV.

        Args:
            hidden: [rows, hidden] residual stream before the first of them; not changed.
            capture: features wanted: n is the residual stream after n decoder layers. Those of other stages are
                passed over: this one gives layers.start < n <= layers.stop, and 0 (the embedding) if it starts there.
            states: none, for a dense model.

        Returns:
            ([rows, hidden] residual stream after the last layer, feature by n, each [rows, hidden]).
        """
        first = self.layers.start
        features = {0: hidden} if first == 0 and 0 in capture else {}
        if self._stack is None:
            return hidden, features
        own = [n - first for n in capture if n - 1 in self.layers]
        hidden, captured = self._stack.run(hidden, batch, self._pages_of(kv), own)
        return hidden, features | {first + n: feature for n, feature in captured.items()}

    def final_norm(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] residual stream after the last layer -> what the output head reads."""
        assert self._norm is not None, "this stage was loaded without the head"
        return rms_norm(hidden, self._norm, self.config.rms_norm_eps)

    def logits(self, normed: Tensor) -> Tensor:
        """[rows, hidden] from `final_norm` -> [rows, vocab] float32."""
        assert self._head is not None, "this stage was loaded without the head"
        return linear_wide(normed, self._head)

    def head_rows(self, token_ids: Tensor) -> Tensor:
        """Rows of the output head for [n] int64 ids: [n, hidden]."""
        assert self._head is not None, "this stage was loaded without the head"
        return unpack_rows(self._head, token_ids)

    def _pages_of(self, kv: KvViews) -> LayerPages:
        pages = self._pages.get(kv)
        if pages is None:
            pages = self._pages[kv] = LayerPages([kv.layer_kv(layer) for layer in self.layers])
        return pages


class _Loader:
    """Tensors of a checkpoint, converted, stacked, packed and on their device."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, activation_dtype: torch.dtype, device: torch.device
    ) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._activation_dtype = activation_dtype
        self._device = device
        self._arena = WeightArena()

    def norm(self, module: str, size: int) -> Tensor:
        # A copy: kernels keep its address, and the checkpoint's may lie in a mapped file.
        return self._tensor(f"{module}.weight", (size,)).to(self._device, self._activation_dtype, copy=True)

    def projection(self, columns: int, rows: Mapping[str, int], has_bias: bool = False) -> LinearWeight:
        """The matrices of `rows` (module -> its outputs) below each other."""
        weights = [self._tensor(f"{module}.weight", (size, columns)) for module, size in rows.items()]
        stacked = torch.cat([weight.to(self._device, self._dtype) for weight in weights])
        if not has_bias:
            return pack_linear(stacked, arena=self._arena)
        biases = [self._tensor(f"{module}.bias", (size,)) for module, size in rows.items()]
        bias = torch.cat([bias.to(self._device, self._activation_dtype) for bias in biases])
        return pack_linear(stacked, bias, arena=self._arena)

    def layer(self, layer: int) -> LayerWeights:
        config = self._checkpoint.config
        hidden, inner = config.hidden_size, config.intermediate_size
        prefix = f"model.layers.{layer}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = {"q": config.q_size, "k": config.kv_size, "v": config.kv_size}
        return LayerWeights(
            input_norm=self.norm(f"{prefix}.input_layernorm", hidden),
            qkv=self.projection(
                hidden, {f"{attention}.{name}_proj": size for name, size in qkv.items()}, config.attention_bias
            ),
            q_norm=self.norm(f"{attention}.q_norm", config.head_dim) if config.qk_norm else None,
            k_norm=self.norm(f"{attention}.k_norm", config.head_dim) if config.qk_norm else None,
            output=self.projection(config.q_size, {f"{attention}.o_proj": hidden}, config.output_bias),
            post_norm=self.norm(f"{prefix}.post_attention_layernorm", hidden),
            gate_up=self.projection(hidden, {f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}),
            down=self.projection(inner, {f"{mlp}.down_proj": hidden}),
        )

    def top(self, with_embedding: bool, with_head: bool) -> tuple[LinearWeight | None, LinearWeight | None]:
        """Embedding and head, one object when they are tied."""
        config = self._checkpoint.config

        def matrix(module: str) -> LinearWeight:
            return self.projection(config.hidden_size, {module: config.vocab_size})

        if config.tie_embeddings:
            shared = matrix("model.embed_tokens") if with_embedding or with_head else None
            return (shared if with_embedding else None), (shared if with_head else None)
        embedding = matrix("model.embed_tokens") if with_embedding else None
        return embedding, matrix("lm_head") if with_head else None

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._checkpoint.tensor(name)
        if tensor.shape != shape:
            raise InvalidRequestError("model", f"tensor {name} is {tuple(tensor.shape)}, the config says {shape}")
        return tensor
