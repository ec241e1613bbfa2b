"""Stage processes that are forked early: they wait for orders, and leave when none can come."""

import os
import subprocess
import sys
from pathlib import Path

from graftline.worker.early_stages import fork_stages, orders_taken_by
from graftline.worker.process import READY_FD_VARIABLE

WAIT_S = 20.0


def run() -> None:
    Path(os.environ["FILE_OF_THE_TEST"]).write_text(os.environ["RANK"])
    os._exit(7)


def test_each_order_goes_to_another_process(tmp_path: Path) -> None:
    start = orders_taken_by(fork_stages(2, run))
    files = [tmp_path / "one", tmp_path / "two"]
    stages = [start({"FILE_OF_THE_TEST": str(file), "RANK": str(rank)}) for rank, file in enumerate(files)]
    assert [stage.wait(WAIT_S) for stage in stages] == [7, 7]
    assert [file.read_text() for file in files] == ["0", "1"]
    assert "FILE_OF_THE_TEST" not in os.environ


def test_a_process_without_orders_runs_until_it_is_ended() -> None:
    (stage,) = fork_stages(1, run)
    assert stage.poll() is None
    stage.kill()
    assert stage.wait(WAIT_S) == -9


def test_a_process_whose_parent_is_gone_leaves() -> None:
    """Two forks: the one in between ends without having given orders."""
    reads, writes = os.pipe()
    middle = os.fork()
    if middle == 0:
        os.close(reads)
        fork_stages(1, run)
        os._exit(0)
    os.waitpid(middle, 0)
    os.close(writes)
    # Ends when the last holder of the other end, the waiting process, does.
    assert os.read(reads, 1) == b""
    os.close(reads)


def test_the_launchers_descriptor_is_let_go(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """The launcher learns of a worker's death by that descriptor: a waiting stage must not keep it open."""
    reads, writes = os.pipe()
    monkeypatch.setenv(READY_FD_VARIABLE, str(writes))
    (stage,) = fork_stages(1, run)
    os.close(writes)
    assert os.read(reads, 1) == b""
    os.close(reads)
    stage.kill()
    stage.wait(WAIT_S)


def test_a_worker_that_fails_to_start_does_not_wait_for_its_stages() -> None:
    """Its interpreter's end must not join processes that wait for orders of it."""
    code = "from graftline.worker.early_stages import fork_stages; fork_stages(1, print); raise SystemExit(2)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 2
