"""Mean and deviation of the target's features, so that training sees all dimensions at one scale."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graftline.engine.draft_head.data import Dialogs
from graftline.engine.draft_head.target import TargetRunner

_BATCH_ROWS = 8


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
    for start in range(0, min(num_rows, len(dialogs.tokens)), _BATCH_ROWS):
        tokens = dialogs.tokens[start : start + _BATCH_ROWS].long()
        features = runner.features(tokens, feature_layers).features[:, 1:].flatten(0, 1).double()
        total = total.to(features.device) + features.sum(0)
        squares = squares.to(features.device) + features.square().sum(0)
        count += len(features)
    mean = total / count
    deviation = (squares / count - mean.square()).clamp_min(1e-6).sqrt()
    return FeatureSpread(mean.float(), (1 / deviation).float())
