"""Gathers pages of a pool into a contiguous staging buffer and scatters them back: few large transfers, not many."""

import torch
from torch import Tensor


def gather_pages(pool: Tensor, page_ids: Tensor, staging: Tensor) -> None:
    """staging[i] = pool[page_ids[i]].

    Args:
        pool: [num_pages, page_bytes] uint8, contiguous.
        page_ids: [n] int64.
        staging: [at least n, page_bytes] uint8, contiguous, on the same device.

    Raises:
        ValueError: shapes or types that do not fit.
    """
    _check(pool, page_ids, staging)
    if pool.is_cuda:
        from graftline.kernels.page_staging_triton import gather_pages as kernel

        kernel(pool, page_ids, staging)
        return
    torch.index_select(pool, 0, page_ids, out=staging[: page_ids.shape[0]])


def scatter_pages(staging: Tensor, page_ids: Tensor, pool: Tensor) -> None:
    """pool[page_ids[i]] = staging[i]; the ids must differ from each other.

    Args:
        staging: [at least n, page_bytes] uint8, contiguous.
        page_ids: [n] int64.
        pool: [num_pages, page_bytes] uint8, contiguous, on the same device.

    Raises:
        ValueError: shapes or types that do not fit.
    """
    _check(pool, page_ids, staging)
    if pool.is_cuda:
        from graftline.kernels.page_staging_triton import scatter_pages as kernel

        kernel(staging, page_ids, pool)
        return
    pool.index_copy_(0, page_ids, staging[: page_ids.shape[0]])


def _check(pool: Tensor, page_ids: Tensor, staging: Tensor) -> None:
    for name, data in (("pool", pool), ("staging", staging)):
        if data.dim() != 2 or data.dtype != torch.uint8 or not data.is_contiguous() or data.shape[1] != pool.shape[1]:
            raise ValueError(f"{name}: {data.dtype} {tuple(data.shape)} is not contiguous bytes [n, {pool.shape[1]}]")
    if page_ids.dim() != 1 or page_ids.dtype != torch.int64 or page_ids.shape[0] > staging.shape[0]:
        raise ValueError(f"page_ids: {page_ids.dtype} {tuple(page_ids.shape)} for {staging.shape[0]} staged pages")
