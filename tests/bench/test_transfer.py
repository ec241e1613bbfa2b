"""The transport benchmark measures what it says."""

import time
from collections.abc import Sequence

import pytest

from graftline.bench.transfer import Route, measure, measure_in_process, measure_mooncake
from graftline.kv_transfer.copy_plan import Copy
from graftline.kv_transfer.in_process import InProcessHub, InProcessTransport


class SlowTransport(InProcessTransport):
    """Takes ten milliseconds a write and notes it."""

    def __init__(self) -> None:
        super().__init__(InProcessHub(), "slow:1", lambda dst, src, num_bytes: None)
        self.writes: list[Sequence[Copy]] = []

    def write(self, session_id: str, copies: Sequence[Copy], deadline_s: float) -> None:
        self.writes.append(copies)
        time.sleep(0.01)


def test_figures_are_those_of_the_writes() -> None:
    transport = SlowTransport()
    (result,) = measure("slow", Route(transport, "slow:1", 1 << 20, 1 << 30), 0.1, [(3, 4)])
    assert result.writes == len(transport.writes) - 1, "the first write warms up"
    assert 0.01 <= result.p50_s <= result.p90_s < 0.1
    assert result.gb_per_s == pytest.approx(3 * 4096 / result.p50_s / 1e9)
    assert [copy.src_address - (1 << 20) for copy in transport.writes[0]] == [0, 8192, 16384]


def test_the_in_process_route_runs() -> None:
    results = measure_in_process(0.01, [(1, 4), (10, 64)])
    assert [(result.num_copies, result.copy_kib) for result in results] == [(1, 4), (10, 64)]
    assert all(result.transport == "in-process" and result.gb_per_s > 0 for result in results)


@pytest.mark.system
def test_the_mooncake_route_runs() -> None:
    (result,) = measure_mooncake(0.01, [(2, 4)])
    assert result.transport == "mooncake-tcp"
    assert result.writes >= 5
