"""Rates over a sliding window."""

from graftline.engine.rates import RecentRate


def test_only_the_window_counts() -> None:
    now = [0.0]
    rate = RecentRate(window_s=5.0, clock=lambda: now[0])
    assert (rate.per_second(), rate.total()) == (0.0, 0.0)
    for second in range(10):
        now[0] = float(second)
        rate.add(10)
    assert (rate.total(), rate.per_second()) == (60.0, 12.0), "seconds 4 to 9, the window's edge included"
    now[0] = 14.1
    assert (rate.total(), rate.per_second()) == (0.0, 0.0)


def test_a_long_life_leaves_no_rounding_behind() -> None:
    now = [0.0]
    rate = RecentRate(window_s=1.0, clock=lambda: now[0])
    for step in range(1000):
        now[0] = step * 0.37
        rate.add(0.1)
    now[0] += 10
    assert rate.total() == 0.0
