"""Triton kernels of `graftline.kernels.gated_delta`, token by token: a program takes a block of columns of one head's
state, which stays in registers, for prompt chunks, decode, tree verify and commit alike.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from graftline.kernels.state_rows import StateRows

_BLOCK_V = 32


@triton.jit
def _delta_inputs_kernel(
    mixed_ptr, gates_ptr, rate_ptr, time_bias_ptr, q_out_ptr, k_out_ptr, decay_ptr, beta_ptr,
    mixed_stride, gates_stride, key_heads, value_heads, key_dim, shrink,
    BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_K)
    inside = d < key_dim
    query_at = mixed_ptr + row * mixed_stride + head * key_dim + d
    query = tl.load(query_at, mask=inside, other=0.0).to(tl.float32)
    key = tl.load(query_at + key_heads * key_dim, mask=inside, other=0.0).to(tl.float32)
    to = (row * key_heads + head) * key_dim + d
    tl.store(q_out_ptr + to, query * (tl.rsqrt(tl.sum(query * query) + 1e-6) * shrink), mask=inside)
    tl.store(k_out_ptr + to, key * tl.rsqrt(tl.sum(key * key) + 1e-6), mask=inside)
    if head == 0:
        h = tl.arange(0, BLOCK_H)
        real = h < value_heads
        b = tl.load(gates_ptr + row * gates_stride + h, mask=real, other=0.0).to(tl.float32)
        a = tl.load(gates_ptr + row * gates_stride + value_heads + h, mask=real, other=0.0).to(tl.float32)
        x = a + tl.load(time_bias_ptr + h, mask=real, other=0.0)
        soft = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
        decay = tl.exp(-tl.load(rate_ptr + h, mask=real, other=0.0) * soft)
        tl.store(decay_ptr + row * value_heads + h, decay, mask=real)
        tl.store(beta_ptr + row * value_heads + h, 1.0 / (1.0 + tl.exp(-b)), mask=real)


@triton.jit
def _delta_step(
    state, row, head, key_head, q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, out_ptr, v_stride, key_heads, value_heads,
    key_dim, value_dim, d, e, HAS_Q: tl.constexpr,
):  # fmt: skip
    """One token, row an int64: the state behind it; its output goes to memory."""
    key = tl.load(k_ptr + (row * key_heads + key_head) * key_dim + d, mask=d < key_dim, other=0.0)
    value = tl.load(v_ptr + row * v_stride + head * value_dim + e, mask=e < value_dim, other=0.0).to(tl.float32)
    decay = tl.load(decay_ptr + row * value_heads + head)
    beta = tl.load(beta_ptr + row * value_heads + head)
    state = state * decay
    change = (value - tl.sum(state * key[:, None], 0)) * beta
    state = state + key[:, None] * change[None, :]
    if HAS_Q:
        query = tl.load(q_ptr + (row * key_heads + key_head) * key_dim + d, mask=d < key_dim, other=0.0)
        out = tl.sum(state * query[:, None], 0).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (row * value_heads + head) * value_dim + e, out, mask=e < value_dim)
    return state


@triton.jit
def _gated_delta_kernel(
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, states_ptr, node_states_ptr, out_ptr,
    segment_rows_ptr, parents_ptr, slots_ptr, is_tree_ptr,
    v_stride, slot_stride, node_slot_stride, node_stride, key_heads, value_heads, key_dim, value_dim,
    HAS_Q: tl.constexpr, KEEP: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_K)
    e = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    first = tl.load(segment_rows_ptr + segment).to(tl.int64)
    count = tl.load(segment_rows_ptr + segment + 1) - first
    slot = tl.load(slots_ptr + segment).to(tl.int64)
    key_head = head // (value_heads // key_heads)
    tile = head * key_dim * value_dim + d[:, None] * value_dim + e[None, :]
    inside = (d[:, None] < key_dim) & (e[None, :] < value_dim)
    own = states_ptr + slot * slot_stride + tile
    state = tl.load(own, mask=inside, other=0.0)
    if tl.load(is_tree_ptr + segment) == 0:
        for index in range(count):
            state = _delta_step(
                state, first + index, head, key_head, q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, out_ptr, v_stride,
                key_heads, value_heads, key_dim, value_dim, d, e, HAS_Q,
            )  # fmt: skip
        tl.store(own, state, mask=inside)
    else:
        state = _delta_step(
            state, first, head, key_head, q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, out_ptr, v_stride, key_heads,
            value_heads, key_dim, value_dim, d, e, HAS_Q,
        )  # fmt: skip
        root = state
        tl.store(own, state, mask=inside)
        nodes = node_states_ptr + slot * node_slot_stride + tile
        node_stride64 = tl.zeros((), tl.int64) + node_stride
        for index in range(1, count):
            parent = tl.load(parents_ptr + first + index)
            if parent != index - 1:  # else the state of the row before is the parent's
                if KEEP:
                    tl.debug_barrier()
                    before = tl.maximum(parent - 1, 0).to(tl.int64)
                    kept = tl.load(nodes + before * node_stride64, mask=inside & (parent > 0), other=0.0)
                    state = tl.where(parent > 0, kept, root)
                else:  # from the root again, down the parent's path
                    depth = 0
                    node = parent
                    while node > 0:
                        depth += 1
                        node = tl.load(parents_ptr + first + node)
                    state = root
                    for done in range(depth):
                        node = parent
                        for _ in range(depth - 1 - done):
                            node = tl.load(parents_ptr + first + node)
                        state = _delta_step(
                            state, first + node, head, key_head, q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, out_ptr,
                            v_stride, key_heads, value_heads, key_dim, value_dim, d, e, False,
                        )  # fmt: skip
            state = _delta_step(
                state, first + index, head, key_head, q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, out_ptr, v_stride,
                key_heads, value_heads, key_dim, value_dim, d, e, HAS_Q,
            )  # fmt: skip
            if KEEP:
                tl.store(nodes + (index - 1) * node_stride64, state, mask=inside)


@triton.jit
def _gated_norm_kernel(x_ptr, gate_ptr, weight_ptr, out_ptr, gate_stride, heads, dim, eps, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < dim
    x = tl.load(x_ptr + index * dim + columns, mask=inside, other=0.0).to(tl.float32)
    gate_at = gate_ptr + index // heads * gate_stride + index % heads * dim + columns
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x) / dim + eps) * weight
    out = normed * (gate / (1.0 + tl.exp(-gate)))
    tl.store(out_ptr + index * dim + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


def delta_inputs(
    mixed: Tensor, beta_alpha: Tensor, decay_rate: Tensor, time_bias: Tensor, num_key_heads: int, key_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `graftline.kernels.gated_delta.delta_inputs`."""
    rows, heads = mixed.shape[0], decay_rate.shape[0]
    q, k = (mixed.new_empty((rows, num_key_heads, key_dim), dtype=torch.float32) for _ in range(2))
    decay, beta = (mixed.new_empty((rows, heads), dtype=torch.float32) for _ in range(2))
    _delta_inputs_kernel[(rows, num_key_heads)](
        mixed, beta_alpha, decay_rate, time_bias, q, k, decay, beta, mixed.stride(0), beta_alpha.stride(0),
        num_key_heads, heads, key_dim, key_dim**-0.5, BLOCK_K=triton.next_power_of_2(key_dim),
        BLOCK_H=triton.next_power_of_2(heads),
    )  # fmt: skip
    return q, k, decay, beta


