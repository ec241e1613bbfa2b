"""From raw arrivals to the figures people compare: TTFT, TPOT, ITL, end to end, throughput, accept lengths.

* TTFT: request due until the first message with tokens.
* TPOT: (last arrival - first arrival) / (tokens - 1) of one request; undefined for a request of one token.
* ITL: one gap per token after the first. A message of k tokens that comes g seconds after the one before it counts
  as one gap of g and k - 1 gaps of zero, because that is what a reader of the stream sees. The k - 1 tokens that
  share a first message count as zero gaps too. So the gaps of a request sum to TPOT * (tokens - 1).
* Pause: the gaps between messages alone, without the zeros: how long the stream stands still.
* E2E: request due until the end of the stream.

Failed requests count in no latency and in no throughput; they are counted by code.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from graftline.bench.records import LoadSummary, RequestRecord, Run, Speculation
from graftline.bench.stats import mean, percentile, summarise


def ttft_s(record: RequestRecord) -> float:
    """Seconds until the first token of a request that is `ok`."""
    return record.arrivals[0].at_s


def tpot_s(record: RequestRecord) -> float | None:
    """Seconds per output token after the first; None for a single token."""
    if record.num_output_tokens < 2:
        return None
    return (record.arrivals[-1].at_s - record.arrivals[0].at_s) / (record.num_output_tokens - 1)


def pauses_s(record: RequestRecord) -> Iterator[float]:
    """Seconds between one message with tokens and the next."""
    for earlier, later in zip(record.arrivals, record.arrivals[1:], strict=False):
        yield later.at_s - earlier.at_s


def gaps_s(record: RequestRecord) -> Iterator[float]:
    """One gap per token after the first, in order; see the head of this module."""
    yield from [0.0] * (record.arrivals[0].num_tokens - 1)
    for pause, arrival in zip(pauses_s(record), record.arrivals[1:], strict=True):
        yield pause
        yield from [0.0] * (arrival.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of a run that variants are compared by.

    Attributes:
        label: what a table calls it.
        unit: how a table prints it: "ms" (values are seconds), "/s" or "" (plain).
        of: the figure; None where the run does not define it.
        by_request: computed from the records alone, so that requests may be resampled.
    """

    label: str
    unit: str
    of: Callable[[Run], float | None]
    by_request: bool = True


def finished(run: Run) -> list[RequestRecord]:
    """The requests that count."""
    return [record for record in run.records if record.ok]


def accept_length(record: Speculation) -> float | None:
    """Tokens a verify emitted on average; None without a round."""
    return (record.accepted + record.rounds) / record.rounds if record.rounds else None


def _speculations(run: Run) -> list[Speculation]:
    """Of the requests that ran at least one round of verifying; without speculation there are none."""
    found = (record.speculation for record in finished(run))
    return [entry for entry in found if entry is not None and entry.rounds > 0 and entry.tree_origin != "none"]


def _accept_length(run: Run) -> float | None:
    entries = _speculations(run)
    rounds = sum(entry.rounds for entry in entries)
    return (rounds + sum(entry.accepted for entry in entries)) / rounds if rounds else None


def _first_accept_length(run: Run) -> float | None:
    entries = _speculations(run)
    return 1 + mean([entry.first_round_accepted for entry in entries]) if entries else None


def _rounds(run: Run) -> float | None:
    entries = _speculations(run)
    return mean([entry.rounds for entry in entries]) if entries else None


def _tokens_per_s(run: Run) -> float | None:
    tokens = sum(record.num_output_tokens for record in finished(run))
    return tokens / run.wall_s if tokens and run.wall_s > 0 else None


def _requests_per_s(run: Run) -> float | None:
    count = len(finished(run))
    return count / run.wall_s if count and run.wall_s > 0 else None


def _kv_bytes(run: Run) -> float | None:
    sizes = [record.handoff.bytes for record in finished(run) if record.handoff is not None and record.handoff.bytes]
    return mean(sizes) if sizes else None


def _kv_gb_per_s(run: Run) -> float | None:
    entries = [record.handoff for record in finished(run) if record.handoff is not None and record.handoff.write_s > 0]
    seconds = sum(entry.write_s for entry in entries)
    return sum(entry.bytes for entry in entries) / seconds / 1e9 if seconds else None


