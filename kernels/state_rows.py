"""Rows of a forward over recurrent state: which slot's state every segment continues, and what its rows do to it."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from graftline.kernels.attention_batch import AttentionBatch


class StateSegment(NamedTuple):
    """One segment, known on the host."""

    first_row: int
    num_rows: int
    slot: int
    is_tree: bool


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
        segments: the same, on the host.
    """

    segment_rows: Tensor
    parents: Tensor
    slots: Tensor
    is_tree: Tensor
    segments: tuple[StateSegment, ...]

    @property
    def num_rows(self) -> int:
        """Rows of all segments."""
        return self.parents.shape[0]

    @property
    def num_segments(self) -> int:
        """Slots that are read."""
        return self.slots.shape[0]

    @property
    def max_tree_rows(self) -> int:
        """Nodes of the largest tree, 0 without any."""
        return max((segment.num_rows for segment in self.segments if segment.is_tree), default=0)


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


def build_state_rows(
    batch: AttentionBatch, num_rows: Sequence[int], slots: Sequence[int], is_tree: Sequence[bool]
) -> StateRows:
    """The rows of `batch`, whose segments have `num_rows` each and continue the states of `slots`.

    Raises:
        ValueError: a count that does not fit, a slot named twice, or (seen on CPU only) a segment with two roots.
    """
    if not len(num_rows) == len(slots) == len(is_tree) == batch.num_segments or sum(num_rows) != batch.num_rows:
        raise ValueError(
            f"{list(num_rows)} rows, {len(slots)} slots, {len(is_tree)} kinds: {batch.num_segments} segments"
        )
    if not batch.parents.is_cuda and int((batch.parents < 0).sum()) != batch.num_segments:
        raise ValueError("parents: a segment has more than one root")
    return _state_rows(batch.segment_rows, batch.parents, num_rows, slots, is_tree)


def chain_rows(slots: Sequence[int], counts: Sequence[int], device: torch.device | str = "cpu") -> StateRows:
    """Segments of real tokens: `counts[s]` rows that continue `slots[s]`."""
    bounds = torch.tensor([0, *accumulate(counts)], dtype=torch.int32).to(device)
    parents = torch.tensor([row - 1 for count in counts for row in range(count)], dtype=torch.int32).to(device)
    return _state_rows(bounds, parents, counts, slots, [False] * len(slots))


def _state_rows(
    segment_rows: Tensor, parents: Tensor, counts: Sequence[int], slots: Sequence[int], is_tree: Sequence[bool]
) -> StateRows:
    if len(set(slots)) != len(slots):
        raise ValueError(f"slots: {list(slots)} name one twice")
    firsts = [0, *accumulate(counts)][:-1]
    device = parents.device
    return StateRows(
        segment_rows=segment_rows,
        parents=parents,
        slots=torch.tensor(list(slots), dtype=torch.int32).to(device),
        is_tree=torch.tensor([int(tree) for tree in is_tree], dtype=torch.int32).to(device),
        segments=tuple(map(StateSegment, firsts, counts, slots, is_tree)),
    )
