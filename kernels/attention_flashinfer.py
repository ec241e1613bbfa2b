"""Attention of planned steps through flashinfer's FA2 kernels for paged KV.

A step is planned once, at its first layer, from the lists that its batch was built from: neither the plan nor a layer
waits for the device. All layers of the step reuse the plan.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graftline.kernels.attention import paged_attention
from graftline.kernels.attention_backend import FLASHINFER_HEAD_DIMS
from graftline.kernels.attention_batch import AttentionBatch, SegmentRows
from graftline.kernels.attention_torch import visible_mask
from graftline.kernels.tree_batch import TreeBatch

WORKSPACE_BYTES = 128 << 20
_PLANS_AHEAD = 4

MakeWrapper = Callable[[Tensor], Any]
"""Makes a `BatchPrefillWithPagedKVCacheWrapper` over a float workspace."""


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """A batch in flashinfer's words, on the host; int32.

    Attributes:
        qo_indptr: [segments + 1] rows of every segment.
        kv_indptr: [segments + 1] its part of `kv_indices`.
        last_page_len: [segments] slots used of its last page.
        kv_indices: [pages] page ids, segment after segment.
        mask: [bytes] uint8, or None for chains: for every segment its rows' visible slots, row after row, eight to a
            byte from the lowest bit, each segment from a new byte on.
        mask_indptr: [segments + 1] bytes of every segment, or None.
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    last_page_len: Tensor
    kv_indices: Tensor
    mask: Tensor | None
    mask_indptr: Tensor | None


@dataclass(slots=True)
class _Plan:
    """A wrapper and what it was planned for last. `copied` passes once the device has taken over the plan's pinned
    memory, which the next plan overwrites.
    """

    wrapper: Any
    batch: AttentionBatch | None = None
    shape: tuple[object, ...] = ()
    copied: torch.cuda.Event | None = None


class FlashInferAttention:
    """See `graftline.kernels.attention_backend.Attention`. One a stage: calls come from one thread and one stream.

    Args:
        make_wrapper: for tests.
    """

    def __init__(self, device: torch.device, make_wrapper: MakeWrapper | None = None) -> None:
        self._device = device
        make = _paged_wrapper if make_wrapper is None else make_wrapper
        # One workspace serves all: the device runs the plans' kernels one after the other.
        workspace = torch.empty(WORKSPACE_BYTES if device.type == "cuda" else 1, dtype=torch.uint8, device=device)
        self._plans = [_Plan(make(workspace)) for _ in range(_PLANS_AHEAD)]
        self._newest = 0

    def __call__(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: AttentionBatch | TreeBatch, scale: float
    ) -> Tensor:
        """See `Attention`. What flashinfer has no kernels for goes to the Triton ones, as do batches of which the host
        knows no segments.
        """
        if isinstance(batch, TreeBatch) or not batch.segments:
            return paged_attention(q, k_pages, v_pages, batch, scale)
        if q.shape[2] not in FLASHINFER_HEAD_DIMS or q.dtype != torch.bfloat16:
            return paged_attention(q, k_pages, v_pages, batch, scale)
        plan = self._plan(batch, (q.shape[1], *k_pages.shape[1:], scale))
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        plan.wrapper.run(q, (k_pages, v_pages), out=out)
        return out

    def _plan(self, batch: AttentionBatch, shape: tuple[object, ...]) -> _Plan:
        newest = self._plans[self._newest]
        if newest.batch is batch and newest.shape == shape:
            return newest
        self._newest = (self._newest + 1) % len(self._plans)
        plan = self._plans[self._newest]
        if plan.copied is not None:
            plan.copied.synchronize()  # four plans ago: usually long past
        plan.batch, plan.shape = None, ()
        heads, page_size, kv_heads, head_dim, scale = shape
        layout = paged_layout(batch.segments, batch.page_size, pinned=self._device.type == "cuda")
        plan.wrapper.plan(
            layout.qo_indptr,
            layout.kv_indptr,
            layout.kv_indices,
            layout.last_page_len,
            heads,
            kv_heads,
            head_dim,
            page_size,
            packed_custom_mask=layout.mask,
            causal=layout.mask is None,
            sm_scale=scale,
            q_data_type=torch.bfloat16,
        )
        if layout.mask_indptr is not None:
            # Given a packed mask, `plan` counts its segments in bits where the kernel counts bytes.
            assert hasattr(plan.wrapper, "_mask_indptr_buf"), "this flashinfer keeps its mask offsets elsewhere"
            plan.wrapper._mask_indptr_buf = layout.mask_indptr.to(self._device, non_blocking=True)
        if self._device.type == "cuda":
            plan.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            plan.copied.record()
        plan.batch, plan.shape = batch, shape
        return plan


def _paged_wrapper(workspace: Tensor) -> Any:
    from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

    return BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")


# --- layouts ----------------------------------------------------------------------------------------------------------


def paged_layout(segments: Sequence[SegmentRows], page_size: int, *, pinned: bool = False) -> PagedLayout:
    """Lays a batch out.

    Args:
        pinned: in memory that the device can read while the host goes on.
    """
    assert segments, "a batch that was not built from segments"
    qo_indptr, kv_indptr, last_page_len, kv_indices = [0], [0], list[int](), list[int]()
    for segment in segments:
        end = segment.start + segment.num_rows
        num_pages = -(-end // page_size)
        qo_indptr.append(qo_indptr[-1] + segment.num_rows)
        kv_indptr.append(kv_indptr[-1] + num_pages)
        last_page_len.append(end - (num_pages - 1) * page_size)
        kv_indices += segment.page_ids[:num_pages]
    packed = [] if all(segment.is_chain for segment in segments) else [packed_mask(segment) for segment in segments]
    return PagedLayout(
        qo_indptr=_ints(qo_indptr, pinned),
        kv_indptr=_ints(kv_indptr, pinned),
        last_page_len=_ints(last_page_len, pinned),
        kv_indices=_ints(kv_indices, pinned),
        mask=_host(np.concatenate(packed), pinned) if packed else None,
        mask_indptr=_ints([0, *accumulate(map(len, packed))], pinned) if packed else None,
    )


def packed_mask(segment: SegmentRows) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """Bytes of one segment's visible slots; see `PagedLayout.mask`."""
    return np.packbits(visible_mask(segment).flatten().numpy(), bitorder="little")


def _ints(values: Sequence[int], pinned: bool) -> Tensor:
    return _host(np.array(values, dtype=np.int32), pinned)


def _host(values: "np.ndarray[Any, Any]", pinned: bool) -> Tensor:
    tensor = torch.from_numpy(values)
    return tensor.pin_memory() if pinned else tensor
