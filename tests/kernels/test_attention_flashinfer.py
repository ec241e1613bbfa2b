"""What flashinfer is told about a step. The real kernels run on a GPU alone: marked cuda, and in bench/gpu.py."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import PagedSequences, normal, random_parents
from torch import Tensor

from graftline.kernels.attention import paged_attention, paged_attention_reference, visible_slots
from graftline.kernels.attention_backend import flashinfer_trouble
from graftline.kernels.attention_batch import AttentionBatch, SegmentRows, build_attention_batch
from graftline.kernels.attention_flashinfer import FlashInferAttention, packed_mask, paged_layout

Rows = tuple[int, int, int, Sequence[int] | None]
CHAINS: list[Rows] = [(0, 0, 5, None), (1, 7, 1, None), (2, 16, 4, None), (3, 15, 1, None)]
TREES: list[Rows] = [(0, 3, 6, [-1, 0, 0, 1, 1, 2]), (1, 0, 2, None), (2, 9, 7, random_parents(7, 3)), (3, 4, 1, [-1])]


class RecordedWrapper:
    """Notes what it is told and computes by the arguments of its plan, as the real one documents them."""

    def __init__(self, workspace: Tensor, told: list[dict[str, Any]]) -> None:
        self._told = told
        self._mask_indptr_buf: Tensor | None = None

    def plan(self, *arguments: Any, **keywords: Any) -> None:
        names = ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len", "heads", "kv_heads", "head_dim", "page_size")
        self._plan = dict(zip(names, arguments, strict=True)) | keywords
        self._told.append(self._plan)

    def run(self, q: Tensor, pages: tuple[Tensor, Tensor], *, out: Tensor) -> None:
        plan = self._plan
        assert (q.shape[1], q.shape[2]) == (plan["heads"], plan["head_dim"])
        assert pages[0].stride() == pages[1].stride()
        for index in range(len(plan["last_page_len"])):
            first, end = plan["qo_indptr"][index : index + 2].tolist()
            ids = plan["kv_indices"][plan["kv_indptr"][index] : plan["kv_indptr"][index + 1]].long()
            length = (len(ids) - 1) * plan["page_size"] + int(plan["last_page_len"][index])
            keys, values = (part[ids].flatten(0, 1)[:length].float() for part in pages)
            group = plan["heads"] // plan["kv_heads"]
            keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
            scores = torch.einsum("rhd,nhd->hrn", q[first:end].float(), keys) * plan["sm_scale"]
            visible = self._visible(index, end - first, length)
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
            out[first:end] = torch.einsum("hrn,nhd->rhd", weights, values).to(out.dtype)

    def _visible(self, index: int, rows: int, length: int) -> Tensor:
        packed = self._plan["packed_custom_mask"]
        if packed is None:
            assert self._plan["causal"]
            return torch.ones(rows, length, dtype=torch.bool).tril(length - rows)
        assert self._mask_indptr_buf is not None
        begin, end = self._mask_indptr_buf[index : index + 2].tolist()
        bits = np.unpackbits(packed[begin:end].numpy(), bitorder="little")[: rows * length]
        return torch.from_numpy(bits).bool().view(rows, length)


def recorded() -> tuple[FlashInferAttention, list[dict[str, Any]]]:
    told: list[dict[str, Any]] = []
    return FlashInferAttention(torch.device("cpu"), lambda workspace: RecordedWrapper(workspace, told)), told


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("rows", [CHAINS, TREES])
def test_a_kernel_that_does_as_it_is_told_gives_what_the_reference_says(rows: list[Rows], page_size: int) -> None:
    sequences = PagedSequences([32] * 4, page_size, 2, 64, torch.bfloat16)
    attention, told = recorded()
    batch = sequences.batch(rows)
    qkv = normal(batch.num_rows, 10, 64, seed=4, dtype=torch.bfloat16)
    q = qkv[:, :6]
    expected = paged_attention_reference(q, sequences.k_pages, sequences.v_pages, batch, 0.125)
    torch.testing.assert_close(attention(q, sequences.k_pages, sequences.v_pages, batch, 0.125), expected)
    assert told[0]["causal"] is (rows is CHAINS)
    assert (told[0]["q_data_type"], told[0]["sm_scale"]) == (torch.bfloat16, 0.125)


def test_a_step_is_laid_out_by_its_pages() -> None:
    layout = paged_layout([SegmentRows(0, 3, [7, 2, 9]), SegmentRows(5, 1, [1, 0, 4]), SegmentRows(3, 1, [8, 6])], 2)
    assert layout.qo_indptr.tolist() == [0, 3, 4, 5]
    assert layout.kv_indptr.tolist() == [0, 2, 5, 7]
    assert layout.kv_indices.tolist() == [7, 2, 1, 0, 4, 8, 6]  # page 9 is reserved and not reached yet
    assert layout.last_page_len.tolist() == [1, 2, 2]
    assert layout.mask is None
    assert all(part.dtype == torch.int32 for part in (layout.qo_indptr, layout.kv_indptr, layout.kv_indices))


def test_masks_of_trees_start_at_bytes_of_their_own() -> None:
    segments = [SegmentRows(2, 3, [0, 1], [-1, 0, 0]), SegmentRows(0, 1, [2]), SegmentRows(8, 2, [3, 4, 5], [-1, -1])]
    layout = paged_layout(segments, 4)
    assert layout.mask is not None
    assert layout.mask_indptr is not None
    assert layout.mask_indptr.tolist() == [0, 2, 3, 6]  # 15 bits, 1 bit, 20 bits
    batch = build_attention_batch(segments, 4)
    for index, segment in enumerate(segments):
        length = segment.start + segment.num_rows
        bits = np.unpackbits(layout.mask[layout.mask_indptr[index] : layout.mask_indptr[index + 1]], bitorder="little")
        assert not bits[segment.num_rows * length :].any()
        for row in range(segment.num_rows):
            seen = np.flatnonzero(bits[row * length : (row + 1) * length]).tolist()
            assert seen == sorted(visible_slots(batch, int(batch.segment_rows[index]) + row))
    assert packed_mask(segments[1]).tolist() == [1]


def run_once(attention: FlashInferAttention, batch: AttentionBatch, heads: int = 4) -> None:
    sequences = PagedSequences([8], 4, 2, 64, torch.bfloat16)
    q = normal(batch.num_rows, heads, 64, dtype=torch.bfloat16)
    attention(q, sequences.k_pages, sequences.v_pages, batch, 0.125)


def test_layers_of_a_step_share_its_plan_and_steps_do_not() -> None:
    attention, told = recorded()
    batches = [build_attention_batch([SegmentRows(start, 1, [0, 1])], 4) for start in range(6)]
    for batch in batches:
        for _ in range(3):
            run_once(attention, batch)
    assert len(told) == len(batches)
    assert [int(plan["last_page_len"][0]) for plan in told] == [1, 2, 3, 4, 1, 2]
    run_once(attention, batches[-1], heads=2)  # a drafter of another shape over the same rows
    assert [plan["heads"] for plan in told[-2:]] == [4, 2]


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 64), (torch.bfloat16, 80)])
def test_what_flashinfer_has_no_kernel_for_goes_to_the_others(dtype: torch.dtype, head_dim: int) -> None:
    attention, told = recorded()
    sequences = PagedSequences([8], 4, 2, head_dim, dtype)
    batch = sequences.batch([(0, 3, 2, None)])
    q = normal(2, 4, head_dim)  # on CPU activations are float32
    if dtype == torch.float32:
        expected = paged_attention(q, sequences.k_pages, sequences.v_pages, batch, 0.1)
        assert torch.equal(attention(q, sequences.k_pages, sequences.v_pages, batch, 0.1), expected)
    else:
        attention(q, sequences.k_pages, sequences.v_pages, batch, 0.1)
    assert told == []


def test_a_plan_that_failed_is_not_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    attention, told = recorded()
    batch = build_attention_batch([SegmentRows(0, 1, [0])], 4)

    def fails(self: RecordedWrapper, *arguments: Any, **keywords: Any) -> None:
        raise RuntimeError("out of workspace")

    monkeypatch.setattr(RecordedWrapper, "plan", fails)
    with pytest.raises(RuntimeError, match="workspace"):
        run_once(attention, batch)
    monkeypatch.undo()
    run_once(attention, batch)
    assert len(told) == 1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available() or flashinfer_trouble() is not None, reason="needs flashinfer")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("rows", [CHAINS, TREES])
def test_the_real_kernels(rows: list[Rows], head_dim: int) -> None:
    sequences = PagedSequences([32] * 4, 16, 2, head_dim, torch.bfloat16)
    batch = sequences.batch(rows)
    q = normal(batch.num_rows, 6, head_dim, seed=4, dtype=torch.bfloat16)
    expected = paged_attention_reference(q, sequences.k_pages, sequences.v_pages, batch, head_dim**-0.5)
    pool = sequences.pool.cuda()
    on_device = build_attention_batch(list(batch.segments), 16, "cuda")
    attention = FlashInferAttention(torch.device("cuda"))
    out = attention(q.cuda(), pool[:, 0], pool[:, 2], on_device, head_dim**-0.5)
    torch.testing.assert_close(out.cpu(), expected, rtol=2e-2, atol=2e-2)
