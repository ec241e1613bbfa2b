"""Writes docs/metrics.md from the table of metrics: `python docker/grafana/metrics_page.py`. A test compares them."""

import re
from collections.abc import Iterable
from pathlib import Path

from dashboard_live import alert_questions, dashboard_questions

from graftline.metrics import TABLE, Kind, Metric, ProcessRole

TARGET = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
HEAD = """# Metrics

Generated from `graftline.metrics` by `python docker/grafana/metrics_page.py`; do not edit.

Routers show theirs at `/metrics` of their HTTP port, workers at `--metrics-listen`. What an engine counts is read from
it at every scrape. Counters end in `_total`, units are base units, histograms of seconds share their buckets (1 ms to
300 s). Values of labels come from bounded sets:

| label | values |
|---|---|
| `model` | models served |
| `role` | prefill, decode |
| `worker` | addresses of workers, as the router knows them |
| `stage` | 0 to stages - 1 |
| `outcome` | stop, length, finished, cancelled, an error class, or a prefill's failure (such as `transfer-failed`) |
| `reason`, `leg` | error classes; prefill, decode |
| `tree_origin` | real, root_only; none without drafts; unspecified when a stop string ended the choice first |
| `state`, `part`, `objective` | as the row says |

In sums: started = ended + open, for routers and for workers. Accept length = 1 + accepted / request rounds. A worker's
pages: free + used + cached + quarantined is constant. Stages that are threads of one process share its memory, so their
resident bytes must not be added up.

"Shown" names the dashboard (`docker/grafana`) or alert (`docker/prometheus/rules`) that uses the metric.
"""


def shown_in(metric: Metric) -> list[str]:
    """Dashboards and alerts that ask for a metric."""
    wanted = re.compile(rf"\b{metric.name}(_bucket|_sum|_count)?\b")
    places = [*dashboard_questions("5m"), *alert_questions("5m")]
    found = {place.where.partition(":")[0].removeprefix("graftline-") for place in places if wanted.search(place.expr)}
    return sorted(found - {place for place in found if place.startswith("alert ")}) + sorted(
        place for place in found if place.startswith("alert ")
    )


def row(metric: Metric) -> str:
    """A metric's line."""
    kind = f"{metric.kind.value}{' (seconds)' if metric.kind is Kind.HISTOGRAM else ''}"
    cells = (f"`{metric.name}`", kind, ", ".join(metric.labels) or "-", metric.help, ", ".join(shown_in(metric)) or "-")
    return f"| {' | '.join(cells)} |"


def section(title: str, metrics: Iterable[Metric]) -> str:
    """A table."""
    lines = [f"## {title}", "| metric | kind | labels | meaning | shown |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *map(row, metrics)]) + "\n"


def page() -> str:
    """The whole page."""
    router = [metric for metric in TABLE if metric.roles == {ProcessRole.ROUTER}]
    both = [metric for metric in TABLE if metric.roles == {ProcessRole.PREFILL, ProcessRole.DECODE}]
    prefill = [metric for metric in TABLE if metric.roles == {ProcessRole.PREFILL}]
    decode = [metric for metric in TABLE if metric.roles == {ProcessRole.DECODE}]
    named = (("Router", router), ("Every worker", both), ("Prefill", prefill), ("Decode", decode))
    assert sum(len(metrics) for _, metrics in named) == len(TABLE)
    return "\n".join([HEAD, *(section(title, metrics) for title, metrics in named)])


def main() -> None:
    """Writes it."""
    TARGET.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
