"""Which rows of a forward attend to what: one form for prefill chunks, plain decode and tree verify.

Pure description; knows neither models nor requests. Built from Python lists at the bottom.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from graftline.kernels.upload import pad_rows, upload_ints


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Rows of several sequences ("segments"), concatenated. All tensors are int32 and on one device.

    Row with local index i of a segment with committed length L keeps its KV at sequence slot L + i, that is page
    `page_tables[segment, (L + i) // page_size]`, offset `(L + i) % page_size`. It attends to slots [0, L), then to its
    ancestors within the segment in order of depth, then to itself.

    Attributes:
        row_segment: [rows] segment of every row. On a GPU -1 for rows behind those of all segments, which fill a step
            up to a size that was captured: their KV is not written, and what is computed for them is arbitrary.
        positions: [rows] absolute position of the row's token: L + depth in its tree.
        parents: [rows] local index of the parent row within the segment; -1 when the row follows slot L - 1.
        segment_rows: [segments + 1] rows of segment s are [segment_rows[s], segment_rows[s + 1]).
        segment_start: [segments] committed length L.
        page_tables: [segments, max_pages] page ids in order of position; entries that no row reaches may hold anything.
        page_size: token positions a page.
        is_chain: every row's parent is the row before it (prefill, plain decode, chain verify).
        segments: the same on the host, for what is planned there; empty when only tensors are known.
    """

    row_segment: Tensor
    positions: Tensor
    parents: Tensor
    segment_rows: Tensor
    segment_start: Tensor
    page_tables: Tensor
    page_size: int
    is_chain: bool
    segments: "tuple[SegmentRows, ...]" = ()

    @property
    def num_rows(self) -> int:
        """Rows of all segments."""
        return self.positions.shape[0]

    @property
    def num_segments(self) -> int:
        """Sequences in the batch."""
        return self.segment_start.shape[0]

    def slots(self) -> Tensor:
        """[rows] int64: flat slot `page * page_size + offset` where every row's own KV goes."""
        segment = self.row_segment.long()
        rows = torch.arange(self.num_rows, device=self.positions.device)
        slot = self.segment_start.long()[segment] + rows - self.segment_rows.long()[segment]
        page = self.page_tables[segment, slot // self.page_size].long()
        return page * self.page_size + slot % self.page_size


@dataclass(frozen=True, slots=True)
class SegmentRows:
    """The rows of one sequence in a forward.

    Attributes:
        start: committed length L.
        num_rows: rows to compute.
        page_ids: pages of the sequence in order of position; must hold start + num_rows slots.
        parents: local parent of every row (-1 = none, parent < row), or None for a chain.
    """

    start: int
    num_rows: int
    page_ids: Sequence[int]
    parents: Sequence[int] | None = None

    @property
    def is_chain(self) -> bool:
        """Every row's parent is the row before it."""
        return self.parents is None or all(map(int.__eq__, self.parents, range(-1, self.num_rows - 1)))

    def depths(self) -> list[int]:
        """Rows between every row and slot `start - 1`.

        Raises:
            ValueError: if the parents do not form a forest of earlier rows.
        """
        if self.parents is None:
            return list(range(self.num_rows))
        if len(self.parents) != self.num_rows:
            raise ValueError(f"{len(self.parents)} parents for {self.num_rows} rows")
        depths: list[int] = []
        for row, parent in enumerate(self.parents):
            if not -1 <= parent < row:
                raise ValueError(f"row {row} has parent {parent}")
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return depths


def build_attention_batch(
    segments: Sequence[SegmentRows], page_size: int, device: torch.device | str = "cpu"
) -> AttentionBatch:
    """Lays segments out one after the other.

    Raises:
        ValueError: no segment, a segment without rows, too few pages, or parents that form no forest.
    """
    if not segments:
        raise ValueError("a batch needs at least one segment")
    if page_size < 1:
        raise ValueError(f"page_size: {page_size} is below 1")
    row_segment: list[int] = []
    positions: list[int] = []
    parents: list[int] = []
    segment_rows = [0]
    is_chain = True
    for index, segment in enumerate(segments):
        if segment.num_rows < 1 or segment.start < 0:
            raise ValueError(f"segment {index}: start {segment.start}, {segment.num_rows} rows")
        if len(segment.page_ids) * page_size < segment.start + segment.num_rows:
            raise ValueError(
                f"segment {index}: {len(segment.page_ids)} pages of {page_size} cannot hold "
                f"{segment.start} + {segment.num_rows} slots"
            )
        row_segment += [index] * segment.num_rows
        positions += [segment.start + depth for depth in segment.depths()]
        parents += range(-1, segment.num_rows - 1) if segment.parents is None else segment.parents
        is_chain = is_chain and segment.is_chain
        segment_rows.append(segment_rows[-1] + segment.num_rows)
    tables = pad_rows([segment.page_ids for segment in segments])
    starts = [segment.start for segment in segments]
    lists = (row_segment, positions, parents, segment_rows, starts, list(chain.from_iterable(tables)))
    tensors = upload_ints(lists, torch.device(device))
    return AttentionBatch(
        row_segment=tensors[0],
        positions=tensors[1],
        parents=tensors[2],
        segment_rows=tensors[3],
        segment_start=tensors[4],
        page_tables=tensors[5].view(len(segments), len(tables[0])),
        page_size=page_size,
        is_chain=is_chain,
        segments=tuple(replace(segment, page_ids=tuple(segment.page_ids)) for segment in segments),
    )
