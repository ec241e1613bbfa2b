"""Copies between any memory; what it does on a GPU the engine tests see when they run on one."""

import ctypes

import pytest

from graftline.errors import TransferFailedError
from graftline.kv_transfer import device_copy


class Runtime:
    """Stands for libcudart where there is none; moves host memory."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.waits = 0

    def cudaMemcpy(self, dst: ctypes.c_void_p, src: ctypes.c_void_p, size: ctypes.c_size_t, kind: int) -> int:
        assert kind == 4
        if not self.error:
            ctypes.memmove(dst, src, size.value)
        return self.error

    def cudaStreamSynchronize(self, stream: None) -> int:
        self.waits += 1
        return 0


def test_bytes_arrive_before_it_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(device_copy, "_cuda_runtime", lambda: runtime)
    source, target = ctypes.create_string_buffer(b"graft"), ctypes.create_string_buffer(6)
    device_copy.copy_any_memory(ctypes.addressof(target), ctypes.addressof(source), 6)
    assert (target.value, runtime.waits) == (b"graft", 1)


def test_a_refusal_is_a_failed_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copy, "_cuda_runtime", lambda: Runtime(error=1))
    with pytest.raises(TransferFailedError, match="error 1"):
        device_copy.copy_any_memory(0, 0, 8)
