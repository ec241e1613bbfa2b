"""What must not happen while a graph is captured."""

import gc
import weakref

import pytest

from graftline.engine.graph_capture import without_collection


class Old:
    """Something that only a collection frees."""

    def __init__(self) -> None:
        self.me = self


def test_nothing_is_collected_meanwhile() -> None:
    gc.collect()
    old = Old()
    seen = weakref.ref(old)
    with without_collection():
        del old
        made = [[index] for index in range(200_000)]  # more than any threshold
        assert seen() is not None
    del made
    assert gc.isenabled()
    gc.collect()
    assert seen() is None


def test_whoever_forbade_collections_before_still_does() -> None:
    gc.disable()
    try:
        with pytest.raises(ZeroDivisionError), without_collection():
            raise ZeroDivisionError
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(ZeroDivisionError), without_collection():
        raise ZeroDivisionError
    assert gc.isenabled()
