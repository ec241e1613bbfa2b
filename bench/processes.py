"""Processor time of this process's descendants, read from /proc: did the idle variants really stay idle?"""

import os
from collections.abc import Collection, Mapping
from pathlib import Path


def descendants() -> set[int]:
    """Ids of all processes that descend from this one; empty where there is no /proc."""
    parents = {pid: fields[0] for pid in _all_pids() if (fields := _stat(pid)) is not None}
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def cpu_times_s(pids: Collection[int]) -> dict[int, float]:
    """Processor seconds (user and system) that each process has used so far; processes that are gone are left out."""
    return {pid: fields[1] for pid in pids if (fields := _stat(pid)) is not None}


def cpu_used_s(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """Processor seconds between two readings of `cpu_times_s`, of the processes that are in both."""
    return sum(after[pid] - used for pid, used in before.items() if pid in after)


def _all_pids() -> list[int]:
    try:
        return [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
    except OSError:
        return []


def _stat(pid: int) -> tuple[int, float] | None:
    """(parent, processor seconds) of a process, or None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the program's name in brackets and may hold anything.
    fields = text.rpartition(")")[2].split()
    return int(fields[1]), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
