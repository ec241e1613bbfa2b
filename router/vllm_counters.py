"""Speculation counters under the names that vLLM's serving benchmark looks for.

Colons in names are not promtool-clean, so scrapers never see these: Prometheus names the version of the format it
wants in its Accept header, benchmarks and curl do not.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from graftline.metrics import SPECULATION_ACCEPTED, SPECULATION_DRAFTED, SPECULATION_ROUNDS, Metric, Metrics

_ALIASES = (
    ("vllm:spec_decode_num_drafts", SPECULATION_ROUNDS),
    ("vllm:spec_decode_num_draft_tokens", SPECULATION_DRAFTED),
    ("vllm:spec_decode_num_accepted_tokens", SPECULATION_ACCEPTED),
)


def is_scraper(accept: str) -> bool:
    """Whether a request with this Accept header is Prometheus'."""
    return "version=" in accept


def vllm_exposition(metrics: Metrics) -> bytes:
    """The counters in Prometheus' text format; nothing before the first verify round."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Aliases(metrics))
    return generate_latest(registry)


class _Aliases(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[CounterMetricFamily]:
        for name, metric in _ALIASES:
            family = CounterMetricFamily(name, f"{metric.help} Also {metric.name}.", labels=["model_name"])
            for model, value in self._by_model(metric):
                family.add_metric([model], value)
            if family.samples:
                yield family

    def _by_model(self, metric: Metric) -> Iterator[tuple[str, float]]:
        for family in self._metrics.counter(metric).collect():
            for sample in family.samples:
                if sample.name == metric.name:
                    yield sample.labels["model"], sample.value
