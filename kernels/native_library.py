"""Builds and loads the C library behind the CPU ops; knows nothing of what the ops mean.

The library is compiled by gcc at first use and cached by the hash of everything that shapes it. Without a compiler the
ops fall back to their torch references, which are correct but slow and not row-count invariant.

    python -m graftline.kernels.native_library OUT.so [MARCH]     builds one for a container image.
"""

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

_LOG = logging.getLogger(__name__)
_SOURCES = Path(__file__).resolve().parent / "native"
# Contraction is off because every fused operation is written as one: bits must not depend on the compiler's taste.
_FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC")
_BUILD_TIMEOUT_S = 300
ENVIRONMENT = "GRAFTLINE_NATIVE_LIBRARY"

_POINTER, _INDEX, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_KINDS = {"p": _POINTER, "x": _INDEX, "i": _INT, "f": _FLOAT}
# p: pointer, x: 64-bit integer, i: int, f: float. The last int is the number of threads.
_SIGNATURES = {
    "gl_linear": "ppxpxxi",
    "gl_unpack_rows": "ppxp",
    "gl_pack_panels": "pxxxp",
    "gl_advise_huge_pages": "px",
    "gl_rms_norm": "pxxxxpfpi",
    "gl_add_rms_norm": "ppxxpfppi",
    "gl_rope": "pxxpxxxxpppxi",
    "gl_silu_mul": "pxxpi",
    "gl_write_kv": "pppxpxi",
    "gl_compact_kv": "pxxxpxppxxi",
    "gl_paged_attention": "pppxpxxfi",
    "gl_decoder_layers": "ppppppi",
    "gl_causal_conv": "ppxxxppxpxxxpi",
    "gl_gated_delta": "ppppxppxxxxpxpxxpxpi",
    "gl_delta_inputs": "pxpxxxxxppppppi",
    "gl_gated_rms_norm": "ppxxxxpfpi",
    "gl_sigmoid_mul": "pxpxxxxpi",
    "gl_route": "pxxxxppi",
    "gl_grow_trees": "pppi",
    "gl_noise": "pppxpp",
    "gl_sample": "pxxxpppppppi",
    "gl_argmax": "pxxxpi",
    "gl_top_k": "pxxxxpppi",
}
_RESULTS = {"gl_unpack_rows": _INDEX, "gl_grow_trees": _INT}


class NativeBuildError(Exception):
    """The compiler refused the sources or did not come to an end, or a prebuilt library does not belong to them."""


@cache
def native_library() -> ctypes.CDLL | None:
    """The library of this process, built if need be; None without a compiler or when switched off.

    Where the cache cannot be written it is built for this process alone.

    The environment variable GRAFTLINE_NATIVE_LIBRARY names a prebuilt library; "none" switches to the references.

    Raises:
        NativeBuildError: the named library was built from other sources.
    """
    chosen = os.environ.get(ENVIRONMENT, "")
    if chosen == "none":
        return None
    if chosen:
        return load_native_library(Path(chosen))
    try:
        try:
            return load_native_library(_cached_library())
        except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
            _LOG.warning("native kernels cannot be kept, the next start compiles them again: %s", error)
        with tempfile.TemporaryDirectory() as folder:
            build_native_library(Path(folder) / "library.so")
            return load_native_library(Path(folder) / "library.so")
    except (NativeBuildError, OSError) as error:
        _LOG.warning("no native kernels, falling back to the slow torch references: %s", error)
        return None


def build_native_library(target: Path, march: str = "native") -> None:
    """Compiles the sources into `target`, which appears at once and complete.

    Args:
        target: the shared object to write.
        march: gcc's -march; "x86-64-v3" (AVX2, FMA) for an image that must run on many machines.

    Raises:
        NativeBuildError: no compiler, or it failed or took too long.
    """
    compiler = _compiler()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        sources = sorted(_SOURCES.glob("*.c"))
        objects = [f"{folder}/{source.stem}.o" for source in sources]
        machine = () if platform.machine() not in ("x86_64", "aarch64") else (f"-march={march}",)
        identity = f'-DGRAFTLINE_SOURCE_HASH="{_source_hash()}"'
        with ThreadPoolExecutor(max_workers=2) as pool:
            commands = [
                [compiler, *_FLAGS, *machine, identity, "-c", str(source), "-o", name]
                for source, name in zip(sources, objects, strict=True)
            ]
            list(pool.map(_run, commands))
        library = f"{folder}/library.so"
        _run([compiler, "-shared", "-o", library, *objects, *_openmp_link_arguments(), "-lm"])
        os.replace(library, target)


def load_native_library(path: Path) -> ctypes.CDLL:
    """Loads a library and declares its functions.

    Raises:
        NativeBuildError: it was built from other sources.
    """
    library = ctypes.CDLL(str(path))
    library.gl_source_hash.restype = ctypes.c_char_p
    built_from = library.gl_source_hash().decode()
    if built_from != _source_hash():
        raise NativeBuildError(f"{path} was built from sources {built_from}, these are {_source_hash()}")
    for name, kinds in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = [_KINDS[kind] for kind in kinds]
        function.restype = _RESULTS.get(name)
    return library


def num_threads(tasks: int) -> int:
    """Threads for an op with so many independent tasks: torch's setting, so that one knob rules both."""
    return max(1, min(torch.get_num_threads(), tasks))


def _cached_library() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graftline" / "native"
    key = hashlib.sha256("\n".join([_source_hash(), _compiler_version(), _cpu(), *_FLAGS]).encode()).hexdigest()[:24]
    target = root / f"{key}.so"
    if not target.exists():
        root.mkdir(parents=True, exist_ok=True)
        with open(root / f"{key}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released by close; one process builds, the others find its result
            if not target.exists():
                build_native_library(target)
    return target


@cache
def _source_hash() -> str:
    digest = hashlib.sha256()
    for source in sorted([*_SOURCES.glob("*.c"), *_SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _compiler() -> str:
    for name in (os.environ.get("CC"), "gcc", "cc"):
        if name and (path := shutil.which(name)):
            return path
    raise NativeBuildError("no C compiler found (gcc)")


def _compiler_version() -> str:
    return _run([_compiler(), "--version"])


def _cpu() -> str:
    """What -march=native depends on: an image or home folder may move between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "model", "cpu family", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.split("\t")[0].strip() in wanted))


def _openmp_link_arguments() -> Sequence[str]:
    """Links against the OpenMP library that torch brings, so that both share one thread pool."""
    package = Path(torch.__file__).resolve().parent
    for folder in (package / "lib", package.parent / "torch.libs"):
        for library in sorted(folder.glob("libgomp*.so*")):
            return (str(library),)
    return ("-fopenmp",)


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise NativeBuildError(f"{' '.join(command)} took longer than {_BUILD_TIMEOUT_S} s") from error
    if done.returncode:
        raise NativeBuildError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    build_native_library(Path(sys.argv[1]), *sys.argv[2:3])
