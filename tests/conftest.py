"""Without a GPU, Triton kernels run under the interpreter; the variable must stand before any test imports a kernel."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny tensors: more threads only wait for each other."""
    torch.set_num_threads(1)
