"""Chaos, in a short form for every run of the tests and a long one: nothing lost, wrong or leaked, no hand needed."""

from dataclasses import replace

import pytest

from graftline.bench.chaos import ChaosPlan, ChaosRun
from graftline.bench.chaos_asks import PoolSize
from graftline.bench.chaos_faults import Lane

pytestmark = pytest.mark.system

SMALL = PoolSize(num_prompts=40, max_prompt_len=60, max_tokens=16)


async def test_a_short_storm() -> None:
    """CASES B01, B11, F01, G02, M05, R03: processes of every kind are hurt while some hundred requests run."""
    plan = ChaosPlan(num_requests=160, pause_s=0.3, pool=SMALL, callers=8)
    plan = replace(plan, cluster=replace(plan.cluster, prefill_stages=1, quarantine_s=7.0, drain_grace_s=1.0))
    result = await ChaosRun(plan, print).run()
    counts = result.counts
    assert result.troubles == ()
    assert counts.lost == counts.wrong == counts.failed_calls == 0
    assert counts.finished + counts.cancelled == counts.requests == 160
    assert {fault.target.partition("-")[0] for fault in result.faults} == {lane.value for lane in Lane}
    assert result.transfer_failures > 0


@pytest.mark.slow
@pytest.mark.timeout(5400)
async def test_ten_thousand_requests() -> None:
    """CASES G13: a long time under load, with a supervisor that does nothing but start what has ended."""
    result = await ChaosRun(ChaosPlan(num_requests=10_000, pause_s=4.0), print).run()
    assert result.troubles == ()
    assert result.counts.resumed > 0
