"""The page allocator of one worker: which pages are free, used, kept for their prefix, or quarantined.

Only stage 0 owns one; page ids mean the same on every stage. Single-threaded: the scheduler's thread calls it.
"""

import hashlib
import heapq
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from graftline.engine.request import PageId
from graftline.engine.service_api import PoolGauges
from graftline.errors import OutOfCapacityError

PrefixKey = bytes


class PageAllocator:
    """Hands out page ids, lowest first so that runs stay contiguous and transfers coalesce.

    A page is in exactly one state: free, used (held by one or more requests), cached (held by none, its
    content still known under a prefix key, taken back when free pages run out) or quarantined (somebody may
    still write to it).
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}")
        self._num_pages = num_pages
        self._free = list(range(num_pages))
        self._holders = [0] * num_pages
        self._key_of: dict[int, PrefixKey] = {}
        self._page_of: dict[PrefixKey, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._quarantined: set[int] = set()

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self._num_pages

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can hand out now."""
        return len(self._free) + len(self._cached)

    def gauges(self) -> PoolGauges:
        """How many pages are in each state."""
        free, cached, quarantined = len(self._free), len(self._cached), len(self._quarantined)
        used = self._num_pages - free - cached - quarantined
        return PoolGauges(self._num_pages, free, used, cached, quarantined)

    def allocate(self, count: int) -> list[PageId]:
        """Takes `count` pages, evicting the longest unused prefixes where free ones do not suffice.

        Raises:
            OutOfCapacityError: fewer are available; nothing was taken.
        """
        if count > self.num_available:
            raise OutOfCapacityError(f"{count} pages wanted, {self.num_available} of {self._num_pages} available")
        while len(self._free) < count:
            self._evict_oldest()
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return [PageId(page) for page in pages]

    def hold(self, pages: Iterable[PageId]) -> None:
        """One more holder for pages that are used or cached."""
        for page in pages:
            assert self._holders[page] > 0 or page in self._cached, f"page {page} is neither used nor cached"
            self._cached.pop(page, None)
            self._holders[page] += 1

    def release(self, pages: Iterable[PageId]) -> None:
        """One holder less; the last one frees the page, or leaves it cached when its prefix is published."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is released but not used"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._key_of:
                    self._cached[page] = None
                else:
                    heapq.heappush(self._free, page)

    def quarantine(self, pages: Iterable[PageId]) -> None:
        """Used pages of one holder go out of use until `end_quarantine`."""
        for page in pages:
            assert self._holders[page] == 1, f"page {page} has {self._holders[page]} holders"
            assert page not in self._key_of, f"page {page} is published"
            self._holders[page] = 0
            self._quarantined.add(page)

    def end_quarantine(self, pages: Iterable[PageId]) -> None:
        """Quarantined pages are free again."""
        for page in pages:
            self._quarantined.remove(page)
            heapq.heappush(self._free, page)

    def publish(self, keys: Sequence[PrefixKey], pages: Sequence[PageId]) -> None:
        """Makes computed pages findable under their prefix keys. A key that is known already keeps its page."""
        for key, page in zip(keys, pages, strict=True):
            assert self._holders[page] > 0, f"page {page} is published but not used"
            if key in self._page_of or page in self._key_of:
                continue
            self._page_of[key] = page
            self._key_of[page] = key

    def find(self, keys: Sequence[PrefixKey]) -> list[PageId]:
        """Pages of the longest known run of keys from the first on. They are not held by this call."""
        pages: list[PageId] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(PageId(page))
        return pages

    def forget_prefixes(self) -> None:
        """Drops every cached prefix."""
        while self._cached:
            self._evict_oldest()

    def check_invariants(self) -> None:
        """Asserts that every page is in exactly one state and that the books agree."""
        free, cached = set(self._free), set(self._cached)
        used = {page for page, holders in enumerate(self._holders) if holders}
        assert len(free) == len(self._free), "a page is free twice"
        assert sum(map(len, (free, cached, used, self._quarantined))) == self._num_pages
        assert free | cached | used | self._quarantined == set(range(self._num_pages))
        assert {page: key for key, page in self._page_of.items()} == self._key_of
        assert cached <= set(self._key_of)
        assert not free & set(self._key_of)

    def _evict_oldest(self) -> None:
        page, _ = self._cached.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        heapq.heappush(self._free, page)


def prefix_keys(token_ids: Sequence[int], page_size: int, lookahead: int = 0) -> list[PrefixKey]:
    """One key per full page: a digest of all tokens its KV depends on, so that equal keys mean equal KV.

    Args:
        lookahead: tokens behind a page that its KV depends on as well: 1 with a drafter, whose row takes the next
            token too. A page whose lookahead goes past the end has no key.
    """
    keys: list[PrefixKey] = []
    digest = hashlib.blake2b(digest_size=16)
    for end in range(page_size, len(token_ids) - lookahead + 1, page_size):
        digest.update(_token_bytes(token_ids[end - page_size : end]))
        ahead = digest.copy()
        ahead.update(_token_bytes(token_ids[end : end + lookahead]))
        keys.append(ahead.digest())
    return keys


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    return array("q", token_ids).tobytes()


def num_pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that `num_tokens` positions take."""
    return -(-num_tokens // page_size)
