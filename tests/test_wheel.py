"""What an installation gets: the wheel's contents, and a router that runs from it where there is no torch."""

import email
import os
import re
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import grpc
import pytest
from packaging.requirements import Requirement
from prometheus_process import free_port

from graftline.health_probe import probe
from graftline.proto.channel import open_sync_channel

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (found,) = folder.glob("*.whl")
    return found


def tracked_files() -> Iterator[str]:
    """Files of the packages, as they are to lie in the wheel."""
    folders = [path for path in (ROOT / "src" / "graftline").iterdir() if path.is_dir() and path.name != "__pycache__"]
    for folder in folders:
        for path in folder.resolve().rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so":
                yield f"graftline/{folder.name}/{path.relative_to(folder.resolve()).as_posix()}"


def test_the_wheel_holds_every_file_behind_the_links(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert set(tracked_files()) <= names
    for pattern in (
        r"graftline/cli\.py",
        r"graftline/py\.typed",
        r"graftline/proto/v1/router_pb2_grpc\.py",
        r"graftline/kernels/native/.+\.c",
        r"graftline/kernels/native/.+\.h",
        r"graftline/engine/draft_heads/smollm2-135m/model\.safetensors",
        r"graftline/bench/prompts/.+\.jsonl",
    ):
        assert any(re.fullmatch(pattern, name) for name in names), pattern
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def router_requirements(wheel: Path) -> set[str]:
    """Names of everything that the wheel brings along without extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        todo = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
    found: set[str] = set()
    while todo:
        requirement = Requirement(todo.pop())
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        is_wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if is_wanted and name not in found:
            found.add(name)
            todo += metadata.distribution(name).requires or []
    return found


@pytest.fixture(scope="module")
def bare_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with the wheel and what a router requires, linked from here: nothing else, and no network."""
    folder = tmp_path_factory.mktemp("router")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    for name in router_requirements(wheel):
        for file in metadata.distribution(name).files or []:
            top = file.parts[0]
            if top not in {"..", "__pycache__"} and not (site / top).exists():
                (site / top).symlink_to(Path(str(file.locate())).parents[len(file.parts) - 1] / top)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return python


def test_a_router_requires_no_torch(wheel: Path, bare_python: Path) -> None:
    assert not {"torch", "numpy", "mooncake-transfer-engine-non-cuda", "transformers"} & router_requirements(wheel)
    check = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is not None)"
    subprocess.run([bare_python, "-c", check], check=True, timeout=60)


def test_a_router_runs_from_the_wheel(bare_python: Path) -> None:
    """CASES F11: it starts without its workers, is alive, and says that it is not ready to serve."""
    address = f"127.0.0.1:{free_port()}"
    workers = ["--prefill", "127.0.0.1:1", "--decode", "127.0.0.1:2"]
    network = ["--listen", address, "--http-listen", "", "--drain-grace-s", "1"]
    process = subprocess.Popen(
        [bare_python, "-m", "graftline", "router", *workers, *network],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        stderr=subprocess.PIPE,
    )
    try:
        with open_sync_channel(address) as channel:
            grpc.channel_ready_future(channel).result(timeout=60)
        assert probe(address) == "SERVING"
        assert probe(address, "nobody.knows.this").startswith("NOT_FOUND")
    finally:
        process.terminate()
        log = process.communicate(timeout=30)[1].decode()
    assert process.returncode == 0, log