def _mean_of(value: Callable[[RequestRecord], float | None]) -> Callable[[Run], float | None]:
    def figure(run: Run) -> float | None:
        values = [number for record in finished(run) if (number := value(record)) is not None]
        return mean(values) if values else None

    return figure


def _percentile_of(value: Callable[[RequestRecord], float | None], percent: float) -> Callable[[Run], float | None]:
    def figure(run: Run) -> float | None:
        values = [number for record in finished(run) if (number := value(record)) is not None]
        return percentile(values, percent) if values else None

    return figure


def _e2e_s(record: RequestRecord) -> float:
    return record.end_s


# What `--compare` prints ratios of.
METRICS: Mapping[str, Metric] = {
    "output_tokens_per_s": Metric("output tokens/s", "/s", _tokens_per_s, by_request=False),
    "requests_per_s": Metric("requests/s", "/s", _requests_per_s, by_request=False),
    "ttft_mean_s": Metric("TTFT mean", "ms", _mean_of(ttft_s)),
    "ttft_p99_s": Metric("TTFT p99", "ms", _percentile_of(ttft_s, 99)),
    "tpot_mean_s": Metric("TPOT mean", "ms", _mean_of(tpot_s)),
    "tpot_p99_s": Metric("TPOT p99", "ms", _percentile_of(tpot_s, 99)),
    "e2e_mean_s": Metric("E2E mean", "ms", _mean_of(_e2e_s)),
    "e2e_p99_s": Metric("E2E p99", "ms", _percentile_of(_e2e_s, 99)),
    "accept_length": Metric("accept length", "", _accept_length),
    "first_round_accept_length": Metric("first-round accept length", "", _first_accept_length),
}
# Figures of a variant on its own; not worth a ratio.
_OWN_FIGURES: Mapping[str, Callable[[Run], float | None]] = {
    "rounds_mean": _rounds,
    "kv_bytes_mean": _kv_bytes,
    "kv_gb_per_s": _kv_gb_per_s,
    "prompt_tokens_mean": _mean_of(lambda record: float(record.num_prompt_tokens)),
    "cached_tokens_mean": _mean_of(lambda record: float(record.num_cached_tokens)),
    "output_tokens_mean": _mean_of(lambda record: float(record.num_output_tokens)),
    "attempts_mean": _mean_of(lambda record: float(record.attempts) if record.attempts else None),
    "cores_used": lambda run: run.own_cpu_s / run.wall_s if run.own_cpu_s and run.wall_s > 0 else None,
    "cores_used_by_idle_variants": lambda run: run.other_cpu_s / run.wall_s if run.wall_s > 0 else None,
    "sent_late_max_s": lambda run: max((record.sent_s for record in run.records), default=None),
}


def summarise_runs(runs: Sequence[Run]) -> LoadSummary:
    """One summary of the runs of one variant at one load, all rounds pooled.

    Raises:
        ValueError: no runs, or runs of several variants or loads.
    """
    if len({(run.variant, run.load) for run in runs}) != 1:
        raise ValueError("runs of one variant at one load are summarised together")
    records = tuple(record for run in runs for record in run.records)
    pooled = Run(
        variant=runs[0].variant,
        round=0,
        load=runs[0].load,
        wall_s=sum(run.wall_s for run in runs),
        own_cpu_s=sum(run.own_cpu_s for run in runs),
        other_cpu_s=sum(run.other_cpu_s for run in runs),
        records=records,
    )
    good = finished(pooled)
    values = {
        "ttft_s": [ttft_s(record) for record in good],
        "tpot_s": [value for record in good if (value := tpot_s(record)) is not None],
        "itl_s": [gap for record in good for gap in gaps_s(record)],
        "pause_s": [pause for record in good for pause in pauses_s(record)],
        "e2e_s": [record.end_s for record in good],
    }
    figures = {**{name: metric.of for name, metric in METRICS.items()}, **_OWN_FIGURES}
    return LoadSummary(
        variant=pooled.variant,
        load=pooled.load,
        num_requests=len(records),
        num_failed=len(records) - len(good),
        latencies={name: summary for name, given in values.items() if (summary := summarise(given)) is not None},
        figures={name: value for name, figure in figures.items() if (value := figure(pooled)) is not None},
        errors=dict(Counter(record.error or "NO_TOKENS" for record in records if not record.ok)),
        tree_origins=dict(Counter(record.speculation.tree_origin for record in good if record.speculation)),
    )
