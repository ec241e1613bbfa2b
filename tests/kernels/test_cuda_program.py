"""Compiled kernels are kept where that is possible; a machine without NVIDIA's libraries has an error of one kind."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from graftline.kernels import cuda_program
from graftline.kernels.cuda_driver import CudaProgramError
from graftline.kernels.cuda_program import BoxMap, compile_program, encode_box_map
from graftline.kernels.layer_weights import DecoderLayerShape
from graftline.kernels.resident_layers import ResidentLayers, ResidentSizes

CODE = b"\x7fELF code"


class Status:
    name = "SUCCESS"

    def __int__(self) -> int:
        return 0


class Nvrtc:
    def nvrtcVersion(self) -> tuple[Status, int, int]:
        return Status(), 13, 0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was compiled, by a compiler that is quick."""
    names: list[str] = []

    def compile_(nvrtc: Any, name: str, text: str, options: Sequence[str]) -> bytes:
        names.append(name)
        return CODE

    monkeypatch.setattr(cuda_program, "bindings", lambda name: Nvrtc())
    monkeypatch.setattr(cuda_program, "_compile", compile_)
    return names


def program() -> bytes:
    return compile_program(["hopper.h"], [])


def test_code_is_kept(compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert [program(), program()] == [CODE, CODE]
    assert compiled == ["hopper.h"]
    (kept,) = (path for path in tmp_path.rglob("*") if path.is_file())
    kept.write_bytes(b"")  # as a machine that lost power leaves it
    assert program() == CODE
    assert kept.read_bytes() == CODE
    assert len(compiled) == 2


def test_a_folder_that_cannot_be_written_costs_another_compilation(
    compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked / "below"))
    with caplog.at_level(logging.WARNING):
        assert [program(), program()] == [CODE, CODE]
    assert len(compiled) == 2
    assert "cannot be kept" in caplog.text


def test_a_user_without_a_home_does_too(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert program() == CODE
    assert compiled == ["hopper.h"]


def broken(error: Exception) -> Callable[[str], Any]:
    def bindings(name: str) -> Any:
        raise error

    return bindings


@pytest.mark.parametrize("error", [RuntimeError("no libnvrtc"), ImportError("no module"), OSError("no file")])
def test_a_missing_library_is_an_error_of_ours(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_program, "bindings", broken(error))
    with pytest.raises(CudaProgramError, match=str(error)):
        program()
    with pytest.raises(CudaProgramError, match=str(error)):
        encode_box_map(BoxMap(0, (64,), (), (64,)))


def test_layers_run_by_single_ops_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Properties:
        multi_processor_count = 132

    monkeypatch.setattr(cuda_program, "bindings", broken(RuntimeError("no libnvrtc")))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties())
    sizes = ResidentSizes(hidden=64, inter=64, heads=1, kv_heads=1, head_dim=64, page_size=8)
    tables = torch.zeros(1, 32)
    shape = DecoderLayerShape(1, 1, 64, 1e-5, 1.0, tables, tables)
    layers = ResidentLayers(sizes, shape, torch.device("cuda", 7))
    assert layers._function(1) is None
    assert "no libnvrtc" in caplog.text
