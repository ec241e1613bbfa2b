"""KV writes and compaction: every byte that must move moves, no other byte changes."""

import random

import pytest
import torch
from kernel_cases import PagedSequences, normal, random_parents, threads

from graftline.kernels.kv_compact import compact_kv, compact_kv_reference
from graftline.kernels.kv_write import write_kv, write_kv_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_rows_land_in_their_slots_and_nowhere_else(dtype: torch.dtype, page_size: int) -> None:
    sequences = PagedSequences([0, 11, 5], page_size, 2, 16, dtype)
    batch = sequences.batch([(0, 0, 40, None), (1, 11, 1, None), (2, 5, 7, random_parents(7, 1))])
    qkv = normal(batch.num_rows, 6, 16, seed=3)
    k, v = qkv[:, 2:4], qkv[:, 4:6]
    expected = sequences.pool.clone()
    write_kv_reference(k, v, expected[:, 0], expected[:, 2], batch)
    with threads(2):
        write_kv(k, v, sequences.k_pages, sequences.v_pages, batch)
    assert torch.equal(sequences.pool, expected)
    page, offset = divmod(int(batch.slots()[45]), page_size)
    assert torch.equal(sequences.k_pages[page, offset], k[45].to(dtype))


def test_rounding_to_bfloat16_is_to_nearest_even_and_keeps_specials() -> None:
    bits = torch.tensor(
        [0x3F808000, 0x3F818000, 0x3F808001, 0x7F800000, 0x7FC00000, 0x7F7FFFFF, 0x80000001, 0x7F800001]
    )
    values = bits.to(torch.int32).view(torch.float32)
    sequences = PagedSequences([0], 1, 1, 8, torch.bfloat16)
    row = values.view(1, 1, 8)
    batch = sequences.batch([(0, 0, 1, None)])
    write_kv(row, row, sequences.k_pages, sequences.v_pages, batch)
    stored = sequences.k_pages[batch.page_tables[0, 0], 0, 0]
    torch.testing.assert_close(stored, values.bfloat16(), equal_nan=True, rtol=0, atol=0)


def test_write_misfits_are_named() -> None:
    sequences = PagedSequences([4], 4, 2, 16, torch.float32)
    batch = sequences.batch([(0, 0, 3, None)])
    good = normal(3, 2, 16)
    with pytest.raises(ValueError, match="pages"):
        write_kv(normal(2, 2, 16), normal(2, 2, 16), sequences.k_pages, sequences.v_pages, batch)
    with pytest.raises(ValueError, match="strides"):
        write_kv(good, good, normal(20, 4, 16, 2).transpose(2, 3), sequences.v_pages, batch)
    with pytest.raises(ValueError, match="int32"):
        write_kv(good, good, sequences.k_pages.int(), sequences.v_pages.int(), batch)
    with pytest.raises(ValueError, match="between pages"):
        write_kv(good, good, sequences.k_pages, sequences.v_pages.clone(), batch)


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("seed", range(4))
def test_accepted_nodes_move_down_in_order(page_size: int, seed: int) -> None:
    draw = random.Random(seed)
    tables, starts, accepted = [], [], []
    pages = draw.sample(range(200), 180)
    for sequence in range(4):
        start = draw.randint(0, 40)
        nodes = sorted(draw.sample(range(1, 16), draw.randint(0, 7)))
        needed = -(-(start + 16) // page_size)
        owned, pages = pages[:needed], pages[needed:]
        tables.append(owned + [0] * (60 - needed))
        starts.append(start)
        accepted.append([0, *nodes] + [-1] * (8 - len(nodes)) if sequence < 3 else [-1] * 9)
    pool = torch.randint(0, 256, (200, 5, page_size, 24), dtype=torch.uint8)
    before, expected = pool.clone(), pool.clone()
    arguments = [torch.tensor(values, dtype=torch.int32) for values in (tables, starts, accepted)]
    compact_kv_reference(expected, *arguments)
    with threads(2):
        compact_kv(pool, *arguments)
    assert torch.equal(pool, expected)
    for table, start, nodes in zip(tables, starts, accepted, strict=True):
        for index, node in enumerate(nodes):
            if node >= 0:
                old, new = divmod(start + node, page_size), divmod(start + index, page_size)
                assert torch.equal(pool[table[new[0]], :, new[1]], before[table[old[0]], :, old[1]])


def test_nothing_accepted_beyond_the_root_moves_nothing() -> None:
    pool = torch.randint(0, 256, (4, 2, 2, 8), dtype=torch.uint8)
    before = pool.clone()
    table = torch.tensor([[2, 1, 3]], dtype=torch.int32)
    compact_kv(pool, table, torch.tensor([2], dtype=torch.int32), torch.tensor([[0, 1, -1]], dtype=torch.int32))
    assert torch.equal(pool, before)


def test_compaction_misfits_are_named() -> None:
    pool = torch.zeros(4, 2, 2, 8, dtype=torch.uint8)
    table, start = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    path = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="pool"):
        compact_kv(pool.float(), table, start, path)
    with pytest.raises(ValueError, match="paths"):
        compact_kv(pool, table, start, path.expand(2, 1).contiguous())
    with pytest.raises(ValueError, match="int64"):
        compact_kv(pool, table, start, path.long())
