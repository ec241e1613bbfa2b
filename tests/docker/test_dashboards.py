"""The stored dashboards and alerts: structure, and that every metric they name is in the table."""

import json
import re
import shutil
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import metrics_page
import pytest
import yaml
from dashboard_files import TARGET, rendered
from dashboard_layout import GRID_WIDTH, Panel, Query, positions
from dashboard_live import RULES, alert_questions, dashboard_questions, dashboards, without_threshold
from dashboard_panels import DASHBOARDS
from prometheus_process import DOCKER, config_for, tool

from graftline.metrics import TABLE, Kind, Metrics, ProcessRole
from graftline.proto.v1.common_pb2 import TreeOrigin

RULE_TESTS = DOCKER / "prometheus" / "tests" / "rules_test.yml"


def exported_names() -> set[str]:
    names = {metric.name for metric in TABLE if metric.kind is not Kind.HISTOGRAM}
    parts = ("_bucket", "_sum", "_count")
    return names | {f"{metric.name}{part}" for metric in TABLE if metric.kind is Kind.HISTOGRAM for part in parts}


def labels_of(name: str) -> set[str]:
    bare = re.sub(r"_(bucket|sum|count)$", "", name)
    (metric,) = (metric for metric in TABLE if metric.name in (name, bare))
    return {*metric.labels, "job", "instance", "le"}


def test_stored_files_are_what_the_spec_gives() -> None:
    assert {path.stem for path in TARGET.glob("*.json")} == {dashboard.uid for dashboard in DASHBOARDS}
    for dashboard in DASHBOARDS:
        stored = (TARGET / f"{dashboard.uid}.json").read_text()
        assert stored == rendered(dashboard), "run docker/grafana/dashboard_files.py"


def test_the_five_pages_are_there() -> None:
    titles = {dashboard["title"].removeprefix("Graftline: ") for dashboard in dashboards()}
    assert titles == {"serving", "speculation", "handoff", "pipeline", "memory"}


@pytest.mark.parametrize("dashboard", dashboards(), ids=lambda dashboard: dashboard["uid"])
def test_structure(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    assert "datasource" in {variable["name"] for variable in dashboard["templating"]["list"]}
    for panel in panels:
        assert panel["description"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
        place = panel["gridPos"]
        assert place["x"] >= 0
        assert place["x"] + place["w"] <= GRID_WIDTH
    for one, other in combinations(panels, 2):
        assert not overlap(one["gridPos"], other["gridPos"]), (one["title"], other["title"])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="no Node.js here")
def test_grafanas_own_types_accept_them(tmp_path: Path) -> None:
    """Grafana's npm package for the version that compose starts; a dashboard is compiled as a value of its type."""
    image = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["grafana"]["image"]
    version = image.rpartition(":")[2].rstrip("}")
    packages = [f"@grafana/schema@{version}", "typescript@5"]
    command = ["npm", "install", "--silent", "--no-audit", "--no-fund", *packages]
    subprocess.run(command, cwd=tmp_path, timeout=300, check=True)
    for dashboard in dashboards():
        for variable in dashboard["templating"]["list"]:
            # Grafana writes it, its types lack it.
            variable.pop("definition", None)
        value = f"export const it: Dashboard = {json.dumps(dashboard)};"
        text = f'import type {{ Dashboard }} from "@grafana/schema";\n{value}\n'
        (tmp_path / f"{dashboard['uid']}.ts").write_text(text)

    def compiled() -> "subprocess.CompletedProcess[str]":
        options = ["--noEmit", "--strict", "--skipLibCheck", "--module", "esnext", "--moduleResolution", "bundler"]
        sources = [path.name for path in tmp_path.glob("*.ts")]
        return subprocess.run(
            ["node_modules/.bin/tsc", *options, "--target", "es2022", *sources],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    assert compiled().stdout == ""
    path = tmp_path / "graftline-serving.ts"
    path.write_text(path.read_text().replace('"panels": [{', '"panels": [{"gridPosition": 1, '))
    assert "gridPosition" in compiled().stdout


def overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
    apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
    return not (apart_x or apart_y)


def test_rows_are_as_high_as_their_highest_panel() -> None:
    query = (Query("up", ""),)
    panels = [
        Panel(str(number), "", "short", query, width=width, height=height)
        for number, (width, height) in enumerate([(16, 4), (8, 9), (12, 3)])
    ]
    assert [(place["x"], place["y"]) for place in positions(panels)] == [(0, 0), (16, 0), (0, 9)]


@pytest.mark.parametrize("question", [*dashboard_questions("1m"), *alert_questions("1m")], ids=lambda q: q.where)
def test_metrics_and_labels_are_in_the_table(question: Any) -> None:
    names = set(re.findall(r"\bgraftline_\w+|\bup\b", question.expr))
    assert names, question.expr
    assert names <= exported_names() | {"up"}
    for name, matchers in re.findall(r"\b(graftline_\w+)\{([^}]*)\}", question.expr):
        assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)) <= labels_of(name), name
    for name in re.findall(r"rate\((\w+)", question.expr):
        assert name.endswith(("_total", "_bucket", "_sum", "_count")), f"the rate of {name}, which is no counter"