def gated_delta(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    rows: StateRows,
    node_states: Tensor | None,
) -> Tensor | None:
    """See `graftline.kernels.gated_delta.gated_delta`. A token's bits depend on its path alone."""
    value_heads, key_dim, value_dim = states.shape[1:]
    out = None if q is None else torch.empty(rows.num_rows, value_heads, value_dim, dtype=v.dtype, device=v.device)
    block_v = min(_BLOCK_V, triton.next_power_of_2(value_dim))
    nodes = states.unsqueeze(1) if node_states is None else node_states
    _gated_delta_kernel[(rows.num_segments, value_heads, triton.cdiv(value_dim, block_v))](
        k if q is None else q, k, v, decay, beta, states, nodes, v if out is None else out,
        rows.segment_rows, rows.parents, rows.slots, rows.is_tree,
        v.stride(0), states.stride(0), nodes.stride(0), nodes.stride(1), k.shape[1], value_heads, key_dim, value_dim,
        HAS_Q=q is not None, KEEP=node_states is not None, BLOCK_K=triton.next_power_of_2(key_dim), BLOCK_V=block_v,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `graftline.kernels.gated_delta.gated_rms_norm`."""
    rows, heads, dim = x.shape
    out = torch.empty(rows, heads * dim, dtype=x.dtype, device=x.device)
    _gated_norm_kernel[(rows * heads,)](
        x, gate, weight, out, gate.stride(0), heads, dim, eps, BLOCK=triton.next_power_of_2(dim)
    )
    return out
