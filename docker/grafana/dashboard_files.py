"""Writes the dashboards: `python docker/grafana/dashboard_files.py`. A test compares what is stored with the spec."""

import json
from pathlib import Path

from dashboard_layout import Dashboard, dashboard_json
from dashboard_panels import DASHBOARDS

TARGET = Path(__file__).parent / "dashboards"


def rendered(dashboard: Dashboard) -> str:
    """The file of a dashboard."""
    return json.dumps(dashboard_json(dashboard), indent=1) + "\n"


def main() -> None:
    """Writes every dashboard."""
    TARGET.mkdir(exist_ok=True)
    for dashboard in DASHBOARDS:
        (TARGET / f"{dashboard.uid}.json").write_text(rendered(dashboard), encoding="utf-8")


if __name__ == "__main__":
    main()
