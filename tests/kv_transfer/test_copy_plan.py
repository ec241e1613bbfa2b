"""Plans are carried out on random pools, and every byte is compared with copies made unit by unit."""

import ctypes
from collections.abc import Sequence

import numpy as np
import pytest
from transfer_pools import Pools, PoolShape, build_pools, page_keys, split

from graftline.engine.transfer_port import page_runs
from graftline.errors import IncompatibleError, InvalidRequestError
from graftline.kv_transfer.copy_plan import CopyPlanner, require_matched
from graftline.kv_transfer.layout import (
    PAGE_KINDS,
    SLOT_KINDS,
    BufferKey,
    BufferKind,
    BufferLayout,
    StageLayout,
    WorkerLayout,
)

KV = frozenset({BufferKind.K, BufferKind.V})


def move(source: Pools, destination: Pools, kinds: frozenset[BufferKind], units: Sequence[tuple[int, int]]) -> int:
    """Carries out the plans of every source stage; returns the number of copies."""
    num_copies, runs = 0, page_runs(*zip(*units, strict=True))
    for stage in source.layout.stages:
        planner = CopyPlanner(stage, destination.layout)
        for copies in [plan.copies(runs) for plan in planner.plans(kinds).values()]:
            for copy in copies:
                ctypes.memmove(copy.dst_address, copy.src_address, copy.num_bytes)
            num_copies += len(copies)
    return num_copies


def move_naively(
    source: Pools, destination: Pools, kinds: frozenset[BufferKind], units: Sequence[tuple[int, int]]
) -> None:
    for key in source.layout.keys:
        if key.kind in kinds:
            for src, dst in units:
                destination.unit(key, dst)[:] = source.unit(key, src)


def random_units(rng: np.random.Generator, num_src: int, num_dst: int) -> list[tuple[int, int]]:
    """Pairs with runs in them: a shuffled mix of consecutive stretches."""
    count = int(rng.integers(1, min(num_src, num_dst) + 1))
    style = rng.integers(3)
    src = np.arange(count) if style == 0 else rng.permutation(num_src)[:count]
    dst = np.arange(count) + (num_dst - count) if style < 2 else np.sort(rng.permutation(num_dst)[:count])
    return [(int(a), int(b)) for a, b in zip(src, dst, strict=True)]


def random_cuts(rng: np.random.Generator, num_layers: int) -> list[int]:
    """Uneven layer splits, as positions in the list of k and v keys."""
    num_stages = int(rng.integers(1, num_layers + 1))
    return sorted(2 * int(cut) for cut in rng.permutation(np.arange(1, num_layers))[: num_stages - 1])


def random_worker(
    rng: np.random.Generator, keys: list[BufferKey], unit_bytes: dict[BufferKey, int], num_layers: int
) -> Pools:
    gaps = [0, 0, 8] if rng.random() < 0.5 else [0]
    shape = PoolShape(
        split(keys, random_cuts(rng, num_layers)),
        num_units=int(rng.integers(1, 12)),
        unit_bytes=unit_bytes,
        page_major=bool(rng.random() < 0.7),
        gap=lambda: int(rng.choice(gaps)),
    )
    return build_pools(shape, rng)


@pytest.mark.parametrize("seed", range(150))
def test_random_geometries_move_exactly_the_wanted_bytes(seed: int) -> None:
    """CASES P07, A15: any stage counts and uneven splits on either side pair by name; nothing else is touched."""
    rng = np.random.default_rng(seed)
    num_layers = int(rng.integers(1, 7))
    keys = page_keys(num_layers, num_draft_layers=int(rng.integers(0, 2)))
    unit_bytes = {key: int(rng.choice([16, 16, 48])) for key in keys}
    source = random_worker(rng, keys, unit_bytes, num_layers)
    destination = random_worker(rng, keys, unit_bytes, num_layers)
    kinds = PAGE_KINDS if rng.random() < 0.5 else KV
    num_units = [pools.layout.stages[0].buffers[0].num_units for pools in (source, destination)]
    units = random_units(rng, num_units[0], num_units[1])

    before_source, before = source.snapshot(), destination.snapshot()
    move(source, destination, kinds, units)
    after = destination.snapshot()

    for array, old in zip(destination.arrays, before, strict=True):
        array[:] = old
    move_naively(source, destination, kinds, units)
    for expected, got in zip(destination.arrays, after, strict=True):
        np.testing.assert_array_equal(got, expected)
    for array, old in zip(source.arrays, before_source, strict=True):
        np.testing.assert_array_equal(array, old)


def page_major(keys_of_stages: list[list[BufferKey]], num_units: int = 8, seed: int = 0) -> Pools:
    unit_bytes = {key: 32 for keys in keys_of_stages for key in keys}
    return build_pools(PoolShape(keys_of_stages, num_units, unit_bytes), np.random.default_rng(seed))


def test_equal_splits_need_one_copy_a_run_of_pages() -> None:
    source, destination = page_major([page_keys(4, 1)]), page_major([page_keys(4, 1)])
    assert move(source, destination, PAGE_KINDS, [(0, 3), (1, 4), (2, 5), (6, 0)]) == 2


