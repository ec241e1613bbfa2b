"""Memory that two processes of a host share, in the place of a GPU's: for links that write into their peer's memory."""

import ctypes
import time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory

import pytest
import torch

from graftline.engine import links_distributed
from graftline.engine.pipeline import StageCommand
from graftline.kernels.cuda_driver import CudaProgramError
from graftline.kernels.peer_memory import HANDLE_BYTES

_AWAIT_S = 20.0
SHARED_MEMORY = "SHARED_MEMORY"
"""In the environment of `stage_main`: its stage has such memory."""


class SharedPeerMemory:
    """See `PeerMemory`. There is no stream: everything is done at once, and waiting is done by the host.

    Args:
        fault: "allocate", "open", "write" or "await": what fails, or in the case of "write" has no effect.
    """

    def __init__(self, fault: str = "") -> None:
        self._fault = fault
        self._segments: list[SharedMemory] = []
        self._names: dict[int, str] = {}
        self._opened: set[int] = set()
        self.copied = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def allocate(self, num_bytes: int) -> int:
        if self._fault == "allocate":
            raise CudaProgramError("cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY")
        segment = SharedMemory(create=True, size=num_bytes)
        address = self._address(segment)
        self._names[address] = segment.name
        return address

    @property
    def num_held(self) -> int:
        """What was allocated or opened here and is still there."""
        return len(self._names) + len(self._opened)

    def free(self, address: int) -> None:
        self._remove(self._names.pop(address))

    def export(self, address: int) -> bytes:
        return self._names[address].encode().ljust(HANDLE_BYTES, b"\0")

    def open(self, handle: bytes) -> int:
        if self._fault == "open":
            raise CudaProgramError("cuIpcOpenMemHandle: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")
        segment = SharedMemory(handle.rstrip(b"\0").decode())
        resource_tracker.unregister(segment._name, "shared_memory")  # type: ignore[attr-defined]
        address = self._address(segment)
        self._opened.add(address)
        return address

    def let_go(self, address: int) -> None:
        self._opened.remove(address)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        self.copied += num_bytes
        ctypes.memmove(target, source, num_bytes)

    def await_at_least(self, address: int, value: int) -> None:
        if self._fault == "await":  # in the words of NVIDIA's bindings, which know no error of ours
            raise RuntimeError('Function "cuStreamWaitValue32_v2" not found')
        deadline = time.monotonic() + _AWAIT_S
        while (self.read(address) - value) & 0x80000000:
            assert time.monotonic() < deadline, f"the number at {address} did not come to {value}"
            time.sleep(0)

    def write(self, address: int, value: int) -> None:
        if self._fault != "write":
            ctypes.c_uint32.from_address(address).value = value

    def read(self, address: int) -> int:
        return ctypes.c_uint32.from_address(address).value

    def close(self) -> None:
        """Removes what was allocated here; nothing may be used any more."""
        for name in self._names.values():
            self._remove(name)

    def _remove(self, name: str) -> None:
        segment = SharedMemory(name)
        segment.close()
        segment.unlink()

    def _address(self, segment: SharedMemory) -> int:
        self._segments.append(segment)
        return ctypes.addressof(ctypes.c_char.from_buffer(segment.buf))


def share_memory(monkeypatch: pytest.MonkeyPatch, command: StageCommand, memory: SharedPeerMemory) -> StageCommand:
    """The command of stages that write into each other's memory, which is `memory` for the one of this process."""
    monkeypatch.setattr(links_distributed, "peer_memory_of", lambda device: memory)
    return StageCommand(command.module, {**command.environment, SHARED_MEMORY: "1"})
