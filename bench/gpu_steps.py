"""Steps of a section of `bench/gpu.py`: each is bounded by the section's time, caught, and on disk once it is over."""

import gc
import json
import os
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TypeVar

import torch

_TRACE_LINES = 12
_OUTPUT_LINES = 20
_KILL_GRACE_S = 20.0

T = TypeVar("T")


class Steps:
    """What a section found so far, kept in a file.

    Args:
        out: rewritten after every step, by renaming.
        seconds: from now on; steps that would begin later are skipped.
    """

    def __init__(self, out: Path, seconds: float) -> None:
        self._out = out
        self._deadline_s = time.monotonic() + seconds
        self.found: dict[str, Any] = {}

    @property
    def left_s(self) -> float:
        """Seconds until the section's time is over."""
        return self._deadline_s - time.monotonic()

    def part(self, name: str) -> Path:
        """A file beside this section's for what a process of its own finds."""
        return self._out.with_name(f"{self._out.stem}.{name}.json")

    def note(self, name: str, value: Any) -> None:
        """Keeps a value."""
        self.found[name] = value
        write_json(self._out, self.found)

    def step(self, name: str, run: Callable[[], T], needs_s: float = 0.0) -> T | None:
        """Runs a step and keeps what it returns; what it raises is kept as its result and gives None.

        Args:
            needs_s: the step is skipped when less time is left.
        """
        if self.left_s < max(needs_s, 0.0):
            self.note(name, {"skipped": f"{max(0.0, self.left_s):.0f} s were left"})
            return None
        started = time.monotonic()
        try:
            value = run()
        except Exception as error:
            lines = traceback.format_exc().strip().splitlines()[-_TRACE_LINES:]
            self.note(name, {"error": f"{type(error).__name__}: {error}", "trace": lines})
            return None
        finally:
            settle()
        self.note(name, value)
        self.note(f"{name}: seconds", round(time.monotonic() - started, 2))
        return value


def write_json(path: Path, value: Any) -> None:
    """Writes JSON so that a reader sees the old or the new text, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(json.dumps(value, indent=1, default=str) + "\n", encoding="utf-8")
    temporary.replace(path)


def read_json(path: Path) -> Any:
    """What is in a file, None without one."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def run_bounded(command: Sequence[str], part: Path, seconds: float) -> dict[str, Any]:
    """Runs a command that writes JSON to `part`; kills it, and its process group, when its time is over.

    It stays in the caller's session, so that whoever ends that ends this too.

    Returns:
        What is in `part` then, how the command ended, and the end of its output.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, process_group=0)
        try:
            ending = ending_of(process.wait(max(1.0, seconds)))
        except subprocess.TimeoutExpired:
            _kill_group(process.pid)
            ending = f"{ending_of(wait_killed(process))} after {seconds:.0f} s"
        finally:
            _kill_group(process.pid)
        return {"found": read_json(part), "ending": ending, "output": last_lines(output, _OUTPUT_LINES)}


def end_session(process: "subprocess.Popen[bytes]") -> int | None:
    """Kills what is left of the session that a process leads; see `wait_killed`."""
    for folder in Path("/proc").glob("[0-9]*"):
        if _session_of(folder) == process.pid:
            with suppress(ProcessLookupError):
                os.kill(int(folder.name), signal.SIGKILL)
    return wait_killed(process)


def wait_killed(process: "subprocess.Popen[bytes]") -> int | None:
    """The exit code of a process that was killed or has ended; None while it is still going.

    Giving tens of gigabytes of a GPU back takes seconds.
    """
    with suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_GRACE_S)
    return process.returncode


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _session_of(folder: Path) -> int | None:
    """The session of a process of /proc; None when it is gone."""
    try:
        text = (folder / "stat").read_text()
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[3])  # state, parent, group, session


def ending_of(code: int | None) -> str:
    """An exit code in words."""
    if code is None:
        return "killed, still going"
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def last_lines(output: IO[bytes], count: int) -> list[str]:
    """The end of what was written."""
    output.seek(0)
    return output.read().decode(errors="replace").splitlines()[-count:]


def settle() -> None:
    """Gives memory that nobody holds back to the device; a broken device stays silent here, the next step shows it."""
    gc.collect()
    if torch.cuda.is_available():
        with suppress(RuntimeError):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
