import pytest

from graftline.engine.transfer_port import page_runs


def test_pages_are_runs_where_they_count_up_on_both_sides() -> None:
    assert page_runs([4], [7]) == [(4, 7, 1)]
    assert page_runs((0, 1, 2, 6, 7, 9), (3, 4, 6, 0, 1, 2)) == [(0, 3, 2), (2, 6, 1), (6, 0, 2), (9, 2, 1)]
    with pytest.raises(ValueError, match="shorter"):
        page_runs([1, 2], [1])
