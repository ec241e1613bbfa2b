"""Every expression of every panel and alert has an answer while a real cluster serves a little load."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from dashboard_live import alert_questions, ask, dashboard_questions, draw, wait_for_answers
from prometheus_process import running_prometheus

from graftline.client import AsyncClient
from graftline.engine.config import StageMode
from graftline.engine.draft_head.random import write_tiny_head
from graftline.engine.models.random import write_tiny_model
from graftline.errors import GraftlineError
from graftline.launcher import Cluster, ClusterSpec, local_cluster

SPAN = "4s"
SCRAPE = "500ms"
WAIT_S = 60.0


@asynccontextmanager
async def small_cluster(folder: Path) -> AsyncIterator[Cluster]:
    model = write_tiny_model(folder / "model")
    head = write_tiny_head(folder / "head", model)
    spec = ClusterSpec(
        model=str(model),
        draft_head=str(head),
        dtype="float32",
        decode_stages=2,
        stage_mode=StageMode.THREADS,
        memory_mib=16,
        chunk_tokens=32,
        threads=1,
    )
    async with local_cluster(spec) as cluster:
        yield cluster


def targets(cluster: Cluster) -> dict[str, list[str]]:
    """Where to scrape, by job."""
    found: dict[str, list[str]] = {"graftline-router": [], "graftline-prefill": [], "graftline-decode": []}
    for name, child in cluster.children.items():
        address = child.ready.get("metrics") or child.ready.get("http")
        assert address is not None, f"{name} has no metrics"
        found[f"graftline-{name.partition('-')[0]}"].append(address)
    return found


async def some_load(client: AsyncClient, worker: int) -> None:
    """Requests one after the other until cancelled: every third repeats a prompt, every fourth is bad."""
    number = 0
    while True:
        number += 1
        prompt = f"{worker} counts {number if number % 3 else 0}: " + "x" * 60
        max_tokens = 24 if number % 4 else -1
        try:
            async for _ in client.generate(prompt, max_tokens=max_tokens, ignore_eos=True, timeout_s=60):
                pass
        except GraftlineError:
            assert max_tokens < 0, "a good request fails"


@asynccontextmanager
async def under_load(cluster: Cluster) -> AsyncIterator[None]:
    async with AsyncClient(cluster.router_address) as client:
        tasks = [asyncio.create_task(some_load(client, worker)) for worker in range(2)]
        try:
            yield
        finally:
            failed = [task for task in tasks if task.done()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    for task in failed:
        task.result()


@pytest.mark.system
async def test_every_expression_has_an_answer(tmp_path: Path) -> None:
    async with (
        small_cluster(tmp_path) as cluster,
        running_prometheus(tmp_path, targets(cluster), SCRAPE) as prometheus,
        under_load(cluster),
    ):
        left = await asyncio.to_thread(wait_for_answers, prometheus, SPAN, WAIT_S)
        assert not left, "\n".join(f"{question.where}: {question.expr}" for question in left)
        await assert_names_are_clean(prometheus)
        picture = await asyncio.to_thread(draw, prometheus, "graftline-handoff", tmp_path, SPAN, 0.2)
        assert picture.stat().st_size > 10_000


async def assert_names_are_clean(prometheus: str) -> None:
    """What the processes export is what the table says, and labels do not multiply."""
    series = await asyncio.to_thread(ask, prometheus, "query", query='count by (__name__) ({__name__=~"graftline_.+"})')
    assert len(series) > 50
    worst = max(series, key=lambda one: float(one["value"][1]))
    assert float(worst["value"][1]) <= 60, worst


def test_there_is_something_to_ask() -> None:
    assert len(list(dashboard_questions(SPAN))) > 80
    assert len(list(alert_questions(SPAN))) >= 14
