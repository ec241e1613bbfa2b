import ctypes

import numpy as np
import pytest
from transfer_pools import Pools, PoolShape, build_pools, page_keys, split

from graftline.kv_transfer.copy_plan import CopyPlanner
from graftline.kv_transfer.digest import EMPTY, combined, digest_units
from graftline.kv_transfer.layout import PAGE_KINDS, SLOT_KINDS, BufferKey, BufferKind

PAGE_SIZE, ROW_BYTES = 4, 8
KEYS = page_keys(3, 1)
SLOTS = [BufferKey(BufferKind.CONV, 0), BufferKey(BufferKind.SSM, 2)]


def pools(cuts: list[int], num_units: int, seed: int) -> Pools:
    keys = [*KEYS, *SLOTS]
    shape = PoolShape(split(keys, cuts), num_units, dict.fromkeys(keys, PAGE_SIZE * ROW_BYTES))
    return build_pools(shape, np.random.default_rng(seed))


def digest_of(worker: Pools, pages: list[tuple[int, int]], slot: tuple[int, int]) -> bytes:
    """Over all stages, page by page, as chunks would be digested."""
    total = EMPTY
    for stage in worker.layout.stages:
        for page in pages:
            total = combined(total, digest_units(stage, PAGE_KINDS, [page]))
        total = combined(total, digest_units(stage, SLOT_KINDS, [slot]))
    return total


@pytest.fixture
def handed_over() -> tuple[Pools, Pools]:
    """Ten tokens in pages 4, 0, 2 of two stages, copied into pages 1, 3, 0 of one."""
    source, destination = pools([4], 6, seed=1), pools([], 5, seed=2)
    for stage in source.layout.stages:
        planner = CopyPlanner(stage, destination.layout)
        wanted = [(PAGE_KINDS, [(4, 1, 1), (0, 3, 1), (2, 0, 1)]), (SLOT_KINDS, [(5, 2, 1)])]
        plans = [plan.copies(runs) for kinds, runs in wanted for plan in planner.plans(kinds).values()]
        for copy in (copy for copies in plans for copy in copies):
            ctypes.memmove(copy.dst_address, copy.src_address, copy.num_bytes)
    return source, destination


SENT, SENT_SLOT = [(4, 1), (0, 3), (2, 0)], (5, 2)
FOUND, FOUND_SLOT = [(3, 3), (0, 0), (1, 1)], (2, 2)


def test_digests_do_not_depend_on_stages_chunks_or_order(handed_over: tuple[Pools, Pools]) -> None:
    """CASES B21."""
    source, destination = handed_over
    sent = digest_of(source, SENT, SENT_SLOT)
    assert sent != EMPTY
    assert sent == digest_of(destination, FOUND, FOUND_SLOT)


def test_pages_in_each_others_place_are_found(handed_over: tuple[Pools, Pools]) -> None:
    """CASES B21: crossed pages hold the same bytes in all."""
    source, destination = handed_over
    crossed = [(4, 3), (0, 1), (2, 0)]
    assert digest_of(source, crossed, SENT_SLOT) != digest_of(destination, FOUND, FOUND_SLOT)


@pytest.mark.parametrize("where", ["page", "slot"])
def test_one_changed_bit_is_found(handed_over: tuple[Pools, Pools], where: str) -> None:
    """CASES B21."""
    source, destination = handed_over
    key, unit = (KEYS[3], 0) if where == "page" else (SLOTS[1], 2)
    destination.unit(key, unit)[7] ^= 1
    assert digest_of(source, SENT, SENT_SLOT) != digest_of(destination, FOUND, FOUND_SLOT)


def test_what_was_not_sent_does_not_count(handed_over: tuple[Pools, Pools]) -> None:
    _, destination = handed_over
    before = digest_of(destination, FOUND, FOUND_SLOT)
    destination.unit(KEYS[0], 2)[0] ^= 1
    assert digest_of(destination, FOUND, FOUND_SLOT) == before
