"""Processor time of child processes, against children that work and children that wait."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from graftline.bench.processes import cpu_times_s, cpu_used_s, descendants

WORK = "import sys, time\nsys.stdin.readline()\nwhile time.process_time() < 0.4: pass\nprint('done', flush=True)\n"


@pytest.fixture
def child() -> Iterator["subprocess.Popen[str]"]:
    """Works for 0.4 s of processor time after each line it is sent, then says so."""
    program = [sys.executable, "-c", WORK + "sys.stdin.readline()\n"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def test_a_working_child_is_seen_to_work(child: "subprocess.Popen[str]") -> None:
    assert child.pid in descendants()
    before = cpu_times_s([child.pid])
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("\n")
    child.stdin.flush()
    assert child.stdout.readline() == "done\n"
    after = cpu_times_s([child.pid])
    # Ticks of /proc are 10 ms; starting the interpreter took some of the 0.4 s.
    assert 0.2 < cpu_used_s(before, after) <= 0.45


def test_processes_that_are_gone_count_as_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert process.pid not in descendants()
    assert cpu_times_s([process.pid]) == {}
    assert cpu_used_s({process.pid: 1.0}, {}) == 0
