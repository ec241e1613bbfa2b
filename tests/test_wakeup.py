"""One waiter, many causes: nothing that is caused is missed, and nothing is seen twice."""

import asyncio

import pytest

from graftline.wakeup import Wakeup


async def test_what_came_before_the_wait_counts_once() -> None:
    wakeup = Wakeup()
    wakeup.wake()
    wakeup.wake()
    await wakeup.wait()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await wakeup.wait()


async def test_a_waiter_wakes_and_waits_again() -> None:
    wakeup = Wakeup()
    turns: list[int] = []

    async def turn() -> None:
        for number in range(3):
            await wakeup.wait()
            turns.append(number)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(turn())
        for number in range(3):
            await asyncio.sleep(0)
            wakeup.wake()
            wakeup.wake()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert turns == list(range(number + 1))


async def test_a_cause_that_meets_a_cancel_is_kept() -> None:
    wakeup = Wakeup()
    waiting = asyncio.create_task(wakeup.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    wakeup.wake()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    async with asyncio.timeout(1):
        await wakeup.wait()


async def test_one_waits_at_a_time() -> None:
    wakeup = Wakeup()
    waiting = asyncio.create_task(wakeup.wait())
    await asyncio.sleep(0)
    with pytest.raises(AssertionError, match="somebody waits"):
        await wakeup.wait()
    wakeup.wake()
    await waiting
