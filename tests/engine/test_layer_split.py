"""Layers per stage."""

from itertools import product

import pytest

from graftline.engine.draft_choice import mtp_config
from graftline.engine.layer_split import automatic_split, check_split, last_stage_cost, parse_split
from graftline.engine.models.config import config_from_dict
from graftline.engine.models.hybrid_figures import active_layer_weights
from graftline.engine.tree_shape import TreeShape
from graftline.errors import InvalidRequestError


def slowest(split: tuple[int, ...], last_stage_cost: float) -> float:
    return max(*split[:-1], split[-1] + last_stage_cost) if len(split) > 1 else split[0] + last_stage_cost


@pytest.mark.parametrize("num_layers", [1, 2, 3, 5, 12, 30])
def test_the_slowest_stage_is_as_fast_as_can_be(num_layers: int) -> None:
    """Against every possible number of layers on the last stage, the others being even."""
    for num_stages, cost in product(range(1, min(num_layers, 7) + 1), (0.0, 0.4, 1.0, 2.5, 3.0, 7.7, 40.0)):
        split = automatic_split(num_layers, num_stages, cost)
        assert len(split) == num_stages
        assert sum(split) == num_layers
        assert min(split) >= 1
        assert max(split[:-1], default=0) - min(split[:-1], default=0) <= 1, "the others are even"
        if num_stages > 1:
            rest = range(1, num_layers - num_stages + 2)
            best = min(max(last + cost, -(-(num_layers - last) // (num_stages - 1))) for last in rest)
            assert slowest(split, cost) == best, (num_stages, cost, split)


@pytest.mark.parametrize(("num_layers", "num_stages"), [(4, 5), (4, 0), (0, 1)])
def test_more_stages_than_layers_are_refused(num_layers: int, num_stages: int) -> None:
    """CASES P10: at the start, by name."""
    with pytest.raises(InvalidRequestError, match="num_stages"):
        automatic_split(num_layers, num_stages, 1.0)


def test_a_written_split_is_read() -> None:
    assert parse_split("10,12,8") == (10, 12, 8)
    assert parse_split("4") == (4,)
    check_split((1, 3), 4)


@pytest.mark.parametrize("text", ["", "a", "1,,2", "1;2", "3,0", "2,-1", "1.5"])
def test_what_is_no_split_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="layer_split"):
        parse_split(text)


def test_a_split_that_does_not_cover_the_model_is_refused() -> None:
    """CASES P10: at the start, with both numbers."""
    with pytest.raises(InvalidRequestError, match=r"\(1, 2\) sums to 3, the model has 4"):
        check_split((1, 2), 4)


def test_experts_make_a_layer_dearer_the_more_rows_it_sees() -> None:
    """A verify of V nodes reads more experts than one token; head and drafter read what they read."""
    published = {"architectures": ["Qwen3NextForCausalLM"], "num_hidden_layers": 48, "hidden_size": 2048}
    shape = {"num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936, "intermediate_size": 5120}
    model = config_from_dict({**published, **shape, "max_position_embeddings": 262144}, {})
    one_row, round_of_four = active_layer_weights(model), active_layer_weights(model, 4)
    expert = 3 * 2048 * 512
    assert round_of_four - one_row == pytest.approx((512 * (1 - (1 - 10 / 512) ** 4) - 10) * expert)
    head = mtp_config(model)
    assert automatic_split(48, 2, last_stage_cost(model, head, TreeShape(3, 1, 4))) == (29, 19)
