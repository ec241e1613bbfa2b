"""What every kind of draft head offers the drafter."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from graftline.engine.kv_pool import KvPool
from graftline.kernels.attention_batch import AttentionBatch
from graftline.kernels.draft_growth import DraftGrowth
from graftline.kernels.tree_batch import RowBatch


class DraftModule(Protocol):
    """A draft head's layer with its input fusion and output head, over paged drafter KV.

    Attributes:
        feature_layers: what it wants of the target; see `DraftHeadConfig.feature_layers`.
        growth: grows whole trees in one call, if this head can.
        is_capturable: asks the host nothing, so that a CUDA graph can hold it.
    """

    feature_layers: tuple[int, ...]
    growth: DraftGrowth | None
    is_capturable: bool

    @property
    def vocab_size(self) -> int:
        """Rows of `logits`."""

    @property
    def hidden_size(self) -> int:
        """Columns of outputs."""

    @property
    def position_limit(self) -> int:
        """The head may run at positions below this one."""

    @property
    def to_target(self) -> Tensor | None:
        """[draft vocabulary] int64 ids of the target; None where they are the same."""

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Vocabulary ids of the target for ids of the draft vocabulary."""

    def fuse(self, features: Tensor) -> Tensor:
        """[rows, num_features * target_hidden] of the target -> [rows, hidden]: what stands for one feature."""

    def logits(self, outputs: Tensor) -> Tensor:
        """[rows, hidden] outputs -> [rows, draft_vocab] float32."""

    def forward(
        self, feature: Tensor, next_tokens: Tensor, batch: RowBatch, pool: KvPool, feature_rows: Tensor | None = None
    ) -> Tensor:
        """[n, hidden] features and [rows] next tokens -> [rows, hidden] outputs; writes the rows' KV.

        Args:
            feature_rows: [rows] int64, the feature of every row; None where they are in order.
        """

    def forward_newest(
        self, feature: Tensor, next_tokens: Tensor, batch: AttentionBatch, pool: KvPool, newest: int
    ) -> Tensor:
        """Like `forward`, but only the last `newest` rows of every segment are new; earlier ones keep their KV.

        Args:
            feature: [segments * newest, hidden].
            next_tokens: [segments * newest].
        """


def feature_columns(
    feature_layers: Sequence[int], features: Sequence[Tensor], final: Callable[[], Tensor]
) -> list[Tensor]:
    """What a head wants of a forward, in its order.

    Args:
        feature_layers: of the head; below 0 for what the output head reads.
        features: [rows, hidden] each: the layers among these, ascending, each once.
        final: what the output head reads.
    """
    captured = dict(zip(sorted({layer for layer in feature_layers if layer >= 0}), features, strict=True))
    return [final() if layer < 0 else captured[layer] for layer in feature_layers]
