"""Manners of real processes: readiness, parents, signals."""

import json
import os
import signal
import subprocess
import sys

import pytest

TIMEOUT_S = 60


def run(code: str, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_readiness_goes_through_the_pipe() -> None:
    read_end, write_end = os.pipe()
    code = "from graftline.worker.process import announce_ready, is_launched\n"
    code += "assert is_launched(); announce_ready(address='a:1', http=None); assert not is_launched()"
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "GRAFTLINE_READY_FD": str(write_end)},
        pass_fds=(write_end,),
    )
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        assert json.loads(pipe.readline()) == {"address": "a:1", "http": None}
    assert child.wait(TIMEOUT_S) == 0


def test_a_process_dies_with_its_parent() -> None:
    """The parent is killed; the child, which only sleeps, ends by itself."""
    child_code = (
        "import os, time\\n"
        "from graftline.worker.process import die_with_launcher\\n"
        "die_with_launcher()\\n"
        "print(os.getpid(), flush=True)\\n"
        "time.sleep(600)\\n"
    )
    parent_code = (
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', '{child_code}'],\n"
        "    env={**os.environ, 'GRAFTLINE_PARENT': str(os.getpid())})\n"
        "time.sleep(600)\n"
    )
    parent = run(parent_code)
    assert parent.stdout is not None
    assert parent.stdout.readline().strip().isdigit()
    parent.kill()
    parent.wait()
    # The child holds the other end of the pipe: it closes when the child has ended.
    assert parent.stdout.read() == ""


def test_a_parent_that_is_gone_already_is_noticed() -> None:
    code = "import time; from graftline.worker.process import die_with_launcher; die_with_launcher(); time.sleep(600)"
    orphan = run(code, GRAFTLINE_PARENT="1")
    assert orphan.wait(TIMEOUT_S) == -signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_and_the_second_ends(number: signal.Signals) -> None:
    code = (
        "import asyncio\n"
        "from graftline.worker.process import stop_signals\n"
        "async def main():\n"
        "    with stop_signals() as stop:\n"
        "        print('ready', flush=True)\n"
        "        await stop.wait()\n"
        "        print('asked', flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    child = run(code)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(number)
    assert child.stdout.readline() == "asked\n"
    child.send_signal(number)
    assert child.wait(TIMEOUT_S) == 130


@pytest.mark.parametrize(("exit_after_s", "status"), [(0.3, 0), (None, 7)])
def test_a_later_stage_waits_for_the_first_ones_word(exit_after_s: float | None, status: int) -> None:
    """A signal to the whole job ends a later stage late or never; the first one drains meanwhile."""
    code = (
        "import sys, time\n"
        "from graftline.worker.process import outlive_signals\n"
        f"outlive_signals({exit_after_s})\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "time.sleep(1)\n"
        "sys.exit(7)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        child.send_signal(number)
    child.communicate("stop\n", TIMEOUT_S)
    assert child.returncode == status


def test_a_containers_first_process_ends_on_sigterm_while_it_starts() -> None:
    """CASES D52: the kernel ignores signals of process 1 that it does not handle."""
    code = "import os, time; os.getpid = lambda: 1\n"
    code += "from graftline.worker.process import begin_process\n"
    code += "begin_process(); print('here', flush=True); time.sleep(600)"
    for number in (signal.SIGTERM, signal.SIGINT):
        child = run(code)
        assert child.stdout is not None
        assert child.stdout.readline() == "here\n"
        child.send_signal(number)
        child.communicate(timeout=TIMEOUT_S)
        assert child.returncode == 128 + number


def test_closed_standard_streams_are_no_ones_files() -> None:
    """CASES D52: the next socket would take the number of one, and what is printed would go to its peer."""
    code = "import os; os.close(0); os.close(1)\n"
    code += "from graftline.worker.process import begin_process\n"
    code += "begin_process(); assert os.open(os.devnull, os.O_RDONLY) > 2"
    child = run(code)
    _, said = child.communicate(timeout=TIMEOUT_S)
    assert child.returncode == 0, said
    # As a shell closes it, before Python begins.
    code = "from graftline.worker.process import begin_process, end_process; begin_process(); print(1); end_process(7)"
    child = subprocess.Popen(
        ["sh", "-c", 'exec "$0" -c "$1" <&- >&-', sys.executable, code], stderr=subprocess.PIPE, text=True
    )
    _, said = child.communicate(timeout=TIMEOUT_S)
    assert child.returncode == 7, said
