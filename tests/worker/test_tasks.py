"""Tasks that a server owns."""

import asyncio
import logging

import pytest

from graftline.worker.tasks import Tasks


async def test_a_failed_task_is_logged_and_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    done = asyncio.Event()

    async def fail() -> None:
        raise ValueError("injected")

    async def work() -> None:
        await asyncio.sleep(0)
        done.set()

    with caplog.at_level(logging.ERROR):
        async with Tasks() as tasks:
            tasks.start(fail(), name="failing")
            tasks.start(work(), name="working")
            await done.wait()
    assert "task failing failed" in caplog.text


async def test_leaving_cancels_and_waits() -> None:
    ended: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("cancelled")

    async with Tasks() as tasks:
        tasks.start(forever(), name="forever")
        await asyncio.sleep(0)
    assert ended == ["cancelled"]
