"""Every metric in one table, and the registry a process builds from its part of it.

Names are promtool-clean: prefix `graftline_`, base units, counters end in `_total`. Label values come from
bounded sets (models served, workers configured, enum members), never from requests.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Kind(Enum):
    """How a metric behaves."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class ProcessRole(Enum):
    """Which process exports a metric."""

    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"


LATENCY_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of the table.

    Attributes:
        labels: their values come from bounded sets.
        at_scrape: read from its owner at every scrape, by a collector; it has no instrument.
    """

    name: str
    kind: Kind
    help: str
    roles: frozenset[ProcessRole]
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    at_scrape: bool = False


def _router(
    name: str, kind: Kind, help_text: str, labels: tuple[str, ...] = (), buckets: tuple[float, ...] = ()
) -> Metric:
    return Metric(f"graftline_router_{name}", kind, help_text, frozenset({ProcessRole.ROUTER}), labels, buckets)


REQUESTS_STARTED = _router("requests_started_total", Kind.COUNTER, "Requests admitted.", ("model",))
REQUESTS_ENDED = _router(
    "requests_ended_total",
    Kind.COUNTER,
    "Admitted requests that ended, by outcome: stop, length, cancelled or an error class. Started minus ended is open.",
    ("model", "outcome"),
)
REQUESTS_REFUSED = _router(
    "requests_refused_total", Kind.COUNTER, "Requests refused before admission, by error class.", ("reason",)
)
REQUESTS_OPEN = _router("requests_open", Kind.GAUGE, "Requests being served now.")
ATTEMPTS_FAILED = _router(
    "attempts_failed_total", Kind.COUNTER, "Attempts that failed, by leg and error class.", ("leg", "reason")
)
STREAMS_RESUMED = _router(
    "streams_resumed_total", Kind.COUNTER, "Choices continued on another pair after their first token.", ("model",)
)
RESUME_GAP = _router(
    "resume_gap_seconds",
    Kind.HISTOGRAM,
    "From the last token before a failure to the first one after it.",
    (),
    LATENCY_BUCKETS_S,
)
SLOW_CONSUMERS_CUT = _router(
    "slow_consumers_cut_total", Kind.COUNTER, "Requests cut because the client read too slowly."
)
PROMPT_TOKENS = _router("prompt_tokens_total", Kind.COUNTER, "Prompt tokens of finished choices.", ("model",))
CACHED_TOKENS = _router(
    "cached_tokens_total", Kind.COUNTER, "Prompt tokens of finished choices found in a prefix cache.", ("model",)
)
COMPLETION_TOKENS = _router("completion_tokens_total", Kind.COUNTER, "Output tokens sent to clients.", ("model",))
SPECULATION_ROUNDS = _router("speculation_rounds_total", Kind.COUNTER, "Verify rounds of finished choices.", ("model",))
SPECULATION_DRAFTED = _router(
    "speculation_drafted_tokens_total", Kind.COUNTER, "Draft tokens verified for finished choices.", ("model",)
)
SPECULATION_ACCEPTED = _router(
    "speculation_accepted_tokens_total", Kind.COUNTER, "Draft tokens accepted for finished choices.", ("model",)
)
FIRST_ROUNDS = _router(
    "first_rounds_total",
    Kind.COUNTER,
    "Finished choices that had a verify round, by origin of their first tree.",
    ("model", "tree_origin"),
)
FIRST_ROUND_DRAFTED = _router(
    "first_round_drafted_tokens_total",
    Kind.COUNTER,
    "Draft tokens verified in first rounds, by origin of the tree.",
    ("model", "tree_origin"),
)
FIRST_ROUND_ACCEPTED = _router(
    "first_round_accepted_tokens_total",
    Kind.COUNTER,
    "Draft tokens accepted in first rounds, by origin of the tree.",
    ("model", "tree_origin"),
)
WITHIN_OBJECTIVE = _router(
    "requests_within_objective_total",
    Kind.COUNTER,
    "Finished requests whose first token, and whose mean time for each token after it, came within the objectives.",
    ("model",),
)
OBJECTIVE = _router(
    "objective_seconds", Kind.GAUGE, "The objectives: first_token, and per_token for those after it.", ("objective",)
)
TOKENIZE = _router("tokenize_seconds", Kind.HISTOGRAM, "Prompt to token ids.", (), LATENCY_BUCKETS_S)
TIME_TO_FIRST_TOKEN = _router(
    "time_to_first_token_seconds", Kind.HISTOGRAM, "Request received to first token.", ("model",), LATENCY_BUCKETS_S
)
INTER_TOKEN = _router(
    "inter_token_seconds",
    Kind.HISTOGRAM,
    "Time between two messages of a choice, divided by the tokens of the later one and counted for each of them.",
    ("model",),
    LATENCY_BUCKETS_S,
)
END_TO_END = _router(
    "request_seconds", Kind.HISTOGRAM, "Request received to its last message.", ("model",), LATENCY_BUCKETS_S
)
WORKER_AVAILABLE = _router(
    "worker_available", Kind.GAUGE, "1 when the worker may be picked for new requests.", ("role", "worker")
)
WORKER_OPEN_REQUESTS = _router(
    "worker_open_requests", Kind.GAUGE, "Requests this router has open on the worker.", ("role", "worker")
)
WORKER_LOST = _router(
    "worker_lost_total", Kind.COUNTER, "Times a worker was found dead, restarted or hung.", ("role", "worker")
)

ROUTER_METRICS = (
    REQUESTS_STARTED,
    REQUESTS_ENDED,
    REQUESTS_REFUSED,
    REQUESTS_OPEN,
    ATTEMPTS_FAILED,
    STREAMS_RESUMED,
    RESUME_GAP,
    SLOW_CONSUMERS_CUT,
    PROMPT_TOKENS,
    CACHED_TOKENS,
    COMPLETION_TOKENS,
    SPECULATION_ROUNDS,
    SPECULATION_DRAFTED,
    SPECULATION_ACCEPTED,
    FIRST_ROUNDS,
    FIRST_ROUND_DRAFTED,
    FIRST_ROUND_ACCEPTED,
    WITHIN_OBJECTIVE,
    OBJECTIVE,
    TOKENIZE,
    TIME_TO_FIRST_TOKEN,
    INTER_TOKEN,
    END_TO_END,
    WORKER_AVAILABLE,
    WORKER_OPEN_REQUESTS,
    WORKER_LOST,
)
# --- workers -------------------------------------------------------------------------------------------------
# What the engine counts is read from it at every scrape, so that nothing freezes when a worker is idle.

_WORKERS = frozenset({ProcessRole.PREFILL, ProcessRole.DECODE})


def _engine(
    name: str,
    kind: Kind,
    help_text: str,
    labels: tuple[str, ...] = (),
    roles: frozenset[ProcessRole] = _WORKERS,
) -> Metric:
    return Metric(f"graftline_{name}", kind, help_text, roles, labels, at_scrape=True)


def _service(
    name: str,
    kind: Kind,
    help_text: str,
    labels: tuple[str, ...] = (),
    buckets: tuple[float, ...] = (),
    roles: frozenset[ProcessRole] = _WORKERS,
) -> Metric:
    return Metric(f"graftline_{name}", kind, help_text, roles, labels, buckets)


_PREFILL = frozenset({ProcessRole.PREFILL})
_DECODE = frozenset({ProcessRole.DECODE})

WORKER_UP = _engine("worker_up", Kind.GAUGE, "1 while the engine runs, 0 once it failed.", ("role",))
WORKER_OPEN = _engine(
    "worker_open_requests", Kind.GAUGE, "Requests the service has not ended, vanished callers' included.", ("role",)
)
WORKER_QUEUED = _engine("worker_queued_requests", Kind.GAUGE, "Requests waiting for pages and a slot.", ("role",))
WORKER_QUEUED_TOKENS = _engine("worker_queued_tokens", Kind.GAUGE, "Prompt tokens not yet computed.", ("role",))
WORKER_RUNNING = _engine("worker_running_requests", Kind.GAUGE, "Requests that hold a slot.", ("role",))
WORKER_PAGES = _engine(
    "worker_pages", Kind.GAUGE, "Pages by state: free, used, cached, quarantined.", ("role", "state")
)
WORKER_SLOTS = _engine("worker_slots", Kind.GAUGE, "Request slots by state: free, used.", ("role", "state"))
WORKER_STAGE_BUSY = _engine(
    "worker_stage_busy_seconds_total", Kind.COUNTER, "Seconds a stage computed.", ("role", "stage")
)
WORKER_STAGE_STEPS = _engine("worker_stage_steps_total", Kind.COUNTER, "Steps a stage computed.", ("role", "stage"))
WORKER_PLANNED_BYTES = _engine(
    "worker_planned_bytes",
    Kind.GAUGE,
    "Bytes of the memory plan, by stage and part: weights, the pools the plan names, and graphs and rings as measured.",
    ("role", "stage", "part"),
)
WORKER_RESIDENT_BYTES = _engine(
    "worker_stage_resident_bytes",
    Kind.GAUGE,
    "Main memory of a stage's process; stages that are threads of one process all show the whole.",
    ("role", "stage"),
)
WORKER_DEVICE_BYTES = _engine(
    "worker_stage_device_bytes", Kind.GAUGE, "GPU memory held by a stage's process; 0 on CPU.", ("role", "stage")
)
WORKER_SKIPPED_BYTES = _engine(
    "worker_skipped_bytes",
    Kind.GAUGE,
    "Bytes that a decode with the same settings would plan on top: a prefill never verifies.",
    ("role",),
)
WORKER_STARTED = _service("worker_requests_started_total", Kind.COUNTER, "Requests taken.", ("role",))
WORKER_ENDED = _service(
    "worker_requests_ended_total",
    Kind.COUNTER,
    "Requests taken that ended, by outcome: stop, length or an error class; of a prefill finished, cancelled or a "
    "failure. Started minus ended is open.",
    ("role", "outcome"),
)
WORKER_REQUEST_TIME = _service(
    "worker_request_seconds", Kind.HISTOGRAM, "Request taken to its end here.", ("role",), LATENCY_BUCKETS_S
)
WORKER_FIRST_TOKEN_TIME = _service(
    "worker_time_to_first_token_seconds",
    Kind.HISTOGRAM,
    "Request taken to its first token here.",
    ("role",),
    LATENCY_BUCKETS_S,
)

PREFILL_STEPS = _engine("prefill_steps_total", Kind.COUNTER, "Steps (one or more chunks each).", (), _PREFILL)
PREFILL_COMPUTED = _engine(
    "prefill_computed_tokens_total", Kind.COUNTER, "Prompt tokens computed, retries included.", (), _PREFILL
)
PREFILL_CACHED = _engine(
    "prefill_cached_tokens_total", Kind.COUNTER, "Prompt tokens found in the prefix cache.", (), _PREFILL
)
PREFILL_SENT_BYTES = _engine(
    "prefill_sent_bytes_total", Kind.COUNTER, "Bytes written to decodes and acknowledged.", (), _PREFILL
)
PREFILL_SEND_TIME = _engine(
    "prefill_send_seconds_total", Kind.COUNTER, "Seconds that writes took, summed over stages.", (), _PREFILL
)
PREFILL_SENDS = _engine("prefill_sends_total", Kind.COUNTER, "Write orders answered by a stage.", (), _PREFILL)
PREFILL_FAILED_SENDS = _engine(
    "prefill_failed_sends_total", Kind.COUNTER, "Write orders that failed while their request was wanted.", (), _PREFILL
)
PREFILL_HANDOFF_TAIL = _service(
    "prefill_handoff_tail_seconds",
    Kind.HISTOGRAM,
    "First token to the last acknowledged write of finished handoffs: what computing did not hide.",
    (),
    LATENCY_BUCKETS_S,
    _PREFILL,
)

DECODE_ROUNDS = _engine("decode_rounds_total", Kind.COUNTER, "Rounds of microbatches.", (), _DECODE)
DECODE_REQUEST_ROUNDS = _engine(
    "decode_request_rounds_total", Kind.COUNTER, "Rounds, counted once for every request in them.", (), _DECODE
)
DECODE_OUTPUT_TOKENS = _engine("decode_output_tokens_total", Kind.COUNTER, "Tokens emitted by rounds.", (), _DECODE)
DECODE_DRAFTED = _engine("decode_drafted_tokens_total", Kind.COUNTER, "Draft nodes verified.", (), _DECODE)
DECODE_ACCEPTED = _engine("decode_accepted_tokens_total", Kind.COUNTER, "Draft nodes accepted.", (), _DECODE)
DECODE_FIRST_ROUNDS = _engine("decode_first_rounds_total", Kind.COUNTER, "First rounds after a handoff.", (), _DECODE)
DECODE_FIRST_DRAFTED = _engine(
    "decode_first_round_drafted_tokens_total", Kind.COUNTER, "Draft nodes verified in first rounds.", (), _DECODE
)
DECODE_FIRST_ACCEPTED = _engine(
    "decode_first_round_accepted_tokens_total", Kind.COUNTER, "Draft nodes accepted in first rounds.", (), _DECODE
)
DECODE_PREEMPTIONS = _engine(
    "decode_preemptions_total", Kind.COUNTER, "Times a request's pages were taken from it.", (), _DECODE
)
DECODE_QUARANTINES = _service(
    "decode_quarantines_total",
    Kind.COUNTER,
    "Reservations whose prefill was lost while it could write.",
    (),
    (),
    _DECODE,
)
DECODE_INTER_TOKEN = _service(
    "decode_inter_token_seconds",
    Kind.HISTOGRAM,
    "Time between two messages of a request, divided by the tokens of the later one and counted for each of them.",
    (),
    LATENCY_BUCKETS_S,
    _DECODE,
)

WORKER_METRICS = (
    WORKER_UP,
    WORKER_OPEN,
    WORKER_QUEUED,
    WORKER_QUEUED_TOKENS,
    WORKER_RUNNING,
    WORKER_PAGES,
    WORKER_SLOTS,
    WORKER_STAGE_BUSY,
    WORKER_STAGE_STEPS,
    WORKER_PLANNED_BYTES,
    WORKER_RESIDENT_BYTES,
    WORKER_DEVICE_BYTES,
    WORKER_SKIPPED_BYTES,
    WORKER_STARTED,
    WORKER_ENDED,
    WORKER_REQUEST_TIME,
    WORKER_FIRST_TOKEN_TIME,
    PREFILL_STEPS,
    PREFILL_COMPUTED,
    PREFILL_CACHED,
    PREFILL_SENT_BYTES,
    PREFILL_SEND_TIME,
    PREFILL_SENDS,
    PREFILL_FAILED_SENDS,
    PREFILL_HANDOFF_TAIL,
    DECODE_ROUNDS,
    DECODE_REQUEST_ROUNDS,
    DECODE_OUTPUT_TOKENS,
    DECODE_DRAFTED,
    DECODE_ACCEPTED,
    DECODE_FIRST_ROUNDS,
    DECODE_FIRST_DRAFTED,
    DECODE_FIRST_ACCEPTED,
    DECODE_PREEMPTIONS,
    DECODE_QUARANTINES,
    DECODE_INTER_TOKEN,
)
TABLE: tuple[Metric, ...] = (*ROUTER_METRICS, *WORKER_METRICS)


class Distribution(Histogram):
    """A histogram that takes equal observations together."""

    def observe_times(self, amount: float, times: int) -> None:
        """As many calls of `observe`."""
        self._sum.inc(amount * times)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(times)


class Metrics:
    """The metrics of one process: a registry of its own, filled from the rows that name its role."""

    def __init__(self, role: ProcessRole, table: Iterable[Metric] = TABLE) -> None:
        self.registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Distribution] = {}
        for metric in table:
            if role in metric.roles and not metric.at_scrape:
                self._add(metric)

    def counter(self, metric: Metric) -> Counter:
        """The instrument of a row."""
        return self._counters[metric.name]

    def gauge(self, metric: Metric) -> Gauge:
        """The instrument of a row."""
        return self._gauges[metric.name]

    def histogram(self, metric: Metric) -> Distribution:
        """The instrument of a row."""
        return self._histograms[metric.name]

    def total(self, metric: Metric) -> float:
        """The value of a counter, summed over its labels."""
        samples = (sample for family in self._counters[metric.name].collect() for sample in family.samples)
        return sum(sample.value for sample in samples if sample.name.endswith("_total"))

    def exposition(self) -> bytes:
        """All current values in Prometheus' text format."""
        return generate_latest(self.registry)

    def _add(self, metric: Metric) -> None:
        match metric.kind:
            case Kind.COUNTER:
                self._counters[metric.name] = Counter(metric.name, metric.help, metric.labels, registry=self.registry)
            case Kind.GAUGE:
                self._gauges[metric.name] = Gauge(metric.name, metric.help, metric.labels, registry=self.registry)
            case Kind.HISTOGRAM:
                self._histograms[metric.name] = Distribution(
                    metric.name, metric.help, metric.labels, registry=self.registry, buckets=metric.buckets
                )
