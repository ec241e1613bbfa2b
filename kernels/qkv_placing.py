"""What lies between the q/k/v product and attention, at once: norms of q and k, rotation, KV into the pages."""

import torch
from torch import Tensor

from graftline.kernels.attention_batch import AttentionBatch
from graftline.kernels.checks import check_rows
from graftline.kernels.kv_write import check_pages, write_kv, write_kv_reference
from graftline.kernels.norm import rms_norm, rms_norm_reference
from graftline.kernels.rope import rope_, rope_reference_
from graftline.kernels.tree_batch import TreeBatch, check_tree_batch


def place_qkv(
    qkv: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: AttentionBatch | TreeBatch,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Norms and rotates q and k, and writes K and V of the rows to their slots: one launch on CUDA.

    Args:
        qkv: [rows, (heads + 2 * kv_heads) * head_dim]: q, k, v; may be overwritten.
        k_pages: [num_pages, page_size, kv_heads, head_dim], see `write_kv`.
        v_pages: likewise.
        batch: says where every row goes.
        positions: [rows] int32, of the rotation; usually the batch's.
        cos: [max_positions, rot / 2] float32, see `rope_`.
        sin: likewise.
        q_norm: [head_dim] of a norm of every query head before the rotation, type of qkv, or None.
        k_norm: likewise of K; both or neither.
        eps: of the norms.

    Returns:
        [rows, heads, head_dim] rotated q, type of qkv; rows may be strided.

    Raises:
        ValueError: shapes, strides or types that do not fit.
    """
    check_pages(k_pages, v_pages, batch.page_size)
    kv_heads, head_dim = k_pages.shape[2:]
    rows, columns = qkv.shape
    heads = columns // head_dim - 2 * kv_heads
    if rows != batch.num_rows or positions.shape != (rows,) or heads < 1 or columns % head_dim:
        raise ValueError(
            f"qkv {tuple(qkv.shape)} and positions {tuple(positions.shape)} for {batch.num_rows} rows and pages "
            f"{tuple(k_pages.shape)}"
        )
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm come together")
    check_rows("qkv", qkv)
    if not qkv.is_cuda:
        q, k, v = torch.split(qkv.view(rows, -1, head_dim), [heads, kv_heads, kv_heads], dim=1)
        if q_norm is not None and k_norm is not None:
            q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
        rope_(q, k, positions, cos, sin)
        write_kv(k, v, k_pages, v_pages, batch)
        return q
    if isinstance(batch, TreeBatch):
        check_tree_batch(batch)
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None and (norm.shape != (head_dim,) or norm.dtype != qkv.dtype or not norm.is_contiguous()):
            raise ValueError(f"{name}: {norm.dtype} {tuple(norm.shape)} for heads of {head_dim} in {qkv.dtype}")
    if positions.dtype != torch.int32 or cos.dtype != torch.float32 or cos.shape != sin.shape:
        raise ValueError(f"positions {positions.dtype}, cos {cos.dtype} {tuple(cos.shape)}, sin {tuple(sin.shape)}")
    if 2 * cos.shape[1] > head_dim or not cos.is_contiguous() or not sin.is_contiguous():
        raise ValueError(f"cos {tuple(cos.shape)} for heads of {head_dim}; contiguous tables are wanted")
    from graftline.kernels.qkv_placing_triton import place_qkv as kernel

    return kernel(qkv, k_pages, v_pages, batch, positions, cos, sin, q_norm, k_norm, eps)


def place_qkv_reference(
    qkv: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: AttentionBatch | TreeBatch,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> Tensor:
    """The specification: that of the single ops, one after the other, each rounding to the type of qkv."""
    kv_heads, head_dim = k_pages.shape[2:]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    q, k, v = torch.split(qkv.clone().view(qkv.shape[0], -1, head_dim), [heads, kv_heads, kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm_reference(q, q_norm, eps), rms_norm_reference(k, k_norm, eps)
    rope_reference_(q, positions, cos, sin)
    rope_reference_(k, positions, cos, sin)
    write_kv_reference(k, v, k_pages, v_pages, batch)
    return q
