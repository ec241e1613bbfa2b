"""A draft head's one decoder layer with its input fusion and output head, over paged drafter KV.

Serves the EAGLE layout (fc over [embedding, feature]) and EAGLE-3's (fc over several features, then one decoder
layer over [norm(embedding), norm(feature)]); `graftline.engine.draft_head.config` has the conventions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from graftline.engine.draft_head.config import WEIGHTS_FILE, DraftHeadConfig, DraftHeadKind, read_draft_head_config
from graftline.engine.draft_head.tensors import read_tensors
from graftline.engine.kv_pool import KvPool
from graftline.engine.models.config import rope_from_dict
from graftline.engine.models.rope import rope_tables
from graftline.errors import InvalidRequestError
from graftline.kernels.attention import paged_attention
from graftline.kernels.attention_backend import Attention
from graftline.kernels.attention_batch import AttentionBatch
from graftline.kernels.draft_growth import DraftGrowth, DraftShape, DraftWeights
from graftline.kernels.draft_inputs import draft_inputs
from graftline.kernels.linear import LinearWeight, linear, linear_gate_up, linear_wide, pack_linear
from graftline.kernels.norm import add_rms_norm, rms_norm
from graftline.kernels.qkv_placing import place_qkv
from graftline.kernels.rope import rope_
from graftline.kernels.tree_batch import RowBatch
from graftline.kernels.weight_arena import WeightArena


@dataclass(frozen=True, slots=True)
class TargetHead:
    """What a draft head may share with its target.

    Attributes:
        embed: token ids [rows] -> embeddings [rows, hidden].
        head_rows: vocabulary ids [n] -> rows of the output head [n, hidden].
        logits: final-normed hidden states [rows, hidden] -> [rows, vocab] float32.
        num_layers: decoder layers of the target.
        context_length: positions the target may reach.
        embedding: what `embed` reads, if a whole growth may read it itself.
        head: what `logits` reads, likewise.
    """

    embed: Callable[[Tensor], Tensor]
    head_rows: Callable[[Tensor], Tensor]
    logits: Callable[[Tensor], Tensor]
    num_layers: int
    context_length: int
    embedding: LinearWeight | None = None
    head: LinearWeight | None = None


_MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


class _Weights:
    """Named tensors of one draft head file."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._file = folder / WEIGHTS_FILE
        self._tensors = read_tensors(folder, device)

    def get(self, name: str, *shape: int) -> Tensor | None:
        tensor = self._tensors.get(name)
        if tensor is not None and tensor.shape != shape:
            raise InvalidRequestError(
                "draft_head", f"{self._file}: {name} is {tuple(tensor.shape)}, the config says {shape}"
            )
        return tensor

    def need(self, name: str, *shape: int) -> Tensor:
        tensor = self.get(name, *shape)
        if tensor is None:
            raise InvalidRequestError("draft_head", f"{self._file} has no tensor {name}")
        return tensor


