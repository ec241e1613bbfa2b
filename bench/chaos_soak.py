"""Memory, descriptors and threads of all processes over time: is anything growing?"""

import asyncio
import time
from collections.abc import Callable, Sequence

from graftline.bench.chaos_gauges import ProcessSample, look_at, stage_pids
from graftline.bench.chaos_records import ProcessTrend
from graftline.child import Child
from graftline.launcher import Cluster

_MIB = 1 << 20
# Caches, arenas and pools of threads fill in the first part of a run.
_WARM_UP_SHARE = 0.25
_MIN_SAMPLES = 8
# What a process may grow by over the samples after the warm-up and still count as flat.
_FLAT_MIB = 8.0
_FLAT_SHARE = 0.02
_FLAT_FDS = 8
_FLAT_THREADS = 4


class SoakSampler:
    """Samples every process of a cluster at an interval."""

    def __init__(self, cluster: Cluster, interval_s: float) -> None:
        self._cluster = cluster
        self._interval_s = interval_s
        self._begun_s = time.monotonic()
        self._samples: dict[tuple[str, int], list[tuple[float, ProcessSample]]] = {}

    async def run(self, on_sample: Callable[[], None] = lambda: None) -> None:
        """Samples until cancelled."""
        while True:
            for name, child in self._cluster.children.items():
                await asyncio.to_thread(self._sample, name, child)
            on_sample()
            await asyncio.sleep(self._interval_s)

    def trends(self) -> tuple[ProcessTrend, ...]:
        """One a process that lived long enough to tell."""
        found = (trend_of(f"{name} ({pid})", samples) for (name, pid), samples in self._samples.items())
        return tuple(trend for trend in found if trend is not None)

    def _sample(self, name: str, child: Child) -> None:
        now_s = time.monotonic() - self._begun_s
        for index, pid in enumerate([child.pid, *stage_pids(child.pid)]):
            sample = look_at(pid)
            if sample is not None:
                where = name if name.startswith("router") else f"{name} stage {index}"
                self._samples.setdefault((where, pid), []).append((now_s, sample))


def trend_of(process: str, samples: Sequence[tuple[float, ProcessSample]]) -> ProcessTrend | None:
    """The trend after the warm-up; None for too few samples.

    Args:
        samples: (seconds, sample), in order of time.
    """
    late = samples[int(len(samples) * _WARM_UP_SHARE) :]
    if len(late) < _MIN_SAMPLES:
        return None
    times = [at_s for at_s, _ in late]
    resident = [sample.resident_bytes / _MIB for _, sample in late]
    fds = [sample.num_fds for _, sample in late]
    threads = [sample.num_threads for _, sample in late]
    slope = slope_of(times, resident)
    growth = slope * (times[-1] - times[0])
    flat = (
        growth <= max(_FLAT_MIB, _FLAT_SHARE * resident[0])
        and _half_growth(fds) <= _FLAT_FDS
        and _half_growth(threads) <= _FLAT_THREADS
    )
    return ProcessTrend(
        process,
        len(late),
        (round(resident[0], 1), round(resident[-1], 1), round(max(resident), 1)),
        round(slope * 3600, 2),
        round(growth, 2),
        (min(fds), max(fds), fds[-1]),
        (min(threads), max(threads), threads[-1]),
        flat,
    )


def slope_of(times: Sequence[float], values: Sequence[float]) -> float:
    """Of the straight line with the least squares, in values a second."""
    mean_t, mean_v = sum(times) / len(times), sum(values) / len(values)
    spread = sum((t - mean_t) ** 2 for t in times)
    if spread == 0:
        return 0.0
    return sum((t - mean_t) * (v - mean_v) for t, v in zip(times, values, strict=True)) / spread


def _half_growth(values: Sequence[int]) -> float:
    """How far the mean of the second half lies above that of the first."""
    half = len(values) // 2
    return sum(values[half:]) / (len(values) - half) - sum(values[:half]) / half
