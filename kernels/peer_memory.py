"""Memory of one GPU that a process with another GPU of the host writes to, and numbers in it that streams wait for.

No kernel takes part: the copy engine copies, and the GPU's front end waits for numbers and writes them. So nothing
holds a multiprocessor while it waits for another device.
"""

import ctypes
import logging
from typing import Any, Protocol

import torch

from graftline.kernels.cuda_driver import CudaProgramError, bindings, checked, has_bindings, refusals

_LOG = logging.getLogger(__name__)
HANDLE_BYTES = 64
_ALIGNED_BYTES = 2 << 20  # what is shared is whole blocks of this size


class PeerMemory(Protocol):
    """Addresses are ints; what is put on "the stream" goes onto the calling thread's current one, of a thread whose
    current device is this one.

    Raises:
        CudaProgramError: from every method, when the driver refuses.
    """

    @property
    def device(self) -> torch.device:
        """Of this process."""

    def allocate(self, num_bytes: int) -> int:
        """Zeroed memory of this process's device, until it is freed or the process ends."""

    def free(self, address: int) -> None:
        """Gives back memory that was allocated here, and that no other process has opened any more."""

    def export(self, address: int) -> bytes:
        """`HANDLE_BYTES` bytes by which another process of this host opens memory that was allocated here."""

    def open(self, handle: bytes) -> int:
        """Memory of another process, until it is let go of, or one of the two ends."""

    def let_go(self, address: int) -> None:
        """Memory of another process that was opened here is not used any more."""

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Copies on the stream, from or to memory of this device."""

    def await_at_least(self, address: int, value: int) -> None:
        """The stream goes on once the number there, an unsigned one of 32 bits that only grows, has come to `value`."""

    def write(self, address: int, value: int) -> None:
        """Writes a number of 32 bits on the stream, behind everything that the stream did before."""

    def read(self, address: int) -> int:
        """The number of 32 bits that is there now; the host waits for nothing else."""


class CudaPeerMemory:
    """See `PeerMemory`.

    Args:
        device: of this process, a CUDA device.

    Raises:
        CudaProgramError: the bindings do not load.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with refusals():
            self._driver: Any = bindings("driver")

    @property
    def device(self) -> torch.device:
        """See `PeerMemory`."""
        return self._device

    def allocate(self, num_bytes: int) -> int:
        """See `PeerMemory`."""
        size = -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        with torch.cuda.device(self._device):
            torch.cuda.current_stream().synchronize()  # a context of torch's is there from now on
            with refusals():
                (address,) = checked("cuMemAlloc", *self._driver.cuMemAlloc(size))
                checked("cuMemsetD8", *self._driver.cuMemsetD8(address, 0, size))
                checked("cuCtxSynchronize", *self._driver.cuCtxSynchronize())
        return int(address)

    def free(self, address: int) -> None:
        """See `PeerMemory`."""
        with torch.cuda.device(self._device), refusals():
            checked("cuMemFree", *self._driver.cuMemFree(address))

    def export(self, address: int) -> bytes:
        """See `PeerMemory`."""
        with torch.cuda.device(self._device), refusals():
            (handle,) = checked("cuIpcGetMemHandle", *self._driver.cuIpcGetMemHandle(address))
        return bytes(handle.reserved).ljust(HANDLE_BYTES, b"\0")

    def open(self, handle: bytes) -> int:
        """See `PeerMemory`."""
        with torch.cuda.device(self._device), refusals():
            theirs = self._driver.CUipcMemHandle()
            theirs.reserved = handle
            flag = self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
            (address,) = checked("cuIpcOpenMemHandle", *self._driver.cuIpcOpenMemHandle(theirs, flag))
        return int(address)

    def let_go(self, address: int) -> None:
        """See `PeerMemory`."""
        with torch.cuda.device(self._device), refusals():
            checked("cuIpcCloseMemHandle", *self._driver.cuIpcCloseMemHandle(address))

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """See `PeerMemory`."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        checked("cuMemcpyDtoDAsync", *self._driver.cuMemcpyDtoDAsync(target, source, num_bytes, stream))

    def await_at_least(self, address: int, value: int) -> None:
        """See `PeerMemory`."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        done = self._driver.cuStreamWaitValue32(stream, address, _bits(value), 0)  # at least, in wrapping arithmetic
        checked("cuStreamWaitValue32", *done)

    def write(self, address: int, value: int) -> None:
        """See `PeerMemory`."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        checked("cuStreamWriteValue32", *self._driver.cuStreamWriteValue32(stream, address, _bits(value), 0))

    def read(self, address: int) -> int:
        """See `PeerMemory`."""
        value = ctypes.c_uint32()
        with torch.cuda.device(self._device), refusals():
            checked("cuMemcpyDtoH", *self._driver.cuMemcpyDtoH(ctypes.addressof(value), address, 4))
        return value.value


def peer_memory_of(device: torch.device) -> PeerMemory | None:
    """Of a CUDA device; None elsewhere, and where NVIDIA's bindings are missing or do not load."""
    if device.type != "cuda" or not has_bindings():
        return None
    try:
        return CudaPeerMemory(device)
    except CudaProgramError as error:
        _LOG.warning("no memory of %s is shared with other processes: %s", device, error)
        return None


def _bits(value: int) -> int:
    return value & 0xFFFFFFFF
