"""The time in which all requests of a run decode: no prompt is computed, none is handed over, nobody is done yet."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graftline.bench.gpu_pair import TimedAnswer


@dataclass(frozen=True, slots=True)
class SteadyWindow:
    """Seconds are of the monotonic clock.

    Attributes:
        begin_s: when the last request had its first tokens from the decode.
        end_s: when the first one had its last.
        tokens: that came in between, of all requests.
    """

    begin_s: float
    end_s: float
    requests: int
    tokens: int

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end_s - self.begin_s


def steady_window(answers: Sequence[TimedAnswer]) -> SteadyWindow | None:
    """Of requests that ran side by side; None when they never decoded all together."""
    if any(len(answer.arrivals) < 3 for answer in answers):
        return None
    begin_s = max(answer.arrivals[1][0] for answer in answers)
    end_s = min(answer.arrivals[-1][0] for answer in answers)
    if end_s <= begin_s:
        return None
    tokens = sum(count for answer in answers for second, count in answer.arrivals if begin_s < second <= end_s)
    return SteadyWindow(begin_s, end_s, len(answers), tokens)


def steady_windows(runs: Sequence[Sequence[TimedAnswer]]) -> Iterator[SteadyWindow]:
    """Of all runs that have one."""
    for answers in runs:
        window = steady_window(answers)
        if window is not None:
            yield window


def tokens_per_s(windows: Sequence[SteadyWindow]) -> float | None:
    """Of all requests, within all windows; None without any."""
    seconds = sum(window.seconds for window in windows)
    return sum(window.tokens for window in windows) / seconds if seconds else None


def tpot_s(windows: Sequence[SteadyWindow]) -> float | None:
    """Seconds a token of one request, on average over all; None without tokens."""
    tokens = sum(window.tokens for window in windows)
    return sum(window.seconds * window.requests for window in windows) / tokens if tokens else None
