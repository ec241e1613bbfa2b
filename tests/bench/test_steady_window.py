"""Windows in which all requests decode."""

import pytest

from graftline.bench.gpu_pair import TimedAnswer
from graftline.bench.steady_window import SteadyWindow, steady_window, steady_windows, tokens_per_s, tpot_s


def answer(*arrivals: tuple[float, int]) -> TimedAnswer:
    return TimedAnswer(0.0, arrivals=list(arrivals))


TOGETHER = [
    answer((0.0, 1), (1.0, 2), (2.5, 3), (5.0, 2)),
    answer((1.0, 1), (2.0, 4), (3.0, 4), (4.0, 4), (6.0, 1)),
]


def test_a_window_begins_with_the_last_ones_first_round_and_ends_with_the_first_ones_last() -> None:
    assert steady_window(TOGETHER) == SteadyWindow(2.0, 5.0, 2, 3 + 2 + 4 + 4)


def test_without_a_time_in_which_all_decode_there_is_no_window() -> None:
    assert steady_window([answer((0.0, 1), (1.0, 1), (2.0, 1)), answer((1.0, 1), (3.0, 1), (4.0, 1))]) is None
    assert steady_window([answer((0.0, 1), (1.0, 1))]) is None
    assert list(steady_windows([[answer((0.0, 1))], TOGETHER])) == [steady_window(TOGETHER)]


def test_rates_are_taken_over_all_windows() -> None:
    windows = [SteadyWindow(0.0, 2.0, 4, 40), SteadyWindow(5.0, 8.0, 4, 10)]
    assert tokens_per_s(windows) == pytest.approx(10.0)
    assert tpot_s(windows) == pytest.approx(0.4)
    assert tokens_per_s([]) is None
    assert tpot_s([]) is None
