"""Building and loading the C library."""

import ctypes
import logging
import os
import shutil
import subprocess
import sys
from ctypes import byref
from pathlib import Path

import pytest
import torch
from kernel_cases import PagedSequences, normal, random_parents, threads

from graftline.kernels import native_library as module
from graftline.kernels.linear import pack_linear
from graftline.kernels.native_library import NativeBuildError, build_native_library, load_native_library, native_library
from graftline.kernels.native_structs import native_batch, native_pages


def fresh_native_library() -> ctypes.CDLL | None:
    """What `native_library` answers in a new process."""
    return native_library.__wrapped__()


def outputs(library: ctypes.CDLL) -> list[torch.Tensor]:
    """One result of every op whose bits must agree between builds."""
    x = 2 * normal(9, 600, seed=1)
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        packed = pack_linear(normal(70, 600, seed=2), normal(70, seed=3), storage=dtype)
        out = torch.empty(9, 70)
        assert packed.native is not None
        library.gl_linear(byref(packed.native), x.data_ptr(), 600, out.data_ptr(), 70, 9, 1)
        results.append(out)
    weight, out = normal(600, seed=4), torch.empty(9, 600)
    library.gl_rms_norm(x.data_ptr(), 600, 9, 1, 600, weight.data_ptr(), 1e-5, out.data_ptr(), 1)
    results.append(out)
    out = torch.empty(9, 300)
    library.gl_silu_mul(x.data_ptr(), 9, 300, out.data_ptr(), 1)
    results.append(out)
    for dtype in (torch.float32, torch.bfloat16):
        sequences = PagedSequences([200], 16, 3, 40, dtype)
        batch = sequences.batch([(0, 190, 8, random_parents(8, 1))])
        q, out = normal(8, 6, 40, seed=5), torch.empty(8, 6, 40)
        library.gl_paged_attention(
            byref(native_batch(batch)),
            byref(native_pages(sequences.k_pages, sequences.v_pages)),
            q.data_ptr(), 240, out.data_ptr(), 240, 6, 0.2, 1,
        )  # fmt: skip
        results.append(out)
    seeds, positions, ids = torch.arange(500) * 7919, torch.arange(500), torch.arange(500) * 31
    words, noise = torch.empty(500, dtype=torch.int64), torch.empty(500)
    library.gl_noise(seeds.data_ptr(), positions.data_ptr(), ids.data_ptr(), 500, words.data_ptr(), noise.data_ptr())
    return [*results, words, noise]


def test_this_machine_has_one() -> None:
    assert native_library() is not None


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="names x86 instruction sets")
@pytest.mark.parametrize("march", ["x86-64-v3", "x86-64"])
def test_other_builds_give_the_same_bits(tmp_path: Path, march: str) -> None:
    """Contract 1 holds between hosts with other builds: AVX2, and plain C without vector instructions."""
    build_native_library(tmp_path / "other.so", march)
    here = native_library()
    assert here is not None
    for ours, theirs in zip(outputs(here), outputs(load_native_library(tmp_path / "other.so")), strict=True):
        assert torch.equal(ours, theirs)


def test_processes_that_start_together_build_once(tmp_path: Path) -> None:
    hasty = tmp_path / "hasty-gcc"
    hasty.write_text('#!/bin/sh\nexec gcc "$@" -O0\n')
    hasty.chmod(0o755)
    code = "from graftline.kernels.native_library import native_library as n; print(n())"
    variables = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "CC": str(hasty)}
    children = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=variables)
        for _ in range(2)
    ]
    assert all("CDLL" in child.communicate(timeout=200)[0] for child in children)
    folder = tmp_path / "graftline" / "native"
    assert len(list(folder.glob("*.so"))) == 1
    assert not [entry for entry in folder.iterdir() if entry.is_dir()]


def test_a_cache_that_cannot_be_written_costs_a_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        library = fresh_native_library()
    assert library is not None
    assert "cannot be kept" in caplog.text
    assert not Path(library._name).exists()


def test_without_a_compiler_the_references_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with caplog.at_level(logging.WARNING):
        assert fresh_native_library() is None
    assert "no C compiler" in caplog.text


def test_a_compiler_that_does_not_end_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker starts without it, slowly, rather than not at all."""
    stuck = tmp_path / "stuck-gcc"
    stuck.write_text('#!/bin/sh\n[ "$1" = --version ] && exec echo 1.0\nexec sleep 60\n')
    stuck.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", str(stuck))
    monkeypatch.setattr(module, "_BUILD_TIMEOUT_S", 0.5)
    with caplog.at_level(logging.WARNING):
        assert fresh_native_library() is None
    assert "took longer than 0.5 s" in caplog.text


def test_the_environment_switches_it_off_or_names_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFTLINE_NATIVE_LIBRARY", "none")
    assert fresh_native_library() is None
    ours = native_library()
    assert ours is not None
    shutil.copy(ours._name, tmp_path / "named.so")
    monkeypatch.setenv("GRAFTLINE_NATIVE_LIBRARY", str(tmp_path / "named.so"))
    named = fresh_native_library()
    assert named is not None
    assert named._name == str(tmp_path / "named.so")


def test_a_library_of_other_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, stale = tmp_path / "stale.c", tmp_path / "stale.so"
    source.write_text('const char *gl_source_hash(void) { return "other"; }')
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(stale)], check=True, timeout=60)
    monkeypatch.setenv("GRAFTLINE_NATIVE_LIBRARY", str(stale))
    with pytest.raises(NativeBuildError, match="built from sources other"):
        fresh_native_library()


def test_a_failing_compiler_is_reported_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")
    with pytest.raises(NativeBuildError, match="failed"):
        build_native_library(tmp_path / "x.so")
    assert list(tmp_path.iterdir()) == []


def test_the_thread_knob_is_torchs() -> None:
    for count in (1, 3):
        with threads(count):
            assert (module.num_threads(0), module.num_threads(100)) == (1, count)
