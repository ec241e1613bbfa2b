"""The batch description and its builder."""

import pytest
import torch

from graftline.kernels.attention import visible_slots
from graftline.kernels.attention_batch import SegmentRows, build_attention_batch


def test_a_chunk_a_decode_row_and_a_tree_lie_side_by_side() -> None:
    batch = build_attention_batch(
        [
            SegmentRows(0, 3, [7, 2]),
            SegmentRows(5, 1, [1, 0, 4]),
            SegmentRows(2, 4, [9, 8, 3], [-1, 0, 0, 1]),
        ],
        page_size=2,
    )
    assert batch.num_rows == 8
    assert batch.num_segments == 3
    assert batch.row_segment.tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert batch.positions.tolist() == [0, 1, 2, 5, 2, 3, 3, 4]
    assert batch.parents.tolist() == [-1, 0, 1, -1, -1, 0, 0, 1]
    assert batch.segment_rows.tolist() == [0, 3, 4, 8]
    assert batch.segment_start.tolist() == [0, 5, 2]
    assert batch.page_tables.tolist() == [[7, 2, 0], [1, 0, 4], [9, 8, 3]]
    assert not batch.is_chain
    assert batch.slots().tolist() == [14, 15, 4, 9, 16, 17, 6, 7]
    assert visible_slots(batch, 7) == [0, 1, 2, 3, 5]
    assert visible_slots(batch, 6) == [0, 1, 2, 4]
    assert visible_slots(batch, 2) == [0, 1, 2]
    assert all(
        tensor.dtype == torch.int32
        for tensor in (batch.row_segment, batch.positions, batch.parents, batch.segment_rows, batch.page_tables)
    )


def test_explicit_chain_parents_are_a_chain() -> None:
    assert build_attention_batch([SegmentRows(1, 3, [0], [-1, 0, 1])], 4).is_chain
    assert not build_attention_batch([SegmentRows(1, 3, [0], [-1, 0, 0])], 4).is_chain
    assert build_attention_batch([SegmentRows(4, 2, [0, 1]), SegmentRows(0, 1, [2])], 4).is_chain


@pytest.mark.parametrize(
    ("segments", "page_size", "message"),
    [
        ([], 4, "at least one"),
        ([SegmentRows(0, 0, [0])], 4, "0 rows"),
        ([SegmentRows(-1, 1, [0])], 4, "start -1"),
        ([SegmentRows(3, 2, [0])], 4, "cannot hold"),
        ([SegmentRows(0, 2, [0], [-1])], 4, "1 parents for 2 rows"),
        ([SegmentRows(0, 2, [0], [-1, 1])], 4, "row 1 has parent 1"),
        ([SegmentRows(0, 2, [0], [-2, 0])], 4, "row 0 has parent -2"),
        ([SegmentRows(0, 1, [0])], 0, "page_size"),
    ],
)
def test_wrong_descriptions_are_refused(segments: list[SegmentRows], page_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_attention_batch(segments, page_size)
