"""What describes the layers of a range, to whatever runs them."""

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from graftline.kernels.linear import LinearWeight


class DecoderLayerWeights(Protocol):
    """Parameters of one pre-norm layer; q, k, v and gate, up are stacked into one matrix each."""

    @property
    def input_norm(self) -> Tensor:
        """[hidden]."""

    @property
    def qkv(self) -> LinearWeight:
        """Hidden -> (heads + 2 * kv_heads) * head_dim."""

    @property
    def q_norm(self) -> Tensor | None:
        """[head_dim] of the per-head norm of q before rope, or None."""

    @property
    def k_norm(self) -> Tensor | None:
        """Likewise of k; both or neither."""

    @property
    def output(self) -> LinearWeight:
        """Heads * head_dim -> hidden."""

    @property
    def post_norm(self) -> Tensor:
        """[hidden]."""

    @property
    def gate_up(self) -> LinearWeight:
        """Hidden -> 2 * inter."""

    @property
    def down(self) -> LinearWeight:
        """Inter -> hidden."""


@dataclass(frozen=True, slots=True)
class DecoderLayerShape:
    """What the layers of a range have in common.

    Attributes:
        eps: of all norms.
        scale: of attention scores, usually head_dim ** -0.5.
        cos: [max_positions, rotated / 2] float32.
        sin: likewise.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float
    cos: Tensor = field(repr=False)
    sin: Tensor = field(repr=False)
