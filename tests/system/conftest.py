"""Models and heads that the system tests share, and engines that nobody waits for."""

import ctypes
import resource
from typing import Any

import pytest
from tiny_world import TinyWorld

from graftline.kv_transfer.mooncake_transport import MooncakeTransport


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    return TinyWorld(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session", autouse=True)
def _engines_stay() -> None:
    """Mooncake's engine takes a second to go away and holds Python's lock meanwhile, so that a system under test would
    freeze whenever engines of earlier ones are collected. They stay to the end of the process: some files, no work.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    begin = MooncakeTransport.__init__

    def keep(self: MooncakeTransport, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._engine))

    MooncakeTransport.__init__ = keep  # type: ignore[method-assign]
