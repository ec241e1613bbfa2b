"""Triton kernel of `graftline.kernels.kv_write`: one program a row."""

import triton
import triton.language as tl
from torch import Tensor

from graftline.kernels.attention_batch import AttentionBatch


@triton.jit
def _write_rows_kernel(
    k_ptr, v_ptr, k_pages_ptr, v_pages_ptr, row_slots_ptr, k_stride, v_stride, page_stride, page_size, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slots_ptr + row)
    columns = tl.arange(0, BLOCK)
    inside = (columns < width) & (slot >= 0)
    at = slot // page_size * page_stride + slot % page_size * width + columns
    k = tl.load(k_ptr + row * k_stride + columns, mask=inside, other=0.0)
    v = tl.load(v_ptr + row * v_stride + columns, mask=inside, other=0.0)
    tl.store(k_pages_ptr + at, k.to(k_pages_ptr.dtype.element_ty), mask=inside)
    tl.store(v_pages_ptr + at, v.to(v_pages_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=("max_pages",))
def _write_kv_kernel(
    k_ptr, v_ptr, k_pages_ptr, v_pages_ptr, row_segment_ptr, segment_rows_ptr, segment_start_ptr, page_tables_ptr,
    k_stride, v_stride, page_stride, max_pages, page_size, width, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    segment = tl.load(row_segment_ptr + row).to(tl.int64)
    slot = tl.load(segment_start_ptr + segment) + row - tl.load(segment_rows_ptr + segment)
    page = tl.load(page_tables_ptr + segment * max_pages + slot // page_size).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    at = page * page_stride + slot % page_size * width + columns
    k = tl.load(k_ptr + row * k_stride + columns, mask=inside, other=0.0)
    v = tl.load(v_ptr + row * v_stride + columns, mask=inside, other=0.0)
    tl.store(k_pages_ptr + at, k.to(k_pages_ptr.dtype.element_ty), mask=inside)
    tl.store(v_pages_ptr + at, v.to(v_pages_ptr.dtype.element_ty), mask=inside)


def write_kv(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, batch: AttentionBatch) -> None:
    """See `graftline.kernels.kv_write.write_kv`."""
    width = k.shape[1] * k.shape[2]
    _write_kv_kernel[(batch.num_rows,)](
        k, v, k_pages, v_pages, batch.row_segment, batch.segment_rows, batch.segment_start, batch.page_tables,
        k.stride(0), v.stride(0), k_pages.stride(0), batch.page_tables.shape[1], batch.page_size, width,
        BLOCK=triton.next_power_of_2(width),
    )  # fmt: skip


def write_rows(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, row_slots: Tensor) -> None:
    """Likewise, for rows whose flat slots [rows] int64 are known; those below 0 are not written."""
    width = k.shape[1] * k.shape[2]
    if k.shape[0]:
        _write_rows_kernel[(k.shape[0],)](
            k, v, k_pages, v_pages, row_slots, k.stride(0), v.stride(0), k_pages.stride(0), k_pages.shape[1], width,
            BLOCK=triton.next_power_of_2(width),
        )  # fmt: skip
