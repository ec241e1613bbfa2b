"""Pictures of a result: distributions of TTFT and TPOT, accept lengths, and one request over time.

Needs matplotlib (`pip install 'graftline[bench]'`), imported when something is drawn.
"""

import base64
import html
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from graftline.bench.metrics import accept_length, finished, tpot_s, ttft_s
from graftline.bench.records import BenchResult, RequestRecord, Run
from graftline.errors import IncompatibleError, InvalidRequestError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZE_INCHES = (7.0, 4.2)
_DPI = 130


class PlotFormat(Enum):
    """PNG files, or one HTML page that holds all pictures of a result."""

    PNG = "png"
    HTML = "html"


def write_plots(result: BenchResult, folder: Path, stem: str, form: PlotFormat) -> list[Path]:
    """Draws every picture of `result` into `folder` and returns the files written.

    Args:
        stem: what file names begin with.

    Raises:
        IncompatibleError: matplotlib is not installed.
        InvalidRequestError: the result holds no finished request.
    """
    pictures = {
        f"{stem}-{_slug(load)}-{name}": figure
        for load in dict.fromkeys(run.load for run in result.runs)
        for name, figure in draw(result, load).items()
    }
    if not pictures:
        raise InvalidRequestError("result", "no request of it finished")
    folder.mkdir(parents=True, exist_ok=True)
    if form is PlotFormat.PNG:
        paths = [folder / f"{name}.png" for name in pictures]
        for path, figure in zip(paths, pictures.values(), strict=True):
            figure.savefig(path, dpi=_DPI)
        return paths
    path = folder / f"{stem}.html"
    path.write_text(_page(result, pictures), encoding="utf-8")
    return [path]


def draw(result: BenchResult, load: str) -> dict[str, "Figure"]:
    """The pictures of one load by name; those that would be empty are left out."""
    records: dict[str, list[RequestRecord]] = {}
    for run in result.runs:
        if run.load == load:
            records.setdefault(run.variant, []).extend(finished(run))
    drawn = {
        "ttft": _distribution("time to first token, ms", load, _values(records, lambda record: ttft_s(record) * 1e3)),
        "tpot": _distribution("time per output token, ms", load, _values(records, _tpot_ms)),
        "accept": _accept_lengths(load, _values(records, _accept_length)),
        "timeline": _timeline(load, [run for run in result.runs if run.load == load]),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _tpot_ms(record: RequestRecord) -> float | None:
    value = tpot_s(record)
    return None if value is None else value * 1e3


def _accept_length(record: RequestRecord) -> float | None:
    return accept_length(record.speculation) if record.speculation and record.speculation.drafted else None


def _values(
    records: Mapping[str, Iterable[RequestRecord]], value: Callable[[RequestRecord], float | None]
) -> dict[str, list[float]]:
    """By variant, sorted; variants without values are left out."""
    found = {
        variant: sorted(number for record in entries if (number := value(record)) is not None)
        for variant, entries in records.items()
    }
    return {variant: numbers for variant, numbers in found.items() if numbers}


def _distribution(label: str, load: str, values: Mapping[str, Sequence[float]]) -> "Figure | None":
    """Cumulative shares: a curve further left is faster, and its tail can be read at the top."""
    if not values:
        return None
    figure, axes = _axes(f"{label.partition(',')[0]} ({load})")
    for variant, numbers in values.items():
        shares = [(index + 1) / len(numbers) for index in range(len(numbers))]
        axes.step([numbers[0], *numbers], [0.0, *shares], where="post", label=variant)
    axes.set_xlabel(label)
    axes.set_ylabel("share of requests")
    axes.set_xlim(left=0)
    axes.legend(loc="lower right")
    return figure


def _accept_lengths(load: str, values: Mapping[str, Sequence[float]]) -> "Figure | None":
    if not values:
        return None
    figure, axes = _axes(f"accept length of each request ({load})")
    longest = max(numbers[-1] for numbers in values.values())
    edges = [1 + step * 0.25 for step in range(int((longest - 1) / 0.25) + 2)]
    axes.hist(list(values.values()), bins=edges, label=list(values))
    axes.set_xlabel("tokens per verify round")
    axes.set_ylabel("requests")
    axes.legend()
    return figure


def _timeline(load: str, runs: Sequence[Run]) -> "Figure | None":
    """Tokens over time of one request that every variant finished: the first such one of the first round."""
    first_round = [run for run in runs if run.round == runs[0].round]
    for records in zip(*(run.records for run in first_round), strict=True):
        if all(record.ok for record in records):
            break
    else:
        return None
    figure, axes = _axes(f"request {records[0].prompt_id} ({load})")
    for run, record in zip(first_round, records, strict=True):
        times, counts = [0.0], [0]
        for arrival in record.arrivals:
            times.append(arrival.at_s)
            counts.append(counts[-1] + arrival.num_tokens)
        axes.step(times, counts, where="post", label=run.variant)
    axes.set_xlabel("seconds since it was due")
    axes.set_ylabel("tokens received")
    axes.legend(loc="upper left")
    return figure


def _axes(title: str) -> "tuple[Figure, Axes]":
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise IncompatibleError(("matplotlib",), "plots need matplotlib: pip install 'graftline[bench]'") from error
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    return figure, axes


def _page(result: BenchResult, pictures: Mapping[str, "Figure"]) -> str:
    """One page without outside parts."""
    images = []
    for name, figure in pictures.items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=_DPI)
        data = base64.b64encode(buffer.getvalue()).decode()
        images.append(f'<figure><img alt="{html.escape(name)}" src="data:image/png;base64,{data}"></figure>')
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>graftline bench</title>'
        "<style>body{font-family:sans-serif;margin:2em}figure{display:inline-block;margin:1em}img{width:40em}</style>"
        f"<h1>graftline bench</h1><pre>{html.escape(result.command)}</pre>"
        f"<p>{html.escape(result.started_at)}, {html.escape(result.machine.cpu_model)}, "
        f"{result.machine.num_cores} cores. {html.escape(result.method)}.</p>{''.join(images)}</html>\n"
    )


def _slug(text: str) -> str:
    return "".join(char if char.isalnum() else "-" for char in text)
