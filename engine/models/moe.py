"""A mixture of experts with a shared expert: every token passes its likeliest experts and the shared one.

A token's output is summed in a fixed order (experts by id, then the shared one) out of products that depend on the
token alone, so its bits do not depend on what it is batched with.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graftline.kernels.gating import route, sigmoid_mul
from graftline.kernels.linear import LinearWeight, linear, linear_gate_up


@dataclass(frozen=True, slots=True)
class GatedBlock:
    """down(silu(gate(x)) * up(x))."""

    gate_up: LinearWeight  # hidden -> 2 * inner
    down: LinearWeight  # inner -> hidden

    def run(self, x: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, hidden]."""
        return linear(linear_gate_up(x, self.gate_up), self.down)


@dataclass(frozen=True, slots=True)
class MoeBlock:
    """The whole mixture.

    Attributes:
        router: hidden -> experts.
        shared_gate: hidden -> 1, before the sigmoid.
        num_chosen: experts a token.
        normalise: the weights of a token's experts sum to 1.
    """

    router: LinearWeight
    experts: Sequence[GatedBlock]
    shared: GatedBlock
    shared_gate: LinearWeight
    num_chosen: int
    normalise: bool

    def run(self, x: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, hidden]."""
        weights, ids = route(linear(x, self.router), self.num_chosen, self.normalise)
        out = torch.zeros_like(x)
        for expert in torch.unique(ids).tolist():  # ascending
            rows, rank = (ids == expert).nonzero(as_tuple=True)
            part = self.experts[expert].run(x[rows]) * weights[rows, rank].unsqueeze(1).to(x.dtype)
            out[rows] += part  # a row is here once at most
        return out + sigmoid_mul(self.shared.run(x), linear(x, self.shared_gate))
