"""The multi-token prediction module of Qwen3-Next as a draft head: one gated attention layer over [embedding, hidden].

Row p takes the target's final-normed hidden state at p and the token at p + 1, both normed and fused by one matrix; the
module's own final norm gives what stands for the target's hidden state at p + 1, and the target's head reads it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from graftline.engine.draft_head.config import FINAL_NORM
from graftline.engine.kv_pool import KvPool
from graftline.engine.models.checkpoint import Checkpoint
from graftline.engine.models.hybrid_config import LayerKind
from graftline.engine.models.qwen3_next import rotations, run_attention, run_feed_forward
from graftline.engine.models.qwen3_next_weights import AttentionWeights, Qwen3NextLoader
from graftline.kernels.attention import paged_attention
from graftline.kernels.attention_backend import Attention
from graftline.kernels.attention_batch import AttentionBatch
from graftline.kernels.draft_growth import DraftGrowth
from graftline.kernels.linear import linear
from graftline.kernels.norm import rms_norm
from graftline.kernels.tree_batch import RowBatch


class MtpModule:
    """See `graftline.engine.draft_module.DraftModule`.

    Args:
        embed: the target's: token ids [rows] -> [rows, hidden].
        logits: the target's: final-normed hidden states [rows, hidden] -> [rows, vocab] float32.
        attention: how its layer attends.

    Raises:
        InvalidRequestError: the checkpoint has no MTP module, or one that does not fit the config.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        embed: Callable[[Tensor], Tensor],
        logits: Callable[[Tensor], Tensor],
        attention: Attention = paged_attention,
    ) -> None:
        self._config = checkpoint.config
        self._embed = embed
        self._logits = logits
        self._attention = attention
        self.feature_layers: tuple[int, ...] = (FINAL_NORM,)
        self.growth: DraftGrowth | None = None
        self.is_capturable = False  # experts are looked up on the host
        loader, hidden = Qwen3NextLoader(checkpoint, dtype, device), self._config.hidden_size
        self._fc = loader.matrix("mtp.fc", hidden, 2 * hidden)
        self._embedding_norm = loader.norm("mtp.pre_fc_norm_embedding", hidden)
        self._hidden_norm = loader.norm("mtp.pre_fc_norm_hidden", hidden)
        self._block = loader.block("mtp.layers.0", LayerKind.FULL, has_experts=True)
        self._norm = loader.norm("mtp.norm", hidden)
        self._rotations = rotations(self._config, device)

    @property
    def vocab_size(self) -> int:
        """Rows of `logits`."""
        return self._config.vocab_size

    @property
    def hidden_size(self) -> int:
        """See `DraftModule`."""
        return self._config.hidden_size

    @property
    def position_limit(self) -> int:
        """See `DraftModule`."""
        return self._config.context_length

    @property
    def to_target(self) -> Tensor | None:
        """None: the vocabulary is the target's."""
        return None

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """The same: the vocabulary is the target's."""
        return draft_ids

    def fuse(self, features: Tensor) -> Tensor:
        """The one feature as it is."""
        return features

    def logits(self, outputs: Tensor) -> Tensor:
        """See `DraftModule`."""
        return self._logits(outputs)

    def forward(
        self, feature: Tensor, next_tokens: Tensor, batch: RowBatch, pool: KvPool, feature_rows: Tensor | None = None
    ) -> Tensor:
        """See `DraftModule`."""
        return self._run(feature if feature_rows is None else feature[feature_rows], next_tokens, batch, pool, None)

    def forward_newest(
        self, feature: Tensor, next_tokens: Tensor, batch: AttentionBatch, pool: KvPool, newest: int
    ) -> Tensor:
        """See `DraftModule`."""
        if batch.num_rows == feature.shape[0]:
            return self.forward(feature, next_tokens, batch, pool)
        ends = batch.segment_rows[1:].long().unsqueeze(1)
        rows = (ends - newest + torch.arange(newest, device=ends.device)).flatten()
        return self._run(feature, next_tokens, batch, pool, rows)

    def _run(
        self, feature: Tensor, next_tokens: Tensor, batch: RowBatch, pool: KvPool, newest: Tensor | None
    ) -> Tensor:
        config, eps, block = self._config, self._config.rms_norm_eps, self._block
        assert isinstance(block.mixer, AttentionWeights)
        embedded = rms_norm(self._embed(next_tokens), self._embedding_norm, eps)
        fused = linear(torch.cat((embedded, rms_norm(feature, self._hidden_norm, eps)), dim=-1), self._fc)
        normed = rms_norm(fused, block.input_norm, eps)
        pages = pool.layer_kv(pool.layers[0])
        mixed = run_attention(config, block.mixer, normed, batch, pages, self._rotations, newest, self._attention)
        return rms_norm(run_feed_forward(block, mixed, fused, eps), self._norm, eps)
