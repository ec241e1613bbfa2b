"""Triton kernels of `graftline.kernels.draft_inputs`: one program a row and source."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _gather_columns_kernel(
    first_ptr, second_ptr, third_ptr, fourth_ptr, rows_ptr, out_ptr, first_stride, second_stride, third_stride,
    fourth_stride, width, count, BLOCK: tl.constexpr,
):  # fmt: skip
    to = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    source = first_ptr
    stride = first_stride
    if part == 1:
        source = second_ptr
        stride = second_stride
    elif part == 2:
        source = third_ptr
        stride = third_stride
    elif part == 3:
        source = fourth_ptr
        stride = fourth_stride
    row = tl.load(rows_ptr + to)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + row * stride + column, mask=column < width, other=0.0)
    tl.store(out_ptr + (to * count + part) * width + column, values, mask=column < width)


@triton.jit
def _draft_inputs_kernel(
    embedding_ptr, next_tokens_ptr, embedding_norm_ptr, feature_ptr, rows_ptr, feature_norm_ptr, out_ptr, taken_ptr,
    hidden, eps, GATHERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    to = tl.program_id(0).to(tl.int64)
    is_feature = tl.program_id(1) == 1
    row = to
    if is_feature:
        if GATHERS:
            row = tl.load(rows_ptr + to)
    else:
        row = tl.load(next_tokens_ptr + to)
    source = embedding_ptr
    norm_ptr = embedding_norm_ptr
    if is_feature:
        source = feature_ptr
        norm_ptr = feature_norm_ptr
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    values = tl.load(source + row * hidden + column, mask=inside, other=0.0)
    if GATHERS:
        tl.store(taken_ptr + to * hidden + column, values, mask=inside & is_feature)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / hidden + eps)
    weight = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
    normed = (wide * scale * weight).to(values.dtype)
    tl.store(out_ptr + (to * 2 + tl.program_id(1)) * hidden + column, normed, mask=inside)


def gather_columns(sources: Sequence[Tensor], rows: Tensor) -> Tensor:
    """See `graftline.kernels.draft_inputs.gather_columns`."""
    width, count = sources[0].shape[1], len(sources)
    out = torch.empty((rows.shape[0], count * width), dtype=sources[0].dtype, device=rows.device)
    if out.numel():
        block = min(1024, triton.next_power_of_2(width))
        padded = [*sources, *[sources[0]] * (4 - count)]
        _gather_columns_kernel[(rows.shape[0], count, triton.cdiv(width, block))](
            *padded, rows, out, *(source.stride(0) for source in padded), width, count, BLOCK=block
        )
    return out


def draft_inputs(
    embedding: Tensor,
    token_ids: Tensor,
    embedding_norm: Tensor,
    feature: Tensor,
    rows: Tensor | None,
    feature_norm: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """See `graftline.kernels.draft_inputs.draft_inputs`."""
    count, hidden = token_ids.shape[0], embedding.shape[1]
    out = torch.empty((count, 2 * hidden), dtype=feature.dtype, device=feature.device)
    taken = feature if rows is None else torch.empty((count, hidden), dtype=feature.dtype, device=feature.device)
    if count:
        block = triton.next_power_of_2(hidden)
        _draft_inputs_kernel[(count, 2)](
            embedding, token_ids, embedding_norm, feature, token_ids if rows is None else rows, feature_norm, out,
            taken, hidden, eps, GATHERS=rows is not None, BLOCK=block, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return out, taken
