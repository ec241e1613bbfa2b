"""Figures from arrivals written by hand."""

from typing import Any

import pytest
from bench_records import record, run, speculation

from graftline.bench.metrics import METRICS, gaps_s, pauses_s, summarise_runs, tpot_s, ttft_s
from graftline.bench.records import Handoff, Speculation


def test_a_message_of_k_tokens_is_one_gap_and_k_minus_1_zeros() -> None:
    made = record([(0.5, 1), (0.8, 3), (0.9, 2)])
    assert ttft_s(made) == 0.5
    assert tpot_s(made) == pytest.approx(0.4 / 5)
    assert list(gaps_s(made)) == pytest.approx([0.3, 0, 0, 0.1, 0])
    assert list(pauses_s(made)) == pytest.approx([0.3, 0.1])


@pytest.mark.parametrize("arrivals", [[(0.5, 1)], [(0.5, 4)], [(0.1, 2), (0.4, 1), (0.7, 5)]])
def test_gaps_of_a_request_are_its_tokens_and_sum_to_its_tpot(arrivals: list[tuple[float, int]]) -> None:
    made = record(arrivals)
    gaps = list(gaps_s(made))
    assert len(gaps) == made.num_output_tokens - 1
    tpot = tpot_s(made)
    assert sum(gaps) == pytest.approx((tpot or 0) * len(gaps))


def test_one_token_has_no_tpot_and_takes_no_part_in_it() -> None:
    single = record([(0.5, 1)])
    assert tpot_s(single) is None
    summary = summarise_runs([run([single, record([(0.1, 1), (0.3, 2)])])])
    assert summary.latencies["tpot_s"].count == 1
    assert summary.latencies["ttft_s"].count == 2
    alone = summarise_runs([run([single])])
    assert "tpot_s" not in alone.latencies
    assert "tpot_mean_s" not in alone.figures


def test_accept_lengths_are_ratios_of_sums_and_first_rounds_a_mean() -> None:
    records = [
        record(speculation=speculation(rounds=10, accepted=10, first=2)),
        record(speculation=speculation(rounds=30, accepted=50, first=1)),
        record(speculation=speculation(rounds=0, accepted=0, first=0)),
        record(speculation=None),
        record(speculation=Speculation(rounds=50, tree_origin="none")),
    ]
    figures = summarise_runs([run(records)]).figures
    assert figures["accept_length"] == pytest.approx((40 + 60) / 40)
    assert figures["first_round_accept_length"] == pytest.approx(2.5)
    assert figures["rounds_mean"] == 20


def test_failed_requests_count_by_code_and_nowhere_else() -> None:
    good = record([(0.1, 1), (0.3, 4)])
    late = record([(9.0, 1), (99.0, 1)], error="UNAVAILABLE", speculation=speculation(1, 0, 0))
    silent = record([], end_s=50.0)
    summary = summarise_runs([run([good, late, silent], wall_s=2.0)])
    assert (summary.num_requests, summary.num_failed) == (3, 2)
    assert summary.errors == {"UNAVAILABLE": 1, "NO_TOKENS": 1}
    assert summary.latencies["e2e_s"].p99 == 0.3
    assert summary.figures["output_tokens_per_s"] == pytest.approx(5 / 2)
    assert "accept_length" not in summary.figures


def test_nothing_finished_gives_no_latencies_and_no_crash() -> None:
    summary = summarise_runs([run([record([], error="INTERNAL")])])
    assert summary.latencies == {}
    assert summary.num_failed == 1
    assert all(metric.of(run([record([], error="INTERNAL")])) is None for metric in METRICS.values())


def test_rounds_are_pooled_and_times_added_up() -> None:
    runs = [
        run([record([(0.1, 1), (0.2, 9)])], round_number=0, wall_s=1.0, own_cpu_s=2.0),
        run([record([(0.3, 1), (0.4, 9)])], round_number=1, wall_s=3.0, own_cpu_s=4.0, other_cpu_s=1.0),
    ]
    summary = summarise_runs(runs)
    assert summary.figures["output_tokens_per_s"] == pytest.approx(20 / 4)
    assert summary.figures["cores_used"] == pytest.approx(6 / 4)
    assert summary.figures["cores_used_by_idle_variants"] == pytest.approx(1 / 4)
    assert summary.latencies["ttft_s"].mean == pytest.approx(0.2)


@pytest.mark.parametrize("other", [{"variant": "b"}, {"load": "concurrency 8"}])
def test_runs_of_different_things_are_not_pooled(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="one variant at one load"):
        summarise_runs([run([record()]), run([record()], **other)])


def test_kv_rates_are_bytes_over_write_seconds() -> None:
    records = [
        record(handoff=Handoff(bytes=3_000_000_000, write_s=1.0)),
        record(handoff=Handoff(bytes=1_000_000_000, write_s=1.0)),
        record(handoff=None),
    ]
    figures = summarise_runs([run(records)]).figures
    assert figures["kv_gb_per_s"] == pytest.approx(2.0)
    assert figures["kv_bytes_mean"] == 2_000_000_000
