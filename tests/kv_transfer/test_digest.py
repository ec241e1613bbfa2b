import ctypes

import numpy as np
import pytest
from transfer_pools import Pools, PoolShape, build_pools, page_keys, split

from graftline.kv_transfer.copy_plan import CopyPlanner
from graftline.kv_transfer.digest import differing, digest_pages, digest_slot
from graftline.kv_transfer.layout import PAGE_KINDS, SLOT_KINDS, BufferKey, BufferKind

PAGE_SIZE, ROW_BYTES = 4, 8
KEYS = page_keys(3, 1)
SLOTS = [BufferKey(BufferKind.CONV, 0), BufferKey(BufferKind.SSM, 2)]


def pools(cuts: list[int], num_units: int, seed: int) -> Pools:
    keys = [*KEYS, *SLOTS]
    shape = PoolShape(split(keys, cuts), num_units, dict.fromkeys(keys, PAGE_SIZE * ROW_BYTES))
    return build_pools(shape, np.random.default_rng(seed))


def digests(worker: Pools, page_ids: list[int], num_tokens: int) -> dict[BufferKey, bytes]:
    found: dict[BufferKey, bytes] = {}
    for stage in worker.layout.stages:
        found |= digest_pages(stage, PAGE_KINDS, page_ids, num_tokens, PAGE_SIZE)
    return found


@pytest.fixture
def handed_over() -> tuple[Pools, Pools]:
    """Ten tokens in pages 4, 0, 2 of two stages, copied into pages 1, 3, 0 of one."""
    source, destination = pools([4], 6, seed=1), pools([], 5, seed=2)
    for stage in source.layout.stages:
        planner = CopyPlanner(stage, destination.layout)
        plans = [planner.plan(PAGE_KINDS, [(4, 1), (0, 3), (2, 0)]), planner.plan(SLOT_KINDS, [(5, 2)])]
        for copy in (copy for plan in plans for copies in plan.values() for copy in copies):
            ctypes.memmove(copy.dst_address, copy.src_address, copy.num_bytes)
    return source, destination


def test_digests_do_not_depend_on_pages_or_stages(handed_over: tuple[Pools, Pools]) -> None:
    """CASES B21."""
    source, destination = handed_over
    ours, theirs = digests(source, [4, 0, 2], 10), digests(destination, [1, 3, 0], 10)
    assert set(ours) == set(KEYS)
    assert differing(ours, theirs) == ()
    assert digests(source, [0, 4, 2], 10) != ours


def test_one_changed_byte_is_found_by_name(handed_over: tuple[Pools, Pools]) -> None:
    """CASES B21."""
    source, destination = handed_over
    destination.unit(KEYS[3], 0)[2 * ROW_BYTES - 1] ^= 1
    ours, theirs = digests(source, [4, 0, 2], 10), digests(destination, [1, 3, 0], 10)
    assert differing(ours, theirs) == (KEYS[3],)


def test_bytes_past_the_last_token_do_not_count(handed_over: tuple[Pools, Pools]) -> None:
    source, destination = handed_over
    for key in KEYS:
        destination.unit(key, 0)[2 * ROW_BYTES :] = 0
    assert differing(digests(source, [4, 0, 2], 10), digests(destination, [1, 3, 0], 10)) == ()
    assert differing(digests(source, [4, 0, 2], 11), digests(destination, [1, 3, 0], 11)) == tuple(sorted(KEYS))


def test_slots_have_digests_of_their_own(handed_over: tuple[Pools, Pools]) -> None:
    source, destination = handed_over
    ours = digest_slot(source.layout.stages[1], SLOT_KINDS, 5)
    assert set(ours) == set(SLOTS)
    assert differing(ours, digest_slot(destination.layout.stages[0], SLOT_KINDS, 2)) == ()
    assert differing(ours, digest_slot(destination.layout.stages[0], SLOT_KINDS, 3)) == tuple(sorted(SLOTS))


def test_a_buffer_that_one_side_lacks_differs() -> None:
    assert differing({KEYS[0]: b"x", KEYS[1]: b"y"}, {KEYS[0]: b"x"}) == (KEYS[1],)


def test_more_tokens_than_pages_is_a_bug(handed_over: tuple[Pools, Pools]) -> None:
    with pytest.raises(AssertionError, match="13 tokens do not fit 3 pages"):
        digests(handed_over[0], [4, 0, 2], 13)
