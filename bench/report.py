"""Benchmark results as Markdown: tables with the command and the machine that made them.

A document holds a result between two marker lines, which `update_document` finds and refills:

    <!-- bench: handover.json -->
    <!-- end -->
"""

import re
from collections.abc import Sequence
from pathlib import Path

from graftline.bench.metrics import METRICS
from graftline.bench.records import BenchResult, LoadSummary, Ratio, read_result
from graftline.errors import InvalidRequestError

_COLUMNS: tuple[tuple[str, str, str], ...] = (
    # (heading, unit, source: "latency/statistic" or a figure)
    ("tokens/s", "/s", "output_tokens_per_s"),
    ("TTFT mean", "ms", "ttft_s/mean"),
    ("TTFT p99", "ms", "ttft_s/p99"),
    ("TPOT mean", "ms", "tpot_s/mean"),
    ("TPOT p99", "ms", "tpot_s/p99"),
    ("ITL p99", "ms", "itl_s/p99"),
    ("E2E mean", "ms", "e2e_s/mean"),
    ("accept", "", "accept_length"),
    ("first accept", "", "first_round_accept_length"),
    ("KV GB/s", "", "kv_gb_per_s"),
    ("cores", "", "cores_used"),
)
_BLOCK = re.compile(r"(<!-- bench: (?P<name>[^ ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def number(value: float | None, unit: str) -> str:
    """A figure for people: seconds as milliseconds for "ms", three significant digits or so, "-" for None."""
    if value is None:
        return "-"
    value = value * 1000 if unit == "ms" else value
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def summary_cells(summary: LoadSummary) -> list[str]:
    """One table row of a summary, in the order of `summary_headings`."""
    cells = [summary.variant]
    for _, unit, source in _COLUMNS:
        name, slash, statistic = source.partition("/")
        if slash:
            latency = summary.latencies.get(name)
            cells.append(number(getattr(latency, statistic) if latency else None, unit))
        else:
            cells.append(number(summary.figures.get(name), unit))
    return [*cells, f"{summary.num_requests - summary.num_failed}/{summary.num_requests}"]


def summary_headings() -> list[str]:
    """Headings of `summary_cells`."""
    named = [f"{heading} ms" if unit == "ms" else heading for heading, unit, _ in _COLUMNS]
    return ["variant", *named, "finished"]


def ratio_cells(ratio: Ratio) -> list[str]:
    """One table row of a ratio, in the order of `RATIO_HEADINGS`."""
    metric = METRICS[ratio.metric]
    interval = "-" if ratio.low is None or ratio.high is None else f"{ratio.low:.3f} … {ratio.high:.3f}"
    unit = " ms" if metric.unit == "ms" else ""
    return [
        ratio.variant,
        metric.label,
        f"{ratio.value:.3f}",
        interval,
        number(ratio.variant_median, metric.unit) + unit,
        number(ratio.base_median, metric.unit) + unit,
    ]


RATIO_HEADINGS = ("variant", "metric", "ratio", "95 % interval", "its median", "base median")


def render(result: BenchResult) -> str:
    """A result as Markdown: how it was made, then its tables."""
    facts, work = result.machine, result.workload
    packages = ", ".join(f"{name} {version}" for name, version in facts.packages.items())
    lines = [
        "```",
        result.command,
        "```",
        "",
        f"{result.started_at}, commit {facts.commit}, {facts.cpu_model}, {facts.num_cores} cores, "
        f"{facts.memory_bytes / 2**30:.0f} GiB, Python {facts.python}, {packages}"
        + "".join(f", {name}" for name in facts.accelerators)
        + ".",
        "",
        f"{work.num_requests} requests a run from `{work.prompts}` ({', '.join(work.kinds)}), at most "
        f"{work.max_tokens} tokens{' (end of sequence ignored)' if work.ignore_eos else ''}, temperature "
        f"{work.temperature:g}, seed {work.seed}. {result.method[:1].upper()}{result.method[1:]}.",
        "",
        *(f"* `{variant.name}`: {_settings(variant.settings)}" for variant in result.variants),
    ]
    for load in dict.fromkeys(summary.load for summary in result.summaries):
        rows = [summary_cells(summary) for summary in result.summaries if summary.load == load]
        lines += ["", f"**{load}**", "", *table(summary_headings(), rows)]
        if found := [ratio for ratio in result.ratios if ratio.load == load]:
            lines += ["", f"Against `{found[0].base}`, {load}:", "", *table(RATIO_HEADINGS, map_cells(found))]
        if same := [entry for entry in result.same_outputs if entry.load == load]:
            said = ", ".join(f"{entry.variant} {entry.num_same}/{entry.num_compared}" for entry in same)
            lines += ["", f"Outputs equal to `{same[0].base}`'s, token for token: {said}."]
    if said := idle_use(result):
        lines += ["", said]
    lines += failures(result)
    return "\n".join(lines) + "\n"


def idle_use(result: BenchResult) -> str:
    """A sentence on what idle variants did while others were measured; empty when there was but one."""
    if len(result.variants) < 2:
        return ""
    cores = [summary.figures.get("cores_used_by_idle_variants", 0.0) for summary in result.summaries]
    return f"Idle variants used {max(cores, default=0.0):.2f} cores at most while others were measured."


def failures(result: BenchResult) -> list[str]:
    """A list of the failed requests, at most 20, and how many more there are; empty when all finished."""
    failed = [(run, record) for run in result.runs for record in run.records if not record.ok]
    if not failed:
        return []
    shown = [
        f"* {run.variant}, {run.load}, round {run.round}, {record.prompt_id}: {record.error or 'NO_TOKENS'} "
        f"{record.error_message}".rstrip()
        for run, record in failed[:20]
    ]
    more = [f"* and {len(failed) - 20} more"] if len(failed) > 20 else []
    return ["", f"{len(failed)} requests failed:", "", *shown, *more]


def map_cells(ratios: Sequence[Ratio]) -> list[list[str]]:
    """Rows of a ratio table."""
    return [ratio_cells(ratio) for ratio in ratios]


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table, its first column left-aligned, the others right."""
    rule = ["---", *(["---:"] * (len(headings) - 1))]
    return ["| " + " | ".join(cells) + " |" for cells in (headings, rule, *rows)]


def update_document(document: Path, results: Sequence[Path]) -> list[str]:
    """Refills the marked blocks of `document` with the results of the same file names.

    Returns:
        Names of the blocks that were refilled.

    Raises:
        InvalidRequestError: a file cannot be read, or a result has no block in the document.
    """
    try:
        text = document.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError("document", f"cannot read {document}: {error.strerror}") from error
    rendered = {path.name: render(read_result(path)) for path in results}
    present = {match["name"] for match in _BLOCK.finditer(text)}
    if missing := [name for name in rendered if name not in present]:
        raise InvalidRequestError("document", f"{document} has no line <!-- bench: {missing[0]} --> with an end")

    def refill(match: re.Match[str]) -> str:
        block = rendered.get(match["name"])
        return match[0] if block is None else f"{match[1]}{block}{match[3]}"

    document.write_text(_BLOCK.sub(refill, text), encoding="utf-8")
    return list(rendered)


def _settings(settings: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items()) or "defaults"
