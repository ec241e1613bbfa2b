"""Events from the engine's thread: all of them, in order, in few wake-ups."""

import asyncio
from typing import Any

import pytest

from graftline.decode_server.attempt import Inbox
from graftline.decode_server.deliveries import Deliveries
from graftline.engine.service_api import DecodeCancelled, Tokens


async def test_events_of_a_round_wake_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, calls = asyncio.get_running_loop(), 0
    call_soon = loop.call_soon_threadsafe

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return call_soon(*args)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    deliveries, taken = Deliveries(), []
    for first in (0, 16):
        for index in range(first, first + 16):
            deliveries.put(taken.append, Tokens((index,)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert [event.ids for event in taken] == [(index,) for index in range(32)]
    assert calls == 2


async def test_nothing_is_lost_or_reordered_between_threads() -> None:
    """Puts meet the loop at any point of taking."""
    deliveries, taken, count = Deliveries(), [], 20_000
    done = asyncio.Event()

    def take(event: Any) -> None:
        taken.append(event)
        if len(taken) == count:
            done.set()

    def put() -> None:
        for index in range(count):
            deliveries.put(take, Tokens((index,)))

    await asyncio.gather(asyncio.to_thread(put), asyncio.wait_for(done.wait(), 20))
    assert [event.ids[0] for event in taken] == list(range(count))


async def test_one_that_raises_does_not_keep_the_others() -> None:
    loop = asyncio.get_running_loop()
    heard: list[Any] = []
    loop.set_exception_handler(lambda _, context: heard.append(context["exception"]))
    deliveries, taken = Deliveries(), []

    def fail(event: object) -> None:
        raise ValueError(event)

    deliveries.put(fail, DecodeCancelled())
    deliveries.put(taken.append, DecodeCancelled())
    for _ in range(3):
        await asyncio.sleep(0)
    assert [type(error) for error in heard] == [ValueError]
    assert taken == [DecodeCancelled()]


async def test_tokens_that_are_handed_on_never_overtake() -> None:
    """Neither those that wait nor those that whoever waited has taken and not dealt with yet."""
    inbox, handed = Inbox(), []
    has_room = True

    def take(tokens: Tokens) -> bool:
        if has_room:
            handed.append(tokens.ids)
        return has_room

    inbox.hand_on(take)
    inbox.put(Tokens((1,)))
    assert await inbox.get() == Tokens((1,)), "nobody waited"
    inbox.put(Tokens((2,)))
    assert await inbox.get() == Tokens((2,))
    waiting = asyncio.create_task(inbox.get())
    await asyncio.sleep(0)
    inbox.put(Tokens((3,)))
    inbox.put(Tokens((4,)))
    assert handed == [(3,), (4,)]
    has_room = False
    inbox.put(Tokens((5,)))
    has_room = True
    inbox.put(Tokens((6,)))
    assert len(inbox) == 2
    assert await waiting == Tokens((5, 6))
    inbox.put(Tokens((7,)))
    assert handed == [(3,), (4,)], "5 and 6 are not known to have left"
    assert await inbox.get() == Tokens((7,))