def test_almost_every_metric_is_shown() -> None:
    """What nobody can see helps nobody; these are for debugging alone."""
    shown = "\n".join(question.expr for question in [*dashboard_questions("1m"), *alert_questions("1m")])
    unseen = {metric.name for metric in TABLE if not re.search(rf"\b{metric.name}(_bucket|_sum|_count)?\b", shown)}
    assert unseen <= {
        "graftline_prefill_sends_total",
        "graftline_router_first_round_drafted_tokens_total",
        "graftline_router_requests_started_total",
        "graftline_router_resume_gap_seconds",
        "graftline_router_speculation_accepted_tokens_total",
        "graftline_router_speculation_drafted_tokens_total",
        "graftline_router_speculation_rounds_total",
        "graftline_worker_open_requests",
        "graftline_worker_request_seconds",
        "graftline_worker_requests_started_total",
    }


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def test_alerts_say_what_to_do_and_have_tests() -> None:
    tests = RULE_TESTS.read_text()
    for rule in alerts():
        assert rule["annotations"]["action"]
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert f'alertname="{rule["alert"]}"' in tests, f"{rule['alert']} never fires in {RULE_TESTS.name}"


def test_thresholds_are_cut_off() -> None:
    assert without_threshold("a > bool 0 * b < 1.5") == "a > bool 0 * b"
    with pytest.raises(ValueError, match="no comparison"):
        without_threshold("rate(a[5m])")


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "config", str(DOCKER / "prometheus" / "prometheus.yml")],
        ["check", "rules", str(RULES)],
        ["test", "rules", str(RULE_TESTS)],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_promtool(arguments: list[str]) -> None:
    done = subprocess.run([tool("promtool"), *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("role", list(ProcessRole))
def test_exposition_is_clean(role: ProcessRole) -> None:
    """Names, units and help texts, in Prometheus' own eyes."""
    metrics = Metrics(role)
    done = subprocess.run(
        [tool("promtool"), "check", "metrics"], input=metrics.exposition(), capture_output=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr.decode()


def test_grafana_finds_what_it_is_given() -> None:
    provisioning = DOCKER / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "graftline.yaml").read_text())["providers"]
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["grafana"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in compose["volumes"]
    home = Path(compose["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == provider["options"]["path"]
    assert (TARGET / home.name).is_file()
    for dashboard in dashboards():
        (variable,) = (v for v in dashboard["templating"]["list"] if v["name"] == "datasource")
        assert variable["current"]["value"] == source["uid"]
    interval = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == interval


def test_a_test_configuration_keeps_every_job() -> None:
    targets = {f"graftline-{role.value}": ["127.0.0.1:1"] for role in ProcessRole}
    config = json.loads(json.dumps(config_for(targets, "1s")))
    assert [job["static_configs"] for job in config["scrape_configs"]] == [[{"targets": ["127.0.0.1:1"]}]] * 3


def test_the_page_of_metrics_is_that_of_the_table() -> None:
    assert metrics_page.TARGET.read_text() == metrics_page.page(), "run docker/grafana/metrics_page.py"


def test_the_page_names_every_origin_of_a_tree() -> None:
    (values,) = re.findall(r"^\| `tree_origin` \| (.+) \|$", metrics_page.page(), re.MULTILINE)
    for name in TreeOrigin.DESCRIPTOR.values_by_name:
        assert re.search(rf"\b{name.removeprefix('TREE_ORIGIN_').lower()}\b", values), name
