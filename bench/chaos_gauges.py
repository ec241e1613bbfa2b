"""Looks into the processes of a cluster from outside: metrics over HTTP, memory and descriptors from /proc."""

import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from graftline.child import Child

_SCRAPE_S = 5.0


def scrape(address: str | None) -> dict[str, float]:
    """Samples by name and labels as Prometheus writes them; empty when nobody answers. Blocks."""
    if address is None:
        return {}
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=_SCRAPE_S) as answered:
            lines = answered.read().decode().splitlines()
    except (OSError, urllib.error.URLError):
        return {}
    samples = (line.rpartition(" ") for line in lines if line and line[0] != "#")
    return {name: float(value) for name, _, value in samples}


def leaks(name: str, child: Child) -> str | None:
    """What an idle worker still holds, in words; None when every pool is whole. Blocks."""
    role = name.partition("-")[0]
    found = scrape(child.ready.get("metrics"))
    if not found:
        return f"{name} does not answer"
    label = f'{{role="{role}"}}'
    held = {
        gauge: found.get(f"graftline_worker_{gauge}{label}", -1.0)
        for gauge in ("open_requests", "running_requests", "queued_requests")
    }
    for pool, state in (("pages", "used"), ("pages", "quarantined"), ("slots", "used")):
        held[f"{pool} {state}"] = found.get(f'graftline_worker_{pool}{{role="{role}",state="{state}"}}', -1.0)
    left = {what: int(count) for what, count in held.items() if count}
    return f"{name} holds {left}" if left else None


class Counters:
    """Sums of counters that start again at zero when their process does: reads often, adds what grew."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], float] = {}
        self.totals: dict[str, float] = {}

    def take(self, process: str, samples: Mapping[str, float], names: Mapping[str, str]) -> None:
        """Adds what grew since the last look at that process (named with its incarnation).

        Args:
            names: prefix of a metric's name -> under which it is summed.
        """
        for sample, value in samples.items():
            for prefix, total in names.items():
                if sample.startswith(prefix):
                    known = self._last.get((process, sample), 0.0)
                    self.totals[total] = self.totals.get(total, 0.0) + max(0.0, value - known)
                    self._last[process, sample] = value


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """What one process holds."""

    resident_bytes: int
    num_fds: int
    num_threads: int


def look_at(pid: int) -> ProcessSample | None:
    """A process's memory, descriptors and threads; None when it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
        return ProcessSample(
            pages * os.sysconf("SC_PAGE_SIZE"),
            len(os.listdir(f"/proc/{pid}/fd")),
            len(os.listdir(f"/proc/{pid}/task")),
        )
    except OSError:
        return None


def stage_pids(worker_pid: int) -> list[int]:
    """Processes of the later stages of a worker, in order of their start; those that were left behind included."""
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == worker_pid:
            continue
        pid = int(entry.name)
        try:
            if os.getpgid(pid) == worker_pid and _state(pid) != "Z":
                found.append(pid)
        except OSError:
            continue
    return sorted(found)


def _state(pid: int) -> str:
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return text.rpartition(")")[2].split()[0]