class DraftLayer:
    """A loaded draft head.

    Args:
        folder: holds config.json and model.safetensors.
        target: what the head shares.
        dtype: type its weights are stored in.
        head_storage: type its own output head is stored in, if another one.
        attention: how its layer attends.

    Raises:
        InvalidRequestError: its file cannot be read, a tensor is missing or not shaped as the config says, or what the
            head shares with its target does not fit it.
    """

    def __init__(
        self,
        folder: Path,
        target: TargetHead,
        dtype: torch.dtype,
        device: torch.device,
        head_storage: torch.dtype | None = None,
        attention: Attention = paged_attention,
    ) -> None:
        self.config: DraftHeadConfig = read_draft_head_config(folder)
        weights = _Weights(folder, device)
        self.is_capturable = True
        self._target = target
        self._attention = attention
        self._is_eagle3 = self.config.kind is DraftHeadKind.EAGLE3
        self._dtype = dtype
        self._activations = torch.float32 if device.type == "cpu" else dtype
        self.feature_layers = self.config.features_of(target.num_layers)
        self._arena = WeightArena()
        self._load_layer(weights)
        self._load_vocabulary(weights, head_storage or dtype)
        rope = rope_from_dict(
            {"rope_theta": self.config.rope_theta, "rope_scaling": self.config.rope_scaling}, self.config.context_length
        )
        positions = max(self.config.context_length, target.context_length) + self.config.position_offset + 1
        cos, sin = rope_tables(rope, self.config.head_dim, positions)
        self._cos, self._sin = cos.to(device), sin.to(device)
        self.growth = self._growth()

    @property
    def vocab_size(self) -> int:
        """Rows of `logits`."""
        return self.config.draft_vocab_size

    @property
    def hidden_size(self) -> int:
        """Columns of outputs."""
        return self.config.hidden_size

    @property
    def position_limit(self) -> int:
        """The head may run below this position: neither past its own context nor past the target's."""
        return min(self.config.context_length, self._target.context_length)

    @property
    def to_target(self) -> Tensor | None:
        """See `DraftModule`."""
        return self._to_target

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Vocabulary ids of the target for ids of the draft vocabulary."""
        return draft_ids if self._to_target is None else self._to_target[draft_ids]

    def fuse(self, features: Tensor) -> Tensor:
        """[rows, num_features * target_hidden] of the target -> [rows, hidden]: what stands for one feature."""
        return linear(features, self._fc) if self._is_eagle3 else features

    def logits(self, outputs: Tensor) -> Tensor:
        """[rows, hidden] outputs -> [rows, draft_vocab] float32."""
        if self._norm is not None:
            outputs = rms_norm(outputs, self._norm, self.config.rms_norm_eps)
        return self._target.logits(outputs) if self._head is None else linear_wide(outputs, self._head)

    def forward(
        self, feature: Tensor, next_tokens: Tensor, batch: RowBatch, pool: KvPool, feature_rows: Tensor | None = None
    ) -> Tensor:
        """See `DraftModule`."""
        qkv, residual = self._inputs(feature, next_tokens, feature_rows)
        k_pages, v_pages = pool.layer_kv(pool.layers[0])
        q = place_qkv(qkv, k_pages, v_pages, batch, self._rotated(batch.positions), self._cos, self._sin)
        return self._outputs(self._attention(q, k_pages, v_pages, batch, self._scale), residual)

    def forward_newest(
        self, feature: Tensor, next_tokens: Tensor, batch: AttentionBatch, pool: KvPool, newest: int
    ) -> Tensor:
        """Like `forward`, but only the last `newest` rows of every segment are new; earlier ones keep their KV.

        Args:
            feature: [segments * newest, hidden].
            next_tokens: [segments * newest].
        """
        if batch.num_rows == feature.shape[0]:
            return self.forward(feature, next_tokens, batch, pool)
        ends = batch.segment_rows[1:].long().unsqueeze(1)
        rows = (ends - newest + torch.arange(newest, device=ends.device)).flatten()
        qkv, residual = self._inputs(feature, next_tokens)
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        q, k, v = torch.split(qkv.view(qkv.shape[0], -1, self.config.head_dim), [heads, kv_heads, kv_heads], dim=1)
        rope_(q, k, self._rotated(batch.positions[rows]), self._cos, self._sin)
        k_pages, v_pages = pool.layer_kv(pool.layers[0])
        slots = batch.slots()[rows]
        pages, offsets = slots // batch.page_size, slots % batch.page_size
        k_pages[pages, offsets] = k.to(k_pages.dtype)
        v_pages[pages, offsets] = v.to(v_pages.dtype)
        queries = q.new_zeros(batch.num_rows, *q.shape[1:])
        queries[rows] = q
        return self._outputs(self._attention(queries, k_pages, v_pages, batch, self._scale)[rows], residual)

    def _rotated(self, positions: Tensor) -> Tensor:
        """Where rows of these positions stand for their rotation."""
        return positions + self.config.position_offset if self.config.position_offset else positions

    def _inputs(
        self, feature: Tensor, next_tokens: Tensor, feature_rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """q, k and v of the rows, side by side, and their residual stream."""
        config = self.config
        eps = config.rms_norm_eps
        table = self._embedding_table(feature)
        if self._is_eagle3 and table is not None:
            assert self._input_norm is not None
            inputs, residual = draft_inputs(
                table, next_tokens, self._input_norm, feature, feature_rows, self._hidden_norm, eps
            )
            return linear(inputs, self._qkv), residual
        feature = feature if feature_rows is None else feature[feature_rows]
        embedded = self._embed(next_tokens)
        if self._is_eagle3:
            assert self._input_norm is not None
            residual = feature
            embedded = rms_norm(embedded, self._input_norm, eps)
            inputs = torch.cat((embedded, rms_norm(feature, self._hidden_norm, eps)), dim=-1)
        else:
            residual = linear(torch.cat((embedded, feature), dim=-1), self._fc)
            inputs = residual if self._input_norm is None else rms_norm(residual, self._input_norm, eps)
        return linear(inputs, self._qkv), residual

    def _outputs(self, attended: Tensor, residual: Tensor) -> Tensor:
        hidden, residual = add_rms_norm(
            linear(attended.flatten(1), self._o), residual, self._post_norm, self.config.rms_norm_eps
        )
        return residual + linear(linear_gate_up(hidden, self._gate_up), self._down)

    def _growth(self) -> DraftGrowth | None:
        """Whole growths in one call, where everything lies in the form for it."""
        config, embedding = self.config, self._target.embedding
        head = self._target.head if self._head is None else self._head
        if embedding is None or head is None or self._embedding is not None:
            return None
        weights = DraftWeights(
            embedding=embedding,
            fusion=None if self._is_eagle3 else self._fc,
            input_norm=self._input_norm,
            feature_norm=self._hidden_norm if self._is_eagle3 else None,
            qkv=self._qkv,
            output=self._o,
            post_norm=self._post_norm,
            gate_up=self._gate_up,
            down=self._down,
            final_norm=self._norm,
            head=head,
            target_ids=self._to_target,
        )
        if not DraftGrowth.is_available(weights):
            return None
        return DraftGrowth(
            weights,
            DraftShape(
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                eps=config.rms_norm_eps,
                scale=self._scale,
                position_offset=config.position_offset,
                cos=self._cos,
                sin=self._sin,
            ),
        )

    def _embedding_table(self, feature: Tensor) -> Tensor | None:
        """The embedding as a plain matrix of the features' type, on CUDA; elsewhere it is packed."""
        if not feature.is_cuda:
            return None
        if self._embedding is not None:
            return self._embedding
        shared = self._target.embedding
        return None if shared is None or shared.dtype != feature.dtype else shared.data

    def _embed(self, token_ids: Tensor) -> Tensor:
        return self._target.embed(token_ids) if self._embedding is None else self._embedding[token_ids]

    def _load_layer(self, weights: _Weights) -> None:
        prefix = "midlayer." if self._is_eagle3 else "layers.0."
        config = self.config
        hidden, inner = config.hidden_size, config.intermediate_size
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

        def packed(columns: int, **rows: int) -> LinearWeight:
            parts = [weights.need(f"{prefix}{_MODULES[name]}.weight", size, columns) for name, size in rows.items()]
            biases = [weights.get(f"{prefix}{_MODULES[name]}.bias", size) for name, size in rows.items()]
            bias = torch.cat([part for part in biases if part is not None]) if biases[0] is not None else None
            bias = None if bias is None else bias.to(self._activations)
            return pack_linear(torch.cat(parts).to(self._dtype), bias, arena=self._arena)

        def norm(name: str) -> Tensor:
            return weights.need(name, hidden).to(self._activations)

        features = len(self.feature_layers) * config.target_hidden_size
        fc_bias = weights.get("fc.bias", hidden)
        self._fc = pack_linear(
            weights.need("fc.weight", hidden, features if self._is_eagle3 else hidden + features).to(self._dtype),
            None if fc_bias is None else fc_bias.to(self._activations),
            arena=self._arena,
        )
        self._qkv = packed(2 * hidden if self._is_eagle3 else hidden, q=q_size, k=kv_size, v=kv_size)
        self._o = packed(q_size, o=hidden)
        self._gate_up = packed(hidden, gate=inner, up=inner)
        self._down = packed(inner, down=hidden)
        self._post_norm = norm(f"{prefix}post_attention_layernorm.weight")
        input_norm = weights.get(f"{prefix}input_layernorm.weight", hidden)
        self._input_norm = None if input_norm is None else input_norm.to(self._activations)
        self._hidden_norm = norm(f"{prefix}hidden_norm.weight") if self._is_eagle3 else self._post_norm
        self._norm = norm("norm.weight") if self.config.norm_output else None
        self._scale = self.config.head_dim**-0.5

    def _load_vocabulary(self, weights: _Weights, head_storage: torch.dtype) -> None:
        config = self.config
        embedding = weights.get("embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._embedding = None if embedding is None else embedding.to(self._activations)
        offsets = weights.get("d2t", config.draft_vocab_size)
        self._to_target: Tensor | None = None
        if offsets is not None:
            self._to_target = torch.arange(offsets.shape[0], device=offsets.device) + offsets.long()
            self._check_target_ids(self._to_target)
        elif config.reduced_vocab:
            raise InvalidRequestError("draft_head", "a reduced vocabulary without the tensor d2t")
        own_head = weights.get("lm_head.weight", config.draft_vocab_size, config.hidden_size)
        if config.hidden_size != config.target_hidden_size and (embedding is None or own_head is None):
            raise InvalidRequestError(
                "draft_head",
                f"a head of width {config.hidden_size} cannot share embedding or output head with a target of width "
                f"{config.target_hidden_size}",
            )
        self._head: LinearWeight | None = None
        if own_head is not None:
            self._head = pack_linear(own_head.to(self._dtype), storage=head_storage, arena=self._arena)
        elif self._to_target is not None:
            shared = self._target.head_rows(self._to_target).to(self._dtype)
            self._head = pack_linear(shared, storage=head_storage, arena=self._arena)

    def _check_target_ids(self, ids: Tensor) -> None:
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.config.vocab_size:
            raise InvalidRequestError("draft_head", f"d2t leads to ids {low}..{high} of {self.config.vocab_size}")
