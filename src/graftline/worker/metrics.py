"""A worker's metrics: what the service observes as it happens, what the engine counts read at every scrape."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from http.server import ThreadingHTTPServer
from socketserver import BaseRequestHandler
from typing import Any

from prometheus_client import start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from graftline import metrics as table
from graftline.engine.memory_plan import MemoryPlan
from graftline.engine.plan import StageAlive
from graftline.engine.service_api import EngineLoad
from graftline.errors import PeerUnavailableError
from graftline.metrics import Kind, Metric, Metrics, ProcessRole
from graftline.proto.address import parse_address

# Rows that are a field of `PrefillTotals` or `DecodeTotals`.
TOTALS: dict[ProcessRole, dict[str, Metric]] = {
    ProcessRole.PREFILL: {
        "steps": table.PREFILL_STEPS,
        "computed_tokens": table.PREFILL_COMPUTED,
        "cached_tokens": table.PREFILL_CACHED,
        "sent_bytes": table.PREFILL_SENT_BYTES,
        "send_s": table.PREFILL_SEND_TIME,
        "sends": table.PREFILL_SENDS,
        "failed_sends": table.PREFILL_FAILED_SENDS,
    },
    ProcessRole.DECODE: {
        "rounds": table.DECODE_ROUNDS,
        "request_rounds": table.DECODE_REQUEST_ROUNDS,
        "output_tokens": table.DECODE_OUTPUT_TOKENS,
        "drafted": table.DECODE_DRAFTED,
        "accepted": table.DECODE_ACCEPTED,
        "first_rounds": table.DECODE_FIRST_ROUNDS,
        "first_round_drafted": table.DECODE_FIRST_DRAFTED,
        "first_round_accepted": table.DECODE_FIRST_ACCEPTED,
        "preemptions": table.DECODE_PREEMPTIONS,
    },
}
Family = GaugeMetricFamily | CounterMetricFamily
Samples = Iterable[tuple[tuple[str, ...], float]]


class EngineCollector(Collector):
    """Reads the engine at every scrape: nothing freezes when a worker is idle."""

    def __init__(
        self,
        role: ProcessRole,
        *,
        load: Callable[[], EngineLoad],
        stage_load: Callable[[], Sequence[StageAlive]],
        totals: object,
        num_open: Callable[[], int],
        memory: MemoryPlan | None = None,
    ) -> None:
        self._role = role
        self._load = load
        self._stage_load = stage_load
        self._totals = totals
        self._num_open = num_open
        self._memory = memory

    def collect(self) -> Iterator[Family]:
        """Every row that is read at a scrape."""
        load, role = self._load(), self._role.value
        pages = load.pages
        by_state = {"free": pages.free, "used": pages.used, "cached": pages.cached, "quarantined": pages.quarantined}
        slots = {"free": load.slots_free, "used": load.slots_total - load.slots_free}
        yield _family(table.WORKER_UP, [((role,), load.failed is None)])
        yield _family(table.WORKER_OPEN, [((role,), self._num_open())])
        yield _family(table.WORKER_QUEUED, [((role,), load.queued)])
        yield _family(table.WORKER_QUEUED_TOKENS, [((role,), load.queued_tokens)])
        yield _family(table.WORKER_RUNNING, [((role,), load.running)])
        yield _family(table.WORKER_PAGES, [((role, state), count) for state, count in by_state.items()])
        yield _family(table.WORKER_SLOTS, [((role, state), count) for state, count in slots.items()])
        stages = self._stage_load()
        yield _family(table.WORKER_STAGE_BUSY, [((role, str(stage.stage)), stage.busy_s) for stage in stages])
        yield _family(table.WORKER_STAGE_STEPS, [((role, str(stage.stage)), stage.steps) for stage in stages])
        yield _family(table.WORKER_RESIDENT_BYTES, [((role, str(s.stage)), s.resident_bytes) for s in stages])
        yield _family(table.WORKER_DEVICE_BYTES, [((role, str(s.stage)), s.device_bytes) for s in stages])
        yield from self._plan()
        for field, metric in TOTALS[self._role].items():
            yield _family(metric, [((), getattr(self._totals, field))])

    def _plan(self) -> Iterator[Family]:
        if self._memory is None:
            return
        role = self._role.value
        parts = [((role, *where), num_bytes) for where, num_bytes in planned_bytes(self._memory).items()]
        yield _family(table.WORKER_PLANNED_BYTES, parts)
        yield _family(table.WORKER_SKIPPED_BYTES, [((role,), self._memory.skipped_bytes)])


def planned_bytes(memory: MemoryPlan) -> dict[tuple[str, str], int]:
    """Bytes of every part of every stage, keyed by (stage, part): whatever byte fields the plan of a stage has."""
    return {
        (str(stage.stage), field.name.removesuffix("_bytes")): getattr(stage, field.name)
        for stage in memory.stages
        for field in fields(stage)
        if field.name.endswith("_bytes")
    }


def _family(metric: Metric, samples: Samples) -> Family:
    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    family: Family = kind(metric.name, metric.help, labels=metric.labels)
    for labels, value in samples:
        family.add_metric(labels, float(value))
    return family


class ServiceMetrics:
    """What a worker's service observes."""

    def __init__(self, metrics: Metrics, role: ProcessRole) -> None:
        self._role = role.value
        self._started = metrics.counter(table.WORKER_STARTED)
        self._ended = metrics.counter(table.WORKER_ENDED)
        self._request_time = metrics.histogram(table.WORKER_REQUEST_TIME)
        self._first_token_time = metrics.histogram(table.WORKER_FIRST_TOKEN_TIME)

    def started(self) -> None:
        """A request was taken."""
        self._started.labels(self._role).inc()

    def first_token(self, seconds: float) -> None:
        """Its first token is there."""
        self._first_token_time.labels(self._role).observe(seconds)

    def ended(self, outcome: str, seconds: float) -> None:
        """It ended."""
        self._ended.labels(self._role, outcome).inc()
        self._request_time.labels(self._role).observe(seconds)


