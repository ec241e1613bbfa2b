"""Triton kernel of `graftline.kernels.skinny_linear`: a program streams some outputs' rows of the weight past all of x.

What counts is that enough of the weight is on its way at any time (about 4 MiB on an H200): many programs, several
stages each. Where outputs are too few for that, inputs are split too, and a second kernel adds the parts in order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from graftline.kernels.skinny_linear import MAX_ROWS

_MANY_OUTPUTS = 32768  # a vocabulary
_SHORT_INPUTS = 1024
_LONG_INPUTS = 8192


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=("rows",))
def _skinny_linear_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, partial_ptr, rows, inputs, outputs, inputs_a_split,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr, SPLIT: tl.constexpr, WIDEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.program_id(1) * inputs_a_split
    end = tl.minimum(begin + inputs_a_split, inputs)
    is_row = m < rows
    is_output = n < outputs
    # Outputs past the end read the last one again: masks would cost more.
    row_of = tl.minimum(n, outputs - 1).to(tl.int64)
    x_at = x_ptr + m[:, None] * inputs
    w_at = weight_ptr + row_of[:, None] * inputs
    up_at = weight_ptr + (row_of + outputs)[:, None] * inputs
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        k = first + tl.arange(0, BLOCK_K)
        if EVEN_K:
            x = tl.load(x_at + k[None, :], mask=is_row[:, None], other=0.0)
            w = tl.load(w_at + k[None, :], eviction_policy="evict_first")
            if GATED:
                up = tl.load(up_at + k[None, :], eviction_policy="evict_first")
        else:
            inside = k < end
            x = tl.load(x_at + k[None, :], mask=is_row[:, None] & inside[None, :], other=0.0)
            w = tl.load(w_at + k[None, :], mask=inside[None, :], other=0.0)
            if GATED:
                up = tl.load(up_at + k[None, :], mask=inside[None, :], other=0.0)
        if WIDEN:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        if GATED:
            if WIDEN:
                up = up.to(tl.float32)
            acc_up = tl.dot(x, tl.trans(up), acc_up, input_precision="ieee")
    mask = is_row[:, None] & is_output[None, :]
    if SPLIT:
        at = (tl.program_id(1).to(tl.int64) * rows + m[:, None]) * outputs + n[None, :]
        tl.store(partial_ptr + at, acc, mask=mask)
    else:
        if GATED:
            acc = _silu(acc) * acc_up
        if HAS_BIAS:
            acc += tl.load(bias_ptr + n, mask=is_output, other=0.0).to(tl.float32)[None, :]
        at = m[:, None].to(tl.int64) * outputs + n[None, :]
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("count", "num_splits"))
def _add_parts_kernel(
    partial_ptr, bias_ptr, out_ptr, count, outputs, num_splits, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    acc = tl.zeros((BLOCK,), tl.float32)
    for split in range(num_splits):
        acc += tl.load(partial_ptr + split * count + at, mask=inside, other=0.0)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + at % outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)


class Streaming(NamedTuple):
    """How the weight is streamed.

    Attributes:
        block_n: outputs a program.
        block_k: inputs a step.
        num_stages: steps on their way, and one being multiplied.
        num_splits: programs that share an output's inputs.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    num_splits: int


def choose_streaming(rows: int, inputs: int, outputs: int, is_gated: bool, processors: int) -> Streaming:
    """A way from what the host knows: what was fastest of the ways that `bench/gpu_kernels.py` times on an H200.

    Args:
        outputs: of the product; of a gated one, half of the weight's rows.
        processors: multiprocessors of the device.
    """
    enough = 3 * processors // 5  # programs that keep the memory busy
    if rows <= 16:
        if outputs >= 64 * enough:
            return Streaming(64, 128, 4, 6, 1)
        if is_gated or outputs >= 32 * enough:
            return Streaming(32, 128, 4, 8, 1)
        return Streaming(16, 64, 4, 8, 1) if inputs < _SHORT_INPUTS else Streaming(16, 256, 4, 6, 1)
    if is_gated:
        return Streaming(64, 64, 4, 6, 1) if outputs >= 64 * enough else Streaming(32, 64, 4, 4, 1)
    if outputs >= _MANY_OUTPUTS:
        return Streaming(64, 64, 4, 4, 1) if inputs < _SHORT_INPUTS else Streaming(128, 64, 8, 5, 1)
    if inputs >= _LONG_INPUTS:
        return Streaming(64, 128, 4, 4, 2)
    return Streaming(64, 128, 4, 4, 1) if outputs >= 64 * enough else Streaming(32, 128, 4, 4, 1)


def is_ahead(rows: int, inputs: int, outputs: int, is_gated: bool) -> bool:
    """Whether this kernel beats cuBLAS (for gated products, with the activation behind it): likewise measured.

    With up to 16 rows, cuBLAS and the activation kernel take 1 % less for the gated product of an 8B model; one way for
    all sizes was preferred.
    """
    if is_gated:
        return rows <= MAX_ROWS
    if outputs >= _MANY_OUTPUTS:
        return rows <= MAX_ROWS and inputs >= _SHORT_INPUTS
    return rows <= 16 or (rows <= MAX_ROWS and (inputs >= _LONG_INPUTS or inputs < _SHORT_INPUTS))


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    streaming: Streaming | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """See `graftline.kernels.skinny_linear.skinny_linear`."""
    return _run(x, weight, bias, weight.shape[0], streaming, out_dtype or x.dtype, is_gated=False)


def skinny_gate_up(x: Tensor, weight: Tensor, streaming: Streaming | None = None) -> Tensor:
    """See `graftline.kernels.skinny_linear.skinny_gate_up`; not to be split."""
    return _run(x, weight, None, weight.shape[0] // 2, streaming, x.dtype, is_gated=True)


def _run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    outputs: int,
    streaming: Streaming | None,
    out_dtype: torch.dtype,
    is_gated: bool,
) -> Tensor:
    rows, inputs = x.shape
    out = torch.empty((rows, outputs), dtype=out_dtype, device=x.device)
    if not rows:
        return out
    if streaming is None:
        processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
        streaming = choose_streaming(rows, inputs, outputs, is_gated, processors)
    block_n, block_k, num_warps, num_stages, num_splits = streaming
    inputs_a_split = triton.cdiv(triton.cdiv(inputs, num_splits), block_k) * block_k
    num_splits = triton.cdiv(inputs, inputs_a_split)
    is_split = num_splits > 1
    partial = torch.empty((num_splits, rows, outputs), dtype=torch.float32, device=x.device) if is_split else out
    _skinny_linear_kernel[(triton.cdiv(outputs, block_n), num_splits)](
        x, weight, weight if bias is None else bias, out, partial, rows, inputs, outputs, inputs_a_split,
        BLOCK_M=max(16, triton.next_power_of_2(rows)), BLOCK_N=block_n, BLOCK_K=block_k,
        EVEN_K=inputs % block_k == 0, GATED=is_gated, HAS_BIAS=bias is not None and not is_split, SPLIT=is_split,
        WIDEN=x.dtype == torch.float32 or x.device.type == "cpu", STAGES=num_stages, num_warps=num_warps,
    )  # fmt: skip
    if is_split:
        count = rows * outputs
        block = min(1024, triton.next_power_of_2(count))
        _add_parts_kernel[(triton.cdiv(count, block),)](
            partial, weight if bias is None else bias, out, count, outputs, num_splits, HAS_BIAS=bias is not None,
            BLOCK=block,
        )  # fmt: skip
    return out
