"""The guard that cuts slow writes."""

import asyncio

import pytest

from graftline.router.outbox import SlowConsumerError, client_guard


async def hanging_write(timeout_s: float) -> None:
    with client_guard(timeout_s) as guard:
        guard.writing()
        await asyncio.Event().wait()


async def test_a_write_that_hangs_is_cut_with_its_own_error() -> None:
    with pytest.raises(SlowConsumerError, match=r"0\.02 s"):
        await hanging_write(0.02)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0, "nothing of the cut is left on the task"


async def test_many_quick_writes_and_long_pauses_between_them_are_no_reason() -> None:
    with client_guard(0.02) as guard:
        for _ in range(6):
            guard.writing()
            await asyncio.sleep(0)
            guard.written()
            await asyncio.sleep(0.02)


async def test_a_cancel_from_outside_stays_a_cancel() -> None:
    task = asyncio.create_task(hanging_write(30))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
