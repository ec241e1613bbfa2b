"""Writes the K and V of a forward's rows into their pages."""

from ctypes import byref

import torch
from torch import Tensor

from graftline.kernels.attention_batch import AttentionBatch
from graftline.kernels.checks import check_rows
from graftline.kernels.native_library import native_library, num_threads
from graftline.kernels.native_structs import native_batch, native_pages
from graftline.kernels.tree_batch import TreeBatch, check_tree_batch


def write_kv(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, batch: AttentionBatch | TreeBatch) -> None:
    """Stores every row's K and V at its slot, rounded to the type of the pages.

    Args:
        k: [rows, kv_heads, head_dim]; rows may be strided.
        v: likewise.
        k_pages: [num_pages, page_size, kv_heads, head_dim] float32 or bfloat16 view of the pool: any stride between
            pages, the rest contiguous.
        v_pages: likewise.
        batch: says where every row goes; rows of a `TreeBatch` without a slot go nowhere.

    Raises:
        ValueError: shapes or strides that do not fit.
    """
    check_pages(k_pages, v_pages, batch.page_size)
    if k.shape != v.shape or k.shape != (batch.num_rows, *k_pages.shape[2:]):
        raise ValueError(f"k {tuple(k.shape)}, v {tuple(v.shape)} for pages {tuple(k_pages.shape)}")
    check_rows("k", k)
    check_rows("v", v)
    if isinstance(batch, TreeBatch):
        check_tree_batch(batch)
        if not k.is_cuda:
            write_kv_reference(k, v, k_pages, v_pages, batch)
            return
        from graftline.kernels.kv_write_triton import write_rows

        write_rows(k, v, k_pages, v_pages, batch.row_slots)
        return
    if k.is_cuda:
        from graftline.kernels.kv_write_triton import write_kv as kernel

        kernel(k, v, k_pages, v_pages, batch)
        return
    library = native_library()
    if library is None:
        write_kv_reference(k, v, k_pages, v_pages, batch)
        return
    library.gl_write_kv(
        byref(native_batch(batch)),
        byref(native_pages(k_pages, v_pages)),
        k.data_ptr(),
        k.stride(0),
        v.data_ptr(),
        v.stride(0),
        num_threads(batch.num_rows // 64),
    )


def write_kv_reference(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, batch: AttentionBatch | TreeBatch
) -> None:
    """The specification."""
    slots = batch.slots()
    written = slots >= 0
    k, v, slots = k[written], v[written], slots[written]
    page, offset = slots // batch.page_size, slots % batch.page_size
    k_pages[page, offset] = k.to(k_pages.dtype)
    v_pages[page, offset] = v.to(v_pages.dtype)


def check_pages(k_pages: Tensor, v_pages: Tensor, page_size: int) -> None:
    """Raises ValueError unless both are views of pages as `write_kv` and `paged_attention` need them."""
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        if pages.dim() != 4 or pages.shape[1] != page_size or pages.shape != k_pages.shape:
            raise ValueError(f"{name}: shape {tuple(pages.shape)} with pages of {page_size}")
        if pages.dtype not in (torch.float32, torch.bfloat16) or pages.dtype != k_pages.dtype:
            raise ValueError(f"{name}: {pages.dtype}")
        if pages.stride(0) != k_pages.stride(0):
            raise ValueError(f"{name}: stride {pages.stride(0)} between pages, k_pages has {k_pages.stride(0)}")
        _, size, heads, dim = pages.shape
        inner = pages.stride()[1:]
        if inner != (heads * dim, dim, 1) and size * heads * dim > 0:
            raise ValueError(f"{name}: strides {pages.stride()} are not contiguous within a page")
