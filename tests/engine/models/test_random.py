"""Tiny random models: reproducible, lively, and loadable by transformers too."""

from pathlib import Path

import pytest
import torch
import transformers
from text_samples import TEXTS
from tokenizers import Tokenizer

from graftline.engine.models.checkpoint import open_checkpoint
from graftline.engine.models.config import DENSE_FAMILIES, Family
from graftline.engine.models.dense import DenseModel
from graftline.engine.models.random import write_tiny_model
from graftline.engine.models.reference import OneRequestKv, forward, greedy


def test_equal_arguments_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_tiny_model(tmp_path / name, seed=5)
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes(), file.name


@pytest.mark.parametrize("seed", range(3))
def test_greedy_output_wanders(seed: int, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny_model(tmp_path / "tiny", seed=seed))
    model = DenseModel(checkpoint, range(4), torch.float32)
    assert len(set(greedy(model, [1, 2, 3], 48))) > 15


@pytest.mark.parametrize("family", DENSE_FAMILIES)
@pytest.mark.parametrize("tie", [False, True])
def test_every_family_loads_and_equals_transformers(family: Family, tie: bool, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny", layers=2, scale=1.0, family=family, tie=tie)
    oracle, report = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ids = list(range(40, 60))
    model = DenseModel(open_checkpoint(path), range(2), torch.float32)
    with torch.no_grad():
        expected = oracle(torch.tensor([ids])).logits[0]
    assert (forward(model, ids, 0, OneRequestKv(model, 20)) - expected).abs().max() < 1e-4


def test_the_tokenizer_keeps_every_text(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny_model(tmp_path / "tiny"))
    tokenizer = Tokenizer.from_buffer(checkpoint.card.tokenizer_json)
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.encode("é<|im_end|>").ids == [0xC3, 0xA9, 258]


@pytest.mark.parametrize("vocab", [4, 8, 300])
def test_other_vocabularies(vocab: int, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny_model(tmp_path / "tiny", vocab=vocab, layers=1))
    tokenizer = Tokenizer.from_buffer(checkpoint.card.tokenizer_json)
    assert tokenizer.get_vocab_size() == vocab
    assert checkpoint.config.eos_token_ids == (vocab - 1,)
    assert tokenizer.token_to_id("<|im_end|>") == vocab - 1
    assert checkpoint.tensor("lm_head.weight").shape == (vocab, 64)
