"""Records of requests that never ran, for tests of what is computed from them."""

from collections.abc import Sequence
from typing import Any

from graftline.bench.records import Arrival, RequestRecord, Run, Speculation


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
