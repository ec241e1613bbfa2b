"""Every Triton kernel compiles for an H200 on a machine without a GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import graftline.kernels.linear

pytest.importorskip("triton")


def test_every_kernel_compiles() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("triton_compile_all.py")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=850, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = {tuple(line.split()[:2]) for line in done.stdout.splitlines()}
    folder = Path(graftline.kernels.linear.__file__).parent
    written = {
        (path.stem, name)
        for path in folder.glob("*_triton.py")
        for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)
    }
    assert compiled == written
