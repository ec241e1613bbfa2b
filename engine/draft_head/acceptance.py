"""What a head's drafts would have been worth on answers already written.

A draft is accepted exactly when it equals the token the target draws at that place, greedy or with seeded noise;
so the answer's own tokens decide, and every possible root of an answer is scored at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graftline.engine.draft_head.config import DraftHeadConfig
from graftline.engine.draft_head.module import HeadWeights, Unroller, to_logit_space


@dataclass(frozen=True, slots=True)
class Answer:
    """One dialog whose answer is known.

    Attributes:
        tokens: [T] int64, prompt and answer.
        num_prompt_tokens: where the answer begins.
    """

    tokens: Tensor
    num_prompt_tokens: int
    kind: str


@dataclass(frozen=True, slots=True)
class Rounds:
    """Verify rounds of answers of one kind: how many, and the tokens they emitted."""

    num_rounds: int
    num_emitted: int

    @property
    def accept_length(self) -> float:
        """Tokens a round emits; the final round counts only what belongs to the answer."""
        return self.num_emitted / max(self.num_rounds, 1)

    def __add__(self, other: "Rounds") -> "Rounds":
        return Rounds(self.num_rounds + other.num_rounds, self.num_emitted + other.num_emitted)


def walk(accepted: Sequence[int], num_prompt_tokens: int, length: int) -> Rounds:
    """Follow the rounds of one answer.

    Args:
        accepted: drafts accepted when row p is the root's row (the root being the token at p + 1).
        length: prompt and answer together; the token at `num_prompt_tokens` comes from the prefill.
    """
    rounds = emitted = 0
    row = num_prompt_tokens - 1
    while row + 2 < length:
        gained = min(accepted[row] + 1, length - (row + 2))
        rounds += 1
        emitted += gained
        row += gained
    return Rounds(rounds, emitted)


@torch.no_grad()
def chain_hits(
    config: DraftHeadConfig,
    weights: HeadWeights,
    unroller: Unroller,
    embeddings: Tensor,
    features: Tensor,
    next_tokens: Tensor,
    vocab_rows: Tensor,
    kept_ids: Tensor,
    depth: int,
) -> Tensor:
    """Whether the k-th draft of a chain is right, given that those before it were: [depth, B, N] bool.

    Entry [k, b, p] is about the chain's row p at depth k, whose root's row is p - k.

    Args:
        next_tokens: [B, N] the token at p + 2, what row p predicts.
        vocab_rows: [V, h] the output head's rows for the draft vocabulary.
        kept_ids: [V] their target ids.
    """
    hits = []
    for output in unroller.unroll(weights, embeddings, features, depth):
        logits = to_logit_space(config, weights, output) @ vocab_rows.T
        hits.append(kept_ids[logits.argmax(-1)] == next_tokens)
    return torch.stack(hits)


def accepted_by_root(hits: Tensor, steps: int) -> Tensor:
    """Accepted drafts of a chain of `steps` for each root row: hits [depth, B, N] -> [B, N] int64."""
    num_rows = hits.shape[2]
    accepted = torch.zeros(hits.shape[1:], dtype=torch.int64, device=hits.device)
    alive = torch.ones_like(hits[0])
    for depth in range(steps):
        at_root = torch.zeros_like(hits[0])
        if depth < num_rows:
            at_root[:, : num_rows - depth] = hits[depth, :, depth:]
        alive = alive & at_root
        accepted += alive
    return accepted
