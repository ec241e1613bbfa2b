"""The layers of a Qwen3-Next model that one stage owns: gated delta nets, gated attention, mixtures of experts.

Sources: Qwen3-Next as published with its weights; Gated Delta Networks (Yang et al. 2024). On CPU activations are
float32 and `dtype` is what weights, KV and conv windows are stored in; the recurrent state is always float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graftline.engine.models.checkpoint import Checkpoint
from graftline.engine.models.config import ModelConfig
from graftline.engine.models.hybrid_config import LinearShape
from graftline.engine.models.partial_model import PartialModel
from graftline.engine.models.qwen3_next_weights import AttentionWeights, BlockWeights, DeltaWeights, Qwen3NextLoader
from graftline.engine.models.rope import POSITIONS_PAST_CONTEXT, rope_tables
from graftline.engine.models.target_model import KvViews, StateViews
from graftline.kernels.attention import paged_attention
from graftline.kernels.attention_backend import Attention
from graftline.kernels.attention_batch import AttentionBatch
from graftline.kernels.causal_conv import causal_conv
from graftline.kernels.gated_delta import delta_inputs, gated_delta, gated_rms_norm
from graftline.kernels.gating import sigmoid_mul
from graftline.kernels.kv_write import write_kv
from graftline.kernels.linear import linear
from graftline.kernels.norm import add_rms_norm, rms_norm
from graftline.kernels.rope import rope_
from graftline.kernels.tree_batch import RowBatch


@dataclass(frozen=True, slots=True)
class Rotations:
    """cos and sin of every position, [positions, rotary_dim / 2] float32."""

    cos: Tensor
    sin: Tensor


def rotations(config: ModelConfig, device: torch.device) -> Rotations:
    """The tables of a model."""
    cos, sin = rope_tables(config.rope, config.rotary_dim, config.context_length + POSITIONS_PAST_CONTEXT)
    return Rotations(cos.to(device), sin.to(device))


class Qwen3NextModel(PartialModel):
    """Decoder layers `layers` of a model and, where asked for, its embedding and its output head.

    See `TargetModel`; for other arguments and errors `PartialModel`.

    Args:
        dtype: float32 or bfloat16.
        attention: how layers attend.
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
    ) -> None:
        loader = Qwen3NextLoader(checkpoint, dtype, device)
        super().__init__(loader, layers, with_embedding=with_embedding, with_head=with_head)
        self._attention = attention
        self._rotations = rotations(self.config, self.device)
        self._linear = loader.hybrid.linear
        self._blocks = {layer: loader.layer(layer) for layer in layers}

    def run_layers(
        self,
        hidden: Tensor,
        batch: RowBatch,
        kv: KvViews,
        capture: Sequence[int] = (),
        states: StateViews | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """See `TargetModel`."""
        assert isinstance(batch, AttentionBatch), "hybrid models have no rounds of fixed shape"
        features = {0: hidden} if self.layers.start == 0 and 0 in capture else {}
        for layer, block in self._blocks.items():
            normed = rms_norm(hidden, block.input_norm, self.config.rms_norm_eps)
            if isinstance(block.mixer, AttentionWeights):
                pages = kv.layer_kv(layer)
                mixed = run_attention(
                    self.config, block.mixer, normed, batch, pages, self._rotations, attention=self._attention
                )
            else:
                assert states is not None, "a hybrid model without its states"
                mixed = run_delta(self._linear, block.mixer, normed, layer, states, self.config.rms_norm_eps)
            hidden = run_feed_forward(block, mixed, hidden, self.config.rms_norm_eps)
            if layer + 1 in capture:
                features[layer + 1] = hidden
        return hidden, features


def run_attention(
    config: ModelConfig,
    weights: AttentionWeights,
    normed: Tensor,
    batch: RowBatch,
    pages: tuple[Tensor, Tensor],
    turns: Rotations,
    newest: Tensor | None = None,
    attention: Attention = paged_attention,
) -> Tensor:
    """Gated attention of [rows, hidden]; writes the rows' KV.

    Args:
        newest: int64 rows of the batch that `normed` stands for; the others keep their KV and get no output. None: all.
    """
    k_pages, v_pages = pages
    positions = batch.positions if newest is None else batch.positions[newest]
    made = linear(normed, weights.inputs)
    split = config.q_size + 2 * config.kv_size
    heads = made[:, :split].view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
    q, k, v = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
    q = rms_norm(q, weights.q_norm, config.rms_norm_eps)
    k = rms_norm(k, weights.k_norm, config.rms_norm_eps)
    rope_(q, k, positions, turns.cos, turns.sin)
    scale = config.head_dim**-0.5
    if newest is None:
        write_kv(k, v, k_pages, v_pages, batch)
        attended = attention(q, k_pages, v_pages, batch, scale)
    else:
        slots = batch.slots()[newest]
        page, offset = slots // batch.page_size, slots % batch.page_size
        k_pages[page, offset] = k.to(k_pages.dtype)
        v_pages[page, offset] = v.to(v_pages.dtype)
        queries = q.new_zeros(batch.num_rows, *q.shape[1:])
        queries[newest] = q
        attended = attention(queries, k_pages, v_pages, batch, scale)[newest]
    return linear(sigmoid_mul(attended.flatten(1), made[:, split:]), weights.output)


def run_delta(
    shape: LinearShape, weights: DeltaWeights, normed: Tensor, layer: int, states: StateViews, eps: float
) -> Tensor:
    """A gated delta net over [rows, hidden]; moves the layer's states on."""
    made = linear(normed, weights.inputs)
    channels, values = shape.conv_channels, shape.value_size
    x, z, gates = made[:, :channels], made[:, channels : channels + values], made[:, channels + values :]
    mixed = causal_conv(x, weights.conv, states.windows(layer), states.rows, states.node_windows(layer))
    q, k, decay, beta = delta_inputs(
        mixed, gates, weights.decay_rate, weights.time_bias, shape.num_key_heads, shape.key_dim
    )
    v = mixed[:, 2 * shape.key_size :]
    states.keep_inputs(layer, x, k, v, decay, beta)
    out = gated_delta(q, k, v, decay, beta, states.states(layer), states.rows, states.node_states(layer))
    assert out is not None
    return linear(gated_rms_norm(out, z, weights.norm, eps), weights.output)


def run_feed_forward(block: BlockWeights, mixed: Tensor, hidden: Tensor, eps: float) -> Tensor:
    """What a layer ends with: [rows, hidden] of the mixer and the residual stream -> the residual stream."""
    normed, hidden = add_rms_norm(mixed, hidden, block.post_norm, eps)
    return hidden + block.feed_forward.run(normed)
