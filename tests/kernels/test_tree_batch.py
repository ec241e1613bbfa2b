"""Rounds of fixed shape: attention and KV writes over `TreeBatch`, against batches the host describes row by row."""

from dataclasses import fields, replace

import pytest
import torch
from kernel_cases import PagedSequences, normal, poisoned_allocations, random_parents
from torch import Tensor

from graftline.kernels.attention import paged_attention, paged_attention_reference, tree_attention_reference
from graftline.kernels.kv_write import write_kv, write_kv_reference
from graftline.kernels.tree_batch import TreeBatch

pytest.importorskip("triton")

from graftline.kernels import kv_write_triton
from graftline.kernels.tree_attention_triton import Tiling, choose_tiling, tree_attention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TREES = [(0, [-1, 0, 0, 1, 1]), None, (70, [-1]), (13, [-1, 0, 1, 2, 1, 0, 5])]


def batch_there(batch: TreeBatch) -> TreeBatch:
    tensors = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return replace(batch, **{name: t.to(DEVICE) for name, t in tensors.items() if isinstance(t, Tensor)})


def close(actual: Tensor, expected: Tensor) -> None:
    loose = expected.dtype == torch.bfloat16
    torch.testing.assert_close(actual.cpu(), expected, rtol=2e-2 if loose else 1e-4, atol=2e-2 if loose else 2e-5)


def real_rows(trees: list[tuple[int, list[int]] | None], rows_each: int) -> list[int]:
    return [index * rows_each + node for index, tree in enumerate(trees) if tree for node in range(len(tree[1]))]


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_rows_see_what_the_same_trees_see_row_by_row(page_size: int) -> None:
    sequences = PagedSequences([0, 1, 70, 13], page_size, 2, 16, torch.float32, slack=9)
    batch = sequences.tree_batch(TREES, 7)
    q = normal(28, 6, 16, seed=5)
    with poisoned_allocations():
        out = paged_attention(q, sequences.k_pages, sequences.v_pages, batch, 0.25)
    plain = sequences.batch([(index, tree[0], len(tree[1]), tree[1]) for index, tree in enumerate(TREES) if tree])
    rows = real_rows(TREES, 7)
    expected = paged_attention_reference(q[rows], sequences.k_pages, sequences.v_pages, plain, 0.25)
    torch.testing.assert_close(out[rows], expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(batch.positions[rows], plain.positions)
    assert torch.equal(batch.slots()[rows], plain.slots())
    assert not out[7:14].any(), "padding sequences are zero"
    assert out.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("page_size", "shape", "tiling"),
    [
        (16, (3, 1, 16), Tiling(16, 16, 1, 16, 4, 2)),
        (1, (2, 2, 24), Tiling(16, 32, 3, 32, 4, 3)),
        (5, (6, 2, 80), Tiling(16, 16, 8, 16, 4, 2)),
        (64, (4, 2, 64), Tiling(16, 32, 2, 64, 4, 2)),
    ],
)
def test_kernel(dtype: torch.dtype, page_size: int, shape: tuple[int, int, int], tiling: Tiling) -> None:
    heads, kv_heads, head_dim = shape
    sequences = PagedSequences([0, 1, 70, 13], page_size, kv_heads, head_dim, dtype, slack=9)
    batch = sequences.tree_batch(TREES, 7)
    _poison_unseen(sequences, batch)
    q = normal(28, heads, head_dim, seed=5, dtype=dtype)
    expected = tree_attention_reference(q, sequences.k_pages, sequences.v_pages, batch, head_dim**-0.5)
    assert expected.isfinite().all()
    pool = sequences.pool.to(DEVICE)
    with poisoned_allocations():
        out = tree_attention(q.to(DEVICE), pool[:, 0], pool[:, 2], batch_there(batch), head_dim**-0.5, tiling)
    close(out, expected)


def _poison_unseen(sequences: PagedSequences, batch: TreeBatch) -> None:
    """NaN in every slot that no row sees: left by other requests, or never written."""
    seen = torch.zeros(sequences.pool.shape[0], sequences.page_size, dtype=torch.bool)
    for index, start in enumerate(batch.starts.tolist()):
        rows = batch.visible[index * batch.rows_each : (index + 1) * batch.rows_each].tolist()
        for slot in [*range(start), *(start + j for j in range(batch.num_tail) if any(row >> j & 1 for row in rows))]:
            page, offset = divmod(slot, sequences.page_size)
            seen[batch.page_tables[index, page], offset] = True
    sequences.pool.transpose(1, 2)[~seen] = torch.nan


def test_kernel_of_a_wide_tail_with_the_sign_bit() -> None:
    """A growth level: few new rows that see any of 64 scratch slots; several tiles of pairs."""
    sequences = PagedSequences([20, 20], 16, 1, 16, torch.float32, slack=64)
    batch = sequences.tree_batch([(20, [-1] * 12), (9, [-1] * 12)], 12, num_tail=64)
    wide = torch.randint(-(2**62), 2**62, (24,), generator=torch.Generator().manual_seed(1)) * 2 + 1
    batch = replace(batch, visible=wide)
    assert bool((wide < 0).any())
    q = normal(24, 3, 16, seed=5)
    expected = tree_attention_reference(q, sequences.k_pages, sequences.v_pages, batch, 0.25)
    pool = sequences.pool.to(DEVICE)
    tiling = Tiling(16, 32, 2, 32, 4, 2)
    close(tree_attention(q.to(DEVICE), pool[:, 0], pool[:, 2], batch_there(batch), 0.25, tiling), expected)


