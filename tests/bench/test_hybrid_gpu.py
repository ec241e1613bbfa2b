"""The logic of the GPU measurement, at a tiny size on CPU; what is measured there is not of interest."""

from pathlib import Path

import pytest

from graftline.bench.hybrid_gpu import Sizes, compare_modes, fitting_layers, measure
from graftline.engine.models.config import read_config
from graftline.engine.models.qwen3_next_random import write_tiny_qwen3_next


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> Sizes:
    kinds = (*["linear_attention"] * 3, "full_attention")
    path = write_tiny_qwen3_next(tmp_path_factory.mktemp("bench"), layer_types=kinds * 2)
    return Sizes(
        model=read_config(Path(path)),
        device="cpu",
        num_slots=3,
        num_pages=8,
        budget_bytes=1 << 30,
        batches=(1, 2),
        rounds=1,
    )


def test_what_is_written(sizes: Sizes) -> None:
    found = measure(sizes)
    prefill, decode = found["pools"]
    assert (prefill["role"], decode["role"], prefill["layers"]) == ("prefill", "decode", 8)
    for role in (prefill, decode):
        assert role["planned_bytes"] == role["allocated_bytes"]
    assert prefill["verify_state_bytes"] == 0
    assert prefill["skipped_bytes"] == decode["verify_state_bytes"] > 0
    assert len(found["verify_state"]) == 6
    for compared in found["verify_state"]:
        assert compared["identical"]
        assert compared["as_plain_decoding"]
        assert compared["bytes_ratio"] < 1
        assert compared["time_ratio"] > 0


def test_only_layers_that_fit_are_allocated(sizes: Sizes) -> None:
    from dataclasses import replace

    whole = fitting_layers(sizes)
    assert whole == 8
    assert fitting_layers(replace(sizes, budget_bytes=200_000)) == 4


def test_a_wrong_commit_is_seen(sizes: Sizes) -> None:
    """The accepted path matters: states after another path are others."""
    parents = (-1, 0, 0)
    one = compare_modes(sizes, "one", parents, (0, 1), 1)
    assert one.as_plain_decoding
    import graftline.bench.hybrid_gpu as bench

    layers = bench.Layers(sizes, 1, parents)
    first, second = (bench._plain_state(layers, path) for path in ((0, 1), (0, 2)))
    assert not bool((first == second).all())
