"""Facts about the machine and the program that a result must carry to mean anything."""

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

from graftline.bench.records import MachineFacts

_PACKAGES = ("graftline", "torch", "transformers", "numpy", "grpcio", "tokenizers", "mooncake-transfer-engine-non-cuda")
_TIMEOUT_S = 10.0


def machine_facts() -> MachineFacts:
    """What this machine is; a fact that cannot be found is "unknown" or left out."""
    return MachineFacts(
        cpu_model=_cpu_model(),
        num_cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        packages=_versions(),
        commit=_commit(),
        accelerators=tuple(_said("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()),
    )


def command_line() -> str:
    """How this process was called, the interpreter and folders left out."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or "unknown"
    names = (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    folder = str(Path(__file__).resolve().parent)
    commit = _said("git", "-C", folder, "rev-parse", "--short=12", "HEAD").strip()
    if not commit:
        return "unknown"
    changed = _said("git", "-C", folder, "status", "--porcelain", "--untracked-files=no").strip()
    return f"{commit}+changes" if changed else commit


def _said(*command: str) -> str:
    """What a command prints, or "" when it is missing, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
