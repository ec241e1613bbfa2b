"""Triton kernels of `graftline.kernels.state_commit`: all layers and all slots of a commit in one or two launches."""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from graftline.kernels.state_commit import PackedLayers

_COPY_BLOCK = 4096
_BLOCK_V = 32
_BLOCK = 512


@triton.jit
def _copy_nodes_kernel(pool_ptr, nodes_ptr, slots_ptr, taken_ptr, slot_words, num_nodes, BLOCK: tl.constexpr):
    slot = tl.load(slots_ptr + tl.program_id(0)).to(tl.int64)
    node = tl.load(taken_ptr + tl.program_id(0)).to(tl.int64)
    words = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = words < slot_words
    moved = tl.load(nodes_ptr + (slot * num_nodes + node) * slot_words + words, mask=inside, other=0)
    tl.store(pool_ptr + slot * slot_words + words, moved, mask=inside)


@triton.jit
def _replay_states_kernel(
    state_pool_ptr, input_pool_ptr, slots_ptr, path_bounds_ptr, path_nodes_ptr,
    slot_floats, slot_layer_floats, state_offset, node_floats, node_layer_floats, num_nodes,
    k_offset, v_offset, decay_offset, beta_offset, key_heads, value_heads, key_dim, value_dim,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    path = tl.program_id(0)
    layer = tl.program_id(1) // value_heads
    head = tl.program_id(1) % value_heads
    d = tl.arange(0, BLOCK_K)
    e = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    slot = tl.load(slots_ptr + path).to(tl.int64)
    key_head = head // (value_heads // key_heads)
    inside = (d[:, None] < key_dim) & (e[None, :] < value_dim)
    base = state_pool_ptr + slot * slot_floats + layer * slot_layer_floats + state_offset
    own = base + head * key_dim * value_dim + d[:, None] * value_dim + e[None, :]
    state = tl.load(own, mask=inside, other=0.0)
    begin = tl.load(path_bounds_ptr + path)
    end = tl.load(path_bounds_ptr + path + 1)
    for index in range(begin, end):
        node = tl.load(path_nodes_ptr + index).to(tl.int64)
        at = input_pool_ptr + (slot * num_nodes + node) * node_floats + layer * node_layer_floats
        key = tl.load(at + k_offset + key_head * key_dim + d, mask=d < key_dim, other=0.0)
        value = tl.load(at + v_offset + head * value_dim + e, mask=e < value_dim, other=0.0)
        decay = tl.load(at + decay_offset + head)
        beta = tl.load(at + beta_offset + head)
        # As `_delta_step` of gated_delta_triton, operation by operation: the same bits.
        state = state * decay
        change = (value - tl.sum(state * key[:, None], 0)) * beta
        state = state + key[:, None] * change[None, :]
    tl.store(own, state, mask=inside)


@triton.jit
def _replay_windows_kernel(
    window_pool_ptr, conv_input_ptr, slots_ptr, path_bounds_ptr, path_nodes_ptr,
    slot_items, slot_layer_items, node_items, node_layer_items, num_nodes, channels,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    path = tl.program_id(0)
    layer = tl.program_id(1)
    c = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = c < channels
    slot = tl.load(slots_ptr + path).to(tl.int64)
    begin = tl.load(path_bounds_ptr + path)
    count = tl.load(path_bounds_ptr + path + 1) - begin
    window = window_pool_ptr + slot * slot_items + layer * slot_layer_items
    # The oldest first: what is read lies behind what was written.
    for place in tl.static_range(WIDTH - 1):
        local = count - (WIDTH - 1 - place)
        node = tl.load(path_nodes_ptr + begin + tl.maximum(local, 0), mask=local >= 0, other=0).to(tl.int64)
        at = conv_input_ptr + (slot * num_nodes + node) * node_items + layer * node_layer_items
        given = tl.load(at + c, mask=inside & (local >= 0), other=0.0)
        old = tl.minimum(place + count, WIDTH - 2)
        kept = tl.load(window + old * channels + c, mask=inside & (local < 0), other=0.0)
        tl.store(window + place * channels + c, tl.where(local >= 0, given, kept), mask=inside)


@triton.jit
def _store_inputs_kernel(
    input_pool_ptr, conv_input_ptr, x_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr,
    draft_rows_ptr, draft_slots_ptr, draft_nodes_ptr,
    node_floats, layer_floats, node_items, layer_items, num_nodes, x_stride, v_stride,
    k_offset, v_offset, decay_offset, beta_offset, channels, key_size, value_size, value_heads,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.load(draft_rows_ptr + tl.program_id(0)).to(tl.int64)
    slot = tl.load(draft_slots_ptr + tl.program_id(0)).to(tl.int64)
    entry = slot * num_nodes + tl.load(draft_nodes_ptr + tl.program_id(0)).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    to = input_pool_ptr + entry * node_floats + layer_floats
    x = tl.load(x_ptr + row * x_stride + c, mask=c < channels, other=0.0)
    conv_at = conv_input_ptr + entry * node_items + layer_items
    tl.store(conv_at + c, x.to(conv_input_ptr.dtype.element_ty), mask=c < channels)
    k = tl.load(k_ptr + row * key_size + c, mask=c < key_size, other=0.0)
    tl.store(to + k_offset + c, k, mask=c < key_size)
    v = tl.load(v_ptr + row * v_stride + c, mask=c < value_size, other=0.0).to(tl.float32)
    tl.store(to + v_offset + c, v, mask=c < value_size)
    decay = tl.load(decay_ptr + row * value_heads + c, mask=c < value_heads, other=0.0)
    tl.store(to + decay_offset + c, decay, mask=c < value_heads)
    beta = tl.load(beta_ptr + row * value_heads + c, mask=c < value_heads, other=0.0)
    tl.store(to + beta_offset + c, beta, mask=c < value_heads)


def copy_nodes(pool: Tensor, nodes: Tensor, slots: Sequence[int], taken: Sequence[int]) -> None:
    """See `graftline.kernels.state_commit.copy_nodes`."""
    words = pool.shape[1] // 8
    grid = (len(slots), triton.cdiv(words, _COPY_BLOCK))
    places = (_ints(slots, pool.device), _ints(taken, pool.device))
    _copy_nodes_kernel[grid](
        pool.view(torch.int64), nodes.view(torch.int64), *places, words, nodes.shape[1], BLOCK=_COPY_BLOCK
    )


def replay_nodes(
    pool: Tensor, inputs: Tensor, layout: PackedLayers, slots: Sequence[int], paths: Sequence[Sequence[int]]
) -> None:
    """See `graftline.kernels.state_commit.replay_nodes`."""
    item, count = layout.window_dtype.itemsize, len(slots)
    places = (
        _ints(slots, pool.device),
        _ints([0, *accumulate(map(len, paths))], pool.device),
        _ints([node for path in paths for node in path], pool.device),
    )
    block_v = min(_BLOCK_V, triton.next_power_of_2(layout.value_dim))
    grid = (count, layout.num_layers * layout.value_heads, triton.cdiv(layout.value_dim, block_v))
    _replay_states_kernel[grid](
        pool.view(torch.float32), inputs.view(torch.float32), *places,
        pool.shape[1] // 4, layout.slot_layer_bytes // 4, layout.state_offset // 4,
        inputs.shape[2] // 4, layout.node_layer_bytes // 4, inputs.shape[1],
        layout.k_offset // 4, layout.v_offset // 4, layout.decay_offset // 4, layout.beta_offset // 4,
        layout.key_heads, layout.value_heads, layout.key_dim, layout.value_dim,
        BLOCK_K=triton.next_power_of_2(layout.key_dim), BLOCK_V=block_v, enable_fp_fusion=False,
    )  # fmt: skip
    block = min(_BLOCK, triton.next_power_of_2(layout.channels))
    _replay_windows_kernel[(count, layout.num_layers, triton.cdiv(layout.channels, block))](
        pool.view(layout.window_dtype), inputs.view(layout.window_dtype), *places,
        pool.shape[1] // item, layout.slot_layer_bytes // item, inputs.shape[2] // item,
        layout.node_layer_bytes // item, inputs.shape[1], layout.channels, WIDTH=layout.conv_width, BLOCK=block,
    )  # fmt: skip


def store_inputs(
    pool: Tensor,
    layout: PackedLayers,
    layer: int,
    places: tuple[Tensor, Tensor, Tensor],
    parts: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
) -> None:
    """See `graftline.kernels.state_commit.store_inputs`."""
    item = layout.window_dtype.itemsize
    x, k, v, decay, beta = parts
    key_size, value_size = layout.key_heads * layout.key_dim, layout.value_heads * layout.value_dim
    widest = max(layout.channels, key_size, value_size, layout.value_heads)
    block = min(_BLOCK, triton.next_power_of_2(widest))
    _store_inputs_kernel[(places[0].shape[0], triton.cdiv(widest, block))](
        pool.view(torch.float32), pool.view(layout.window_dtype), x, k, v, decay, beta, *places,
        pool.shape[2] // 4, layer * layout.node_layer_bytes // 4, pool.shape[2] // item,
        layer * layout.node_layer_bytes // item, pool.shape[1], x.stride(0), v.stride(0),
        layout.k_offset // 4, layout.v_offset // 4, layout.decay_offset // 4, layout.beta_offset // 4,
        layout.channels, key_size, value_size, layout.value_heads, BLOCK=block,
    )  # fmt: skip


def _ints(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32).to(device, non_blocking=True)
