"""DenseModel against transformers, and against itself in pieces."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from graftline.engine.models.checkpoint import open_checkpoint
from graftline.engine.models.dense import DenseModel
from graftline.engine.models.random import write_tiny_model
from graftline.engine.models.reference import OneRequestKv, forward
from graftline.errors import InvalidRequestError
from graftline.kernels.attention_batch import SegmentRows, build_attention_batch

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 16}),
    "llama-no-gqa": ("Llama", {"num_key_value_heads": 6}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("Llama", {"rope_parameters": LINEAR}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied-yarn": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2-yarn-factor": ("Qwen2", {"rope_parameters": {**YARN, "attention_factor": 0.8, "beta_fast": 16.0}}),
    "qwen2-yarn-mscale": ("Qwen2", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-tied-bias": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-theta": ("Mistral", {"sliding_window": None, "rope_parameters": {"rope_theta": 1e6}}),
}


def whole(path: Path, dtype: torch.dtype = torch.float32) -> DenseModel:
    checkpoint = open_checkpoint(path)
    return DenseModel(checkpoint, range(checkpoint.config.num_layers), dtype)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, save_tiny: Any) -> None:
    kind, overrides = CASES[case]
    path, oracle = save_tiny(kind, **overrides)
    ids = torch.randint(0, 97, (70,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = oracle(ids.unsqueeze(0)).logits[0]
    model = whole(path)
    logits = forward(model, ids.tolist(), 0, OneRequestKv(model, 70))
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max() <= 1e-4
    assert expected.std() > 0.1


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny", scale=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_and_decode_steps_equal_one_pass(tiny: Path, dtype: torch.dtype) -> None:
    model = whole(tiny, dtype)
    ids = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    at_once = forward(model, ids, 0, OneRequestKv(model, 40))
    kv = OneRequestKv(model, 40, page_size=5)
    parts, start = [], 0
    for length in (7, 16, 10, 1, 1, 1, 4):
        parts.append(forward(model, ids[start : start + length], start, kv))
        start += length
    assert start == len(ids)
    torch.testing.assert_close(torch.cat(parts), at_once, rtol=0, atol=1e-4)


@pytest.mark.parametrize("splits", [[1], [2, 3], [0, 4], [1, 1, 2]])
def test_ranges_compose_to_the_whole(tiny: Path, splits: list[int]) -> None:
    checkpoint = open_checkpoint(tiny)
    ids = list(range(30, 60))
    batch = build_attention_batch([SegmentRows(0, 30, range(2))], 16)
    model = whole(tiny)
    kv = OneRequestKv(model, 30)
    expected, features = model.run_layers(model.embed(torch.tensor(ids)), batch, kv, capture=(0, 2, 3, 4))
    assert sorted(features) == [0, 2, 3, 4]
    assert torch.equal(features[4], expected)

    bounds = [0, *splits, checkpoint.config.num_layers]
    stage_kv = OneRequestKv(model, 30)
    hidden, collected = None, {}
    for first, last in itertools.pairwise(bounds):
        is_last = last == checkpoint.config.num_layers
        stage = DenseModel(checkpoint, range(first, last), torch.float32, with_embedding=first == 0, with_head=is_last)
        hidden = stage.embed(torch.tensor(ids)) if hidden is None else hidden
        hidden, captured = stage.run_layers(hidden, batch, stage_kv, capture=(0, 2, 3, 4))
        collected |= captured
    assert hidden is not None
    assert torch.equal(hidden, expected)
    assert {n: f.tolist() for n, f in collected.items()} == {n: f.tolist() for n, f in features.items()}
    assert torch.equal(stage.logits(stage.final_norm(hidden)), model.logits(model.final_norm(expected)))
    for layer in range(checkpoint.config.num_layers):
        assert all(map(torch.equal, kv.layer_kv(layer), stage_kv.layer_kv(layer)))


def test_features_are_the_residual_stream(save_tiny: Any) -> None:
    path, oracle = save_tiny("Llama")
    ids = torch.arange(20)
    with torch.no_grad():
        states = oracle(ids.unsqueeze(0), output_hidden_states=True).hidden_states
    model = whole(path)
    batch = build_attention_batch([SegmentRows(0, 20, range(2))], 16)
    hidden, features = model.run_layers(model.embed(ids), batch, OneRequestKv(model, 20), capture=(0, 1, 2))
    for layer in (0, 1, 2):
        torch.testing.assert_close(features[layer], states[layer][0], rtol=0, atol=1e-4)
    torch.testing.assert_close(model.final_norm(hidden), states[3][0], rtol=0, atol=1e-4)


def test_tree_rows_see_only_their_ancestors(tiny: Path) -> None:
    model = whole(tiny)
    prompt, tree, parents = [10, 20, 30, 40, 50], [60, 61, 62, 63, 64], [-1, 0, 0, 1, 2]
    kv = OneRequestKv(model, 16)
    forward(model, prompt, 0, kv)
    batch = build_attention_batch([SegmentRows(5, 5, kv.page_ids, parents)], kv.page_size)
    hidden, _ = model.run_layers(model.embed(torch.tensor(tree)), batch, kv)
    in_tree = model.logits(model.final_norm(hidden))
    for node, path in ((0, [60]), (1, [60, 61]), (2, [60, 62]), (3, [60, 61, 63]), (4, [60, 62, 64])):
        alone = forward(model, prompt + path, 0, OneRequestKv(model, 16))[-1]
        torch.testing.assert_close(in_tree[node], alone, rtol=0, atol=1e-4)


def test_a_tied_head_shares_the_embedding(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tied", tie=True)
    model = whole(path)
    assert model._embedding is model._head
    assert torch.equal(model.head_rows(torch.tensor([3, 9])), model.embed(torch.tensor([3, 9])))


def test_bfloat16_keeps_activations_in_float32_on_cpu(tiny: Path) -> None:
    model = whole(tiny, torch.bfloat16)
    hidden = model.embed(torch.tensor([1, 2]))
    assert hidden.dtype == torch.float32
    assert torch.equal(hidden, open_checkpoint(tiny).tensor("model.embed_tokens.weight")[1:3].bfloat16().float())
    assert OneRequestKv(model, 4).layer_kv(0)[0].dtype == torch.bfloat16


def test_rotations_exist_past_the_context_for_draft_nodes(tmp_path: Path) -> None:
    """CASES S28: a draft node may stand past the last position of the context before it is cut."""
    model = whole(write_tiny_model(tmp_path / "short", context=16))
    kv = OneRequestKv(model, 24)
    assert forward(model, list(range(20)), 0, kv).isfinite().all()


@pytest.mark.parametrize("layers", [range(5), range(-1, 2), range(3, 1), range(0, 4, 2)])
def test_layers_that_do_not_exist_are_refused(tiny: Path, layers: range) -> None:
    with pytest.raises(ValueError, match="4 layers"):
        DenseModel(open_checkpoint(tiny), layers, torch.float32)


def test_a_tensor_of_another_shape_is_refused(tiny: Path) -> None:
    config = (tiny / "config.json").read_text()
    (tiny / "config.json").write_text(config.replace('"intermediate_size": 128', '"intermediate_size": 64'))
    with pytest.raises(InvalidRequestError, match=r"gate_proj.weight is \(128, 64\)"):
        whole(tiny)
