"""Hugging Face directories: one file, shards, types, and what is missing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from graftline.engine.models.checkpoint import open_checkpoint
from graftline.engine.models.random import write_tiny_model
from graftline.errors import InvalidRequestError

NAME = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


def shard(path: Path) -> Path:
    """Splits the weights into two files with an index."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    weight_map = {}
    for index, half in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        file = f"model-{index + 1:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in half}, path / file)
        weight_map |= dict.fromkeys(half, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def test_shards_hold_the_same_tensors(tiny: Path, tmp_path: Path) -> None:
    single, sharded = open_checkpoint(tiny), open_checkpoint(shard(write_tiny_model(tmp_path / "sharded")))
    for name in load_file(tiny / "model.safetensors"):
        assert torch.equal(single.tensor(name), sharded.tensor(name))


def test_transformers_shards(save_tiny: Any) -> None:
    path, model = save_tiny("Llama")
    model.save_pretrained(path, max_shard_size="20KB")
    (path / "model.safetensors").unlink(missing_ok=True)
    checkpoint = open_checkpoint(path)
    for name, value in model.state_dict().items():
        assert torch.equal(checkpoint.tensor(name), value)


@pytest.mark.parametrize(
    ("stored", "given"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)],
)
def test_types(tiny: Path, stored: torch.dtype, given: torch.dtype) -> None:
    tensors = load_file(tiny / "model.safetensors")
    save_file({name: value.to(stored) for name, value in tensors.items()}, tiny / "model.safetensors")
    value = open_checkpoint(tiny).tensor(NAME)
    assert value.dtype == given
    assert torch.equal(value, tensors[NAME].to(stored).to(given))


def test_other_types_are_refused(tiny: Path) -> None:
    save_file({NAME: torch.zeros(2, 2, dtype=torch.int8)}, tiny / "model.safetensors")
    with pytest.raises(InvalidRequestError, match=r"k_proj.*torch\.int8"):
        open_checkpoint(tiny).tensor(NAME)


def test_missing_tensor(tiny: Path) -> None:
    with pytest.raises(InvalidRequestError, match="no tensor nonsense"):
        open_checkpoint(tiny).tensor("nonsense")


def test_an_index_that_names_what_its_file_lacks(tiny: Path) -> None:
    index = shard(tiny) / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    files = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    [content["weight_map"][NAME]] = files - {content["weight_map"][NAME]}
    index.write_text(json.dumps(content))
    with pytest.raises(InvalidRequestError, match=rf"cannot read tensor {NAME} of .*model-0000\d-of-00002"):
        open_checkpoint(tiny).tensor(NAME)


def test_missing_files(tiny: Path, tmp_path: Path) -> None:
    sharded = shard(write_tiny_model(tmp_path / "sharded"))
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InvalidRequestError, match="lacks model-00002-of-00002"):
        open_checkpoint(sharded)
    (tiny / "model.safetensors").write_bytes(b"rubbish")
    with pytest.raises(InvalidRequestError, match=r"cannot read .*model\.safetensors"):
        open_checkpoint(tiny)
    (tiny / "model.safetensors").unlink()
    with pytest.raises(InvalidRequestError, match="holds neither"):
        open_checkpoint(tiny)
    (tiny / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(InvalidRequestError, match="no weight_map"):
        open_checkpoint(tiny)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    for path, says in ((tmp_path, "no config.json and 0 GGUF"), (tmp_path / "x.gguf", "neither a directory")):
        with pytest.raises(InvalidRequestError, match=says):
            open_checkpoint(path)
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.gguf").touch()
    with pytest.raises(InvalidRequestError, match="2 GGUF files"):
        open_checkpoint(tmp_path)


def test_hash_follows_the_contents(tiny: Path, tmp_path: Path) -> None:
    same = open_checkpoint(write_tiny_model(tmp_path / "same")).model_hash
    assert open_checkpoint(tiny).model_hash == same
    assert open_checkpoint(write_tiny_model(tmp_path / "seed", seed=1)).model_hash != same
    config = (tiny / "config.json").read_text()
    (tiny / "config.json").write_text(config.replace("10000.0", "20000.0"))
    assert open_checkpoint(tiny).model_hash != same
