"""Asks a real Prometheus every question that the dashboards and alerts ask, and draws what it answers.

python docker/grafana/dashboard_live.py http://127.0.0.1:9090 --wait-s 60 --draw docs/images
Exit status 0 once every expression has an answer with a number in it; otherwise the silent ones are printed.
"""

import argparse
import json
import math
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
RULES = FOLDER.parent / "prometheus" / "rules" / "graftline.yml"
TIMEOUT_S = 10.0
_THRESHOLD = re.compile(r"\s(?:<|>|<=|>=|==|!=)\s*[0-9.]+\s*$")
_RULE_SPAN = re.compile(r"\[\d+[smh]\]")


@dataclass(frozen=True, slots=True)
class Question:
    """One expression, and where it stands."""

    where: str
    expr: str


class NoAnswerError(Exception):
    """Prometheus refused an expression or cannot be reached."""


def dashboards() -> list[dict[str, Any]]:
    """The stored dashboards."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted((FOLDER / "dashboards").glob("*.json"))]


def panel_questions(panel: dict[str, Any], where: str, span: str) -> Iterator[Question]:
    """A panel's expressions with Grafana's variables filled in."""
    for target in panel["targets"]:
        expr = target["expr"].replace("$__rate_interval", span).replace("$model", ".*")
        yield Question(f"{where}: {panel['title']} ({target['refId']})", expr)


def dashboard_questions(span: str) -> Iterator[Question]:
    """Every expression of every panel."""
    for dashboard in dashboards():
        for panel in dashboard["panels"]:
            yield from panel_questions(panel, dashboard["uid"], span)


def alert_questions(span: str) -> Iterator[Question]:
    """What every alert compares with its threshold; the times it looks back are cut to `span`."""
    import yaml

    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            yield Question(f"alert {rule['alert']}", _RULE_SPAN.sub(f"[{span}]", without_threshold(rule["expr"])))


def without_threshold(expr: str) -> str:
    """The value that an alert's expression compares.

    Raises:
        ValueError: it does not end with a comparison with a number.
    """
    value, count = _THRESHOLD.subn("", expr.strip())
    if not count:
        raise ValueError(f"no comparison with a number at the end of {expr!r}")
    return value


def ask(prometheus: str, path: str, **parameters: str) -> list[dict[str, Any]]:
    """The result of a query. Raises NoAnswerError."""
    url = f"{prometheus}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            return list(json.load(answer)["data"]["result"])
    except urllib.error.HTTPError as error:
        raise NoAnswerError(f"{error.code}: {error.read().decode(errors='replace')}") from error
    except OSError as error:
        raise NoAnswerError(str(error)) from error


def has_number(samples: Sequence[dict[str, Any]]) -> bool:
    """Whether an instant answer holds anything but NaN."""
    return any(math.isfinite(float(sample["value"][1])) for sample in samples)


def silent(prometheus: str, questions: Sequence[Question]) -> list[Question]:
    """Questions without an answer. Raises NoAnswerError for one that Prometheus refuses."""
    return [question for question in questions if not has_number(ask(prometheus, "query", query=question.expr))]


def wait_for_answers(prometheus: str, span: str, wait_s: float) -> list[Question]:
    """Asks until each question has had an answer once; what is left when time is up."""
    left = [*dashboard_questions(span), *alert_questions(span)]
    deadline = time.monotonic() + wait_s
    while True:
        left = silent(prometheus, left)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.5)


def draw(prometheus: str, uid: str, folder: Path, span: str, minutes: float) -> Path:
    """A picture of a dashboard's last minutes."""
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    (dashboard,) = (dashboard for dashboard in dashboards() if dashboard["uid"] == uid)
    end = time.time()
    figure = _figure(prometheus, dashboard, span, end - 60 * minutes, end)
    figure.savefig(folder / f"{uid}.png", dpi=60)
    return folder / f"{uid}.png"


def _figure(prometheus: str, dashboard: dict[str, Any], span: str, begin: float, end: float) -> Any:
    from matplotlib import pyplot

    panels = dashboard["panels"]
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = pyplot.figure(figsize=(20, height / 3), layout="constrained")
    figure.suptitle(dashboard["title"])
    grid = figure.add_gridspec(height, 24)
    for panel in panels:
        place = panel["gridPos"]
        axes = figure.add_subplot(grid[place["y"] : place["y"] + place["h"], place["x"] : place["x"] + place["w"]])
        lines = _lines(prometheus, panel, span, begin, end)
        _draw_panel(axes, panel, lines, begin)
    return figure


@dataclass(frozen=True, slots=True)
class _Line:
    label: str
    times: list[float]
    values: list[float]


def _lines(prometheus: str, panel: dict[str, Any], span: str, begin: float, end: float) -> Iterator[_Line]:
    step = max(1, int((end - begin) / 120))
    for question, target in zip(panel_questions(panel, "", span), panel["targets"], strict=True):
        window = {"start": str(begin), "end": str(end), "step": str(step)}
        for series in ask(prometheus, "query_range", query=question.expr, **window):
            label = re.sub(
                r"{{(\w+)}}", lambda match, labels=series["metric"]: labels.get(match[1], ""), target["legendFormat"]
            )
            times, values = zip(*series["values"], strict=True)
            yield _Line(label, [float(at) for at in times], [float(value) for value in values])


def _draw_panel(axes: Any, panel: dict[str, Any], lines: Iterator[_Line], begin: float) -> None:
    axes.set_title(f"{panel['title']} [{panel['fieldConfig']['defaults']['unit']}]", fontsize=9)
    axes.tick_params(labelsize=7)
    drawn = list(lines)
    if panel["type"] == "stat":
        axes.axis("off")
        latest = [f"{line.label}: {_last(line.values):.4g}" for line in drawn]
        axes.text(0.5, 0.5, "\n".join(latest) or "no data", ha="center", va="center", fontsize=13)
        return
    for line in drawn:
        axes.plot([at - begin for at in line.times], line.values, label=line.label, linewidth=1)
    least = panel["fieldConfig"]["defaults"].get("min")
    if least is not None:
        axes.set_ylim(bottom=least)
    axes.set_xlabel("s", fontsize=7)
    if drawn:
        axes.legend(fontsize=6)


def _last(values: Sequence[float]) -> float:
    return next((value for value in reversed(values) if math.isfinite(value)), math.nan)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description="Asks every question of the dashboards and alerts.")
    parser.add_argument("prometheus", help="http://host:port")
    parser.add_argument("--span", default="15s", help="what rates look back on; at least four scrapes")
    parser.add_argument("--wait-s", type=float, default=60.0)
    parser.add_argument("--draw", type=Path, help="folder for one picture of each dashboard")
    parser.add_argument("--minutes", type=float, default=3.0, help="what the pictures show")
    arguments = parser.parse_args()
    left = wait_for_answers(arguments.prometheus, arguments.span, arguments.wait_s)
    for question in left:
        print(f"no answer: {question.where}\n    {question.expr}")
    asked = len([*dashboard_questions("1m"), *alert_questions("1m")])
    print(f"{asked - len(left)} of {asked} expressions of dashboards and alerts have answers")
    if arguments.draw:
        for dashboard in dashboards():
            draw(arguments.prometheus, dashboard["uid"], arguments.draw, arguments.span, arguments.minutes)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
