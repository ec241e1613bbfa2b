"""NVIDIA's bindings to the driver and the compiler, found when they are needed, with errors of one kind."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any


class CudaProgramError(RuntimeError):
    """The compiler or the driver refused something, or is not there."""


@cache
def has_bindings() -> bool:
    """Whether NVIDIA's bindings are installed."""
    try:
        return find_spec("cuda.bindings.nvrtc") is not None
    except ImportError:
        return False


def bindings(name: str) -> Any:
    """A module of theirs, such as "driver"."""
    return import_module(f"cuda.bindings.{name}")


def checked(call: str, status: Any, *results: Any) -> tuple[Any, ...]:
    """What a call gave besides its status.

    Raises:
        CudaProgramError: the status is an error.
    """
    if int(status):
        raise CudaProgramError(f"{call}: {status.name}")
    return results


@contextmanager
def refusals() -> Iterator[None]:
    """Where a library of NVIDIA's is missing or too old, the bindings raise what they like."""
    try:
        yield
    except CudaProgramError:
        raise
    except (ImportError, OSError, RuntimeError) as error:
        raise CudaProgramError(f"{type(error).__name__}: {error}") from error
