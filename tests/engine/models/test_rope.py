"""Frequencies against transformers' own functions."""

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from graftline.engine.models.config import rope_from_dict
from graftline.engine.models.rope import DivisorScaling, Rope, inverse_frequencies, rope_tables

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 512}
CASES: list[dict[str, Any]] = [
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    YARN,
    {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    {**YARN, "attention_factor": 1.5, "original_max_position_embeddings": 32},
]


@pytest.mark.parametrize("values", CASES)
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_frequencies_equal_transformers(values: dict[str, Any], head_dim: int) -> None:
    theirs = transformers.LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, max_position_embeddings=2048, rope_parameters=values
    )
    expected, factor = ROPE_INIT_FUNCTIONS[values["rope_type"]](theirs, torch.device("cpu"))
    rope = rope_from_dict({"rope_parameters": values}, 2048)
    torch.testing.assert_close(inverse_frequencies(rope, head_dim), expected, rtol=1e-5, atol=0)
    assert rope.attention_factor == pytest.approx(factor)


def test_tables_carry_the_attention_factor() -> None:
    rope = rope_from_dict({"rope_parameters": {**YARN, "attention_factor": 0.5}}, 2048)
    cos, sin = rope_tables(rope, 16, 10)
    assert cos.shape == sin.shape == (10, 8)
    assert cos.dtype == torch.float32
    assert torch.equal(cos[0], torch.full((8,), 0.5))
    torch.testing.assert_close(cos**2 + sin**2, torch.full((10, 8), 0.25))
    torch.testing.assert_close(sin[7], 0.5 * (7 * inverse_frequencies(rope, 16)).sin())


def test_divisors_divide_one_frequency_each() -> None:
    plain = inverse_frequencies(Rope(1e4), 8)
    scaled = inverse_frequencies(Rope(1e4, DivisorScaling((1.0, 2.0, 4.0, 8.0))), 8)
    assert torch.equal(scaled * torch.tensor([1.0, 2.0, 4.0, 8.0]), plain)
