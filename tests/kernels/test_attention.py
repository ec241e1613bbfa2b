"""Paged attention: values against the reference, bits that depend on the row's own past alone."""

import pytest
import torch
from kernel_cases import PagedSequences, normal, poisoned_allocations, random_parents, threads

from graftline.kernels.attention import paged_attention, paged_attention_reference
from graftline.kernels.attention_batch import AttentionBatch

TYPES = [torch.float32, torch.bfloat16]


def attend(sequences: PagedSequences, q: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
    with poisoned_allocations():
        return paged_attention(q, sequences.k_pages, sequences.v_pages, batch, q.shape[2] ** -0.5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 16), (8, 1, 80), (2, 1, 256), (6, 2, 24)]
)
def test_mixed_batches_match(dtype: torch.dtype, page_size: int, heads: int, kv_heads: int, head_dim: int) -> None:
    sequences = PagedSequences([0, 70, 5, 130], page_size, kv_heads, head_dim, dtype)
    batch = sequences.batch(
        [(0, 0, 19, None), (1, 70, 1, None), (2, 5, 8, random_parents(8, 1)), (3, 127, 5, [-1] * 5)]
    )
    q = normal(batch.num_rows, heads, head_dim, seed=5)
    expected = paged_attention_reference(q, sequences.k_pages, sequences.v_pages, batch, head_dim**-0.5)
    for num_threads in (1, 2):
        with threads(num_threads):
            torch.testing.assert_close(attend(sequences, q, batch), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("length", [1, 7, 8, 9, 63, 64, 65, 128, 200])
def test_block_boundaries(dtype: torch.dtype, length: int) -> None:
    sequences = PagedSequences([length], 16, 2, 32, dtype)
    batch = sequences.batch([(0, length - 1, 1, None)])
    q = 3 * normal(1, 4, 32, seed=5)
    expected = paged_attention_reference(q, sequences.k_pages, sequences.v_pages, batch, 32**-0.5)
    torch.testing.assert_close(attend(sequences, q, batch), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_row_has_the_same_bits_in_every_chunk_and_batch(dtype: torch.dtype, page_size: int) -> None:
    """Contract 1: one row alone, chunks of 1 to 140, with other sequences around, on one or two threads."""
    length = 140
    sequences = PagedSequences([length, 33, 90], page_size, 3, 64, dtype)
    q = normal(length, 9, 64, seed=5)
    alone = torch.cat([attend(sequences, q[i : i + 1], sequences.batch([(0, i, 1, None)])) for i in range(length)])
    others = normal(11, 9, 64, seed=6)
    for num_threads in (1, 2):
        with threads(num_threads):
            for chunk in (2, 3, 4, 8, 17, 33, 64, 139, 140):
                for start in range(0, length, chunk):
                    rows = slice(start, min(length, start + chunk))
                    batch = sequences.batch([(0, start, rows.stop - start, None)])
                    assert torch.equal(attend(sequences, q[rows], batch), alone[rows]), (chunk, start, num_threads)
            batch = sequences.batch([(1, 30, 3, None), (0, 100, 4, None), (2, 82, 8, random_parents(8, 2))])
            together = attend(sequences, torch.cat([others[:3], q[100:104], others[3:]]), batch)
            assert torch.equal(together[3:7], alone[100:104])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("start", [0, 5, 61, 64, 100])
def test_a_tree_node_has_the_bits_of_the_plain_sequence(dtype: torch.dtype, start: int) -> None:
    """Contract 1: every root-to-leaf path of a tree equals the chain that a plain decode would have computed."""
    parents = [-1, 0, 0, 1, 1, 2, 3, 5, 6, 8]
    page_size, heads, kv_heads, dim = 4, 6, 2, 32
    sequences = PagedSequences([start, start], page_size, kv_heads, dim, dtype)
    q = normal(len(parents), heads, dim, seed=5)
    tree = sequences.batch([(0, start, len(parents), parents)])
    out = attend(sequences, q, tree)
    slots = tree.slots()
    for leaf in range(len(parents)):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        chain = sequences.batch([(1, start, len(path), None)])
        for position in range(start):  # the same committed past
            for pages in (sequences.k_pages, sequences.v_pages):
                source, target = sequences.page_ids[0], sequences.page_ids[1]
                page, offset = divmod(position, page_size)
                pages[target[page], offset] = pages[source[page], offset]
        for node, slot in zip(path, chain.slots().tolist(), strict=True):
            page, offset = divmod(int(slots[node]), page_size)
            for pages in (sequences.k_pages, sequences.v_pages):
                pages[slot // page_size, slot % page_size] = pages[page, offset]
        assert torch.equal(attend(sequences, q[path], chain)[-1], out[leaf]), leaf


def test_long_chunks_on_long_pasts_match() -> None:
    sequences = PagedSequences([600], 16, 1, 64, torch.bfloat16)
    batch = sequences.batch([(0, 300, 270, None)])
    q = normal(270, 3, 64, seed=5)
    expected = paged_attention_reference(q, sequences.k_pages, sequences.v_pages, batch, 0.125)
    torch.testing.assert_close(attend(sequences, q, batch), expected, rtol=1e-4, atol=2e-5)


def test_large_scores_do_not_overflow() -> None:
    sequences = PagedSequences([130], 16, 1, 16, torch.float32)
    sequences.k_pages *= 100
    batch = sequences.batch([(0, 100, 30, None)])
    q = 100 * normal(30, 2, 16, seed=5)
    expected = paged_attention_reference(q, sequences.k_pages, sequences.v_pages, batch, 1.0)
    torch.testing.assert_close(attend(sequences, q, batch), expected, rtol=1e-3, atol=1e-4)


def test_nan_in_one_sequence_stays_there() -> None:
    """CASES I12: a poisoned request must not poison its neighbours."""
    sequences = PagedSequences([20, 20], 4, 1, 16, torch.float32)
    sequences.k_pages[sequences.page_ids[0][1]] = torch.nan
    batch = sequences.batch([(0, 20, 2, None), (1, 20, 2, None)])
    out = attend(sequences, normal(4, 2, 16), batch)
    assert out[:2].isnan().all()
    assert out[2:].isfinite().all()


def test_q_may_be_a_strided_view() -> None:
    sequences = PagedSequences([9], 4, 1, 16, torch.float32)
    batch = sequences.batch([(0, 6, 3, None)])
    qkv = normal(3, 4 * 16)
    view = qkv[:, :32].view(3, 2, 16)
    assert torch.equal(attend(sequences, view, batch), attend(sequences, view.contiguous(), batch))


def test_misfits_are_named() -> None:
    sequences = PagedSequences([9], 4, 2, 16, torch.float32)
    batch = sequences.batch([(0, 6, 3, None)])
    for q, message in ((normal(2, 2, 16), "2, 2, 16"), (normal(3, 3, 16), "3, 3, 16"), (normal(3, 2, 8), "3, 2, 8")):
        with pytest.raises(ValueError, match=message):
            paged_attention(q, sequences.k_pages, sequences.v_pages, batch, 1.0)
    with pytest.raises(ValueError, match="v_pages"):
        paged_attention(normal(3, 2, 16), sequences.k_pages, sequences.v_pages.bfloat16(), batch, 1.0)
    with pytest.raises(ValueError, match="pages of 4"):
        paged_attention(normal(3, 2, 16), sequences.pool[:, 0, :3], sequences.pool[:, 2, :3], batch, 1.0)
