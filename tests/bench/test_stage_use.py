"""Busy shares within windows, from signs of life whose seconds of compute are one heartbeat old."""

import time
from collections.abc import Sequence
from threading import Lock

import pytest

from graftline.bench.stage_use import Sign, SignLog, stage_uses
from graftline.engine.plan import StageAlive


def signs_of(stage: int, looks: Sequence[tuple[float, float, int]]) -> list[Sign]:
    """Of a stage that had so many seconds of compute and steps at these seconds."""
    told_s, signs = 0.0, []
    for sequence, (second, busy_s, steps) in enumerate(looks):
        signs.append(Sign(second, StageAlive(stage, sequence, told_s, steps)))
        told_s = busy_s
    return signs


# Idle until 1.0, busy for half of the time until 2.0, idle since.
LOOKS = [(0.1 * beat, min(max(0.0, 0.05 * (beat - 10)), 0.5), min(max(0, beat - 10), 10)) for beat in range(31)]


def test_compute_is_counted_within_the_window_alone() -> None:
    (use,) = stage_uses(signs_of(1, LOOKS), [(0.95, 2.05)])
    assert (use.stage, use.steps) == (1, 10)
    assert use.busy == pytest.approx(0.5)
    assert use.s_a_step == pytest.approx(0.05)
    assert stage_uses(signs_of(1, LOOKS), [(0.0, 0.95)])[0].busy == 0.0
    assert stage_uses(signs_of(1, LOOKS), [(0.0, 0.95)])[0].s_a_step is None


def test_windows_add_up_and_stages_stay_apart() -> None:
    signs = signs_of(1, LOOKS) + signs_of(0, [(second, second, 0) for second, _, _ in LOOKS])
    first, second = stage_uses(signs, [(0.45, 0.95), (1.15, 1.65)])
    assert (first.stage, second.stage) == (0, 1)
    assert first.busy == pytest.approx(1.0)
    assert second.busy == pytest.approx(0.25)
    assert second.seconds == pytest.approx(0.8)


def test_a_window_of_one_beat_tells_nothing() -> None:
    assert stage_uses(signs_of(0, LOOKS), [(1.15, 1.35)]) == []
    assert stage_uses([], [(0.0, 9.0)]) == []


def test_a_missed_sign_makes_no_sample() -> None:
    """Nobody knows when its seconds of compute were looked up."""
    signs = signs_of(0, LOOKS)
    (use,) = stage_uses(signs[:10] + signs[11:], [(0.0, 0.95)])
    assert use.seconds == pytest.approx(0.8)


class Beating:
    """Two stages that give a sign of life every few looks."""

    def __init__(self) -> None:
        self._looks = 0
        self._lock = Lock()

    def __call__(self) -> list[StageAlive]:
        with self._lock:
            self._looks += 1
            return [StageAlive(stage, self._looks // 3, 0.0, 0) for stage in (0, 1)]


def test_a_log_keeps_every_sign_once_and_waits_for_two_more() -> None:
    log = SignLog(Beating())
    deadline = time.monotonic() + 10.0
    while not log.num_signs and time.monotonic() < deadline:
        time.sleep(0.001)
    before = time.monotonic()
    signs = log.finish()
    for stage in (0, 1):
        sequences = [sign.alive.sequence for sign in signs if sign.alive.stage == stage]
        assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))
        assert len(sequences) >= 3
    assert signs[-1].second >= before
