"""The plain generator against the plainest: the whole sequence anew for every token."""

import pytest
import torch

from graftline.engine.models.checkpoint import open_checkpoint
from graftline.engine.models.dense import DenseModel
from graftline.engine.models.random import write_tiny_model
from graftline.engine.models.reference import OneRequestKv, forward, generate, greedy
from graftline.kernels.sample import build_sampling_rows, sample


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DenseModel:
    path = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", layers=2, context=64, scale=1.0)
    return DenseModel(open_checkpoint(path), range(2), torch.float32)


def test_greedy_is_the_argmax_of_the_whole_sequence(model: DenseModel) -> None:
    ids = [5, 6, 7]
    for token in greedy(model, ids, 12):
        logits = forward(model, ids, 0, OneRequestKv(model, len(ids)))
        assert token == int(logits[-1].argmax())
        ids = [*ids, token]


def test_sampling_is_keyed_by_seed_and_position(model: DenseModel) -> None:
    ids = [5, 6, 7]
    rows = build_sampling_rows([0.9], [40], [0.95], [0.01], [11])
    output = generate(model, ids, 12, temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=11)
    for token in output:
        logits = forward(model, ids, 0, OneRequestKv(model, len(ids)))[-1:]
        assert token == int(sample(logits, rows, torch.tensor([len(ids)])))
        ids = [*ids, token]
    assert generate(model, [5, 6, 7], 12, temperature=0.9, seed=12) != output


def test_it_ends_at_an_ending_id_and_includes_it(model: DenseModel) -> None:
    free = greedy(model, [5, 6, 7], 12)
    first = free.index(free[5])
    assert greedy(model, [5, 6, 7], 12, eos_ids={free[5]}) == free[: first + 1]


@pytest.mark.parametrize(("prompt", "asked", "given"), [(60, 10, 4), (63, 10, 1), (3, 5, 5), (3, 0, 0)])
def test_it_ends_with_the_context(model: DenseModel, prompt: int, asked: int, given: int) -> None:
    assert len(greedy(model, list(range(prompt)), asked)) == given
