"""Percentiles against numpy's, and intervals whose coverage is known."""

import random
import statistics

import numpy as np
import pytest

from graftline.bench.stats import bootstrap_interval, mean, median, percentile, summarise


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
@pytest.mark.parametrize("percent", [0, 1, 50, 90, 99, 100])
def test_percentiles_equal_numpys(count: int, percent: float) -> None:
    generator = random.Random(count)
    values = [generator.gauss(0, 10) for _ in range(count)]
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_percentiles_that_cannot_be_are_refused(values: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match="percentile"):
        percentile(values, percent)


def test_a_summary_is_of_all_values_and_none_of_no_values() -> None:
    summary = summarise([float(value) for value in range(101)])
    assert summary is not None
    assert (summary.count, summary.mean, summary.p50, summary.p90, summary.p99) == (101, 50, 50, 90, 99)
    assert summarise([]) is None
    assert median([3.0, 1.0, 2.0]) == 2
    with pytest.raises(ValueError, match="no values"):
        mean([])


def test_the_interval_of_a_mean_has_the_width_theory_says() -> None:
    generator = random.Random(1)
    values = [generator.gauss(5, 2) for _ in range(400)]

    def resample(drawing: random.Random) -> float:
        return statistics.fmean(drawing.choices(values, k=len(values)))

    interval = bootstrap_interval(resample, draws=1000, seed=3)
    assert interval is not None
    low, high = interval
    assert low < statistics.fmean(values) < high
    assert high - low == pytest.approx(2 * 1.96 * statistics.stdev(values) / 20, rel=0.15)
    assert interval == bootstrap_interval(resample, draws=1000, seed=3)
    assert interval != bootstrap_interval(resample, draws=1000, seed=4)


def test_a_narrower_level_gives_a_narrower_interval() -> None:
    def resample(drawing: random.Random) -> float:
        return drawing.random()

    wide = bootstrap_interval(resample, draws=1000, seed=0, level=0.95)
    narrow = bootstrap_interval(resample, draws=1000, seed=0, level=0.5)
    assert wide == pytest.approx((0.025, 0.975), abs=0.02)
    assert narrow == pytest.approx((0.25, 0.75), abs=0.04)


def test_draws_without_a_value_are_left_out_until_they_are_too_many() -> None:
    def seldom(drawing: random.Random) -> float | None:
        return 1.0 if drawing.random() < 0.9 else None

    assert bootstrap_interval(seldom, draws=100, seed=0) == (1.0, 1.0)
    assert bootstrap_interval(lambda _: None, draws=100, seed=0) is None
