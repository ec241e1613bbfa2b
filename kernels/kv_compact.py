"""Moves the KV of accepted tree nodes to the slots that follow the committed ones, for all layers at once."""

import torch
from torch import Tensor

from graftline.kernels.native_library import native_library, num_threads


def compact_kv(pool: Tensor, page_tables: Tensor, starts: Tensor, accepted: Tensor) -> None:
    """For every sequence, copies slot `start + accepted[j]` to slot `start + j`, for j in order.

    Args:
        pool: [num_pages, planes, page_size, token_bytes] uint8, contiguous: a page-major pool seen as bytes, a plane
            being the K or the V of one layer.
        page_tables: [sequences, max_pages] int32.
        starts: [sequences] int32: committed length before the verify.
        accepted: [sequences, max_accepted] int32: accepted nodes, root first, strictly ascending, so that
            accepted[j] >= j; padded with -1.

    Raises:
        ValueError: shapes or types that do not fit.
    """
    if pool.dim() != 4 or pool.dtype != torch.uint8 or not pool.is_contiguous():
        raise ValueError(f"pool: {pool.dtype} {tuple(pool.shape)} is not contiguous bytes [pages, planes, size, bytes]")
    if page_tables.shape[0] != starts.shape[0] or accepted.shape[0] != starts.shape[0]:
        raise ValueError(f"{page_tables.shape[0]} page tables, {starts.shape[0]} starts, {accepted.shape[0]} paths")
    for name, ints in (("page_tables", page_tables), ("starts", starts), ("accepted", accepted)):
        if ints.dtype != torch.int32 or not ints.is_contiguous():
            raise ValueError(f"{name}: {ints.dtype} with strides {ints.stride()}, contiguous int32 is wanted")
    if pool.is_cuda:
        from graftline.kernels.kv_compact_triton import compact_kv as kernel

        kernel(pool, page_tables, starts, accepted)
        return
    library = native_library()
    if library is None:
        compact_kv_reference(pool, page_tables, starts, accepted)
        return
    _, planes, page_size, token_bytes = pool.shape
    library.gl_compact_kv(
        pool.data_ptr(),
        planes,
        page_size,
        token_bytes,
        page_tables.data_ptr(),
        page_tables.shape[1],
        starts.data_ptr(),
        accepted.data_ptr(),
        accepted.shape[0],
        accepted.shape[1],
        num_threads(planes),
    )


def compact_kv_reference(pool: Tensor, page_tables: Tensor, starts: Tensor, accepted: Tensor) -> None:
    """The specification."""
    page_size = pool.shape[2]
    for table, start, nodes in zip(page_tables.tolist(), starts.tolist(), accepted.tolist(), strict=True):
        for index, node in enumerate(nodes):
            if node < 0:
                break
            source, target = start + node, start + index
            if source != target:
                pool[table[target // page_size], :, target % page_size] = pool[
                    table[source // page_size], :, source % page_size
                ]
