"""Decoder layers in one call: the bits of the composition, whatever the model's shape."""

from dataclasses import replace

import pytest
import torch
from kernel_cases import PagedSequences, normal, poisoned_allocations, random_parents, threads
from torch import Tensor

from graftline.engine.models.dense import LayerWeights
from graftline.kernels.decoder_layer import DenseLayers, LayerPages
from graftline.kernels.layer_weights import DecoderLayerShape
from graftline.kernels.linear import LinearWeight, pack_linear


def layer(
    seed: int, hidden: int, heads: int, kv_heads: int, dim: int, inter: int, dtype: torch.dtype, extras: bool
) -> LayerWeights:
    def matrix(rows: int, columns: int, offset: int, bias: bool = False) -> LinearWeight:
        weight = normal(rows, columns, seed=seed + offset) / columns**0.5
        return pack_linear(weight, normal(rows, seed=seed + 50) if bias else None, storage=dtype)

    return LayerWeights(
        input_norm=1 + 0.1 * normal(hidden, seed=seed),
        qkv=matrix((heads + 2 * kv_heads) * dim, hidden, 1, extras),
        q_norm=1 + 0.1 * normal(dim, seed=seed + 2) if extras else None,
        k_norm=1 + 0.1 * normal(dim, seed=seed + 3) if extras else None,
        output=matrix(hidden, heads * dim, 4, extras),
        post_norm=1 + 0.1 * normal(hidden, seed=seed + 5),
        gate_up=matrix(2 * inter, hidden, 6),
        down=matrix(hidden, inter, 7),
    )


def make(
    num_layers: int = 3,
    hidden: int = 40,
    heads: int = 6,
    kv_heads: int = 2,
    dim: int = 16,
    inter: int = 48,
    rotated: int = 16,
    dtype: torch.dtype = torch.float32,
    extras: bool = False,
) -> DenseLayers:
    angles = normal(400, rotated // 2, seed=9)
    shape = DecoderLayerShape(heads, kv_heads, dim, 1e-5, dim**-0.5, angles.cos(), angles.sin())
    layers = [layer(100 * index, hidden, heads, kv_heads, dim, inter, dtype, extras) for index in range(num_layers)]
    return DenseLayers(layers, shape)


def pool(lengths: list[int], num_layers: int, dtype: torch.dtype, kv_heads: int = 2, dim: int = 16) -> PagedSequences:
    sequences = PagedSequences(lengths, 4, kv_heads, dim, dtype)
    sequences.pool = normal(sequences.pool.shape[0], 2 * num_layers, 4, kv_heads, dim, seed=3).to(dtype)
    return sequences


def pages_of(data: Tensor) -> LayerPages:
    return LayerPages([(data[:, 2 * index], data[:, 2 * index + 1]) for index in range(data.shape[1] // 2)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"extras": True, "rotated": 8},
        {"inter": 50, "hidden": 33},
        {"num_layers": 1, "heads": 4, "kv_heads": 4, "dim": 24, "rotated": 24},
        {"heads": 8, "kv_heads": 1, "inter": 16},
    ],
)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_one_call_gives_the_bits_of_the_ops(dtype: torch.dtype, options: dict[str, int], num_threads: int) -> None:
    model = make(dtype=dtype, **options)
    kv_heads, dim = options.get("kv_heads", 2), options.get("dim", 16)
    sequences = pool([0, 70, 5], model.num_layers, dtype, kv_heads, dim)
    batch = sequences.batch([(0, 0, 19, None), (1, 70, 1, None), (2, 5, 8, random_parents(8, 1))])
    hidden = normal(batch.num_rows, model.hidden_size, seed=4)
    before = hidden.clone()
    composed_pool, fused_pool = sequences.pool.clone(), sequences.pool.clone()
    capture = {1, model.num_layers}
    with threads(num_threads), poisoned_allocations():
        expected, expected_features = model.run_composed(hidden, batch, pages_of(composed_pool), capture)
        out, features = model.run(hidden, batch, pages_of(fused_pool), capture)
    assert expected.isfinite().all()
    assert torch.equal(out, expected)
    assert torch.equal(hidden, before)
    assert features.keys() == expected_features.keys() == capture
    assert all(torch.equal(features[n], expected_features[n]) for n in capture)
    assert torch.equal(features[model.num_layers], out)
    assert torch.equal(fused_pool, composed_pool)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_in_every_chunk_batch_and_tree(dtype: torch.dtype) -> None:
    """Contract 1, through whole layers: a prompt row by row, in chunks, beside others, and as a tree's path."""
    model = make(dtype=dtype)
    length = 60
    hidden = normal(length, model.hidden_size, seed=4)
    sequences = pool([length, 40], model.num_layers, dtype)

    def chunked(size: int, data: Tensor) -> Tensor:
        outs = []
        for start in range(0, length, size):
            rows = min(size, length - start)
            batch = sequences.batch([(0, start, rows, None)])
            outs.append(model.run(hidden[start : start + rows], batch, pages_of(data))[0])
        return torch.cat(outs)

    alone = chunked(1, sequences.pool.clone())
    for size in (3, 4, 8, 33, 60):
        with threads(1 + size % 2):
            assert torch.equal(chunked(size, sequences.pool.clone()), alone)

    data = sequences.pool.clone()
    chunked(60, data)
    parents = [-1, 0, 0, 2, 1, 3]  # the path 0, 2, 3, 5 carries the tokens that really follow
    tree_hidden = torch.cat([hidden[50:51], hidden[:1], hidden[51:53], hidden[1:2], hidden[53:54]])
    batch = sequences.batch([(1, 40, 2, None), (0, 50, 6, parents)])
    out, _ = model.run(torch.cat([hidden[:2], tree_hidden]), batch, pages_of(data))
    assert torch.equal(out[[2, 4, 5, 7]], alone[50:54])


def test_misfits_are_named() -> None:
    model = make()
    sequences = pool([9], 3, torch.float32)
    batch = sequences.batch([(0, 6, 3, None)])
    pages = pages_of(sequences.pool)
    with pytest.raises(ValueError, match="hidden"):
        model.run(normal(2, 40), batch, pages)
    with pytest.raises(ValueError, match="pages of 2 layers"):
        model.run(normal(3, 40), batch, pages_of(sequences.pool[:, :4]))
    with pytest.raises(ValueError, match="capture"):
        model.run(normal(3, 40), batch, pages, [4])
    with pytest.raises(ValueError, match="pages of 4"):
        model.run(normal(3, 40), batch, pages_of(pool([9], 3, torch.float32, kv_heads=1).pool))
    good = layer(0, 40, 6, 2, 16, 48, torch.float32, False)
    shape = DecoderLayerShape(6, 2, 16, 1e-5, 0.25, normal(9, 8), normal(9, 8))
    with pytest.raises(ValueError, match="none"):
        DenseLayers([], shape)
    with pytest.raises(ValueError, match="layer 1: down"):
        DenseLayers([good, replace(good, down=good.output)], shape)
    with pytest.raises(ValueError, match="come together"):
        DenseLayers([replace(good, q_norm=normal(16))], shape)
    with pytest.raises(ValueError, match="post_norm"):
        DenseLayers([replace(good, post_norm=normal(41))], shape)
    with pytest.raises(ValueError, match="cos"):
        DenseLayers([good], replace(shape, cos=normal(9, 9), sin=normal(9, 9)))
