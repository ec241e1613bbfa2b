"""A real Prometheus (Debian's package) over targets of a test, with the repository's own configuration."""

import asyncio
import contextlib
import shutil
import socket
import urllib.error
import urllib.request
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

DOCKER = Path(__file__).resolve().parents[2] / "docker"
CONFIG = DOCKER / "prometheus" / "prometheus.yml"
START_S = 30.0


def tool(name: str) -> str:
    """The path of a program of Debian's package."""
    path = shutil.which(name)
    assert path is not None, f"{name} is not installed: make system-packages"
    return path


def config_for(targets: Mapping[str, Sequence[str]], interval: str) -> dict[str, Any]:
    """The repository's configuration with fixed targets in place of names, scraping more often."""
    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    config["global"] = {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval}
    config["rule_files"] = [str(CONFIG.parent / path) for path in config["rule_files"]]
    assert {job["job_name"] for job in config["scrape_configs"]} == set(targets)
    for job in config["scrape_configs"]:
        del job["dns_sd_configs"]
        job["static_configs"] = [{"targets": list(targets[job["job_name"]])}]
    return config


@asynccontextmanager
async def running_prometheus(
    folder: Path, targets: Mapping[str, Sequence[str]], interval: str = "1s"
) -> AsyncIterator[str]:
    """Runs it while the block is open; yields its URL.

    Args:
        folder: for its data, configuration and log.
        targets: addresses by the name of their job.
    """
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config_for(targets, interval)))
    address = f"127.0.0.1:{free_port()}"
    arguments = [
        tool("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*arguments, stdin=DEVNULL, stdout=log, stderr=log)
        try:
            await asyncio.wait_for(_ready(f"http://{address}", process), START_S)
            yield f"http://{address}"
        finally:
            await _stop(process)


def free_port() -> int:
    """A port that was free a moment ago: Prometheus does not tell which one it got for 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _stop(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), 10)
    except TimeoutError:
        process.kill()
        await process.wait()


async def _ready(url: str, process: Process) -> None:
    while not await asyncio.to_thread(_is_ready, url):
        assert process.returncode is None, "prometheus ended; see prometheus.log"
        await asyncio.sleep(0.1)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
