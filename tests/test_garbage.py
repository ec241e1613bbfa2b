"""What a process that serves no longer looks through."""

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from graftline import cli_router
from graftline.garbage import keep_what_is_there
from graftline.router.config import RouterConfig


def test_what_was_there_is_left_alone_and_the_rest_is_collected() -> None:
    class Node:
        def __init__(self) -> None:
            self.itself = self

    kept = Node()
    try:
        keep_what_is_there()
        later = Node()
        tracked = gc.get_objects()
        assert not any(found is kept for found in tracked)
        assert any(found is later for found in tracked)
    finally:
        gc.unfreeze()
    assert any(found is kept for found in gc.get_objects())


async def test_a_router_leaves_alone_what_it_started_with(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def stopped() -> Iterator[asyncio.Event]:
        stop = asyncio.Event()
        stop.set()
        yield stop

    monkeypatch.setattr(cli_router, "stop_signals", stopped)
    gc.unfreeze()
    try:
        await cli_router._serve(RouterConfig(drain_grace_s=0))
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()