class PrefillMetrics(ServiceMetrics):
    """What a prefill's service observes besides."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(metrics, ProcessRole.PREFILL)
        self._tail = metrics.histogram(table.PREFILL_HANDOFF_TAIL)

    def handed_over(self, tail_s: float) -> None:
        """A handoff finished `tail_s` after its first token."""
        self._tail.observe(tail_s)


class DecodeMetrics(ServiceMetrics):
    """What a decode's service observes besides."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(metrics, ProcessRole.DECODE)
        self._inter_token = metrics.histogram(table.DECODE_INTER_TOKEN)
        self._quarantines = metrics.counter(table.DECODE_QUARANTINES)

    def tokens(self, num_tokens: int, seconds: float) -> None:
        """Tokens came `seconds` after the ones before them."""
        self._inter_token.observe_times(seconds / num_tokens, num_tokens)

    def quarantined(self) -> None:
        """Pages went out of use."""
        self._quarantines.inc()


# For a request to come and its answer to be taken: a scraper asks at once.
SCRAPE_TIMEOUT_S = 10.0


def _impatient(handler: Any, timeout_s: float) -> type[BaseRequestHandler]:
    """A handler that ends connections which bring no request, or do not take its answer: each holds a thread."""

    class Impatient(handler):  # type: ignore[misc]  # whatever class the library uses
        timeout = timeout_s

        def handle(self) -> None:
            with contextlib.suppress(TimeoutError, ConnectionError):
                super().handle()

    return Impatient


class MetricsServer:
    """Prometheus' text format over HTTP, in a thread of its own."""

    def __init__(self, metrics: Metrics, listen: str, timeout_s: float = SCRAPE_TIMEOUT_S) -> None:
        """Raises PeerUnavailableError when the port cannot be opened."""
        host, port = parse_address(listen, field="metrics_listen")
        try:
            server, thread = start_http_server(port, host.strip("[]"), metrics.registry)
        except OSError as error:
            raise PeerUnavailableError(f"cannot listen on {listen}: {error}") from error
        server.RequestHandlerClass = _impatient(server.RequestHandlerClass, timeout_s)
        self._server: Any | ThreadingHTTPServer = server
        self._thread: threading.Thread = thread
        self.address = f"{host}:{server.server_port}"

    def close(self) -> None:
        """Ends the thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)
