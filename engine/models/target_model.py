"""What every kind of target model offers a stage, and how it reaches the state of its layers."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from graftline.engine.models.config import ModelConfig
from graftline.kernels.linear import LinearWeight
from graftline.kernels.state_rows import StateRows
from graftline.kernels.tree_batch import RowBatch


class KvViews(Protocol):
    """The KV memory of a stage's layers; it stays where it is as long as the object lives."""

    def layer_kv(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a global layer: two of [num_pages, page_size, num_kv_heads, head_dim]."""


class StateViews(Protocol):
    """The recurrent state that one forward continues. Tensors are views of pools, written in place.

    Attributes:
        rows: which slot each segment continues.
    """

    @property
    def rows(self) -> StateRows:
        """See the class."""

    def windows(self, layer: int) -> Tensor:
        """[slots, conv_width - 1, channels] of a global layer."""

    def states(self, layer: int) -> Tensor:
        """[slots, value_heads, key_dim, value_dim] float32."""

    def node_windows(self, layer: int) -> Tensor | None:
        """[slots, nodes, conv_width - 1, channels]: where windows behind tree nodes go, if anywhere."""

    def node_states(self, layer: int) -> Tensor | None:
        """[slots, nodes, value_heads, key_dim, value_dim] float32, likewise."""

    def keep_inputs(self, layer: int, x: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> None:
        """Takes the inputs of every row's recurrence: those of tree nodes may be wanted again."""


class TargetModel(Protocol):
    """A contiguous range of layers and, where asked for, embedding and output head.

    Attributes:
        layers: global ids.
        dtype: type that weights and KV are stored in.
    """

    config: ModelConfig
    layers: range
    dtype: torch.dtype
    device: torch.device

    @property
    def embedding(self) -> LinearWeight | None:
        """What `embed` reads; None where the stage has none."""

    @property
    def head(self) -> LinearWeight | None:
        """What `logits` reads; None where the stage has none."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings of [rows] int64 ids: [rows, hidden]."""

    def run_layers(
        self,
        hidden: Tensor,
        batch: RowBatch,
        kv: KvViews,
        capture: Sequence[int] = (),
        states: StateViews | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Runs the layers and writes their KV and state.

        Args:
            hidden: [rows, hidden] residual stream before the first of them; not changed.
            capture: features wanted: n is the residual stream after n decoder layers. Those of other stages are
                passed over: this one gives layers.start < n <= layers.stop, and 0 (the embedding) if it starts there.
            states: of hybrid models.

        Returns:
            ([rows, hidden] residual stream after the last layer, feature by n, each [rows, hidden]).
        """

    def final_norm(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] residual stream after the last layer -> what the output head reads."""

    def logits(self, normed: Tensor) -> Tensor:
        """[rows, hidden] from `final_norm` -> [rows, vocab] float32."""

    def head_rows(self, token_ids: Tensor) -> Tensor:
        """Rows of the output head for [n] int64 ids: [n, hidden]."""
