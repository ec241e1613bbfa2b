"""Memory for other processes, by a driver that writes down what it is asked for."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graftline.kernels import peer_memory
from graftline.kernels.cuda_driver import CudaProgramError
from graftline.kernels.peer_memory import CudaPeerMemory, peer_memory_of

GPU, STREAM = torch.device("cuda", 1), 77


class Status:
    def __init__(self, code: int = 0) -> None:
        self._code = code

    name = "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"

    def __int__(self) -> int:
        return self._code


class Driver:
    """Calls by name, with their arguments."""

    def __init__(self, code: int = 0) -> None:
        self.calls: list[tuple[object, ...]] = []
        self._code = code

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: object) -> tuple[object, ...]:
            self.calls.append((name, *arguments))
            has_result = name not in {"cuMemFree", "cuIpcCloseMemHandle"}
            return (Status(self._code), 4096) if has_result else (Status(self._code),)

        return call


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()

    @contextmanager
    def device(_: torch.device) -> Iterator[None]:
        yield

    stream = SimpleNamespace(cuda_stream=STREAM, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    monkeypatch.setattr(peer_memory, "bindings", lambda _: found)
    return found


def test_what_is_shared_is_whole_blocks_of_zeros(driver: Driver) -> None:
    """A handle is one of a whole block, whose start it opens."""
    assert CudaPeerMemory(GPU).allocate((2 << 20) + 1) == 4096
    assert driver.calls == [("cuMemAlloc", 4 << 20), ("cuMemsetD8", 4096, 0, 4 << 20), ("cuCtxSynchronize",)]


def test_memory_is_given_back(driver: Driver) -> None:
    memory = CudaPeerMemory(GPU)
    memory.let_go(8192)
    memory.free(4096)
    assert driver.calls == [("cuIpcCloseMemHandle", 8192), ("cuMemFree", 4096)]


def test_numbers_beyond_32_bits_go_on_at_zero(driver: Driver) -> None:
    memory = CudaPeerMemory(GPU)
    memory.write(64, (1 << 32) + 3)
    memory.await_at_least(64, (1 << 32) - 1)
    memory.copy(1, 2, 3)
    assert driver.calls == [
        ("cuStreamWriteValue32", STREAM, 64, 3, 0),
        ("cuStreamWaitValue32", STREAM, 64, 0xFFFFFFFF, 0),
        ("cuMemcpyDtoDAsync", 1, 2, 3, STREAM),
    ]


def test_what_the_driver_refuses_is_an_error(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_memory, "bindings", lambda _: Driver(217))
    memory = CudaPeerMemory(GPU)
    for ask in (lambda: memory.allocate(1), lambda: memory.write(64, 1), lambda: memory.await_at_least(64, 1)):
        with pytest.raises(CudaProgramError, match="PEER_ACCESS_UNSUPPORTED"):
            ask()


def test_bindings_that_do_not_load_are_none(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise ImportError(f"no lib{name}")

    monkeypatch.setattr(peer_memory, "has_bindings", lambda: True)
    assert peer_memory_of(GPU) is not None
    monkeypatch.setattr(peer_memory, "bindings", broken)
    assert peer_memory_of(GPU) is None
    assert peer_memory_of(torch.device("cpu")) is None