@pytest.mark.parametrize("start", [31, 32, 33, 64])
def test_kernel_at_block_boundaries(start: int) -> None:
    sequences = PagedSequences([start], 16, 1, 16, torch.float32, slack=8)
    batch = sequences.tree_batch([(start, [-1, 0, 0])], 3)
    q = 3 * normal(3, 2, 16, seed=5)
    expected = tree_attention_reference(q, sequences.k_pages, sequences.v_pages, batch, 0.25)
    pool = sequences.pool.to(DEVICE)
    for num_splits in (1, 2, 3):
        tiling = Tiling(16, 32, num_splits, 32, 4, 2)
        close(tree_attention(q.to(DEVICE), pool[:, 0], pool[:, 2], batch_there(batch), 0.25, tiling), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_writes_leave_out_padding(dtype: torch.dtype, page_size: int) -> None:
    sequences = PagedSequences([0, 1, 70, 13], page_size, 2, 16, dtype, slack=9)
    batch = sequences.tree_batch(TREES, 7)
    # Values that bfloat16 holds: the interpreter truncates where the GPU rounds.
    k, v = normal(28, 2, 16, seed=3).bfloat16().float(), normal(28, 2, 16, seed=4).bfloat16().float()
    plain = sequences.batch([(index, tree[0], len(tree[1]), tree[1]) for index, tree in enumerate(TREES) if tree])
    rows = real_rows(TREES, 7)
    expected, kernel = sequences.pool.clone(), sequences.pool.to(DEVICE, copy=True)
    write_kv_reference(k[rows], v[rows], expected[:, 0], expected[:, 2], plain)
    there = batch_there(batch)
    kv_write_triton.write_rows(k.to(DEVICE), v.to(DEVICE), kernel[:, 0], kernel[:, 2], there.row_slots)
    assert torch.equal(kernel.cpu(), expected)
    write_kv(k, v, sequences.k_pages, sequences.v_pages, batch)
    assert torch.equal(sequences.pool, expected)


@pytest.mark.parametrize("sequences", [1, 4, 64, 256])
@pytest.mark.parametrize("pairs", [1, 8, 32, 256])
@pytest.mark.parametrize("max_slots", [64, 2048, 131072])
def test_tilings_keep_their_promises(sequences: int, pairs: int, max_slots: int) -> None:
    for head_dim, itemsize in ((64, 2), (128, 2), (256, 2), (128, 4), (256, 4)):
        tiling = choose_tiling(sequences, 8, pairs, head_dim, itemsize, max_slots, 132)
        assert 16 <= tiling.block_m <= 128
        assert tiling.block_m * head_dim * 4 <= 64 * 1024, "accumulators stay in registers"
        assert 1 <= tiling.num_splits <= 64
        assert tiling.num_splits == 1 or tiling.num_splits * tiling.min_span <= max_slots
        blocks = 2 * tiling.num_stages * tiling.block_n * head_dim * itemsize
        assert blocks <= 200 * 1024, "what is read ahead fits into shared memory"


def test_long_sequences_on_a_busy_device_read_further_ahead() -> None:
    tilings = {
        (count, slots): choose_tiling(count, 8, 4, 128, 2, slots, 132) for count in (16, 32) for slots in (1088, 17408)
    }
    assert [tilings[count, 1088].num_stages for count in (16, 32)] == [3, 3]
    assert [(tilings[count, 17408].num_splits, tilings[count, 17408].num_stages) for count in (16, 32)] == [
        (4, 4),
        (4, 4),
    ]
    assert choose_tiling(1, 8, 4, 128, 2, 17408, 132).num_stages == 3, "it has the device to itself"


def test_misfits_are_named() -> None:
    sequences = PagedSequences([9], 4, 2, 16, torch.float32)
    batch = sequences.tree_batch([(6, random_parents(3, 1))], 3)
    q, pages = normal(3, 2, 16), (sequences.k_pages, sequences.v_pages)
    for change, message in (
        ({"visible": batch.visible.int()}, "visible"),
        ({"starts": batch.starts.long()}, "starts"),
        ({"rows_each": 2}, "2 each"),
        ({"num_tail": 65}, "num_tail 65"),
        ({"page_tables": batch.page_tables[0]}, "page_tables"),
        ({"row_slots": batch.row_slots[:2]}, "row_slots"),
    ):
        with pytest.raises(ValueError, match=message):
            paged_attention(q, *pages, replace(batch, **change), 1.0)
    with pytest.raises(ValueError, match="positions"):
        write_kv(q, q, *pages, replace(batch, positions=batch.positions.long()))
