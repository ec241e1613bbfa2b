"""The dense unrolling against one row at a time."""

import pytest
import torch

from graftline.engine.draft_head.config import DraftHeadConfig
from graftline.engine.draft_head.module import DraftHeadModule, Unroller, tensor_sizes
from graftline.engine.draft_head.spread import FeatureSpread
from tests.engine.draft_head.builders import EAGLE, EAGLE3, naive_path, weights_of


@pytest.mark.parametrize("config", [EAGLE3, EAGLE], ids=["eagle3", "eagle"])
def test_every_level_is_what_a_draft_at_that_depth_would_see(config: DraftHeadConfig) -> None:
    torch.manual_seed(0)
    weights = weights_of(config)
    embeddings, features = torch.randn(2, 11, 32), torch.randn(2, 11, 32 * len(config.feature_layers))
    levels = list(Unroller(config).unroll(weights, embeddings, features, 4))
    for root in (0, 1, 6):
        for depth in range(4):
            drafted = embeddings[1, root + 1 : root + 1 + depth]
            expected = naive_path(config, weights, embeddings[1], features[1], root, drafted)
            torch.testing.assert_close(levels[depth][1, root + depth], expected, atol=1e-5, rtol=1e-4)


def test_gradients_reach_every_parameter_through_the_deepest_level() -> None:
    module = DraftHeadModule(EAGLE3, 3, seed=0)
    embeddings, features = torch.randn(1, 9, 32), torch.randn(1, 9, 96)
    *_, deepest = Unroller(EAGLE3).unroll(module.cast(torch.float32), embeddings, features, 3)
    deepest.square().sum().backward()
    unused = {name for name, parameter in module.tensors().items() if parameter.grad is None}
    assert unused == {"norm.weight"}


def test_weights_of_a_seed_are_the_same_and_of_another_differ() -> None:
    first, same, other = (DraftHeadModule(EAGLE3, 3, seed=seed).tensors() for seed in (5, 5, 6))
    assert set(first) == set(tensor_sizes(EAGLE3, 3))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])


@pytest.mark.parametrize("config", [EAGLE3, EAGLE], ids=["eagle3", "eagle"])
def test_folded_weights_read_raw_features_as_plain_ones_read_standardised(config: DraftHeadConfig) -> None:
    torch.manual_seed(1)
    width = 32 * len(config.feature_layers)
    spread = FeatureSpread(torch.randn(width) * 9, torch.rand(width) + 0.1)
    module = DraftHeadModule(config, len(config.feature_layers), seed=0)
    embeddings, features = torch.randn(1, 5, 32), torch.randn(1, 5, width) * 7
    unroller = Unroller(config)
    with torch.no_grad():
        (folded,) = unroller.unroll(module.cast(torch.float32, spread), embeddings, features, 1)
        (plain,) = unroller.unroll(module.cast(torch.float32), embeddings, spread.standardise(features), 1)
    torch.testing.assert_close(folded, plain, atol=1e-3, rtol=1e-3)
