"""Rows of a decode round whose shape is fixed: as many rows a sequence, whatever their trees are.

Unlike `AttentionBatch`, nothing here depends on values that only the device knows: a captured CUDA graph reads the same
tensors round after round. Pure description; knows neither models nor requests.
"""

from dataclasses import dataclass

from torch import Tensor

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
