"""From a client's cancel to the decode: when its call is over there, and when its rounds are, pages given back.

Real processes on loopback: router, prefill, decode of two stages with a tiny model. The decode's own spans say when;
each cancel comes in the middle of an answer, one after the other. Run:

    python tests/system/measure_cancel.py [--cancels 100]
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

from eventually import eventually
from trace_collector import Collector, running_collector

from graftline.bench.stats import summarise
from graftline.client import AsyncClient
from graftline.engine.draft_head.random import write_tiny_head
from graftline.engine.models.random import write_tiny_model
from graftline.launcher import ClusterSpec, local_cluster

_SPANS = ("graftline.decode", "graftline.rounds")
# Not counted: a cluster's very first took 25 ms where no other took more than 8.
WARM_UPS = 3


async def cancels_ns(client: AsyncClient, count: int) -> list[int]:
    """When each of so many requests was left, after its third message."""
    left: list[int] = []
    for number in range(count):
        stream = client.generate([number % 200 + 1, 2, 3], max_tokens=400, temperature=0, ignore_eos=True)
        async with aclosing(cast(AsyncGenerator[object, None], stream)) as deltas:
            messages = 0
            async for _ in deltas:
                messages += 1
                if messages == 3:
                    break
            left.append(time.time_ns())
        await asyncio.sleep(0.05)
    return left


def ends_ns(collector: Collector, name: str) -> list[int]:
    """When the decode's spans of a name ended, in order."""
    return sorted(span.end_ns for span in collector.spans if span.name == name)


async def measure(count: int) -> dict[str, dict[str, float]]:
    """Milliseconds, by span."""
    with tempfile.TemporaryDirectory() as scratch, running_collector() as collector:
        model = write_tiny_model(Path(scratch) / "model", context=512)
        spec = ClusterSpec(
            model=str(model),
            draft_head=str(write_tiny_head(Path(scratch) / "head", model)),
            dtype="float32",
            decode_stages=2,
            threads=1,
            environment={"OTEL_EXPORTER_OTLP_ENDPOINT": collector.address, "OTEL_BSP_SCHEDULE_DELAY": "200"},
        )
        async with local_cluster(spec) as cluster, AsyncClient(cluster.router_address) as client:
            left = await cancels_ns(client, WARM_UPS + count)
            await eventually(
                lambda: all(len(ends_ns(collector, name)) == len(left) for name in _SPANS), "all spans are here"
            )
    found = {}
    for name in _SPANS:
        ends = ends_ns(collector, name)
        taken_ms = [max(0, end - begin) / 1e6 for begin, end in zip(left, ends, strict=True)]
        summary = summarise(taken_ms[WARM_UPS:])
        assert summary is not None
        found[name] = {"p50_ms": summary.p50, "p90_ms": summary.p90, "p99_ms": summary.p99}
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cancels", type=int, default=100)
    for name, figures in asyncio.run(measure(parser.parse_args().cancels)).items():
        print(name, json.dumps({key: round(value, 2) for key, value in figures.items()}))


if __name__ == "__main__":
    main()
