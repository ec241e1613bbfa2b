"""The arithmetic against what loaded models really hold."""

from pathlib import Path

import pytest
import torch

from graftline.engine.models.checkpoint import open_checkpoint
from graftline.engine.models.config import Family
from graftline.engine.models.dense import DenseModel
from graftline.engine.models.memory_figures import memory_figures
from graftline.engine.models.random import write_tiny_model
from graftline.engine.models.reference import OneRequestKv


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("tie", [False, True])
def test_parameters_on_disk(family: Family, tie: bool, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny_model(tmp_path / "tiny", family=family, tie=tie))
    total = (tmp_path / "tiny" / "model.safetensors").stat().st_size
    figures = memory_figures(checkpoint.config, torch.float32, torch.float32)
    weights = figures.weight_bytes(4, with_embedding=True, with_head=True)
    assert 0 < total - weights < 8192  # the file's header


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kv_and_stages(dtype: torch.dtype, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny_model(tmp_path / "tiny"))
    figures = memory_figures(checkpoint.config, dtype, torch.float32)
    model = DenseModel(checkpoint, range(4), dtype)
    keys, values = OneRequestKv(model, 32).layer_kv(0)
    assert figures.kv_bytes(1, 32) == keys.nbytes + values.nbytes
    whole = figures.weight_bytes(4, with_embedding=True, with_head=True)
    first = figures.weight_bytes(1, with_embedding=True, with_head=False)
    last = figures.weight_bytes(3, with_embedding=False, with_head=True)
    assert first + last == whole
    assert figures.embedding_bytes == 259 * 64 * dtype.itemsize
