"""Rows of a forward over recurrent state: which slot's state every segment continues, and what its rows do to it."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graftline.kernels.attention_batch import AttentionBatch


@dataclass(frozen=True, slots=True)
class StateRows:
    """The segments of an `AttentionBatch` with their slots. All tensors are int32 and on one device.

    A segment of real tokens (a prompt chunk) moves its slot's state on, row by row. Of a tree only the root is sure to
    hold: it moves the slot's state on; the state behind any other node derives from its parent's and is kept apart.

    Attributes:
        segment_rows: [segments + 1] rows of segment s are [segment_rows[s], segment_rows[s + 1]).
        parents: [rows] local index of the parent row; -1 for the first row of a segment.
        slots: [segments] whose state.
        is_tree: [segments] 1 for trees.
        max_tree_rows: nodes of the largest tree, 0 without any.
    """

    segment_rows: Tensor
    parents: Tensor
    slots: Tensor
    is_tree: Tensor
    max_tree_rows: int

    @property
    def num_rows(self) -> int:
        """Rows of all segments."""
        return self.parents.shape[0]

    @property
    def num_segments(self) -> int:
        """Slots that are read."""
        return self.slots.shape[0]

    def segments(self) -> list[tuple[int, int, int, bool]]:
        """(first row, rows, slot, whether a tree) of every segment, on the host."""
        bounds = self.segment_rows.tolist()
        return [
            (first, end - first, slot, bool(tree))
            for first, end, slot, tree in zip(
                bounds, bounds[1:], self.slots.tolist(), self.is_tree.tolist(), strict=False
            )
        ]


class NativeStateRows(ctypes.Structure):
    """`StateRows` of native/recurrent.h; the tensors must outlive it."""

    _fields_ = (
        ("segment_rows", ctypes.c_void_p),
        ("parents", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("is_tree", ctypes.c_void_p),
        ("num_segments", ctypes.c_int64),
    )


def native_state_rows(rows: StateRows) -> NativeStateRows:
    """Describes the rows."""
    return NativeStateRows(
        rows.segment_rows.data_ptr(),
        rows.parents.data_ptr(),
        rows.slots.data_ptr(),
        rows.is_tree.data_ptr(),
        rows.num_segments,
    )


def build_state_rows(batch: AttentionBatch, slots: Sequence[int], is_tree: Sequence[bool]) -> StateRows:
    """The rows of `batch`, whose segments continue the states of `slots`.

    Raises:
        ValueError: a count that does not fit, a slot named twice, or a segment with two roots.
    """
    if len(slots) != batch.num_segments or len(is_tree) != batch.num_segments:
        raise ValueError(f"{len(slots)} slots and {len(is_tree)} kinds for {batch.num_segments} segments")
    if len(set(slots)) != len(slots):
        raise ValueError(f"slots: {list(slots)} name one twice")
    if int((batch.parents < 0).sum()) != batch.num_segments:
        raise ValueError("parents: a segment has more than one root")
    device = batch.parents.device
    counts = batch.segment_rows.diff().tolist()
    return StateRows(
        segment_rows=batch.segment_rows,
        parents=batch.parents,
        slots=torch.tensor(list(slots), dtype=torch.int32).to(device),
        is_tree=torch.tensor([int(tree) for tree in is_tree], dtype=torch.int32).to(device),
        max_tree_rows=max((count for count, tree in zip(counts, is_tree, strict=True) if tree), default=0),
    )


def chain_rows(slots: Sequence[int], counts: Sequence[int], device: torch.device | str = "cpu") -> StateRows:
    """Segments of real tokens: `counts[s]` rows that continue `slots[s]`."""
    bounds = [0]
    for count in counts:
        bounds.append(bounds[-1] + count)
    return StateRows(
        segment_rows=torch.tensor(bounds, dtype=torch.int32).to(device),
        parents=torch.tensor([row - 1 for count in counts for row in range(count)], dtype=torch.int32).to(device),
        slots=torch.tensor(list(slots), dtype=torch.int32).to(device),
        is_tree=torch.zeros(len(slots), dtype=torch.int32).to(device),
        max_tree_rows=0,
    )
