"""Rows of a decode round whose shape is fixed: as many rows a sequence, whatever their trees are.

Unlike `AttentionBatch`, nothing here depends on values that only the device knows: a captured CUDA graph reads the same
tensors round after round. Pure description; knows neither models nor requests.
"""

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from graftline.kernels.attention_batch import AttentionBatch

MAX_TAIL = 64


@dataclass(frozen=True, slots=True)
class TreeBatch:
    """`sequences * rows_each` rows, sequence by sequence. All tensors are contiguous and on one device.

    Row r of a sequence with committed length L sees slots [0, L) and, behind them, slot L + j for every bit j of its
    mask; its own KV goes to `row_slots[r]`.

    Attributes:
        positions: [rows] int32 absolute positions, for rotations.
        row_slots: [rows] int64 flat slot `page * page_size + offset` of every row's own KV; -1 for a row that is not
            written (padding).
        visible: [rows] int64 bit masks over the `num_tail` slots behind the committed ones.
        starts: [sequences] int32 committed length L; 0 for padding.
        page_tables: [sequences, max_pages] int32 page ids in order of position; must reach L + num_tail slots of every
            real sequence, other entries may hold any page of the pool.
        rows_each: rows of every sequence.
        num_tail: slots behind the committed ones that masks speak of, at most `MAX_TAIL`.
        page_size: token positions a page.
    """

    positions: Tensor
    row_slots: Tensor
    visible: Tensor
    starts: Tensor
    page_tables: Tensor
    rows_each: int
    num_tail: int
    page_size: int

    @property
    def num_rows(self) -> int:
        """Rows of all sequences."""
        return self.positions.shape[0]

    @property
    def num_segments(self) -> int:
        """Sequences in the batch."""
        return self.starts.shape[0]

    def slots(self) -> Tensor:
        """[rows] int64 flat slots of the rows' own KV, -1 for none."""
        return self.row_slots


def check_tree_batch(batch: TreeBatch) -> None:
    """Raises ValueError unless shapes and types are as described; values are on the device and not looked at."""
    sequences, rows = batch.num_segments, batch.num_rows
    if rows != sequences * batch.rows_each or not 0 <= batch.num_tail <= MAX_TAIL or batch.page_size < 1:
        raise ValueError(
            f"{rows} rows of {sequences} sequences with {batch.rows_each} each, num_tail {batch.num_tail} of "
            f"{MAX_TAIL}, page_size {batch.page_size}"
        )
    fields = (
        ("positions", batch.positions, torch.int32, (rows,)),
        ("row_slots", batch.row_slots, torch.int64, (rows,)),
        ("visible", batch.visible, torch.int64, (rows,)),
        ("starts", batch.starts, torch.int32, (sequences,)),
        ("page_tables", batch.page_tables, torch.int32, (sequences, batch.page_tables.shape[-1])),
    )
    for name, value, dtype, shape in fields:
        if value.dtype != dtype or value.shape != shape or not value.is_contiguous():
            raise ValueError(f"{name}: {value.dtype} {tuple(value.shape)}, contiguous {dtype} {shape} is wanted")


RowBatch: TypeAlias = AttentionBatch | TreeBatch
"""Rows of a forward, in either form."""
