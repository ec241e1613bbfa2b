"""The manifests: against Kubernetes' own schemas, against each other, and against the command line they start."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import typer.main
import yaml
from dashboard_live import RULES
from prometheus_process import DOCKER

from graftline import cli
from graftline.kv_transfer.mooncake_engine import MooncakeConfig

FOLDER = DOCKER / "kubernetes"
VERSION = "1.31"
FILES = sorted(path for path in FOLDER.glob("*.yaml") if path.name != "kustomization.yaml")
OPERATOR = "monitoring.coreos.com/v1"


RESOURCES = [found for path in FILES for found in yaml.safe_load_all(path.read_text()) if found]


def of_kind(*kinds: str) -> list[dict[str, Any]]:
    return [resource for resource in RESOURCES if resource["kind"] in kinds]


def name_of(resource: dict[str, Any]) -> str:
    return f"{resource['kind']}/{resource['metadata']['name']}"


WORKLOADS = of_kind("Deployment", "StatefulSet")


def pod_labels(workload: dict[str, Any]) -> dict[str, str]:
    return dict(workload["spec"]["template"]["metadata"]["labels"])


def selected(selector: dict[str, str]) -> list[dict[str, Any]]:
    return [workload for workload in WORKLOADS if selector.items() <= pod_labels(workload).items()]


def containers(workload: dict[str, Any]) -> list[dict[str, Any]]:
    pod = workload["spec"]["template"]["spec"]
    return [*pod.get("initContainers", []), *pod["containers"]]


@pytest.mark.parametrize("resource", [r for r in RESOURCES if r["apiVersion"] != OPERATOR], ids=name_of)
def test_schema(resource: dict[str, Any]) -> None:
    kubernetes_validate.validate(resource, VERSION, strict=True)


def test_the_schema_check_can_fail() -> None:
    broken = {**of_kind("Service")[0], "spec": {"prots": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSION, strict=True)


def test_kustomization_names_every_file() -> None:
    text = (FOLDER / "kustomization.yaml").read_text()
    assert [path.name for path in FILES if f"- {path.name}" not in text] == []


@pytest.mark.parametrize("workload", WORKLOADS, ids=name_of)
class TestWorkload:
    def test_selector_matches_its_own_pods_only(self, workload: dict[str, Any]) -> None:
        assert selected(workload["spec"]["selector"]["matchLabels"]) == [workload]

    def test_pods_are_confined(self, workload: dict[str, Any]) -> None:
        pod = workload["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        for container in containers(workload):
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}

    def test_volumes_are_there(self, workload: dict[str, Any]) -> None:
        volumes = {volume["name"] for volume in workload["spec"]["template"]["spec"]["volumes"]}
        for container in containers(workload):
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes

    def test_arguments_are_the_command_lines(self, workload: dict[str, Any]) -> None:
        """What a pod starts is parsed by the real command line."""
        for container in containers(workload):
            values = parsed([argument.replace("$(POD_IP)", "10.1.2.3") for argument in container["args"]])
            if container["args"][0] in {"prefill", "decode"}:
                assert values["advertise"] == "10.1.2.3"
                assert values["drain_grace_s"] + values["stop_timeout_s"] < grace_s(workload)

    def test_ports_are_where_the_process_listens(self, workload: dict[str, Any]) -> None:
        container = workload["spec"]["template"]["spec"]["containers"][0]
        for port in container.get("ports", []):
            option = {"grpc": "--listen", "http": "--http-listen", "metrics": "--metrics-listen"}.get(port["name"])
            if option is not None:
                assert f"{option}=0.0.0.0:{port['containerPort']}" in container["args"]


def grace_s(workload: dict[str, Any]) -> float:
    return float(workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"])


def parsed(arguments: list[str]) -> dict[str, Any]:
    """The values a command would be called with. Raises for anything it would refuse."""
    command: Any = typer.main.get_command(cli.app)
    context = typer.Context(command, info_name="graftline")
    rest = list(arguments)
    while hasattr(command, "get_command"):
        command = command.get_command(context, rest.pop(0))
        assert command is not None, arguments
    return dict(command.make_context(command.name, rest, parent=context).params)


def compose_commands() -> Iterator[list[str]]:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    for name, service in services.items():
        if name not in {"prometheus", "grafana"}:
            defaults = {"PREFILL_THREADS": "1", "DECODE_THREADS": "1", "DECODE_STAGES": "2"}
            assert all(f"${{{key}:-{value}}}" in str(services) for key, value in defaults.items())
            yield [without_variables(argument) for argument in service["command"]]


def without_variables(argument: str) -> str:
    """An argument with the defaults of its variables."""
    before, found, after = argument.partition("${")
    if not found:
        return argument
    inside, _, rest = after.partition("}")
    return f"{before}{inside.partition(':-')[2]}{rest}"


@pytest.mark.parametrize("arguments", list(compose_commands()), ids=lambda arguments: " ".join(arguments[:2]))
def test_compose_starts_command_lines_that_exist(arguments: list[str]) -> None:
    values = parsed(arguments)
    if arguments[0] != "model":
        assert values["advertise"] == "auto"


@pytest.mark.parametrize("service", of_kind("Service"), ids=name_of)
def test_services_find_pods_with_their_ports(service: dict[str, Any]) -> None:
    (workload,) = selected(service["spec"]["selector"])
    ports = {port["name"]: port["containerPort"] for port in containers(workload)[-1]["ports"]}
    for port in service["spec"]["ports"]:
        assert port.get("targetPort", port["port"]) in {*ports, *ports.values()}


def test_routers_ask_for_names_that_exist() -> None:
    (router,) = of_kind("Deployment")
    names = {service["metadata"]["name"]: service["spec"] for service in of_kind("Service")}
    for role in ("prefill", "decode"):
        assert f"--{role}=dns:{role}:7001" in containers(router)[0]["args"]
        assert names[role]["clusterIP"] == "None"


def test_stages_of_a_wide_decode_are_numbered() -> None:
    """Ranks 0 to WORLD_SIZE - 1, one pod each, meeting where the first is; all with the same command line."""
    head, stages = selected({"app.kubernetes.io/name": "graftline-decode-wide"})
    ordinals = [
        workload["spec"].get("ordinals", {}).get("start", 0) + index
        for workload in (head, stages)
        for index in range(workload["spec"]["replicas"])
    ]
    environments = [{one["name"]: one for one in containers(workload)[0]["env"]} for workload in (head, stages)]
    assert environments[0] == environments[1]
    assert containers(head)[0]["args"] == containers(stages)[0]["args"]
    world = int(environments[0]["WORLD_SIZE"]["value"])
    assert ordinals == list(range(world))
    assert f"--stages={world}" in containers(head)[0]["args"]
    assert environments[0]["MASTER_ADDR"]["value"] == f"{head['metadata']['name']}-0.{head['spec']['serviceName']}"


def allowed(port: int | str) -> list[dict[str, Any]]:
    """Rules of all policies that open a port of workers."""
    found = []
    for policy in of_kind("NetworkPolicy"):
        for rule in policy["spec"].get("ingress", []):
            for opened in rule.get("ports", []):
                first, last = opened["port"], opened.get("endPort", opened["port"])
                if first == port or (isinstance(port, int) and isinstance(first, int) and first <= port <= last):
                    found.append({"policy": policy["metadata"]["name"], **rule})
    return found


def test_transfer_ports_are_open_to_workers_only() -> None:
    limits = MooncakeConfig(host="h")
    for port in (limits.min_port, limits.max_port - 1):
        (rule,) = allowed(port)
        assert rule["from"] == [{"podSelector": {"matchLabels": {"graftline/transfers": "true"}}}]
    for workload in WORKLOADS:
        is_worker = containers(workload)[-1]["image"] == "graftline-worker"
        assert (pod_labels(workload).get("graftline/transfers") == "true") == is_worker
    (closed,) = (policy for policy in of_kind("NetworkPolicy") if "ingress" not in policy["spec"])
    assert closed["spec"]["podSelector"] == {}
    assert not [rule for rule in allowed("metrics") if "namespaceSelector" not in rule["from"][0]]


def test_policies_select_pods() -> None:
    for policy in of_kind("NetworkPolicy"):
        assert selected(policy["spec"]["podSelector"].get("matchLabels", {})), name_of(policy)


def test_monitors_find_pods_and_name_jobs_as_alerts_do() -> None:
    jobs = set()
    for monitor in of_kind("PodMonitor"):
        pods = selected(monitor["spec"]["selector"]["matchLabels"])
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert any(port["name"] == endpoint["port"] for pod in pods for port in containers(pod)[-1].get("ports", []))
        jobs |= {relabel["replacement"] for relabel in endpoint["relabelings"] if relabel["targetLabel"] == "job"}
    config = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())
    assert jobs == {job["job_name"] for job in config["scrape_configs"]}


def test_the_rule_is_the_one_that_was_tested() -> None:
    (rule,) = of_kind("PrometheusRule")
    assert rule["spec"] == yaml.safe_load(Path(RULES).read_text())
