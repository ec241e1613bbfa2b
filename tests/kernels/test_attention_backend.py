"""Which way of attending is chosen, and that plain torch operations give what the specification says."""

from collections.abc import Sequence

import pytest
import torch
from kernel_cases import PagedSequences, normal, random_parents

from graftline.errors import InvalidRequestError
from graftline.kernels import attention_backend
from graftline.kernels.attention import paged_attention, paged_attention_reference, visible_slots
from graftline.kernels.attention_backend import choose_attention, flashinfer_trouble, settle_backend
from graftline.kernels.attention_batch import SegmentRows, build_attention_batch
from graftline.kernels.attention_kind import AttentionBackend
from graftline.kernels.attention_torch import torch_attention, visible_mask

AUTO, FLASHINFER, TRITON, TORCH = AttentionBackend
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def has_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_backend, "flashinfer_trouble", lambda: None)


@pytest.fixture
def lacks_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_backend, "flashinfer_trouble", lambda: "no compiler")


@pytest.mark.parametrize(
    ("wanted", "dtype", "head_dim", "settled"),
    [
        (AUTO, torch.bfloat16, 128, FLASHINFER),
        (FLASHINFER, torch.bfloat16, 64, FLASHINFER),
        (AUTO, torch.float32, 128, TRITON),
        (FLASHINFER, torch.float32, 128, TRITON),
        (FLASHINFER, torch.bfloat16, 80, TRITON),
        (TRITON, torch.bfloat16, 128, TRITON),
        (TORCH, torch.bfloat16, 128, TORCH),
    ],
)
@pytest.mark.usefixtures("has_flashinfer")
def test_what_a_gpu_takes(
    wanted: AttentionBackend, dtype: torch.dtype, head_dim: int, settled: AttentionBackend
) -> None:
    assert settle_backend(wanted, CUDA, dtype, head_dim) is settled


@pytest.mark.usefixtures("lacks_flashinfer")
def test_auto_does_without_what_cannot_be_built_and_a_name_insists() -> None:
    assert settle_backend(AUTO, CUDA, torch.bfloat16, 128) is TRITON
    with pytest.raises(InvalidRequestError, match=r"attention_backend: flashinfer: no compiler"):
        settle_backend(FLASHINFER, CUDA, torch.bfloat16, 128)


def test_a_cpu_has_one_way() -> None:
    for wanted in (AUTO, TORCH):
        settled, attention = choose_attention(wanted, CPU, torch.bfloat16, 64)
        assert (settled, attention) == (TORCH, paged_attention)
    for wanted in (FLASHINFER, TRITON):
        with pytest.raises(InvalidRequestError, match=f"{wanted.value} needs a CUDA device, not cpu"):
            choose_attention(wanted, CPU, torch.bfloat16, 64)


def test_every_reason_against_flashinfer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    present: dict[str, str | None] = {}
    monkeypatch.setattr(attention_backend.shutil, "which", lambda name: present.get(name))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(attention_backend.importlib.util, "find_spec", lambda name: None)
    assert "not installed" in (flashinfer_trouble() or "")
    monkeypatch.setattr(attention_backend.importlib.util, "find_spec", lambda name: object())
    assert "no nvcc" in (flashinfer_trouble() or "")
    monkeypatch.setenv("CUDA_HOME", "/cuda")
    present["/cuda/bin/nvcc"] = "/cuda/bin/nvcc"
    assert "no ninja" in (flashinfer_trouble() or "")
    present["ninja"] = "/bin/ninja"
    monkeypatch.setattr(attention_backend.importlib, "import_module", _fails)
    assert flashinfer_trouble() == "its import failed: OSError: broken"
    monkeypatch.setattr(attention_backend.importlib, "import_module", lambda name: None)
    assert flashinfer_trouble() is None


def _fails(name: str) -> None:
    raise OSError("broken")


SEGMENTS: list[list[tuple[int, int, int, Sequence[int] | None]]] = [
    [(0, 0, 5, None), (1, 7, 1, None), (2, 16, 4, None)],
    [(0, 3, 6, [-1, 0, 0, 1, 1, 2]), (1, 0, 2, None), (2, 9, 7, random_parents(7, 3))],
    [(0, 4, 4, [-1, -1, 0, 1])],
]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("segments", SEGMENTS)
def test_torch_operations_give_what_the_reference_says(
    segments: list[tuple[int, int, int, Sequence[int] | None]], page_size: int
) -> None:
    sequences = PagedSequences([32, 32, 32], page_size, 2, 16, torch.float32)
    batch = sequences.batch(segments)
    q = normal(batch.num_rows, 6, 16, seed=4)
    expected = paged_attention_reference(q, sequences.k_pages, sequences.v_pages, batch, 0.25)
    actual = torch_attention(q, sequences.k_pages, sequences.v_pages, batch, 0.25)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("parents", [None, [-1, 0, 1, 2], [-1, 0, 0, 2], [-1, -1, 1, 0]])
def test_a_mask_shows_the_slots_of_the_specification(parents: list[int] | None) -> None:
    segment = SegmentRows(3, 4, [5, 1], parents)
    batch = build_attention_batch([segment], 4)
    mask = visible_mask(segment)
    assert mask.shape == (4, 7)
    assert [sorted(visible_slots(batch, row)) for row in range(4)] == [
        row.nonzero().squeeze(1).tolist() for row in mask
    ]


def test_a_batch_remembers_the_values_it_was_built_from() -> None:
    pages = [3, 1]
    batch = build_attention_batch([SegmentRows(0, 3, pages), SegmentRows(2, 2, [0, 4, 2], [-1, 0])], 2)
    pages[0] = 9
    assert [segment.page_ids for segment in batch.segments] == [(3, 1), (0, 4, 2)]
    assert [segment.is_chain for segment in batch.segments] == [True, True]
