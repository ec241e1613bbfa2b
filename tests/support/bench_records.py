"""Records of requests that never ran, for tests of what is computed from them."""

from collections.abc import Sequence
from typing import Any

from graftline.bench.compare import ratios, same_outputs
from graftline.bench.machine import machine_facts
from graftline.bench.metrics import summarise_runs
from graftline.bench.records import (
    Arrival,
    BenchResult,
    RequestRecord,
    Run,
    Speculation,
    VariantFacts,
    Workload,
)


def record(arrivals: Sequence[tuple[float, int]] = ((0.1, 1), (0.2, 1)), **changes: Any) -> RequestRecord:
    """A finished request whose messages came at the given times with the given numbers of tokens."""
    made = tuple(Arrival(at_s, count) for at_s, count in arrivals)
    fields: dict[str, Any] = {
        "index": 0,
        "prompt_id": "p",
        "kind": "chat",
        "due_s": 0.0,
        "sent_s": 0.0,
        "end_s": made[-1].at_s if made else 0.0,
        "arrivals": made,
        "finish_reason": "length",
        "attempts": 1,
        "output_hash": "h",
    }
    return RequestRecord(**{**fields, **changes})


def run(records: Sequence[RequestRecord], *, variant: str = "a", round_number: int = 0, **changes: Any) -> Run:
    fields: dict[str, Any] = {"load": "concurrency 1", "wall_s": 1.0}
    return Run(variant=variant, round=round_number, records=tuple(records), **{**fields, **changes})


def speculation(rounds: int, accepted: int, first: int) -> Speculation:
    return Speculation(
        rounds=rounds,
        drafted=3 * rounds,
        accepted=accepted,
        first_round_drafted=3,
        first_round_accepted=first,
        tree_origin="real",
    )


def result(failed: int = 0) -> BenchResult:
    """Two rounds of a fast and a slow variant, with `failed` failed requests in every run."""
    good = [record([(0.1, 1), (0.3, 4)], index=0, speculation=speculation(2, 2, 2))]
    slow = [record([(0.1, 1), (0.5, 4)], index=0, speculation=speculation(2, 2, 0))]
    bad = [
        record([], index=1 + index, error="UNAVAILABLE", error_message="gone", prompt_id=f"bad-{index}")
        for index in range(failed)
    ]
    runs = [
        run([*made, *bad], variant=name, round_number=number)
        for number in range(2)
        for name, made in (("real", good), ("root-only", slow))
    ]
    return BenchResult(
        command="graftline bench --compare",
        started_at="2026-01-01 00:00 UTC",
        method="two rounds",
        machine=machine_facts(),
        workload=Workload(
            prompts="p.jsonl",
            prompts_sha256="0",
            kinds=("chat",),
            num_requests=1,
            warmup=0,
            max_tokens=5,
            temperature=0.0,
            seed=0,
            ignore_eos=False,
            rounds=2,
        ),
        variants=(VariantFacts("real", "cluster", {"initial_tree": "real"}), VariantFacts("root-only", "cluster", {})),
        runs=tuple(runs),
        summaries=tuple(
            summarise_runs([made for made in runs if made.variant == name]) for name in ("real", "root-only")
        ),
        ratios=tuple(ratios(runs, seed=0, draws=20)),
        same_outputs=tuple(same_outputs(runs)),
    )
