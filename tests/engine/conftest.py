"""Models and heads that the engine's tests share."""

import pytest
import torch
from tiny_world import TinyWorld


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    return TinyWorld(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny tensors: more threads only wait for each other."""
    torch.set_num_threads(1)
