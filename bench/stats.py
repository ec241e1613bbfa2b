"""Percentiles, summaries and bootstrap intervals: the few statistics a benchmark needs, in plain Python."""

import math
import random
from collections.abc import Callable, Sequence

import msgspec


class Summary(msgspec.Struct, frozen=True):
    """One metric over a set of values, in the values' own unit. `count` is how many there were."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` (0 to 100) of the sorted values lie, linear between neighbours.

    Raises:
        ValueError: no values, or a percent outside [0, 100].
    """
    if not values or not 0 <= percent <= 100:
        raise ValueError(f"percentile {percent} of {len(values)} values")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def median(values: Sequence[float]) -> float:
    """The 50th percentile. Raises as `percentile`."""
    return percentile(values, 50)


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("mean of no values")
    return math.fsum(values) / len(values)


def summarise(values: Sequence[float]) -> Summary | None:
    """Mean and percentiles; None without values."""
    if not values:
        return None
    p50, p90, p99 = (percentile(values, percent) for percent in (50, 90, 99))
    return Summary(len(values), mean(values), p50, p90, p99)


def bootstrap_interval(
    resample: Callable[[random.Random], float | None], *, draws: int, seed: int, level: float = 0.95
) -> tuple[float, float] | None:
    """The central `level` of `draws` values of `resample` (percentile bootstrap).

    Args:
        resample: computes the figure on data drawn with replacement by the generator it is given; None where the
            drawn data do not define it (such draws are left out).

    Returns:
        (low, high), or None when fewer than half of the draws gave a value.
    """
    generator = random.Random(seed)
    values = [value for _ in range(draws) if (value := resample(generator)) is not None]
    if 2 * len(values) <= draws:
        return None
    tail = 50 * (1 - level)
    return percentile(values, tail), percentile(values, 100 - tail)
