"""Compiles CUDA C++ at first use and launches it on torch's stream; knows nothing of what kernels mean.

NVRTC compiles, which torch's CUDA builds bring along: no toolkit need be installed. Results are kept by the hash of
everything that shapes them.
"""

import ctypes
import hashlib
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graftline.kernels.cuda_driver import CudaProgramError, bindings, checked, refusals

_LOG = logging.getLogger(__name__)
_SOURCES = Path(__file__).resolve().parent / "cuda"
_MACHINE_CODE = b"\x7fELF"


def compile_program(names: Sequence[str], options: Sequence[str]) -> bytes:
    """Machine code of files of this package, behind each other.

    Args:
        names: files of the folder `cuda`.
        options: of NVRTC, among them the architecture, such as "--gpu-architecture=sm_90a".

    Raises:
        CudaProgramError: the compiler refused them, with its words, or there is none.
    """
    with refusals():
        text = "\n".join(_source(name) for name in names)
        nvrtc = bindings("nvrtc")
        version = checked("nvrtcVersion", *nvrtc.nvrtcVersion())
        key = hashlib.sha256("\0".join([text, *options, repr(version)]).encode()).hexdigest()[:24]
        code = _kept(key)
        if code is None:
            code = _compile(nvrtc, names[-1], text, options)
            _keep(key, code)
        return code


@dataclass(frozen=True, slots=True)
class BoxMap:
    """How the copy engine finds boxes of a bfloat16 tensor, innermost dimension first.

    Attributes:
        sizes: elements of every dimension.
        strides: bytes from element to element of every dimension but the first.
        box: elements of a box in every dimension; 64 in the first: its lines of 128 bytes arrive swizzled.
    """

    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


def encode_box_map(box_map: BoxMap) -> bytes:
    """The 128 bytes that a kernel reads.

    Raises:
        CudaProgramError: the driver refused it, for example for a misaligned address.
    """
    with refusals():
        return _encoded(bindings("driver"), box_map)


def _encoded(driver: Any, box_map: BoxMap) -> bytes:
    (encoded,) = checked(
        "cuTensorMapEncodeTiled",
        *driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            len(box_map.sizes),
            box_map.address,
            [driver.cuuint64_t(size) for size in box_map.sizes],
            [driver.cuuint64_t(stride) for stride in box_map.strides],
            [driver.cuuint32_t(size) for size in box_map.box],
            [driver.cuuint32_t(1)] * len(box_map.sizes),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
    )
    return ctypes.string_at(int(encoded.getPtr()), 128)


class CudaFunction:
    """A kernel that is loaded on one device.

    Args:
        code: from `compile_program`.
        name: of the kernel.
        device: a CUDA device.
        shared_bytes: dynamic shared memory of a block.

    Raises:
        CudaProgramError: the driver refused it.
    """

    def __init__(self, code: bytes, name: str, device: torch.device, shared_bytes: int) -> None:
        self._shared_bytes = shared_bytes
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # a context of torch's is there from now on
            with refusals():
                self._load(code, name)

    def _load(self, code: bytes, name: str) -> None:
        self._driver = driver = bindings("driver")
        (self._module,) = checked("cuModuleLoadData", *driver.cuModuleLoadData(code))
        (self._function,) = checked("cuModuleGetFunction", *driver.cuModuleGetFunction(self._module, name.encode()))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        checked("cuFuncSetAttribute", *driver.cuFuncSetAttribute(self._function, attribute, self._shared_bytes))

    def launch_together(self, blocks: int, threads: int, arguments: ctypes.Structure) -> None:
        """Launches on the current stream so that all blocks are resident at once and may wait for each other.

        Args:
            arguments: the kernel's only parameter; copied by the launch.

        Raises:
            CudaProgramError: the driver refused it, also when the device cannot hold so many blocks.
        """
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        stream = torch.cuda.current_stream().cuda_stream
        done = self._driver.cuLaunchCooperativeKernel(
            self._function, blocks, 1, 1, threads, 1, 1, self._shared_bytes, stream, ctypes.addressof(parameters)
        )
        checked("cuLaunchCooperativeKernel", *done)


def _compile(nvrtc: Any, name: str, text: str, options: Sequence[str]) -> bytes:
    (program,) = checked("nvrtcCreateProgram", *nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), 0, [], []))
    words = [option.encode() for option in options]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(words), words)
    if int(status):
        (size,) = checked("nvrtcGetProgramLogSize", *nvrtc.nvrtcGetProgramLogSize(program))
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise CudaProgramError(f"{name} does not compile:\n{log.decode(errors='replace')[-4000:]}")
    (size,) = checked("nvrtcGetCUBINSize", *nvrtc.nvrtcGetCUBINSize(program))
    code = b" " * size
    checked("nvrtcGetCUBIN", *nvrtc.nvrtcGetCUBIN(program, code))
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(code)


def _kept_at(key: str) -> Path:
    """Where code is kept.

    Raises:
        RuntimeError: the user has no home.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "graftline" / "cuda" / f"{key}.cubin"


def _kept(key: str) -> bytes | None:
    """Code of an earlier run, if it can be read and is some."""
    try:
        code = _kept_at(key).read_bytes()
    except (OSError, RuntimeError):
        return None
    return code if code.startswith(_MACHINE_CODE) else None


def _keep(key: str, code: bytes) -> None:
    """Keeps code for later runs; nothing depends on it, and containers have folders that cannot be written."""
    try:
        target = _kept_at(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            fresh = Path(folder) / target.name
            fresh.write_bytes(code)
            os.replace(fresh, target)
    except (OSError, RuntimeError) as error:
        _LOG.warning("a compiled kernel cannot be kept, the next start compiles it again: %s", error)


def _source(name: str) -> str:
    return (_SOURCES / name).read_text().replace("#pragma once", "")
