"""Commits of draft nodes' recurrent state over packed pools: a copy of a node's state, or its inputs applied again.

A slot of a state pool holds every layer's conv window and recurrent state, `layer_bytes` after the layer before; a node
of an input pool holds every layer's conv input, k, v, decay and beta, likewise. Knows bytes, no requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graftline.kernels.causal_conv import move_windows
from graftline.kernels.gated_delta import gated_delta
from graftline.kernels.state_rows import chain_rows


@dataclass(frozen=True, slots=True)
class PackedLayers:
    """Where things lie in bytes; every offset is a multiple of 16.

    Attributes:
        slot_layer_bytes: one layer of a slot: the window, then (at `state_offset`) the float32 state.
        node_layer_bytes: one layer of a node's inputs: conv input at 0, then float32 k, v, decay and beta.
        window_dtype: of windows and conv inputs.
    """

    num_layers: int
    slot_layer_bytes: int
    state_offset: int
    node_layer_bytes: int
    k_offset: int
    v_offset: int
    decay_offset: int
    beta_offset: int
    window_dtype: torch.dtype
    conv_width: int
    channels: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    def windows(self, pool: Tensor, layer: int) -> Tensor:
        """[slots, conv_width - 1, channels] of the `layer`-th layer of [slots, bytes]."""
        shape = (self.conv_width - 1, self.channels)
        return typed_view(pool, layer * self.slot_layer_bytes, self.window_dtype, shape)

    def states(self, pool: Tensor, layer: int) -> Tensor:
        """[slots, value_heads, key_dim, value_dim] float32, likewise."""
        shape = (self.value_heads, self.key_dim, self.value_dim)
        return typed_view(pool, layer * self.slot_layer_bytes + self.state_offset, torch.float32, shape)

    def inputs(self, pool: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """x, k, v, decay, beta of the `layer`-th layer of [slots, nodes, bytes]."""
        base, heads = layer * self.node_layer_bytes, (self.value_heads,)
        return (
            typed_view(pool, base, self.window_dtype, (self.channels,)),
            typed_view(pool, base + self.k_offset, torch.float32, (self.key_heads, self.key_dim)),
            typed_view(pool, base + self.v_offset, torch.float32, (self.value_heads * self.value_dim,)),
            typed_view(pool, base + self.decay_offset, torch.float32, heads),
            typed_view(pool, base + self.beta_offset, torch.float32, heads),
        )


def copy_nodes(pool: Tensor, nodes: Tensor, slots: Sequence[int], taken: Sequence[int]) -> None:
    """Node `taken[i]` of slot `slots[i]` becomes the slot's state.

    Args:
        pool: [slots, slot_bytes] uint8, contiguous.
        nodes: [slots, nodes, slot_bytes] uint8, contiguous.
    """
    if not slots:
        return
    if pool.is_cuda:
        from graftline.kernels.state_commit_triton import copy_nodes as kernel

        kernel(pool, nodes, slots, taken)
        return
    for slot, node in zip(slots, taken, strict=True):
        pool[slot] = nodes[slot, node]


def replay_nodes(
    pool: Tensor, inputs: Tensor, layout: PackedLayers, slots: Sequence[int], paths: Sequence[Sequence[int]]
) -> None:
    """Moves the state of `slots[i]` on by the inputs of its nodes `paths[i]`, in all layers.

    Args:
        pool: [slots, slot_bytes] uint8, contiguous.
        inputs: [slots, nodes, node_bytes] uint8, contiguous.
        paths: nodes in order, at least one each.
    """
    if not slots:
        return
    if pool.is_cuda:
        from graftline.kernels.state_commit_triton import replay_nodes as kernel

        kernel(pool, inputs, layout, slots, paths)
        return
    replay_nodes_reference(pool, inputs, layout, slots, paths)


def replay_nodes_reference(
    pool: Tensor, inputs: Tensor, layout: PackedLayers, slots: Sequence[int], paths: Sequence[Sequence[int]]
) -> None:
    """The specification: the ops of a forward once more over chains of those inputs, without outputs."""
    rows = chain_rows(slots, [len(path) for path in paths], pool.device)
    of_slot = torch.tensor([slot for slot, path in zip(slots, paths, strict=True) for _ in path], device=pool.device)
    nodes = torch.tensor([node for path in paths for node in path], device=pool.device)
    activations = torch.float32 if pool.device.type == "cpu" else layout.window_dtype
    for layer in range(layout.num_layers):
        x, k, v, decay, beta = (part[of_slot, nodes] for part in layout.inputs(inputs, layer))
        move_windows(x.to(activations), layout.windows(pool, layer), rows)
        gated_delta(None, k, v, decay, beta, layout.states(pool, layer), rows, None)


def store_inputs(
    pool: Tensor,
    layout: PackedLayers,
    layer: int,
    places: tuple[Tensor, Tensor, Tensor],
    parts: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Writes the inputs of some rows to their nodes, in one layer.

    Args:
        pool: [slots, nodes, node_bytes] uint8, contiguous.
        places: [drafts] int64 each: row, slot, node.
        parts: x [rows, channels], k, v [rows, value_heads * value_dim], decay, beta; rows of x and v may be strided.
    """
    if pool.is_cuda:
        from graftline.kernels.state_commit_triton import store_inputs as kernel

        kernel(pool, layout, layer, places, parts)
        return
    rows, slots, nodes = places
    for view, part in zip(layout.inputs(pool, layer), parts, strict=True):
        view[slots, nodes] = part[rows].to(view.dtype)


def typed_view(data: Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """[..., *shape] of another type: so many bytes of [..., bytes] uint8 from `offset` on, in place."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return data[..., offset : offset + num_bytes].view(dtype).view(*data.shape[:-1], *shape)
