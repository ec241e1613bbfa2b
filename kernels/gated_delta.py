"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks"): what goes in, the recurrence, what comes out.

Per head and token, with S of [key_dim, value_dim]: S <- decay * S; S <- S + k (beta * (v - S^T k)); output S^T q. A
token's new state is one fixed-order function of its parent's state and its own inputs, whatever it is batched with.
"""

from ctypes import byref

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from graftline.kernels.checks import check_rows
from graftline.kernels.native_library import native_library, num_threads
from graftline.kernels.norm import rms_norm_reference
from graftline.kernels.state_rows import StateRows, native_state_rows

MAX_DIM = 256
_L2_EPS = 1e-6


def delta_inputs(
    mixed: Tensor, beta_alpha: Tensor, decay_rate: Tensor, time_bias: Tensor, num_key_heads: int, key_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and gates of the recurrence.

    Args:
        mixed: [rows, 2 * num_key_heads * key_dim + ...]: q, then k, then anything; rows may be strided.
        beta_alpha: [rows, 2 * value_heads]: before the sigmoid, then before the softplus; rows may be strided.
        decay_rate: [value_heads] float32, exp(A_log).
        time_bias: [value_heads] float32.

    Returns:
        (q, k: [rows, num_key_heads, key_dim], of length 1 and q times key_dim ** -0.5; decay, beta: [rows, value_heads]
        in (0, 1)); all float32.

    Raises:
        ValueError: shapes that do not fit.
    """
    rows, value_heads = mixed.shape[0], decay_rate.shape[0]
    if mixed.shape[1] < 2 * num_key_heads * key_dim or beta_alpha.shape != (rows, 2 * value_heads):
        raise ValueError(f"mixed {tuple(mixed.shape)}, beta_alpha {tuple(beta_alpha.shape)} for {value_heads} heads")
    check_rows("mixed", mixed)
    check_rows("beta_alpha", beta_alpha)
    if mixed.is_cuda:
        from graftline.kernels.gated_delta_triton import delta_inputs as kernel

        return kernel(mixed, beta_alpha, decay_rate, time_bias, num_key_heads, key_dim)
    library = native_library()
    if library is None:
        return delta_inputs_reference(mixed, beta_alpha, decay_rate, time_bias, num_key_heads, key_dim)
    q, k = torch.empty(rows, num_key_heads, key_dim), torch.empty(rows, num_key_heads, key_dim)
    decay, beta = torch.empty(rows, value_heads), torch.empty(rows, value_heads)
    library.gl_delta_inputs(
        mixed.data_ptr(),
        mixed.stride(0),
        beta_alpha.data_ptr(),
        beta_alpha.stride(0),
        rows,
        num_key_heads,
        value_heads,
        key_dim,
        decay_rate.data_ptr(),
        time_bias.data_ptr(),
        q.data_ptr(),
        k.data_ptr(),
        decay.data_ptr(),
        beta.data_ptr(),
        num_threads(q.numel() // 8192),
    )
    return q, k, decay, beta


def delta_inputs_reference(
    mixed: Tensor, beta_alpha: Tensor, decay_rate: Tensor, time_bias: Tensor, num_key_heads: int, key_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The specification."""
    size = num_key_heads * key_dim
    heads = mixed[:, : 2 * size].float().reshape(-1, 2, num_key_heads, key_dim)
    heads = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _L2_EPS)
    b, a = beta_alpha.float().chunk(2, dim=-1)
    decay = torch.exp(-decay_rate * softplus(a + time_bias))
    return heads[:, 0] * key_dim**-0.5, heads[:, 1].contiguous(), decay, b.sigmoid()


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
    """Runs the recurrence over every segment.

    Args:
        q: [rows, key_heads, key_dim] float32, or None when only the states matter.
        k: likewise. Value head h reads key head h // (value_heads / key_heads).
        v: [rows, value_heads * value_dim]; rows may be strided.
        decay: [rows, value_heads] float32.
        beta: likewise.
        states: [slots, value_heads, key_dim, value_dim] float32; slots may be strided. Moved on behind a chunk's last
            row, behind a tree's root.
        node_states: [slots, nodes, value_heads, key_dim, value_dim]: gets the state behind node i of a tree at i - 1;
            None when it is not wanted.

    Returns:
        [rows, value_heads, value_dim] of the type of v, or None without q.

    Raises:
        ValueError: shapes, types or strides that do not fit.
    """
    _check(q, k, v, decay, beta, states, rows, node_states)
    if k.is_cuda:
        from graftline.kernels.gated_delta_triton import gated_delta as kernel

        return kernel(q, k, v, decay, beta, states, rows, node_states)
    library = native_library()
    if library is None:
        return gated_delta_reference(q, k, v, decay, beta, states, rows, node_states)
    value_heads, key_dim, value_dim = states.shape[1:]
    out = None if q is None else torch.empty(rows.num_rows, value_heads, value_dim)
    threads = num_threads(rows.num_segments * value_heads)
    scratch_nodes = max(0, rows.max_tree_rows - 1) if node_states is None else 0
    scratch = torch.empty(threads * scratch_nodes * key_dim * value_dim)
    library.gl_gated_delta(
        byref(native_state_rows(rows)),
        None if q is None else q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        v.stride(0),
        decay.data_ptr(),
        beta.data_ptr(),
        k.shape[1],
        value_heads,
        key_dim,
        value_dim,
        states.data_ptr(),
        states.stride(0),
        None if node_states is None else node_states.data_ptr(),
        0 if node_states is None else node_states.stride(0),
        0 if node_states is None else node_states.stride(1),
        scratch.data_ptr(),
        scratch_nodes,
        None if out is None else out.data_ptr(),
        threads,
    )
    return out


def gated_delta_reference(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    rows: StateRows,
    node_states: Tensor | None,
) -> Tensor | None:
    """The specification: token by token, in float32."""
    value_heads, _, value_dim = states.shape[1:]
    group = value_heads // k.shape[1]
    values = v.float().reshape(-1, value_heads, value_dim)
    out = torch.empty(values.shape, dtype=v.dtype, device=v.device)
    parents = rows.parents.tolist()
    for first, count, slot, is_tree in rows.segments:
        behind: list[Tensor] = []  # the state behind every row
        for row in range(first, first + count):
            before = states[slot] if parents[row] < 0 else behind[parents[row]]
            key = k[row].repeat_interleave(group, dim=0)  # [value_heads, key_dim]
            state = before * decay[row, :, None, None]
            change = (values[row] - (state * key.unsqueeze(-1)).sum(1)) * beta[row].unsqueeze(-1)
            state = state + key.unsqueeze(-1) * change.unsqueeze(1)
            if q is not None:
                query = q[row].repeat_interleave(group, dim=0)
                out[row] = (state * query.unsqueeze(-1)).sum(1).to(out.dtype)
            behind.append(state)
        states[slot] = behind[0] if is_tree else behind[-1]
        if is_tree and node_states is not None:
            for node in range(1, count):
                node_states[slot, node - 1] = behind[node]
    return None if q is None else out


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(x) * silu(gate).

    Args:
        x: [rows, heads, dim] contiguous.
        gate: [rows, heads * dim], type of x; rows may be strided.
        weight: [dim], type of x.

    Returns:
        [rows, heads * dim], type of x.

    Raises:
        ValueError: shapes that do not fit.
    """
    rows, heads, dim = x.shape
    if gate.shape != (rows, heads * dim) or weight.shape != (dim,) or not x.is_contiguous():
        raise ValueError(f"x {tuple(x.shape)}, gate {tuple(gate.shape)}, weight {tuple(weight.shape)}")
    check_rows("gate", gate)
    if x.is_cuda:
        from graftline.kernels.gated_delta_triton import gated_rms_norm as kernel

        return kernel(x, gate, weight, eps)
    library = native_library()
    if library is None:
        return gated_rms_norm_reference(x, gate, weight, eps)
    out = torch.empty(rows, heads * dim)
    library.gl_gated_rms_norm(
        x.data_ptr(),
        gate.data_ptr(),
        gate.stride(0),
        rows,
        heads,
        dim,
        weight.data_ptr(),
        eps,
        out.data_ptr(),
        num_threads(out.numel() // 8192),
    )
    return out


def gated_rms_norm_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The specification: arithmetic in float32, one rounding at the end."""
    normed = rms_norm_reference(x.float(), weight.float(), eps).flatten(1)
    return (normed * silu(gate.float())).to(x.dtype)


def _check(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    rows: StateRows,
    node_states: Tensor | None,
) -> None:
    value_heads, key_dim, value_dim = states.shape[1:]
    num_rows, key_heads = rows.num_rows, k.shape[1]
    if k.shape != (num_rows, key_heads, key_dim) or value_heads % key_heads:
        raise ValueError(f"k {tuple(k.shape)} for {num_rows} rows of {tuple(states.shape)}")
    if v.shape != (num_rows, value_heads * value_dim):
        raise ValueError(f"v {tuple(v.shape)} for {num_rows} rows of {tuple(states.shape)}")
    if decay.shape != (num_rows, value_heads) or beta.shape != decay.shape:
        raise ValueError(f"decay {tuple(decay.shape)}, beta {tuple(beta.shape)} for {num_rows} rows")
    if q is not None and (q.shape != k.shape or not q.is_contiguous() or q.dtype != torch.float32):
        raise ValueError(f"q: {q.dtype} {tuple(q.shape)}, contiguous float32 {tuple(k.shape)} is wanted")
    for name, part in (("k", k), ("decay", decay), ("beta", beta)):
        if not part.is_contiguous() or part.dtype != torch.float32:
            raise ValueError(f"{name}: {part.dtype} with strides {part.stride()}, contiguous float32 is wanted")
    check_rows("v", v)
    if max(key_dim, value_dim) > MAX_DIM:
        raise ValueError(f"states: heads of {key_dim} x {value_dim}, at most {MAX_DIM}")
    inner = (key_dim * value_dim, value_dim, 1)
    for name, data, lead in (("states", states, 1), ("node_states", node_states, 2)):
        if data is None:
            continue
        if data.shape[lead:] != states.shape[1:] or data.stride()[lead:] != inner or data.dtype != torch.float32:
            raise ValueError(f"{name}: {data.dtype} {tuple(data.shape)} with strides {data.stride()}")
    if node_states is not None and node_states.shape[1] < rows.max_tree_rows - 1:
        raise ValueError(f"node_states: {node_states.shape[1]} nodes for trees of {rows.max_tree_rows}")
