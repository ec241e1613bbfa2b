"""Children of a launcher."""

import os
from pathlib import Path

import pytest

from graftline.child import Child


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


async def test_a_child_that_cannot_be_started_leaves_nothing_open(tmp_path: Path) -> None:
    child = Child("prefill-0", ["prefill"], tmp_path / "no such folder" / "log", {})
    before = open_files()
    for _ in range(3):
        with pytest.raises(FileNotFoundError):
            await child.start(1.0)
    assert open_files() == before
    assert await child.stop(0) == 0
