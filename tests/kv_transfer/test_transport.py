import pytest

from graftline.errors import InvalidRequestError
from graftline.kv_transfer.copy_plan import Copy
from graftline.kv_transfer.transport import MemoryRegions


def regions(*spans: tuple[int, int]) -> MemoryRegions:
    made = MemoryRegions()
    for address, num_bytes in spans:
        made.add(address, num_bytes)
    return made


def test_a_copy_must_lie_inside_one_region() -> None:
    made = regions((200, 100), (100, 100), (400, 1))
    inside = [(100, 100), (100, 1), (199, 1), (200, 100), (400, 1)]
    outside = [(99, 1), (99, 2), (150, 51), (299, 2), (300, 1), (400, 2), (401, 1), (100, 0), (100, -1), (1, 1000)]
    assert all(made.contains(*span) for span in inside)
    assert not any(made.contains(*span) for span in outside)


def test_a_region_ends_where_another_one_may_begin() -> None:
    made = regions((200, 100), (100, 100), (400, 1))
    assert [made.end_of(address) for address in (100, 199, 200, 299, 400)] == [200, 200, 300, 300, 401]
    assert [made.end_of(address) for address in (0, 99, 300, 399, 401)] == [0] * 5


@pytest.mark.parametrize("span", [(100, 1), (50, 51), (199, 1), (50, 400), (0, 8), (-8, 8), (300, 0)])
def test_impossible_and_overlapping_regions_are_refused(span: tuple[int, int]) -> None:
    made = regions((100, 100))
    with pytest.raises(InvalidRequestError, match="region"):
        made.add(*span)
    assert made.starts == (100,)


def test_the_first_copy_from_unregistered_memory_is_named() -> None:
    made = regions((0x100, 0x100))
    made.require_sources([Copy(0x100, 0xDEAD, 0x100)])
    with pytest.raises(InvalidRequestError, match=r"0x1ff, \+2"):
        made.require_sources([Copy(0x100, 0xDEAD, 0x100), Copy(0x1FF, 0xDEAD, 2)])
