"""What a chaos run found out, as values that go to a JSON file."""

from pathlib import Path

import msgspec

from graftline.bench.records import MachineFacts
from graftline.bench.stats import Summary


class FaultRecord(msgspec.Struct, frozen=True):
    """One injected fault.

    Attributes:
        at_s: since the load began.
        noticed_s: from the fault until every router that lived had the worker out of use; None: none ever did.
        ended_s: from the fault until the process was gone; None: it lived on.
        ready_s: from the start of its successor until that said it was ready.
        usable_s: from the start of its successor (or from the end of a freeze) until routers could use it.
        served_s: from the start of its successor to the end of the first request that it served.
    """

    number: int
    kind: str
    target: str
    at_s: float
    noticed_s: float | None = None
    ended_s: float | None = None
    ready_s: float | None = None
    usable_s: float | None = None
    served_s: float | None = None


class Trouble(msgspec.Struct, frozen=True):
    """Something that must not happen, with what is known about it."""

    what: str
    detail: str


class ChaosCounts(msgspec.Struct, frozen=True):
    """Requests by their fate.

    Attributes:
        cancelled: left by their caller, who got nothing wrong before.
        lost: never answered, whatever their caller tried.
        wrong: answered with other tokens, counts or endings than the plain model's.
        moved: answered after more than one attempt inside the system.
        resumed: streams that went on elsewhere after their first token, as the routers counted.
        caller_retries: calls that ended because their router did, and were made again.
        failed_calls: calls that ended with an error although their router lived.
    """

    requests: int
    finished: int
    cancelled: int
    lost: int
    wrong: int
    moved: int
    attempts: int
    resumed: int
    caller_retries: int
    failed_calls: int
    tokens: int


class ProcessTrend(msgspec.Struct, frozen=True):
    """What one process held over a run, first half of the samples against the second, and the slope over all.

    Attributes:
        resident_mib: (first, last, highest) after the warm-up.
        mib_per_hour: slope of a straight line through the resident memory.
        growth_mib: what that slope adds up to over the samples.
        fds, threads: (lowest, highest, last).
    """

    process: str
    num_samples: int
    resident_mib: tuple[float, float, float]
    mib_per_hour: float
    growth_mib: float
    fds: tuple[int, int, int]
    threads: tuple[int, int, int]
    flat: bool


class ChaosResult(msgspec.Struct, frozen=True):
    """A whole run.

    Attributes:
        gap_s: the longest gap between two messages, of answers that took more than one attempt.
        moved_first_token_s: time to first token of these.
        noticed_s, usable_s, served_s: of `FaultRecord`, by kind and role.
        cancel_s: from a caller's leaving until its decode had nothing open any more, as polled: an upper bound.
    """

    command: str
    started_at: str
    machine: MachineFacts
    seed: int
    seconds: float
    cluster: dict[str, str]
    counts: ChaosCounts
    first_token_s: Summary | None
    request_s: Summary | None
    gap_s: Summary | None
    moved_first_token_s: Summary | None
    fault_counts: dict[str, int]
    noticed_s: dict[str, Summary]
    usable_s: dict[str, Summary]
    served_s: dict[str, Summary]
    cancel_s: Summary | None
    transfer_failures: int
    quarantines: int
    troubles: tuple[Trouble, ...]
    faults: tuple[FaultRecord, ...]
    trends: tuple[ProcessTrend, ...] = ()

    @property
    def good(self) -> bool:
        """Nothing lost, nothing wrong, nothing leaked, no hand needed."""
        return not self.troubles


def write_chaos(path: Path, result: ChaosResult) -> None:
    """Writes a result as indented JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1))
