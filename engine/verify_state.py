"""What a verify keeps of the nodes that may not hold, for running slots, indexed by slot; and how they are committed.

The root of a tree always holds: the forward moves the slot's own state on behind it. Behind every other node either
the state itself is kept (snapshot) or the inputs of its recurrence (replay), from which the accepted path is applied
again. Both give the bits that plain decoding gives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from graftline.engine.state_pool import StateGeometry, StatePool
from graftline.engine.verify_mode import VerifyMode
from graftline.kernels.state_commit import PackedLayers, copy_nodes, replay_nodes, store_inputs
from graftline.kernels.state_rows import StateRows


@dataclass(frozen=True, slots=True)
class AcceptedPath:
    """Nodes of a slot's last tree that hold.

    Attributes:
        nodes: ascending, the root (0) first.
    """

    slot: int
    nodes: Sequence[int]

    @property
    def drafts(self) -> Sequence[int]:
        """All but the root, whose state is committed already."""
        return self.nodes[1:]


class VerifyState(Protocol):
    """Memory of both kinds."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool, padding included."""

    def node_windows(self, layer: int) -> Tensor | None:
        """See `StateViews`."""

    def node_states(self, layer: int) -> Tensor | None:
        """See `StateViews`."""

    def keep_inputs(
        self, layer: int, rows: "DraftRows", x: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
    ) -> None:
        """See `StateViews`."""

    def commit(self, pool: StatePool, paths: Sequence[AcceptedPath]) -> None:
        """Moves the slots' states on behind the last node of each path."""


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Rows of a step that are tree nodes other than roots, and where each belongs; [drafts] int64 each."""

    rows: Tensor
    slots: Tensor
    nodes: Tensor  # numbered from 0: node 1 of the tree is 0 here

    @classmethod
    def of(cls, rows: StateRows) -> "DraftRows":
        """Those of a step."""
        found = [
            (first + node, slot, node - 1)
            for first, count, slot, is_tree in rows.segments
            if is_tree
            for node in range(1, count)
        ]
        columns = torch.tensor(found, dtype=torch.int64).reshape(-1, 3).t().contiguous().to(rows.slots.device)
        return cls(columns[0], columns[1], columns[2])


def node_bytes(geometry: StateGeometry, mode: VerifyMode) -> int:
    """Bytes that one node of one slot takes."""
    if mode is VerifyMode.SNAPSHOT:
        return geometry.slot_bytes
    return len(geometry.layers) * _packed(geometry).node_layer_bytes


def verify_state_bytes(geometry: StateGeometry, mode: VerifyMode, num_slots: int, num_nodes: int) -> int:
    """Bytes of the pool for trees of `num_nodes` nodes, root included."""
    return (num_slots + 1) * (num_nodes - 1) * node_bytes(geometry, mode)


def build_verify_state(
    geometry: StateGeometry, mode: VerifyMode, num_slots: int, num_nodes: int, device: torch.device | str = "cpu"
) -> VerifyState:
    """Allocates the memory for trees of at most `num_nodes` >= 2 nodes."""
    kind = Snapshots if mode is VerifyMode.SNAPSHOT else Inputs
    return kind(geometry, num_slots, num_nodes, device)


class Snapshots:
    """The whole state behind every node: [num_slots + 1, nodes - 1, slot_bytes]."""

    def __init__(
        self, geometry: StateGeometry, num_slots: int, num_nodes: int, device: torch.device | str = "cpu"
    ) -> None:
        self._geometry = geometry
        self._data = torch.zeros(num_slots + 1, num_nodes - 1, geometry.slot_bytes, dtype=torch.uint8, device=device)

    @property
    def num_bytes(self) -> int:
        """See `VerifyState`."""
        return self._data.numel()

    def node_windows(self, layer: int) -> Tensor | None:
        """See `VerifyState`."""
        return self._geometry.windows(self._data, layer)

    def node_states(self, layer: int) -> Tensor | None:
        """See `VerifyState`."""
        return self._geometry.states(self._data, layer)

    def keep_inputs(
        self, layer: int, rows: DraftRows, x: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
    ) -> None:
        """Nothing: the states are kept."""

    def commit(self, pool: StatePool, paths: Sequence[AcceptedPath]) -> None:
        """See `VerifyState`: one copy a slot."""
        moved = [path for path in paths if path.drafts]
        taken = [path.nodes[-1] - 1 for path in moved]
        copy_nodes(pool.data, self._data, [path.slot for path in moved], taken)


class Inputs:
    """The inputs of every node's recurrence: [num_slots + 1, nodes - 1, layers, inputs]."""

    def __init__(
        self, geometry: StateGeometry, num_slots: int, num_nodes: int, device: torch.device | str = "cpu"
    ) -> None:
        self._places = {layer: index for index, layer in enumerate(geometry.layers)}
        self._layout = _packed(geometry)
        size = len(geometry.layers) * self._layout.node_layer_bytes
        self._data = torch.zeros(num_slots + 1, num_nodes - 1, size, dtype=torch.uint8, device=device)

    @property
    def num_bytes(self) -> int:
        """See `VerifyState`."""
        return self._data.numel()

    def node_windows(self, layer: int) -> Tensor | None:
        """None: windows follow from the inputs."""
        return None

    def node_states(self, layer: int) -> Tensor | None:
        """None: states follow from the inputs."""
        return None

    def keep_inputs(
        self, layer: int, rows: DraftRows, x: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
    ) -> None:
        """See `VerifyState`."""
        places, parts = (rows.rows, rows.slots, rows.nodes), (x, k, v, decay, beta)
        store_inputs(self._data, self._layout, self._places[layer], places, parts)

    def commit(self, pool: StatePool, paths: Sequence[AcceptedPath]) -> None:
        """See `VerifyState`: the recurrence once more over every path, without outputs."""
        moved = [path for path in paths if path.drafts]
        nodes = [[node - 1 for node in path.drafts] for path in moved]
        replay_nodes(pool.data, self._data, self._layout, [path.slot for path in moved], nodes)


