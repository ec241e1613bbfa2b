"""What `graftline top` shows, as values: one look at a router's status and metrics, and what two looks come to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families

from graftline.metrics import (
    ATTEMPTS_FAILED,
    COMPLETION_TOKENS,
    INTER_TOKEN,
    REQUESTS_ENDED,
    REQUESTS_REFUSED,
    SPECULATION_ACCEPTED,
    SPECULATION_ROUNDS,
    STREAMS_RESUMED,
    TIME_TO_FIRST_TOKEN,
    Metric,
)
from graftline.proto.v1.common_pb2 import WorkerRole
from graftline.proto.v1.router_pb2 import GetStatusResponse, WorkerStatus
from graftline.proto.v1.worker_pb2 import WorkerState

_GOOD = frozenset({"stop", "length"})


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker as the router sees it.

    Attributes:
        reason: why it is not available; empty when it is.
        tokens_per_s: output tokens a second, of a decode.
        accept_length: over its last rounds; None without any.
    """

    role: str
    address: str
    state: str
    available: bool
    reason: str
    num_stages: int
    open_requests: int
    queued: int
    queued_tokens: int
    running: int
    pages_total: int
    pages_free: int
    pages_quarantined: int
    tokens_per_s: float
    accept_length: float | None

    @classmethod
    def of(cls, status: WorkerStatus) -> "WorkerRow":
        """From the router's answer."""
        load = status.load
        return cls(
            role=WorkerRole.Name(status.identity.role).removeprefix("WORKER_ROLE_").lower(),
            address=status.identity.address,
            state=WorkerState.Name(load.state).removeprefix("WORKER_STATE_").lower(),
            available=status.available,
            reason=status.reason,
            num_stages=status.num_stages,
            open_requests=status.open_requests,
            queued=load.queued,
            queued_tokens=load.queued_tokens,
            running=load.running,
            pages_total=load.pages_total,
            pages_free=load.pages_free,
            pages_quarantined=load.pages_quarantined,
            tokens_per_s=load.tokens_per_s,
            accept_length=load.accept_length or None,
        )


