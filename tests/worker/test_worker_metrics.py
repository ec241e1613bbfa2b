"""What a worker exports about memory, and of finished handoffs."""

from dataclasses import replace

import pytest
from fake_engines import load_of
from prometheus_client import CollectorRegistry, generate_latest

from graftline import metrics as table
from graftline.engine.config import Role
from graftline.engine.memory_plan import MemoryPlan, StagePlan
from graftline.engine.plan import StageAlive
from graftline.engine.process_memory import device_bytes, resident_bytes
from graftline.engine.rates import PrefillTotals
from graftline.metrics import Metrics, ProcessRole
from graftline.worker.metrics import EngineCollector, PrefillMetrics, planned_bytes

STAGE = StagePlan(0, range(2), weight_bytes=100, target_kv_bytes=40, draft_kv_bytes=0, draft_scratch_bytes=0)
STAGE_PLANS = (STAGE, replace(STAGE, stage=1, draft_kv_bytes=7))
PLAN = MemoryPlan(Role.PREFILL, 4, 16, STAGE_PLANS, skips_verify=True, skipped_stage_bytes=(5, 6))
STAGES = [
    StageAlive(0, 1, 2.5, 7, resident_bytes=1000),
    StageAlive(1, 1, 0.5, 7, resident_bytes=2000, device_bytes=3000),
]


def exposition(memory: MemoryPlan | None) -> str:
    registry = CollectorRegistry()
    registry.register(
        EngineCollector(
            ProcessRole.PREFILL,
            load=lambda: load_of(queued=0, running=0, free=4, total=4, failed=None),
            stage_load=lambda: STAGES,
            totals=PrefillTotals(),
            num_open=lambda: 0,
            memory=memory,
        )
    )
    return generate_latest(registry).decode()


def test_every_part_of_the_plan_is_exported() -> None:
    parts = planned_bytes(PLAN)
    assert parts["0", "weight"] == 100
    assert parts["1", "draft_kv"] == 7
    for stage in PLAN.stages:
        own = [size for (owner, _), size in parts.items() if owner == str(stage.stage)]
        assert sum(own) == stage.pool_bytes + stage.weight_bytes
    text = exposition(PLAN)
    assert f'{table.WORKER_PLANNED_BYTES.name}{{part="target_kv",role="prefill",stage="1"}} 40.0' in text
    assert f'{table.WORKER_SKIPPED_BYTES.name}{{role="prefill"}} 11.0' in text


def test_processes_show_what_they_hold() -> None:
    text = exposition(None)
    assert f'{table.WORKER_RESIDENT_BYTES.name}{{role="prefill",stage="0"}} 1000.0' in text
    assert f'{table.WORKER_DEVICE_BYTES.name}{{role="prefill",stage="1"}} 3000.0' in text
    assert table.WORKER_PLANNED_BYTES.name not in text


def test_this_process_is_resident() -> None:
    assert 10e6 < resident_bytes() < 100e9
    assert device_bytes() >= 0


def test_tails_of_handoffs() -> None:
    metrics = Metrics(ProcessRole.PREFILL)
    PrefillMetrics(metrics).handed_over(0.03)
    text = metrics.exposition().decode()
    assert f'{table.PREFILL_HANDOFF_TAIL.name}_bucket{{le="0.025"}} 0.0' in text
    assert f'{table.PREFILL_HANDOFF_TAIL.name}_bucket{{le="0.05"}} 1.0' in text


def test_equal_observations_count_alike_together_and_one_by_one() -> None:
    """Bounds belong to the bucket below."""
    one_by_one, together = (Metrics(ProcessRole.DECODE) for _ in range(2))
    for amount, times in ((0.0004, 3), (table.LATENCY_BUCKETS_S[2], 1), (1e9, 2)):
        for _ in range(times):
            one_by_one.histogram(table.DECODE_INTER_TOKEN).observe(amount)
        together.histogram(table.DECODE_INTER_TOKEN).observe_times(amount, times)

    def values(metrics: Metrics) -> dict[str, float]:
        samples = [
            sample
            for family in metrics.registry.collect()
            for sample in family.samples
            if sample.name.startswith(table.DECODE_INTER_TOKEN.name) and not sample.name.endswith("_created")
        ]
        return {f"{sample.name}{sample.labels}": sample.value for sample in samples}

    assert values(together) == pytest.approx(values(one_by_one))
    assert sum(values(together).values()) > 6
