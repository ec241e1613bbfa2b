"""Dialogs ready for training: equal rows on one device, the features' spread, and the draft vocabulary they call for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graftline.engine.draft_head.data import Dialogs
from graftline.engine.draft_head.target import TargetRunner

# Rows of one forward when only statistics are wanted.
_STATS_BATCH = 8


@dataclass(frozen=True, slots=True)
class FeatureSpread:
    """Mean and inverse deviation of each feature dimension, [n * h] float32.

    A few dimensions of a language model's hidden states are hundreds of times larger than the rest; without this
    the loss hardly moves. Position 0 is left out: its state is an outlier in every dimension.
    """

    mean: Tensor
    inverse_deviation: Tensor

    def standardise(self, features: Tensor) -> Tensor:
        """Features [..., n * h] at mean 0 and deviation 1, in their own type."""
        return ((features.float() - self.mean) * self.inverse_deviation).to(features.dtype)


def feature_spread(
    runner: TargetRunner, dialogs: Dialogs, feature_layers: Sequence[int], num_rows: int
) -> FeatureSpread:
    """Measure the spread over the first `num_rows` rows of dialogs."""
    total = squares = torch.zeros((), dtype=torch.float64)
    count = 0
    for start in range(0, min(num_rows, len(dialogs.tokens)), _STATS_BATCH):
        tokens = dialogs.tokens[start : start + _STATS_BATCH].long()
        features = runner.features(tokens, feature_layers).features[:, 1:].flatten(0, 1).double()
        total = total.to(features.device) + features.sum(0)
        squares = squares.to(features.device) + features.square().sum(0)
        count += len(features)
    mean = total / count
    deviation = (squares / count - mean.square()).clamp_min(1e-6).sqrt()
    return FeatureSpread(mean.float(), (1 / deviation).float())


def draft_vocabulary(dialogs: Dialogs, vocab_size: int, draft_vocab_size: int, always: Sequence[int]) -> Tensor:
    """The target ids a reduced draft vocabulary keeps: the most frequent in answers, then anywhere; sorted [V] int64."""
    tokens = dialogs.tokens.long()
    counts = torch.bincount(tokens.flatten(), minlength=vocab_size).double() * 0.05
    counts += torch.bincount(tokens[dialogs.answers], minlength=vocab_size)
    counts[list(always)] = float("inf")
    return counts.sort(descending=True, stable=True).indices[:draft_vocab_size].sort().values


def coverage(dialogs: Dialogs, kept: Tensor, vocab_size: int) -> float:
    """Share of answer tokens that are in a draft vocabulary."""
    inside = torch.zeros(vocab_size, dtype=torch.bool, device=kept.device)
    inside[kept] = True
    return float(inside[dialogs.tokens[dialogs.answers].long()].float().mean())


def batches(num_rows: int, batch_rows: int, seed: int, first: int) -> Iterator[Tensor]:
    """Endless batches of row numbers, every row once an epoch in a seeded order, beginning with batch `first`."""
    per_epoch = num_rows // batch_rows
    assert per_epoch > 0, f"{num_rows} rows do not fill a batch of {batch_rows}"
    number = first
    while True:
        epoch, place = divmod(number, per_epoch)
        order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed * 100_003 + epoch))
        for at in range(place, per_epoch):
            yield order[at * batch_rows : (at + 1) * batch_rows]
        number = (epoch + 1) * per_epoch
