"""The page allocator against a naive model, and the arithmetic beside it."""

from dataclasses import dataclass, field
from random import Random

import pytest

from graftline.engine.pages import PageAllocator, num_pages_for, prefix_keys
from graftline.engine.request import PageId
from graftline.errors import OutOfCapacityError


@dataclass
class NaivePool:
    """The same book-keeping with lists and no cleverness."""

    num_pages: int
    holders: dict[int, int] = field(default_factory=dict)
    keys: dict[bytes, int] = field(default_factory=dict)
    cached: list[int] = field(default_factory=list)
    quarantined: set[int] = field(default_factory=set)

    def free(self) -> list[int]:
        taken = {*self.holders, *self.cached, *self.quarantined}
        return [page for page in range(self.num_pages) if page not in taken]

    def allocate(self, count: int) -> list[int] | None:
        if count > len(self.free()) + len(self.cached):
            return None
        while len(self.free()) < count:
            oldest = self.cached.pop(0)
            self.keys = {key: page for key, page in self.keys.items() if page != oldest}
        pages = self.free()[:count]
        self.holders |= dict.fromkeys(pages, 1)
        return pages

    def hold(self, pages: list[int]) -> None:
        for page in pages:
            self.holders[page] = self.holders.get(page, 0) + 1
            if page in self.cached:
                self.cached.remove(page)

    def release(self, pages: list[int]) -> None:
        for page in pages:
            self.holders[page] -= 1
            if self.holders[page] == 0:
                del self.holders[page]
                if page in self.keys.values():
                    self.cached.append(page)

    def find(self, keys: list[bytes]) -> list[int]:
        found = []
        for key in keys:
            if key not in self.keys:
                break
            found.append(self.keys[key])
        return found

    def publish(self, keys: list[bytes], pages: list[int]) -> None:
        for key, page in zip(keys, pages, strict=True):
            if key not in self.keys and page not in self.keys.values():
                self.keys[key] = page


@pytest.mark.parametrize("seed", range(8))
def test_random_sequences_agree_with_a_naive_pool(seed: int) -> None:
    """Allocate, share, publish, release, evict and quarantine in random order; books checked after every operation."""
    draw = Random(seed)
    allocator, naive = PageAllocator(20), NaivePool(20)
    held: list[tuple[list[bytes], list[PageId]]] = []
    quarantined: list[list[PageId]] = []
    for _ in range(600):
        match draw.choice(("take", "take", "take", "release", "release", "quarantine", "end", "forget", "too many")):
            case "take":  # a prompt of a few pages out of few different ones, so that prefixes repeat
                tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 14))]
                keys, wanted = prefix_keys(tokens, 2), num_pages_for(len(tokens), 2)
                shared = allocator.find(keys)
                assert shared == naive.find(keys)
                allocator.hold(shared)
                naive.hold(list(shared))
                expected = naive.allocate(wanted - len(shared))
                if expected is None:
                    with pytest.raises(OutOfCapacityError):
                        allocator.allocate(wanted - len(shared))
                    allocator.release(shared)
                    naive.release(list(shared))
                else:
                    pages = [*shared, *allocator.allocate(wanted - len(shared))]
                    assert pages[len(shared) :] == expected
                    if draw.random() < 0.6:
                        allocator.publish(keys, pages[: len(keys)])
                        naive.publish(keys, list(pages[: len(keys)]))
                        held.append((keys, pages))
                    else:
                        held.append(([], pages))
            case "release" if held:
                _, pages = held.pop(draw.randrange(len(held)))
                allocator.release(pages)
                naive.release(list(pages))
            case "quarantine" if held:
                _, pages = held[-1]
                if all(naive.holders[page] == 1 and page not in naive.keys.values() for page in pages):
                    held.pop()
                    allocator.quarantine(pages)
                    for page in pages:
                        del naive.holders[page]
                    naive.quarantined |= set(pages)
                    quarantined.append(pages)
            case "end" if quarantined:
                pages = quarantined.pop(draw.randrange(len(quarantined)))
                allocator.end_quarantine(pages)
                naive.quarantined -= set(pages)
            case "forget" if draw.random() < 0.1:
                allocator.forget_prefixes()
                naive.keys = {key: page for key, page in naive.keys.items() if page not in naive.cached}
                naive.cached = []
            case "too many":
                with pytest.raises(OutOfCapacityError):
                    allocator.allocate(allocator.num_available + 1)
        allocator.check_invariants()
        gauges = allocator.gauges()
        assert gauges.total == gauges.free + gauges.used + gauges.cached + gauges.quarantined == 20
        assert (gauges.free, gauges.cached) == (len(naive.free()), len(naive.cached))
        assert (gauges.used, gauges.quarantined) == (len(naive.holders), len(naive.quarantined))
        assert allocator.num_available == len(naive.free()) + len(naive.cached)


def test_pages_come_lowest_first_so_that_runs_stay_together() -> None:
    allocator = PageAllocator(8)
    first, second = allocator.allocate(3), allocator.allocate(2)
    allocator.release(first)
    assert (first, second) == ([0, 1, 2], [3, 4])
    assert allocator.allocate(4) == [0, 1, 2, 5]


def test_a_shared_page_outlives_its_first_holder() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    allocator.publish([b"a", b"b"], pages)
    allocator.hold(allocator.find([b"a"]))
    allocator.release(pages)
    assert allocator.gauges().used == 1
    assert allocator.gauges().cached == 1
    assert allocator.allocate(3) == [1, 2, 3], "page 0 is held still, the cached page 1 is evicted"
    assert allocator.find([b"a", b"b"]) == [0]


def test_misuse_is_noticed() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    with pytest.raises(AssertionError, match="published but not used"):
        allocator.publish([b"a"], [PageId(3)])
    allocator.publish([b"a"], pages[:1])
    with pytest.raises(AssertionError, match="is published"):
        allocator.quarantine(pages[:1])
    allocator.release(pages)
    with pytest.raises(AssertionError, match="released but not used"):
        allocator.release(pages[1:])
    with pytest.raises(AssertionError, match="neither used nor cached"):
        allocator.hold([PageId(3)])
    with pytest.raises(ValueError, match="num_pages"):
        PageAllocator(0)


def test_a_key_stands_for_everything_up_to_the_pages_end() -> None:
    base = list(range(1, 13))
    keys = prefix_keys(base, 4)
    assert len(keys) == 3
    for changed in range(12):
        others = prefix_keys([*base[:changed], 99, *base[changed + 1 :]], 4)
        equal = [key == other for key, other in zip(keys, others, strict=True)]
        assert equal == [index < changed // 4 for index in range(3)]
    assert prefix_keys(base[:11], 4) == keys[:2]
    assert prefix_keys(base[:3], 4) == []


@pytest.mark.parametrize(("num_tokens", "page_size", "pages"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2), (7, 1, 7)])
def test_pages_that_tokens_take(num_tokens: int, page_size: int, pages: int) -> None:
    assert num_pages_for(num_tokens, page_size) == pages
