"""Triton kernels against the references: on the GPU where there is one, else tiny shapes under the interpreter."""

from dataclasses import fields, replace

import pytest
import torch
from kernel_cases import PagedSequences, normal, poisoned_allocations, random_parents
from torch import Tensor

from graftline.kernels.activation import silu_mul_reference
from graftline.kernels.attention import paged_attention_reference
from graftline.kernels.attention_batch import AttentionBatch
from graftline.kernels.kv_compact import compact_kv_reference
from graftline.kernels.kv_write import write_kv_reference
from graftline.kernels.norm import rms_norm_reference
from graftline.kernels.page_staging import gather_pages, scatter_pages
from graftline.kernels.rope import rope_reference_
from graftline.kernels.sample import SamplingRows, build_sampling_rows, sample_reference, top_k_reference

pytest.importorskip("triton")

from graftline.kernels import (
    activation_triton,
    attention_triton,
    kv_compact_triton,
    kv_write_triton,
    norm_triton,
    page_staging_triton,
    rope_triton,
    sample_triton,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TYPES = [torch.float32, torch.bfloat16]


def there(x: Tensor) -> Tensor:
    return x.to(DEVICE)


def batch_there(batch: AttentionBatch) -> AttentionBatch:
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return replace(batch, **{name: there(value) for name, value in values.items() if isinstance(value, Tensor)})


def close(actual: Tensor, expected: Tensor) -> None:
    loose = expected.dtype == torch.bfloat16
    torch.testing.assert_close(actual.cpu(), expected, rtol=2e-2 if loose else 1e-4, atol=2e-2 if loose else 2e-5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("dim", [1, 24, 100])
def test_norms(dtype: torch.dtype, dim: int) -> None:
    x, residual, weight = normal(3, dim, seed=1, dtype=dtype), normal(3, dim, seed=2, dtype=dtype), normal(dim, seed=3)
    weight = weight.to(dtype)
    with poisoned_allocations():
        close(norm_triton.rms_norm(there(x), there(weight), 1e-5), rms_norm_reference(x, weight, 1e-5))
        normed, total = norm_triton.add_rms_norm(there(x), there(residual), there(weight), 1e-5)
    close(total, x + residual)
    close(normed, rms_norm_reference(x + residual, weight, 1e-5))
    heads = normal(2, 5 * dim, seed=4, dtype=dtype)[:, dim : 3 * dim].view(2, 2, dim)
    close(norm_triton.rms_norm(there(heads), there(weight), 1e-5), rms_norm_reference(heads, weight, 1e-5))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("head_dim", "rotated"), [(16, 16), (20, 6)])
def test_rope(dtype: torch.dtype, head_dim: int, rotated: int) -> None:
    angles, positions = normal(9, rotated // 2), torch.tensor([0, 8, 3], dtype=torch.int32)
    qkv = normal(3, 5 * head_dim, seed=2, dtype=dtype)
    moved = there(qkv.clone())
    q, k = moved[:, : 3 * head_dim].view(3, 3, head_dim), moved[:, 3 * head_dim : 4 * head_dim].view(3, 1, head_dim)
    rope_triton.rope_(q, k, there(positions), there(angles.cos()), there(angles.sin()))
    rope_reference_(qkv[:, : 4 * head_dim].view(3, 4, head_dim), positions, angles.cos(), angles.sin())
    close(moved, qkv)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("inter", [1, 33, 1500])
def test_silu_mul(dtype: torch.dtype, inter: int) -> None:
    gate_up = 3 * normal(2, 2 * inter, dtype=dtype)
    with poisoned_allocations():
        close(activation_triton.silu_mul(there(gate_up)), silu_mul_reference(gate_up))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_write_kv(dtype: torch.dtype, page_size: int) -> None:
    sequences = PagedSequences([0, 5], page_size, 2, 12, dtype, slack=8)
    batch = sequences.batch([(0, 0, 4, None), (1, 5, 3, random_parents(3, 1))])
    # Values that bfloat16 holds: the interpreter truncates where the GPU rounds.
    k, v = normal(7, 2, 12, seed=3).bfloat16().float(), normal(7, 2, 12, seed=4).bfloat16().float()
    pool = there(sequences.pool.clone())
    kv_write_triton.write_kv(there(k), there(v), pool[:, 0], pool[:, 2], batch_there(batch))
    write_kv_reference(k, v, sequences.k_pages, sequences.v_pages, batch)
    assert torch.equal(pool.cpu(), sequences.pool)


@pytest.mark.parametrize("token_bytes", [6, 24])
def test_compact_kv(token_bytes: int) -> None:
    pool = torch.randint(0, 256, (12, 3, 4, token_bytes), dtype=torch.uint8)
    arguments = [
        torch.tensor(values, dtype=torch.int32)
        for values in ([[3, 1, 7], [2, 9, 0], [5, 6, 8]], [2, 0, 5], [[0, 2, 3, 6], [0, 1, -1, -1], [0, 5, -1, -1]])
    ]
    moved = there(pool.clone())
    kv_compact_triton.compact_kv(moved, *map(there, arguments))
    compact_kv_reference(pool, *arguments)
    assert torch.equal(moved.cpu(), pool)


@pytest.mark.parametrize("page_bytes", [7, 64, 5000])
def test_page_staging(page_bytes: int) -> None:
    pool = torch.randint(0, 256, (6, page_bytes), dtype=torch.uint8)
    ids = torch.tensor([4, 0, 3])
    plain = torch.zeros(5, page_bytes, dtype=torch.uint8)
    gather_pages(pool, ids, plain)
    assert torch.equal(plain[:3], pool[ids])
    assert not plain[3:].any()
    staging = there(torch.zeros_like(plain))
    page_staging_triton.gather_pages(there(pool), there(ids), staging)
    assert torch.equal(staging.cpu(), plain)
    back, expected = there(torch.zeros_like(pool)), torch.zeros_like(pool)
    page_staging_triton.scatter_pages(staging, there(ids), back)
    scatter_pages(plain, ids, expected)
    assert torch.equal(back.cpu(), expected)
    assert torch.equal(expected[ids], pool[ids])


def test_page_staging_misfits_are_named() -> None:
    pool, ids = torch.zeros(4, 8, dtype=torch.uint8), torch.tensor([1, 2])
    with pytest.raises(ValueError, match="staging"):
        gather_pages(pool, ids, torch.zeros(2, 9, dtype=torch.uint8))
    with pytest.raises(ValueError, match="page_ids"):
        gather_pages(pool, ids, torch.zeros(1, 8, dtype=torch.uint8))
    with pytest.raises(ValueError, match="page_ids"):
        scatter_pages(pool, ids.int(), pool)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("page_size", "shape", "num_splits"),
    [(16, (3, 1, 16), 1), (1, (2, 2, 24), 3), (5, (6, 2, 80), 1), (64, (4, 2, 256), 2)],
)
def test_attention(dtype: torch.dtype, page_size: int, shape: tuple[int, int, int], num_splits: int) -> None:
    heads, kv_heads, head_dim = shape
    sequences = PagedSequences([0, 70, 5], page_size, kv_heads, head_dim, dtype, slack=12)
    q = normal(14, heads, head_dim, seed=5, dtype=dtype)
    parents = [-1, 0, 0, 1, 2, 2, 5]
    for segments in (
        [(0, 0, 6, None), (1, 70, 1, None), (2, 5, 7, None)],
        [(0, 0, 6, [-1, -1, 1, 0, 3, 3]), (1, 70, 1, None), (2, 5, 7, parents)],
    ):
        batch = sequences.batch(segments)
        expected = paged_attention_reference(q, sequences.k_pages, sequences.v_pages, batch, head_dim**-0.5)
        pool = there(sequences.pool)
        with poisoned_allocations():
            out = attention_triton.paged_attention(
                there(q), pool[:, 0], pool[:, 2], batch_there(batch), head_dim**-0.5, num_splits
            )
        close(out, expected)


def test_attention_of_a_chunk_longer_than_a_tile() -> None:
    sequences = PagedSequences([40], 16, 1, 16, torch.float32, slack=80)
    batch = sequences.batch([(0, 33, 75, None)])
    q = normal(75, 2, 16, seed=5)
    pool = there(sequences.pool)
    out = attention_triton.paged_attention(there(q), pool[:, 0], pool[:, 2], batch_there(batch), 0.25)
    close(out, paged_attention_reference(q, sequences.k_pages, sequences.v_pages, batch, 0.25))


@pytest.mark.parametrize("num_splits", [1, 3])
def test_attention_of_a_step_that_is_filled_up(num_splits: int) -> None:
    """Rows behind all segments, and segments without rows: what a captured step has where there are fewer prompts."""
    sequences = PagedSequences([40, 0], 16, 1, 16, torch.float32, slack=80)
    batch = sequences.batch([(0, 33, 20, None), (1, 0, 7, None)])

    def longer(values: Tensor, *more: int) -> Tensor:
        return torch.cat((values, torch.tensor(more, dtype=torch.int32)))

    filled = replace(
        batch,
        row_segment=longer(batch.row_segment, *[-1] * 5),
        positions=longer(batch.positions, *[0] * 5),
        segment_rows=longer(batch.segment_rows, 27, 27),
        segment_start=longer(batch.segment_start, 0, 0),
        page_tables=torch.cat((batch.page_tables, torch.full_like(batch.page_tables, 10**6))),
    )
    q = normal(32, 2, 16, seed=5)
    pool = there(sequences.pool)
    with poisoned_allocations():
        out = attention_triton.paged_attention(there(q), pool[:, 0], pool[:, 2], batch_there(filled), 0.25, num_splits)
    close(out[:27], paged_attention_reference(q[:27], sequences.k_pages, sequences.v_pages, batch, 0.25))


def rows_there(rows: SamplingRows) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return tuple(map(there, (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed)))


@pytest.mark.parametrize(("count", "max_candidates"), [(1, 8), (150, 8192), (150, 12)])
def test_sample(count: int, max_candidates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draws of the CPU: same filters, same noise; rows thinned out first, or not where too many remain."""
    monkeypatch.setattr(sample_triton, "_BLOCK", 64)
    monkeypatch.setattr(sample_triton, "_MAX_CANDIDATES", max_candidates)
    logits = 2 * normal(10, count, seed=1)
    logits[8] = logits[8].round()  # ties at every threshold
    logits[9] = logits[9].round()
    logits[2, : count // 2] = -torch.inf
    rows = build_sampling_rows(
        [0.0, 1.0, 0.7, 1.3, 1.0, 1.0, 2.0, 1e-30, 1.0, 1.0],
        [0, 0, 3, 1, 0, 40, 0, 0, 5, 0],
        [1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 1.0, 1.0, 1.0, 0.6],
        [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.3, 0.0, 0.0, 0.0],
        [*range(9), 2**64 - 1],
    )
    positions = torch.arange(50, 60)
    ids = sample_triton.sample(there(logits), *rows_there(rows), there(positions))
    assert ids.cpu().tolist() == sample_reference(logits, rows, positions).tolist()


def test_sample_marks_bad_rows() -> None:
    """CASES I12."""
    logits = normal(5, 30)
    logits[1, 29], logits[2], logits[3, 0] = torch.nan, -torch.inf, torch.inf
    rows = build_sampling_rows([0.0, 1.0, 1.0, 0.0, 1.0], [0] * 5, [0.9] * 5, [0.0] * 5, [1] * 5)
    ids = sample_triton.sample(there(logits), *rows_there(rows), there(torch.arange(5))).cpu().tolist()
    assert ids[1:4] == [-1, -1, -1]
    assert ids[0] == int(logits[0].argmax())
    assert sample_triton.argmax(there(logits)).cpu().tolist()[:4] == [ids[0], -1, -1, -1]


@pytest.mark.parametrize(("count", "k"), [(1, 1), (9, 4), (150, 3)])
def test_top_k(count: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_triton, "_BLOCK", 64)
    logits = normal(3, count, seed=2)
    logits[1] = logits[1].round()
    values, ids, norms = sample_triton.top_k(there(logits), k)
    expected_values, expected_ids = top_k_reference(logits, k)
    assert torch.equal(ids.cpu(), expected_ids)
    close(values, expected_values)
    close(norms, logits.logsumexp(-1))
