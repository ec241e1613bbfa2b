"""One request through real processes is one trace, as a collector that speaks OpenTelemetry's own protocol sees it."""

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
import pytest_asyncio
from eventually import eventually
from tiny_world import TinyWorld, prompt
from trace_collector import Collected, Collector, running_collector

from graftline.launcher import Cluster, ClusterSpec, local_cluster
from graftline.proto.channel import open_channel
from graftline.proto.v1.router_pb2 import GenerateRequest, TokenPrompt
from graftline.proto.v1.router_pb2_grpc import RouterServiceStub

pytestmark = [pytest.mark.system, pytest.mark.asyncio(loop_scope="module")]
NUM_TOKENS = 12
# The span of each name, the process it belongs to, and whose child it is.
TREE = {
    "graftline.request": ("graftline-router", None),
    "graftline.tokenize": ("graftline-router", "graftline.request"),
    "graftline.attempt": ("graftline-router", "graftline.request"),
    "graftline.decode": ("graftline-decode", "graftline.attempt"),
    "graftline.handoff": ("graftline-decode", "graftline.decode"),
    "graftline.prefill": ("graftline-prefill", "graftline.handoff"),
    "graftline.queue": ("graftline-prefill", "graftline.prefill"),
    "graftline.compute": ("graftline-prefill", "graftline.prefill"),
    "graftline.transfer": ("graftline-prefill", "graftline.prefill"),
    "graftline.rounds": ("graftline-decode", "graftline.decode"),
    "graftline.round": ("graftline-decode", "graftline.rounds"),
}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with running_collector() as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(world: TinyWorld, collector: Collector) -> AsyncIterator[Cluster]:
    # The SDK's own variable: sends spans soon.
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.address, "OTEL_BSP_SCHEDULE_DELAY": "50"}
    spec = ClusterSpec(
        model=str(world.plain.path),
        draft_head=str(world.eagle),
        dtype="float32",
        page_size=4,
        pages=64,
        chunk_tokens=16,
        threads=1,
        environment=environment,
    )
    async with local_cluster(spec) as running:
        yield running


async def whole_trace(collector: Collector, trace_id: str) -> list[Collected]:
    await eventually(lambda: set(TREE) <= {span.name for span in collector.of_trace(trace_id)}, "all spans came")
    return collector.of_trace(trace_id)


def check_tree(spans: list[Collected], caller: str) -> None:
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        service, parent = TREE[span.name]
        assert span.service == service
        assert (by_id[span.parent_id].name if parent else span.parent_id) == (parent or caller)
    (whole,) = [span for span in spans if span.name == "graftline.request"]
    # One machine, one clock: what runs inside lies inside.
    inside = [span for span in spans if span.service == "graftline-router"]
    assert all(whole.begin_ns <= span.begin_ns <= span.end_ns <= whole.end_ns for span in inside)
    rounds = [span for span in spans if span.name == "graftline.round"]
    assert 1 + sum(span.attributes["graftline.tokens"] for span in rounds) == NUM_TOKENS
    (transfer,) = [span for span in spans if span.name == "graftline.transfer"]
    assert transfer.attributes["graftline.kv.bytes"] > 0


async def test_grpc_metadata_joins_every_process_in_one_trace(cluster: Cluster, collector: Collector) -> None:
    trace_id, caller = "1a" * 16, "2b" * 8
    asked = GenerateRequest(
        tokens=TokenPrompt(token_ids=prompt(20)), max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True
    )
    async with open_channel(cluster.router_address) as channel:
        call = RouterServiceStub(channel).Generate(
            asked, timeout=60, metadata=[("traceparent", f"00-{trace_id}-{caller}-01")]
        )
        assert [message async for message in call]
    check_tree(await whole_trace(collector, trace_id), caller)


async def test_http_headers_do_too(cluster: Cluster, collector: Collector) -> None:
    trace_id, caller = "3c" * 16, "4d" * 8
    body = {"model": "plain", "prompt": prompt(20), "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=f"http://{cluster.http_address}", trust_env=False, timeout=60) as client:
        body["model"] = (await client.get("/v1/models")).json()["data"][0]["id"]
        headers = {"traceparent": f"00-{trace_id}-{caller}-01"}
        answered = await client.post("/v1/completions", json=body, headers=headers)
    assert answered.status_code == 200
    check_tree(await whole_trace(collector, trace_id), caller)
