"""Models and heads that the engine's tests share."""

import pytest
from tiny_world import TinyWorld


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    return TinyWorld(tmp_path_factory.mktemp("world"))
