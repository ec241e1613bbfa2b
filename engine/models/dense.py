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
from graftline.engine.models.partial_model import PartialModel
from graftline.engine.models.rope import POSITIONS_PAST_CONTEXT, rope_tables
from graftline.engine.models.target_model import KvViews, StateViews
from graftline.engine.models.weight_loader import WeightLoader
from graftline.kernels.attention import paged_attention
from graftline.kernels.attention_backend import Attention
from graftline.kernels.decoder_layer import DenseLayers, LayerPages
from graftline.kernels.layer_weights import DecoderLayerShape
from graftline.kernels.linear import LinearWeight, pack_linear
from graftline.kernels.tree_batch import RowBatch
from graftline.kernels.weight_arena import WeightArena


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


class DenseModel(PartialModel):
    """Decoder layers `layers` of a model and, where asked for, its embedding and its output head.

    See `TargetModel`; for other arguments and errors `PartialModel`.

    Args:
        dtype: float32 or bfloat16; what weights are stored in.
        attention: how layers attend on CUDA.
        may_reside: see `DenseLayers`.
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
        loader = _Loader(checkpoint, dtype, device)
        super().__init__(loader, layers, with_embedding=with_embedding, with_head=with_head)
        config = self.config
        cos, sin = rope_tables(config.rope, config.head_dim, config.context_length + POSITIONS_PAST_CONTEXT)
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

    def run_layers(
        self,
        hidden: Tensor,
        batch: RowBatch,
        kv: KvViews,
        capture: Sequence[int] = (),
        states: StateViews | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """See `TargetModel`; `states` is not for dense models."""
        first = self.layers.start
        features = {0: hidden} if first == 0 and 0 in capture else {}
        if self._stack is None:
            return hidden, features
        own = [n - first for n in capture if n - 1 in self.layers]
        hidden, captured = self._stack.run(hidden, batch, self._pages_of(kv), own)
        return hidden, features | {first + n: feature for n, feature in captured.items()}

    def _pages_of(self, kv: KvViews) -> LayerPages:
        pages = self._pages.get(kv)
        if pages is None:
            pages = self._pages[kv] = LayerPages([kv.layer_kv(layer) for layer in self.layers])
        return pages


class _Loader(WeightLoader):
    """Stacks what is read together, and packs all into one arena."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__(checkpoint, dtype, device)
        self._arena = WeightArena()

    def norm(self, module: str, size: int) -> Tensor:
        # A copy: kernels keep its address, and the checkpoint's may lie in a mapped file.
        return self.tensor(f"{module}.weight", size).to(self.device, self.activation_dtype, copy=True)

    def matrix(self, module: str, rows: int, columns: int) -> LinearWeight:
        return self.projection(columns, {module: rows})

    def projection(self, columns: int, rows: Mapping[str, int], has_bias: bool = False) -> LinearWeight:
        """The matrices of `rows` (module -> its outputs) below each other."""
        weights = [self.tensor(f"{module}.weight", size, columns) for module, size in rows.items()]
        stacked = torch.cat([weight.to(self.device, self.dtype) for weight in weights])
        if not has_bias:
            return pack_linear(stacked, arena=self._arena)
        biases = [self.tensor(f"{module}.bias", size) for module, size in rows.items()]
        bias = torch.cat([bias.to(self.device, self.activation_dtype) for bias in biases])
        return pack_linear(stacked, bias, arena=self._arena)

    def layer(self, layer: int) -> LayerWeights:
        config = self.config
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
