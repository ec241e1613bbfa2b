"""Qwen3NextModel against transformers, and against itself in pieces."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from graftline.engine.models.checkpoint import open_checkpoint
from graftline.engine.models.config import Family, config_from_dict, read_config
from graftline.engine.models.hybrid_config import LayerKind
from graftline.engine.models.qwen3_next import Qwen3NextModel
from graftline.engine.models.qwen3_next_random import LAYER_TYPES, write_tiny_qwen3_next
from graftline.engine.models.reference import OneRequestKv, forward, greedy
from graftline.errors import InvalidRequestError

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "wide": {"key_heads": 1, "value_heads": 3, "linear_dim": 12, "conv_width": 2, "heads": 2, "head_dim": 32},
    "attention-first": {"layer_types": LAYER_TYPES[::-1], "chosen": 4, "conv_width": 5, "seed": 3, "scale": 2.0},
}


@pytest.fixture(scope="module", params=list(VARIANTS))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3_next(tmp_path_factory.mktemp(request.param), **VARIANTS[request.param])


def whole(path: Path, dtype: torch.dtype = torch.float32) -> Qwen3NextModel:
    checkpoint = open_checkpoint(path)
    return Qwen3NextModel(checkpoint, range(checkpoint.config.num_layers), dtype)


def oracle(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, experts_implementation="eager")
    return model.eval()


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def in_chunks(model: Qwen3NextModel, ids: list[int], count: int) -> Tensor:
    kv = OneRequestKv(model, len(ids))
    return torch.cat([forward(model, ids[first : first + count], first, kv) for first in range(0, len(ids), count)])


@torch.inference_mode()
def test_logits_are_those_of_transformers(path: Path) -> None:
    """In float64, that is: in float32 transformers itself is up to 1e-4 away from it."""
    ids = prompt(75)
    wanted = oracle(path, torch.float64)(torch.tensor([ids])).logits[0].float()
    torch.testing.assert_close(in_chunks(whole(path), ids, 75), wanted, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_greedy_ids_are_those_of_transformers(path: Path) -> None:
    """Single-token decode on both sides, with the caches of each."""
    ids, reference = prompt(21, seed=1), oracle(path)
    made = reference.generate(
        torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, 21:]
    ours = greedy(whole(path), ids, 24)
    assert ours == made.tolist()
    assert len(set(ours)) > 8, "an answer that says little"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_chunks_of_any_size_give_the_same_bits(path: Path, dtype: torch.dtype) -> None:
    """Contract 1, around the width of the convolution and on both sides of a page."""
    model, ids = whole(path, dtype), prompt(37)
    at_once = in_chunks(model, ids, 37)
    for count in (1, 2, 3, 4, 5, 16, 17, 36):
        assert torch.equal(in_chunks(model, ids, count), at_once)


@torch.inference_mode()
def test_bfloat16_is_close_to_float32(path: Path) -> None:
    ids = prompt(20)
    exact, rounded = in_chunks(whole(path), ids, 20), in_chunks(whole(path, torch.bfloat16), ids, 20)
    assert 0 < (rounded - exact).norm() / exact.norm() < 0.05


@torch.inference_mode()
def test_stages_and_features(path: Path) -> None:
    """Two stages give what one does; features come from the stage that passes their layer."""
    checkpoint, ids, model = open_checkpoint(path), prompt(9), whole(path)
    kv = OneRequestKv(model, 9)
    first = Qwen3NextModel(checkpoint, range(1), torch.float32, with_head=False)
    rest = Qwen3NextModel(checkpoint, range(1, 4), torch.float32, with_embedding=False)
    hidden = model.embed(torch.tensor(ids))
    batch, states = _batch(kv, 9)
    through, early = first.run_layers(hidden, batch, kv, (0, 1, 3), states)
    through, late = rest.run_layers(through, batch, kv, (0, 1, 3), states)
    assert torch.equal(rest.logits(rest.final_norm(through)), in_chunks(model, ids, 9))
    assert (sorted(early), sorted(late)) == ([0, 1], [3])
    assert torch.equal(early[0], hidden)


def _batch(kv: OneRequestKv, rows: int) -> tuple[Any, Any]:
    from graftline.kernels.attention_batch import SegmentRows, build_attention_batch

    batch = build_attention_batch([SegmentRows(0, rows, kv.page_ids)], kv.page_size)
    return batch, kv.step_states(batch)


def test_config(path: Path) -> None:
    config = read_config(path)
    assert config.hybrid is not None
    assert config.family is Family.QWEN3_NEXT
    assert config.attention_layers(range(4)) + config.linear_layers(range(4)) in ((3, 0, 1, 2), (0, 1, 2, 3))
    assert config.rotary_dim == config.head_dim // 4


def test_published_config_without_layer_types() -> None:
    """As the 80B model's file has it: kinds of layers by interval, RoPE the old way."""
    raw = {
        "architectures": ["Qwen3NextForCausalLM"],
        "num_hidden_layers": 48,
        "full_attention_interval": 4,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
    }
    config = config_from_dict(raw, {})
    assert config.hybrid is not None
    assert [config.hybrid.layer_kinds[layer] for layer in (0, 2, 3, 47)] == [
        LayerKind.LINEAR,
        LayerKind.LINEAR,
        LayerKind.FULL,
        LayerKind.FULL,
    ]
    assert (config.rotary_dim, len(config.linear_layers(range(48)))) == (64, 36)
    assert config.hybrid.linear.conv_channels == 8192
    for name, value in (
        ("attention_bias", True),
        ("layer_types", ["other"] * 48),
        ("linear_num_value_heads", 33),
        ("num_experts_per_tok", 513),
        ("linear_conv_kernel_dim", 1),
        ("partial_rotary_factor", 2.0),
    ):
        with pytest.raises(InvalidRequestError, match=name):
            config_from_dict({**raw, name: value}, {})
