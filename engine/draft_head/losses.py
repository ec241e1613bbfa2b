"""The distance between the head's and the target's next-token distributions, without ever keeping all logits.

Both sides multiply the same frozen output head, so only gradients of the hidden states are needed; they are
computed chunk by chunk in the forward pass.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from graftline.engine.draft_head.target import fixed_shape_compiler


@dataclass(frozen=True, slots=True)
class LossOptions:
    """What the head is pulled toward.

    Attributes:
        target_temperature: below 1 sharpens the target's distribution first.
        hard_share: share of the pull that goes to the target's likeliest token alone.
        level_decay: level k weighs level_decay ** k.
    """

    target_temperature: float = 1.0
    hard_share: float = 0.0
    level_decay: float = 0.8


@dataclass(frozen=True, slots=True)
class LevelScores:
    """Per level: mean cross-entropy (carries the gradient) and share of rows whose likeliest tokens agree; [L]."""

    cross_entropy: Tensor
    agreement: Tensor


class DistillationLoss:
    """Cross-entropy of the head against the target over a (draft) vocabulary, rows taken in chunks of one size."""

    def __init__(self, options: LossOptions, *, chunk: int, compiled: bool) -> None:
        self.options = options
        self.chunk = chunk
        wrap = fixed_shape_compiler(compiled)
        self.soft_targets = wrap(soft_targets)
        self.scores_and_slope = wrap(scores_and_slope)

    def __call__(self, outputs: Tensor, target_hidden: Tensor, vocab_rows: Tensor) -> LevelScores:
        """Score every level on the same rows.

        Args:
            outputs: [L, M, h] what the head puts to the output head; M a multiple of the chunk.
            target_hidden: [M, h] final-normed hidden states of the target.
            vocab_rows: [V, h] the frozen output head's rows of the draft vocabulary.
        """
        cross_entropy, agreement = _FusedDistillation.apply(outputs, target_hidden, vocab_rows, self)  # type: ignore[no-untyped-call]
        return LevelScores(cross_entropy, agreement)

    def total(self, scores: LevelScores) -> Tensor:
        """The weighted mean over levels that training minimises."""
        levels = torch.arange(len(scores.cross_entropy), device=scores.cross_entropy.device)
        weights = self.options.level_decay**levels
        return (scores.cross_entropy * weights).sum() / weights.sum()


class _FusedDistillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, outputs: Tensor, target_hidden: Tensor, vocab_rows: Tensor, loss: DistillationLoss
    ) -> tuple[Tensor, Tensor]:
        num_levels, num_rows, _ = outputs.shape
        assert num_rows % loss.chunk == 0, f"{num_rows} rows in chunks of {loss.chunk}"
        options = loss.options
        slopes = torch.empty_like(outputs)
        sums = torch.zeros(2, num_levels, device=outputs.device)
        for start in range(0, num_rows, loss.chunk):
            rows = slice(start, start + loss.chunk)
            wanted, best = loss.soft_targets(
                functional.linear(target_hidden[rows], vocab_rows), options.target_temperature, options.hard_share
            )
            for level in range(num_levels):
                logits = functional.linear(outputs[level, rows], vocab_rows)
                entropy, agreed, slope = loss.scores_and_slope(logits, wanted, best)
                sums[0, level] += entropy
                sums[1, level] += agreed
                slopes[level, rows] = slope @ vocab_rows
        ctx.save_for_backward(slopes)
        ctx.num_rows = num_rows
        cross_entropy, agreement = sums / num_rows
        ctx.mark_non_differentiable(agreement)
        return cross_entropy, agreement

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (slopes,) = ctx.saved_tensors
        scale = (grads[0] / ctx.num_rows).to(slopes.dtype)
        return slopes * scale[:, None, None], None, None, None


def soft_targets(logits: Tensor, temperature: float, hard_share: float) -> tuple[Tensor, Tensor]:
    """The distribution to learn and its likeliest token, from target logits [m, V]."""
    best = logits.argmax(-1)
    probabilities = torch.softmax(logits.float() / temperature, dim=-1)
    if hard_share:
        probabilities = probabilities * (1 - hard_share)
        columns = torch.arange(logits.shape[-1], device=logits.device)
        probabilities = torch.where(columns == best[:, None], probabilities + hard_share, probabilities)
    return probabilities.to(logits.dtype), best


def scores_and_slope(logits: Tensor, wanted: Tensor, best: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Summed cross-entropy, number of agreeing rows, and the slope in the logits [m, V]."""
    log_q = torch.log_softmax(logits.float(), dim=-1)
    wide = wanted.float()
    entropy = -(wide * log_q).sum()
    agreed = (logits.argmax(-1) == best).sum()
    return entropy, agreed, (log_q.exp() - wide).to(logits.dtype)
