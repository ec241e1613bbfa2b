"""Dockerfiles and compose files as their own tools and our rules see them; nothing is built here."""

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from prometheus_process import DOCKER

BIN = Path(sys.executable).parent
DOCKERFILES = sorted(DOCKER.glob("Dockerfile.*"))
PACKAGE_FOLDERS = {"bench", "decode_server", "engine", "kernels", "kv_transfer", "prefill_server", "proto", "router"}


def composed(*files: str, profile: str | None = None, **variables: str) -> dict[str, Any]:
    """What Compose makes of the files."""
    arguments = [part for file in files for part in ("-f", str(DOCKER / file))]
    choice = ["--profile", profile] if profile else []
    done = subprocess.run(
        [BIN / "docker-compose", *arguments, *choice, "config"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PATH": "/usr/bin:/bin", "HOME": "/tmp", **variables},
    )
    config: dict[str, Any] = yaml.safe_load(done.stdout)
    return config


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
class TestDockerfile:
    def test_lint(self, dockerfile: Path) -> None:
        done = subprocess.run([BIN / "hadolint", dockerfile], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout

    def test_base_is_an_argument_and_pinned(self, dockerfile: Path) -> None:
        text = dockerfile.read_text()
        base = re.search(r"^ARG BASE_IMAGE=(\S+)$", text, re.MULTILINE)
        assert base is not None
        assert re.search(r":\d+\.\d+\.\d+", base[1])
        assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${BASE_IMAGE}"}

    def test_runs_as_nobody_special_and_can_tell_its_health(self, dockerfile: Path) -> None:
        last = dockerfile.read_text().rpartition("\nFROM ")[2]
        assert re.search(r"^USER 1\d{4}$", last, re.MULTILINE)
        assert '"-m", "graftline.health_probe"' in last
        assert 'ENTRYPOINT ["graftline"]' in last

    def test_copies_every_folder_of_the_package(self, dockerfile: Path) -> None:
        copied = set(re.findall(r"^COPY (\w+) \1$", dockerfile.read_text(), re.MULTILINE))
        assert copied == PACKAGE_FOLDERS | {"src"}
        ignore = (DOCKER.parent / ".dockerignore").read_text().splitlines()
        assert {f"!{folder}" for folder in copied} <= set(ignore)


def test_only_the_cuda_image_keeps_a_compiler() -> None:
    """Triton compiles launchers on first use; nothing else does."""
    last_stages = {path.name: path.read_text().rpartition("\nFROM ")[2].partition("RUN")[2] for path in DOCKERFILES}
    keeping = {name for name, text in last_stages.items() if "gcc" in text}
    assert keeping == {"Dockerfile.cuda"}


def test_images_pin_what_they_install() -> None:
    lines = (DOCKER / "constraints.txt").read_text().splitlines()[1:]
    pinned = {line.partition("==")[0]: line.partition("==")[2] for line in lines}
    project = worker_requirements()
    missing = {name for name in project if name not in pinned}
    assert not missing, "docker/constraints.txt lacks them"


def worker_requirements() -> set[str]:
    """Everything that the images' extras bring, as installed here, without torch and what only torch wants."""
    project = tomllib.loads((DOCKER.parent / "pyproject.toml").read_text())["project"]
    todo = [*project["dependencies"]]
    for extra in ("cpu", "sglang", "tracing"):
        todo += project["optional-dependencies"][extra]
    found: set[str] = set()
    while todo:
        requirement = Requirement(todo.pop())
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name in found | {"torch"} or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        todo += metadata.distribution(name).requires or []
    return found


@pytest.mark.parametrize("profile", [None, "cpu", "gpu"])
def test_compose_starts_a_pair_in_every_profile(profile: str | None) -> None:
    """CASES D01: every process advertises an address that its peers can reach."""
    services = composed("compose.yaml", profile=profile)["services"]
    suffix = "-gpu" if profile == "gpu" else ""
    assert set(services) == {"model", "router", "prometheus", "grafana", f"prefill{suffix}", f"decode{suffix}"}
    for role in ("prefill", "decode"):
        service = services[f"{role}{suffix}"]
        assert "--advertise=auto" in service["command"]
        assert "--listen=0.0.0.0:7001" in service["command"]
        assert "--metrics-listen=0.0.0.0:9100" in service["command"]
        assert f"--{role}=dns:{role}:7001" in services["router"]["command"]
        names = {f"{role}{suffix}", *(service["networks"]["inside"] or {}).get("aliases", [])}
        assert role in names
    assert "--stages=2" in services[f"decode{suffix}"]["command"]


def test_workers_see_all_gpus_and_take_their_own() -> None:
    """Whoever is to write into another one's GPU must see it."""
    services = composed("compose.yaml", profile="gpu")["services"]
    for name, devices in (("prefill-gpu", "cuda:0"), ("decode-gpu", "cuda:1,cuda:2")):
        (device,) = services[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device["driver"] == "nvidia"
        assert device["count"] in ("all", -1)
        assert "device_ids" not in device
        assert f"--devices={devices}" in services[name]["command"]
        assert services[name]["ipc"] == "host"


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_only_router_and_grafana_can_be_reached_from_outside(profile: str) -> None:
    config = composed("compose.yaml", profile=profile)
    published = {name: service["ports"] for name, service in config["services"].items() if "ports" in service}
    assert set(published) == {"router", "grafana"}
    assert {port["host_ip"] for ports in published.values() for port in ports} == {"127.0.0.1"}
    assert config["networks"]["inside"]["internal"] is True
    for name, service in config["services"].items():
        if name.startswith(("prefill", "decode", "prometheus")):
            assert set(service["networks"]) == {"inside"}, name


def test_secrets_are_files_and_processes_have_no_privileges() -> None:
    config = composed("compose.yaml")
    assert all(Path(secret["file"]).is_file() for secret in config["secrets"].values())
    for name in ("router", "prefill", "decode"):
        service = config["services"][name]
        assert service["environment"]["GRAFTLINE_TOKEN_FILE"] == "/run/secrets/token"
        assert [secret["source"] for secret in service["secrets"]] == ["token"]
        assert service["cap_drop"] == ["ALL"]
        assert service["read_only"] is True
        assert "health_probe" in service["healthcheck"]["test"][3]


def test_images_can_be_built_on_another_base() -> None:
    """Of one that the environment names; without one the Dockerfile's own counts."""
    for profile in ("cpu", "gpu"):
        for variables in ({}, {"BASE_IMAGE": "mirror/python:3.11"}):
            services = composed("compose.yaml", profile=profile, **variables)["services"]
            built = [service["build"].get("args", {}) for service in services.values() if "build" in service]
            assert len(built) >= 2
            assert [arguments.get("BASE_IMAGE") for arguments in built] == [variables.get("BASE_IMAGE")] * len(built)


def test_foreign_images_are_pinned() -> None:
    services = composed("compose.yaml")["services"]
    for name in ("prometheus", "grafana"):
        assert re.search(r":v?\d+\.\d+\.\d+$", services[name]["image"]), name


def test_the_override_adds_a_decode() -> None:
    services = composed("compose.yaml", "compose.two-decodes.yaml")["services"]
    assert services["decode"]["deploy"]["replicas"] == 2


def test_prometheus_scrapes_the_services_by_name() -> None:
    jobs = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    found = {(name, lookup["port"]) for job in jobs for lookup in job["dns_sd_configs"] for name in lookup["names"]}
    assert found == {("router", 8000), ("prefill", 9100), ("decode", 9100)}
