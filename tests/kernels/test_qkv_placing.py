"""Norm, rotation and KV write at once, against the single ops, for batches of both kinds."""

from dataclasses import fields, replace

import pytest
import torch
from kernel_cases import PagedSequences, normal, poisoned_allocations
from torch import Tensor

from graftline.kernels.attention_batch import AttentionBatch
from graftline.kernels.qkv_placing import place_qkv, place_qkv_reference
from graftline.kernels.tree_batch import TreeBatch

pytest.importorskip("triton")

from graftline.kernels import qkv_placing_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PARENTS = [-1, 0, 0]


def batch_there(batch: AttentionBatch | TreeBatch) -> AttentionBatch | TreeBatch:
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return replace(batch, **{name: x.to(DEVICE) for name, x in values.items() if isinstance(x, Tensor)})


def batches(sequences: PagedSequences) -> list[AttentionBatch | TreeBatch]:
    """Rows of both kinds: the same trees, then those with padding between them."""
    trees = [(5, PARENTS), (0, [-1])]
    plain = sequences.batch([(index, start, len(parents), parents) for index, (start, parents) in enumerate(trees)])
    return [plain, sequences.tree_batch(trees, 3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(
    ("page_size", "shape", "rotated"), [(16, (3, 1, 16), 16), (1, (4, 2, 24), 24), (5, (2, 2, 32), 12)]
)
def test_all_at_once(
    dtype: torch.dtype, has_norm: bool, page_size: int, shape: tuple[int, int, int], rotated: int
) -> None:
    heads, kv_heads, dim = shape
    angles = normal(9, rotated // 2)
    tables = angles.cos(), angles.sin()
    # Values that bfloat16 holds where nothing is computed: the interpreter truncates where the GPU rounds.
    norms = [normal(dim, seed=seed).to(dtype) for seed in (7, 8)] if has_norm else [None, None]
    for kind in (0, 1):
        sequences = PagedSequences([5, 0], page_size, kv_heads, dim, dtype, slack=8)
        batch = batches(sequences)[kind]
        qkv = normal(batch.num_rows, (heads + 2 * kv_heads) * dim, seed=3).to(dtype)
        expected_pool, pool = sequences.pool.clone(), sequences.pool.to(DEVICE, copy=True)
        expected = place_qkv_reference(
            qkv, expected_pool[:, 0], expected_pool[:, 2], batch, batch.positions, *tables, *norms, 1e-5
        )
        there = batch_there(batch)
        with poisoned_allocations():
            q = qkv_placing_triton.place_qkv(
                qkv.to(DEVICE), pool[:, 0], pool[:, 2], there, there.positions, *(x.to(DEVICE) for x in tables),
                *(None if norm is None else norm.to(DEVICE) for norm in norms), 1e-5,
            )  # fmt: skip
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(q.cpu(), expected, **tolerance)
        torch.testing.assert_close(pool.cpu(), expected_pool, **tolerance)
        assert torch.equal(pool.cpu()[:, 1:], expected_pool[:, 1:]), "values are copied, planes of others untouched"


@pytest.mark.parametrize("kind", [0, 1])
def test_cpu_composes_the_same(kind: int) -> None:
    sequences = PagedSequences([5, 0], 4, 2, 16, torch.float32, slack=8)
    batch = batches(sequences)[kind]
    qkv, angles = normal(batch.num_rows, 6 * 16, seed=3), normal(9, 8)
    norms = normal(16, seed=7), normal(16, seed=8)
    expected_pool = sequences.pool.clone()
    expected = place_qkv_reference(
        qkv, expected_pool[:, 0], expected_pool[:, 2], batch, batch.positions, angles.cos(), angles.sin(), *norms, 1e-5
    )
    q = place_qkv(
        qkv, sequences.k_pages, sequences.v_pages, batch, batch.positions, angles.cos(), angles.sin(),
        q_norm=norms[0], k_norm=norms[1], eps=1e-5,
    )  # fmt: skip
    torch.testing.assert_close(q, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sequences.pool, expected_pool, rtol=1e-5, atol=1e-6)


def test_misfits_are_named() -> None:
    sequences = PagedSequences([5, 0], 4, 2, 16, torch.float32, slack=8)
    batch = batches(sequences)[1]
    tables = normal(9, 8).cos(), normal(9, 8).sin()
    pages = sequences.k_pages, sequences.v_pages
    for columns in (4 * 16, 6 * 16 + 8):
        with pytest.raises(ValueError, match=f"{columns}"):
            place_qkv(normal(6, columns), *pages, batch, batch.positions, *tables)
    with pytest.raises(ValueError, match="positions"):
        place_qkv(normal(6, 96), *pages, batch, batch.positions[:3], *tables)
    with pytest.raises(ValueError, match="together"):
        place_qkv(normal(6, 96), *pages, batch, batch.positions, *tables, q_norm=normal(16))


def test_rows_behind_all_segments_are_not_written() -> None:
    """Steps that are filled up to the size of a captured one."""
    sequences = PagedSequences([5, 0], 4, 2, 16, torch.float32, slack=8)
    batch = sequences.batch([(0, 5, 3, None), (1, 0, 2, None)])
    padded = replace(
        batch,
        row_segment=torch.cat((batch.row_segment, torch.full((3,), -1, dtype=torch.int32))),
        positions=torch.cat((batch.positions, torch.zeros(3, dtype=torch.int32))),
    )
    qkv, angles = normal(8, 6 * 16, seed=3), normal(9, 8)
    expected_pool, pool = sequences.pool.clone(), sequences.pool.to(DEVICE, copy=True)
    tables = angles.cos(), angles.sin()
    expected = place_qkv_reference(
        qkv[:5], expected_pool[:, 0], expected_pool[:, 2], batch, batch.positions, *tables, None, None, 1e-5
    )
    there = batch_there(padded)
    q = qkv_placing_triton.place_qkv(
        qkv.to(DEVICE),
        pool[:, 0],
        pool[:, 2],
        there,
        there.positions,
        *(x.to(DEVICE) for x in tables),
        None,
        None,
        1e-5,
    )
    torch.testing.assert_close(q.cpu()[:5], expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(pool.cpu(), expected_pool, rtol=1e-5, atol=1e-6)