def test_leaving_the_drafter_out_makes_one_copy_a_page() -> None:
    source, destination = page_major([page_keys(4, 1)]), page_major([page_keys(4, 1)])
    assert move(source, destination, KV, [(0, 3), (1, 4), (2, 5)]) == 3


def test_one_stage_to_two_makes_one_copy_a_page_and_stage() -> None:
    keys = page_keys(4)
    assert move(page_major([keys]), page_major(split(keys, [2])), KV, [(0, 3), (1, 4)]) == 4


def test_two_stages_to_one_write_their_own_layers_only() -> None:
    keys = page_keys(4)
    source, destination = page_major(split(keys, [6]), seed=1), page_major([keys], seed=2)
    before = destination.unit(keys[7], 5).copy()
    planner = CopyPlanner(source.layout.stages[0], destination.layout)
    for copy in planner.plans(KV)["session-0"].copies([(2, 5, 1)]):
        ctypes.memmove(copy.dst_address, copy.src_address, copy.num_bytes)
    np.testing.assert_array_equal(destination.unit(keys[5], 5), source.unit(keys[5], 2))
    np.testing.assert_array_equal(destination.unit(keys[7], 5), before)


def test_only_sessions_that_get_something_are_planned() -> None:
    keys = page_keys(4)
    source, destination = page_major(split(keys, [2])), page_major(split(keys, [2, 6]))
    planners = [CopyPlanner(stage, destination.layout) for stage in source.layout.stages]
    assert [planner.session_ids for planner in planners] == [("session-0",), ("session-1", "session-2")]
    assert [set(planner.plans(KV)) for planner in planners] == [{"session-0"}, {"session-1", "session-2"}]
    assert not planners[0].plans(frozenset({BufferKind.DRAFT_K}))


def test_slots_move_apart_from_pages() -> None:
    keys = [*page_keys(1), BufferKey(BufferKind.CONV, 0), BufferKey(BufferKind.SSM, 0)]
    source, destination = page_major([keys], seed=1), page_major([keys], seed=2)
    move(source, destination, SLOT_KINDS, [(1, 4)])
    np.testing.assert_array_equal(destination.unit(keys[3], 4), source.unit(keys[3], 1))
    with pytest.raises(AssertionError, match="mix pages and slots"):
        move(source, destination, PAGE_KINDS | SLOT_KINDS, [(1, 4)])


def test_unit_ids_of_the_peer_are_checked_and_ours_asserted() -> None:
    source, destination = page_major([page_keys(1)]), page_major([page_keys(1)], num_units=4)
    planner = CopyPlanner(source.layout.stages[0], destination.layout)
    for bad in (-1, 4, 1 << 40):
        with pytest.raises(InvalidRequestError, match="destination units"):
            planner.plans(KV)["session-0"].copies([(0, 0, 1), (1, bad, 1)])
    for repeated in ([(0, 2, 1), (1, 2, 1)], [(0, 1, 2), (4, 2, 1)], [(4, 3, 1), (0, 0, 4)]):
        with pytest.raises(InvalidRequestError, match="repeat"):
            planner.plans(KV)["session-0"].copies(repeated)
    with pytest.raises(InvalidRequestError, match="destination units"):
        planner.plans(KV)["session-0"].copies([(0, 2, 3)])
    for ours in ([(8, 0, 1)], [(6, 0, 3)], [(0, 0, 0)], [(0, 0, 1), (1, 1, 0)]):
        with pytest.raises(AssertionError, match=r"source unit|without units"):
            planner.plans(KV)["session-0"].copies(ours)


def layout(*buffers: tuple[BufferKey, str, int]) -> WorkerLayout:
    placed = (
        BufferLayout(key, dtype, 4096 * (index + 1), unit_bytes, unit_bytes, 4)
        for index, (key, dtype, unit_bytes) in enumerate(buffers)
    )
    return WorkerLayout((StageLayout(0, "a:1", tuple(placed)),))


def test_a_mismatch_names_every_buffer_and_field() -> None:
    k0, v0, k1 = BufferKey(BufferKind.K, 0), BufferKey(BufferKind.V, 0), BufferKey(BufferKind.K, 1)
    source = layout((k0, "bfloat16", 32), (v0, "bfloat16", 32), (k1, "bfloat16", 32))
    destination = layout((k0, "float32", 64), (v0, "bfloat16", 32))
    with pytest.raises(IncompatibleError) as caught:
        CopyPlanner(source.stages[0], destination)
    assert caught.value.fields == ("k[0]", "k[1]")
    assert "dtype is bfloat16 here, float32 at the destination; unit_bytes is 32 here, 64" in str(caught.value)
    assert "k[1]: the destination has no such buffer" in str(caught.value)


def test_a_destination_buffer_that_nobody_fills_is_a_mismatch() -> None:
    k0, draft = BufferKey(BufferKind.K, 0), BufferKey(BufferKind.DRAFT_K, 0)
    both, one = layout((k0, "bfloat16", 32), (draft, "bfloat16", 32)), layout((k0, "bfloat16", 32))
    require_matched(both, both)
    with pytest.raises(IncompatibleError, match=r"the source has no buffer for draft_k\[0\]"):
        require_matched(one, both)
