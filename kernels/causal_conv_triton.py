"""Triton kernels of `graftline.kernels.causal_conv`: one program a (row, block of channels); windows move afterwards.

Outputs and windows behind tree nodes read the slots' windows as they were, so a second launch moves those on.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from graftline.kernels.state_rows import StateRows

_BLOCK = 512


@triton.jit
def _causal_conv_kernel(
    x_ptr, weight_ptr, windows_ptr, node_windows_ptr, out_ptr,
    segment_rows_ptr, parents_ptr, slots_ptr, is_tree_ptr,
    x_stride, window_stride, node_slot_stride, node_stride, channels, num_segments,
    WIDTH: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < channels
    lanes = tl.arange(0, BLOCK_S)
    ends = tl.load(segment_rows_ptr + 1 + lanes, mask=lanes < num_segments, other=2147483647)
    segment = tl.sum((ends <= row).to(tl.int32))
    first = tl.load(segment_rows_ptr + segment)
    slot = tl.load(slots_ptr + segment).to(tl.int64)
    is_tree = tl.load(is_tree_ptr + segment)
    local = row - first
    beyond = local * 0  # inputs taken from the window so far, the newest first
    total = tl.zeros((BLOCK,), tl.float32)
    for distance in tl.static_range(WIDTH):
        in_rows = local >= 0
        at = (first + tl.maximum(local, 0)).to(tl.int64)
        given = tl.load(x_ptr + at * x_stride + c, mask=inside & in_rows, other=0.0)
        place = tl.maximum(WIDTH - 2 - beyond, 0)
        kept = tl.load(windows_ptr + slot * window_stride + place * channels + c, mask=inside & (local < 0), other=0.0)
        value = tl.where(in_rows, given.to(kept.dtype), kept)
        weight = tl.load(weight_ptr + (WIDTH - 1 - distance) * channels + c, mask=inside, other=0.0)
        total += value.to(tl.float32) * weight.to(tl.float32)
        if KEEP and distance < WIDTH - 1:
            node = row - first - 1
            target = slot * node_slot_stride + node.to(tl.int64) * node_stride + (WIDTH - 2 - distance) * channels
            tl.store(node_windows_ptr + target + c, value, mask=inside & (is_tree != 0) & (node >= 0))
        beyond += (local < 0).to(tl.int32)
        local = tl.load(parents_ptr + at, mask=in_rows, other=-1)
    out = total / (1.0 + tl.exp(-total))
    tl.store(out_ptr + row.to(tl.int64) * channels + c, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _move_windows_kernel(
    x_ptr, windows_ptr, segment_rows_ptr, slots_ptr, is_tree_ptr, x_stride, window_stride, channels,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < channels
    first = tl.load(segment_rows_ptr + segment)
    slot = tl.load(slots_ptr + segment).to(tl.int64)
    last = tl.load(segment_rows_ptr + segment + 1) - 1 - first
    last = tl.where(tl.load(is_tree_ptr + segment) != 0, 0, last)
    window = windows_ptr + slot * window_stride
    # The oldest first: what is read lies behind what was written.
    for place in tl.static_range(WIDTH - 1):
        local = last - (WIDTH - 2 - place)
        at = (first + tl.maximum(local, 0)).to(tl.int64)
        given = tl.load(x_ptr + at * x_stride + c, mask=inside & (local >= 0), other=0.0)
        old = tl.minimum(place + last + 1, WIDTH - 2)
        kept = tl.load(window + old * channels + c, mask=inside & (local < 0), other=0.0)
        tl.store(window + place * channels + c, tl.where(local >= 0, given.to(kept.dtype), kept), mask=inside)


def causal_conv(x: Tensor, weight: Tensor, windows: Tensor, rows: StateRows, node_windows: Tensor | None) -> Tensor:
    """See `graftline.kernels.causal_conv.causal_conv`."""
    channels, block = x.shape[1], min(_BLOCK, triton.next_power_of_2(x.shape[1]))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    nodes = windows if node_windows is None else node_windows
    _causal_conv_kernel[(rows.num_rows, triton.cdiv(channels, block))](
        x, weight, windows, nodes, out, rows.segment_rows, rows.parents, rows.slots, rows.is_tree,
        x.stride(0), windows.stride(0), nodes.stride(0), nodes.stride(1), channels, rows.num_segments,
        WIDTH=weight.shape[0], KEEP=node_windows is not None, BLOCK=block,
        BLOCK_S=triton.next_power_of_2(rows.num_segments),
    )  # fmt: skip
    move_windows(x, windows, rows)
    return out


def move_windows(x: Tensor, windows: Tensor, rows: StateRows) -> None:
    """See `graftline.kernels.causal_conv.move_windows`."""
    channels, block = x.shape[1], min(_BLOCK, triton.next_power_of_2(x.shape[1]))
    _move_windows_kernel[(rows.num_segments, triton.cdiv(channels, block))](
        x, windows, rows.segment_rows, rows.slots, rows.is_tree, x.stride(0), windows.stride(0), channels,
        WIDTH=windows.shape[1] + 1, BLOCK=block,
    )  # fmt: skip
