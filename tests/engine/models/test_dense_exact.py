"""Contract 1: a token's bits do not depend on the chunk, batch or tree it was computed in (native CPU kernels)."""

import pytest
import torch
from torch import Tensor

from graftline.engine.models.checkpoint import open_checkpoint
from graftline.engine.models.config import Family
from graftline.engine.models.dense import DenseModel
from graftline.engine.models.random import write_tiny_model
from graftline.engine.models.reference import OneRequestKv, forward
from graftline.kernels.attention_batch import SegmentRows, build_attention_batch
from graftline.kernels.native_library import native_library

pytestmark = pytest.mark.skipif(native_library() is None, reason="the references are not row-count invariant")

IDS = torch.randint(0, 97, (51,), generator=torch.Generator().manual_seed(4)).tolist()


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = getattr(torch, request.param)
    return chosen


@pytest.fixture(scope="module", params=[Family.LLAMA, Family.QWEN2, Family.QWEN3])
def model(request: pytest.FixtureRequest, dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory) -> DenseModel:
    """Sizes that fill neither tiles nor panels."""
    path = write_tiny_model(
        tmp_path_factory.mktemp("models") / "odd",
        layers=3,
        hidden=72,
        heads=3,
        kv_heads=1,
        intermediate=100,
        vocab=97,
        family=request.param,
    )
    return DenseModel(open_checkpoint(path), range(3), dtype)


@pytest.fixture(scope="module")
def one_by_one(model: DenseModel) -> Tensor:
    """Logits of every position, each computed alone."""
    kv = OneRequestKv(model, len(IDS))
    return torch.cat([forward(model, [token], start, kv) for start, token in enumerate(IDS)])


@pytest.mark.parametrize("chunk", [2, 3, 4, 7, 8, 16, 17, 51])
def test_chunks(model: DenseModel, one_by_one: Tensor, chunk: int) -> None:
    kv = OneRequestKv(model, len(IDS), page_size=1 if chunk == 7 else 16)
    parts = [forward(model, IDS[start : start + chunk], start, kv) for start in range(0, len(IDS), chunk)]
    assert torch.equal(torch.cat(parts), one_by_one)


def test_a_batch_of_three(model: DenseModel, one_by_one: Tensor) -> None:
    kv = OneRequestKv(model, 3 * 80)
    lengths = (51, 20, 33)
    segments = [SegmentRows(0, n, range(5 * index, 5 * index + 5)) for index, n in enumerate(lengths)]
    rows = torch.tensor([token for n in lengths for token in IDS[:n]])
    hidden, _ = model.run_layers(model.embed(rows), build_attention_batch(segments, 16), kv)
    parts = model.logits(model.final_norm(hidden)).split(lengths)
    for part, length in zip(parts, lengths, strict=True):
        assert torch.equal(part, one_by_one[:length])


@pytest.mark.parametrize("nodes", [4, 8])
def test_a_verify(model: DenseModel, one_by_one: Tensor, nodes: int) -> None:
    """The true continuation as one path of a tree among wrong drafts."""
    start = 35
    kv = OneRequestKv(model, start + nodes)
    forward(model, IDS[:start], 0, kv)
    tokens, parents, path = [IDS[start]], [-1], [0]
    while len(tokens) < nodes:
        tokens.append(IDS[start + len(path)] if len(tokens) % 2 else 5)
        parents.append(path[-1])
        if len(tokens) % 2 == 0:
            path.append(len(tokens) - 1)
    batch = build_attention_batch([SegmentRows(start, nodes, kv.page_ids, parents)], 16)
    hidden, _ = model.run_layers(model.embed(torch.tensor(tokens)), batch, kv)
    logits = model.logits(model.final_norm(hidden))
    assert torch.equal(logits[path], one_by_one[start : start + len(path)])


def test_threads(model: DenseModel, one_by_one: Tensor) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        at_once = forward(model, IDS, 0, OneRequestKv(model, len(IDS)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(at_once, one_by_one)