@dataclass(frozen=True, slots=True)
class PairRow:
    """A prefill and a decode, by address, and the fields that keep them apart."""

    prefill: str
    decode: str
    usable: bool
    mismatched_fields: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Counts:
    """Totals of a router since it started, from its metrics.

    Attributes:
        first_token, inter_token: cumulative histograms: upper bounds in seconds -> observations.
    """

    finished: float = 0.0
    failed: float = 0.0
    refused: float = 0.0
    attempts_failed: float = 0.0
    resumed: float = 0.0
    tokens: float = 0.0
    rounds: float = 0.0
    accepted: float = 0.0
    first_token: Mapping[float, float] = field(default_factory=dict)
    inter_token: Mapping[float, float] = field(default_factory=dict)

    @classmethod
    def of(cls, exposition: str) -> "Counts":
        """From a router's /metrics."""
        samples = [sample for family in text_string_to_metric_families(exposition) for sample in family.samples]

        def total(metric: Metric) -> float:
            return sum(sample.value for sample in samples if sample.name == metric.name)

        def histogram(metric: Metric) -> dict[float, float]:
            buckets: dict[float, float] = {}
            for sample in samples:
                if sample.name == f"{metric.name}_bucket":
                    bound = float(sample.labels["le"])
                    buckets[bound] = buckets.get(bound, 0.0) + sample.value
            return dict(sorted(buckets.items()))

        ended = [sample for sample in samples if sample.name == REQUESTS_ENDED.name]
        finished = sum(sample.value for sample in ended if sample.labels["outcome"] in _GOOD)
        return cls(
            finished=finished,
            failed=sum(sample.value for sample in ended) - finished,
            refused=total(REQUESTS_REFUSED),
            attempts_failed=total(ATTEMPTS_FAILED),
            resumed=total(STREAMS_RESUMED),
            tokens=total(COMPLETION_TOKENS),
            rounds=total(SPECULATION_ROUNDS),
            accepted=total(SPECULATION_ACCEPTED),
            first_token=histogram(TIME_TO_FIRST_TOKEN),
            inter_token=histogram(INTER_TOKEN),
        )


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a router did between two looks, or since it started. None: nothing to compute it from.

    Attributes:
        seconds: between the looks; None: since the router started, so there are no rates.
    """

    seconds: float | None
    requests_per_s: float | None
    tokens_per_s: float | None
    finished: int
    failed: int
    refused: int
    attempts_failed: int
    resumed: int
    accept_length: float | None
    first_token_p50_s: float | None
    first_token_p99_s: float | None
    inter_token_p50_s: float | None
    inter_token_p99_s: float | None

    @classmethod
    def between(cls, before: Counts | None, after: Counts, seconds: float | None) -> "Traffic":
        """What happened from `before` (None: the router's start) to `after`; a restarted router starts anew."""
        if before is None or after.finished + after.failed < before.finished + before.failed:
            before, seconds = Counts(), None
        first = _difference(before.first_token, after.first_token)
        later = _difference(before.inter_token, after.inter_token)
        rounds = after.rounds - before.rounds
        ended = after.finished + after.failed - before.finished - before.failed
        return cls(
            seconds=seconds,
            requests_per_s=ended / seconds if seconds else None,
            tokens_per_s=(after.tokens - before.tokens) / seconds if seconds else None,
            finished=int(after.finished - before.finished),
            failed=int(after.failed - before.failed),
            refused=int(after.refused - before.refused),
            attempts_failed=int(after.attempts_failed - before.attempts_failed),
            resumed=int(after.resumed - before.resumed),
            accept_length=(rounds + after.accepted - before.accepted) / rounds if rounds > 0 else None,
            first_token_p50_s=quantile(first, 0.5),
            first_token_p99_s=quantile(first, 0.99),
            inter_token_p50_s=quantile(later, 0.5),
            inter_token_p99_s=quantile(later, 0.99),
        )


@dataclass(frozen=True, slots=True)
class Look:
    """One look at a router.

    Attributes:
        problem: why there is no traffic, or no router.
    """

    router: str
    open_requests: int
    workers: tuple[WorkerRow, ...]
    pairs: tuple[PairRow, ...]
    traffic: Traffic | None = None
    problem: str = ""

    @classmethod
    def of(cls, router: str, status: GetStatusResponse, traffic: Traffic | None, problem: str = "") -> "Look":
        """From the router's answers."""
        workers = sorted(status.workers, key=lambda worker: (worker.identity.role, worker.identity.address))
        rows = tuple(map(WorkerRow.of, workers))
        return cls(router, status.open_requests, rows, tuple(pairs_of(workers)), traffic, problem)


def pairs_of(workers: Sequence[WorkerStatus]) -> list[PairRow]:
    """Every prefill with every decode."""

    def of_role(role: WorkerRole.ValueType) -> list[WorkerStatus]:
        return [worker for worker in workers if worker.identity.role == role]

    rows = []
    for prefill in of_role(WorkerRole.WORKER_ROLE_PREFILL):
        for decode in of_role(WorkerRole.WORKER_ROLE_DECODE):
            ours, theirs = dict(prefill.fingerprint.fields), dict(decode.fingerprint.fields)
            differing = tuple(sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)))
            usable = prefill.available and decode.available and not differing
            rows.append(PairRow(prefill.identity.address, decode.identity.address, usable, differing))
    return rows


def quantile(buckets: Mapping[float, float], share: float) -> float | None:
    """Interpolated within its bucket, as Prometheus does; None without observations.

    Args:
        buckets: cumulative: upper bound in seconds -> observations, in order; the last bound is infinite.
    """
    counts = list(buckets.values())
    if not counts or counts[-1] <= 0:
        return None
    rank = share * counts[-1]
    for (low, before), (high, upto) in pairwise([(0.0, 0.0), *buckets.items()]):
        if upto >= rank and upto > before:
            return low if high == float("inf") else low + (high - low) * (rank - before) / (upto - before)
    return None


def _difference(before: Mapping[float, float], after: Mapping[float, float]) -> dict[float, float]:
    return {bound: count - before.get(bound, 0.0) for bound, count in after.items()}
