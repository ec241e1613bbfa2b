"""Heads on disk: round trip, folding, refusals, and the one that ships."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import graftline
from graftline.engine.draft_head.config import DraftHeadConfig
from graftline.engine.draft_head.module import DraftHeadModule, Unroller
from graftline.engine.draft_head.overlap import ngram_hashes, shared_ngrams
from graftline.engine.draft_head.spread import FeatureSpread
from graftline.engine.draft_head.weights import (
    fold_spread,
    head_weights,
    kept_ids,
    read_draft_head,
    write_draft_head,
)
from graftline.engine.draft_layer import DraftLayer, TargetHead
from graftline.engine.worker_engine import draft_head_hash
from graftline.errors import InvalidRequestError
from tests.engine.draft_head.builders import EAGLE, EAGLE3

SHIPPED = Path(graftline.__file__).parent / "engine" / "draft_heads" / "smollm2-135m"
KEPT = torch.tensor([0, 3, 4, 5, 9, 20, 22, 23])
NO_TARGET = TargetHead(torch.clone, torch.clone, torch.clone, num_layers=4, context_length=64)


@pytest.mark.parametrize("config", [replace(EAGLE3, draft_vocab_size=8), EAGLE], ids=["eagle3-reduced", "eagle"])
def test_a_written_head_computes_what_the_trained_one_did(tmp_path: Path, config: DraftHeadConfig) -> None:
    torch.manual_seed(0)
    width = 32 * len(config.feature_layers)
    # Means far from zero, as in real hidden states: rounding of the matrix must not be multiplied by them.
    spread = FeatureSpread(torch.randn(width) * 100, torch.rand(width) + 0.5)
    module = DraftHeadModule(config, len(config.feature_layers), seed=0)
    write_draft_head(tmp_path, config, fold_spread(config, module.tensors(), spread), KEPT)
    read, tensors = read_draft_head(tmp_path)
    assert read == config
    assert kept_ids(read, tensors).tolist() == (KEPT.tolist() if config.reduced_vocab else list(range(24)))
    embeddings = torch.randn(1, 6, 32)
    features = torch.randn(1, 6, width) / spread.inverse_deviation + spread.mean
    with torch.no_grad():
        (ours,) = Unroller(config).unroll(head_weights(read, tensors, embeddings), embeddings, features, 1)
        (wanted,) = Unroller(config).unroll(module.cast(torch.float32, spread), embeddings, features, 1)
    assert (ours - wanted).norm() / wanted.norm() < 0.02


def test_damaged_heads_are_refused(tmp_path: Path) -> None:
    config = replace(EAGLE3, draft_vocab_size=8)
    tensors = {name: value.detach() for name, value in DraftHeadModule(config, 3, seed=0).tensors().items()}
    write_draft_head(tmp_path, config, tensors, KEPT)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    for name in ("fc.weight", "midlayer.mlp.down_proj.weight", "d2t"):
        save_file({other: value for other, value in whole.items() if other != name}, file)
        with pytest.raises(InvalidRequestError, match=name):
            read_draft_head(tmp_path)
    save_file({**whole, "norm.weight": torch.ones(31)}, file)
    with pytest.raises(InvalidRequestError, match=r"norm.weight is \(31,\)"):
        read_draft_head(tmp_path)
    file.write_bytes(b"not safetensors")
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        read_draft_head(tmp_path)
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        DraftLayer(tmp_path, NO_TARGET, torch.float32, torch.device("cpu"))
    file.unlink()
    with pytest.raises(InvalidRequestError, match=r"cannot be read: .*model\.safetensors"):
        draft_head_hash(str(tmp_path))


def test_the_shipped_head_is_whole_and_small() -> None:
    config, tensors = read_draft_head(SHIPPED)
    assert (SHIPPED / "model.safetensors").stat().st_size <= 12_000_000
    assert (config.hidden_size, config.vocab_size) == (576, 49152)
    kept = kept_ids(config, tensors)
    assert len(kept) == config.draft_vocab_size
    assert kept.max() < config.vocab_size
    assert kept.diff().min() > 0
    assert {0, 1, 2} <= set(kept.tolist())
    assert all(value.isfinite().all() for value in tensors.values())


def test_ngrams_shared_with_training_rows() -> None:
    train = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 9, 1, 2, 3]], dtype=torch.int32)
    assert shared_ngrams(train, [[2, 3, 4, 5], [4, 5, 7, 8], [9, 1], [5, 6, 7]], 3) == [1.0, 0.0, 0.0, 0.0]
    assert shared_ngrams(train, [[1, 2, 3, 9]], 3) == [0.5]
    assert ngram_hashes(train, 6).shape == (2, 1)
    assert ngram_hashes(train, 7).shape == (2, 0)
