"""What a dashboard is made of, and how it becomes Grafana's JSON: panels are laid out row by row, none can overlap."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

GRID_WIDTH = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
SCHEMA_VERSION = 39


class Show(Enum):
    """How a panel draws its series."""

    LINES = "lines"
    STACKED = "stacked"
    NUMBER = "number"


@dataclass(frozen=True, slots=True)
class Query:
    """One expression of a panel; `legend` names labels as {{label}}."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Attributes:
        text: what it tells and what to do about it, shown on hover.
        unit: Grafana's name of the unit.
        width, height: in cells of Grafana's grid, which is 24 wide.
    """

    title: str
    text: str
    unit: str
    queries: tuple[Query, ...]
    show: Show = Show.LINES
    width: int = 8
    height: int = 8
    least: float | None = 0


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A page of panels, in reading order."""

    uid: str
    title: str
    text: str
    panels: tuple[Panel, ...]


def number(title: str, text: str, unit: str, *queries: Query, width: int = 6) -> Panel:
    """A panel that shows the latest value."""
    return Panel(title, text, unit, queries, Show.NUMBER, width, 4)


def positions(panels: Sequence[Panel]) -> Iterator[dict[str, int]]:
    """Where panels lie: left to right, a new row when one does not fit; a row is as high as its highest panel."""
    x = y = row_height = 0
    for panel in panels:
        if x + panel.width > GRID_WIDTH:
            x, y, row_height = 0, y + row_height, 0
        yield {"x": x, "y": y, "w": panel.width, "h": panel.height}
        x += panel.width
        row_height = max(row_height, panel.height)


def dashboard_json(dashboard: Dashboard) -> dict[str, Any]:
    """The JSON that Grafana provisions."""
    placed = zip(dashboard.panels, positions(dashboard.panels), strict=True)
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.text,
        "tags": ["graftline"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "timezone": "browser",
        "links": [_links()],
        "templating": {"list": [_datasource_variable(), _model_variable()]},
        "panels": [_panel_json(number, panel, place) for number, (panel, place) in enumerate(placed, start=1)],
    }


def _panel_json(panel_id: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    is_number = panel.show is Show.NUMBER
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.least is not None:
        defaults["min"] = panel.least
    if not is_number:
        defaults["custom"] = _drawing(panel.show)
    return {
        "id": panel_id,
        "title": panel.title,
        "description": panel.text,
        "type": "stat" if is_number else "timeseries",
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _number_options() if is_number else _line_options(),
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": SOURCE, "expr": query.expr, "legendFormat": query.legend}
            for index, query in enumerate(panel.queries)
        ],
    }


def _drawing(show: Show) -> dict[str, Any]:
    stacked = show is Show.STACKED
    return {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 40 if stacked else 8,
        "showPoints": "never",
        "spanNulls": True,
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
    }


def _number_options() -> dict[str, Any]:
    return {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "area",
        "textMode": "auto",
    }


def _line_options() -> dict[str, Any]:
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _datasource_variable() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {"text": "Prometheus", "value": "graftline-prometheus"},
        "hide": 0,
        "refresh": 1,
    }


def _model_variable() -> dict[str, Any]:
    query = "label_values(graftline_router_requests_started_total, model)"
    return {
        "name": "model",
        "label": "Model",
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": "models"},
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
        "sort": 1,
    }


def _links() -> dict[str, Any]:
    """To the other dashboards, with the time and the model that are chosen here."""
    return {
        "title": "Graftline",
        "type": "dashboards",
        "tags": ["graftline"],
        "icon": "external link",
        "tooltip": "",
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
    }
