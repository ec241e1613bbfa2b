"""Copies between any memory of this process, of its GPUs too: what an `InProcessHub` needs when pools lie there."""

import ctypes
from functools import cache
from pathlib import Path

from graftline.errors import TransferFailedError

_ANY_KIND = 4  # cudaMemcpyDefault: the driver tells host from device by the address


@cache
def _cuda_runtime() -> ctypes.CDLL:
    """The CUDA runtime that something in this process, torch for one, has loaded."""
    loaded = sorted({word for word in Path("/proc/self/maps").read_text().split() if "/libcudart" in word})
    if not loaded:
        raise TransferFailedError("no CUDA runtime is loaded in this process", drained=True)
    return ctypes.CDLL(loaded[0])


def copy_any_memory(dst_address: int, src_address: int, num_bytes: int) -> None:
    """Copies bytes; they have arrived when this returns.

    Raises:
        TransferFailedError: CUDA refused, or is not in use here.
    """
    runtime = _cuda_runtime()
    error = runtime.cudaMemcpy(
        ctypes.c_void_p(dst_address), ctypes.c_void_p(src_address), ctypes.c_size_t(num_bytes), _ANY_KIND
    )
    # A copy within one device is only queued by then.
    error = error or runtime.cudaStreamSynchronize(None)
    if error:
        raise TransferFailedError(f"cudaMemcpy of {num_bytes} bytes: error {error}", drained=True)
