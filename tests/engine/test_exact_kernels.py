"""A worker on a CPU without the C library."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from graftline.engine import exact_kernels
from graftline.engine.exact_kernels import check_exact_kernels
from graftline.errors import InvalidRequestError
from graftline.kernels.native_library import native_library


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The check, in a process that has loaded no library yet and finds no compiler."""
    monkeypatch.setattr(exact_kernels, "native_library", native_library.__wrapped__)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("GRAFTLINE_NATIVE_LIBRARY", raising=False)
    return check_exact_kernels


def test_this_machine_has_them() -> None:
    check_exact_kernels()


def test_without_a_compiler_it_does_not_serve_unless_told_to(
    no_compiler: Callable[[], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """CASES D54."""
    with pytest.raises(InvalidRequestError, match=r"no native kernels .* install gcc"):
        no_compiler()
    monkeypatch.setenv("GRAFTLINE_NATIVE_LIBRARY", "none")
    with caplog.at_level(logging.WARNING):
        no_compiler()
    assert "output may differ" in caplog.text


def test_a_library_that_cannot_be_used_is_named(
    no_compiler: Callable[[], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken.so").write_text("no library")
    for name in ("absent.so", "broken.so"):
        monkeypatch.setenv("GRAFTLINE_NATIVE_LIBRARY", str(tmp_path / name))
        with pytest.raises(InvalidRequestError, match=name):
            no_compiler()