def _packed(geometry: StateGeometry) -> PackedLayers:
    """Where the inputs of a node lie: conv input, k, v, decay, beta, each at a multiple of 16 bytes."""
    shape, wide = geometry.shape, torch.float32.itemsize
    sizes = (
        shape.conv_channels * geometry.dtype.itemsize,
        shape.key_size * wide,
        shape.value_size * wide,
        shape.num_value_heads * wide,
        shape.num_value_heads * wide,
    )
    k, v, decay, beta, end = accumulate(-(-size // 16) * 16 for size in sizes)
    return PackedLayers(
        num_layers=len(geometry.layers),
        slot_layer_bytes=geometry.window_bytes + geometry.state_bytes,
        state_offset=geometry.window_bytes,
        node_layer_bytes=end,
        k_offset=k,
        v_offset=v,
        decay_offset=decay,
        beta_offset=beta,
        window_dtype=geometry.dtype,
        conv_width=shape.conv_width,
        channels=shape.conv_channels,
        key_heads=shape.num_key_heads,
        value_heads=shape.num_value_heads,
        key_dim=shape.key_dim,
        value_dim=shape.value_dim,
    )


class StepStates:
    """The states that one step continues: `graftline.engine.models.target_model.StateViews` over the pools.

    Args:
        verify: None where nothing but roots and chunks is run.
    """

    def __init__(self, pool: StatePool, verify: VerifyState | None, rows: StateRows) -> None:
        assert verify is not None or rows.max_tree_rows <= 1, "a verify without verify state"
        self._pool = pool
        self._verify = verify
        self._rows = rows
        self._drafts = DraftRows.of(rows) if rows.max_tree_rows > 1 else None

    @property
    def rows(self) -> StateRows:
        """Which slot each segment continues."""
        return self._rows

    def windows(self, layer: int) -> Tensor:
        """See `StateViews`."""
        return self._pool.windows(layer)

    def states(self, layer: int) -> Tensor:
        """See `StateViews`."""
        return self._pool.states(layer)

    def node_windows(self, layer: int) -> Tensor | None:
        """See `StateViews`."""
        return None if self._verify is None or self._drafts is None else self._verify.node_windows(layer)

    def node_states(self, layer: int) -> Tensor | None:
        """See `StateViews`."""
        return None if self._verify is None or self._drafts is None else self._verify.node_states(layer)

    def keep_inputs(self, layer: int, x: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> None:
        """See `StateViews`."""
        if self._verify is not None and self._drafts is not None:
            self._verify.keep_inputs(layer, self._drafts, x, k, v, decay, beta)
