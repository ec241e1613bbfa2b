"""What a benchmark writes down: raw arrivals per request, runs of requests, and where they were measured.

Every figure of a report can be computed again from these. Times are seconds of the client's monotonic clock.
"""

from pathlib import Path
from typing import Any

import msgspec

from graftline.bench.stats import Summary
from graftline.errors import InvalidRequestError

SCHEMA = "graftline.bench/1"


class Arrival(msgspec.Struct, frozen=True, array_like=True):
    """One message with tokens: when it arrived, counted from the moment its request was due, and its tokens."""

    at_s: float
    num_tokens: int


class Speculation(msgspec.Struct, frozen=True):
    """As `graftline.v1.SpeculationStats`. `tree_origin`: none, real, root-only or unknown."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    first_round_drafted: int = 0
    first_round_accepted: int = 0
    tree_origin: str = ""


class Handoff(msgspec.Struct, frozen=True):
    """As `graftline.v1.HandoffStats`."""

    bytes: int = 0
    write_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    chunks: int = 0


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One measured request.

    Attributes:
        index: its number within the run; equal indexes of one round are the same prompt for every variant.
        due_s: when it was due, counted from the start of the run. Latencies count from here, so that a client
            that sends late cannot make a server look fast.
        sent_s: how much later than due it was sent.
        end_s: end of its stream, counted from due.
        output_hash: of the output token ids: equal hashes are equal outputs.
        error: gRPC code name of what ended it; empty when it finished.
    """

    index: int
    prompt_id: str
    kind: str
    due_s: float
    sent_s: float
    end_s: float
    arrivals: tuple[Arrival, ...]
    output_hash: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: str = ""
    attempts: int = 0
    speculation: Speculation | None = None
    handoff: Handoff | None = None
    error: str = ""
    error_message: str = ""

    @property
    def ok(self) -> bool:
        """It finished, with at least one token."""
        return not self.error and bool(self.arrivals)

    @property
    def num_output_tokens(self) -> int:
        """Tokens that arrived."""
        return sum(arrival.num_tokens for arrival in self.arrivals)


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The measured requests of one variant at one load in one round.

    Attributes:
        load: "concurrency N" or "rate R/s".
        wall_s: from the first request's due time to the last one's end.
        own_cpu_s: processor seconds that the variant's processes used in `wall_s`; 0 for a router that runs elsewhere.
        other_cpu_s: processor seconds that this benchmark's other child processes (idle variants) used meanwhile.
    """

    variant: str
    round: int
    load: str
    wall_s: float
    records: tuple[RequestRecord, ...]
    num_warmup: int = 0
    num_warmup_failed: int = 0
    own_cpu_s: float = 0.0
    other_cpu_s: float = 0.0


class MachineFacts(msgspec.Struct, frozen=True):
    """Where it was measured."""

    cpu_model: str
    num_cores: int
    memory_bytes: int
    system: str
    python: str
    packages: dict[str, str]
    commit: str
    accelerators: tuple[str, ...] = ()


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What was sent."""

    prompts: str
    prompts_sha256: str
    kinds: tuple[str, ...]
    num_requests: int
    warmup: int
    max_tokens: int
    temperature: float
    seed: int
    ignore_eos: bool
    rounds: int


class VariantFacts(msgspec.Struct, frozen=True):
    """A configuration by name. `kind`: cluster, router or baseline; `settings`: what was set, as text."""

    name: str
    kind: str
    settings: dict[str, str]


class LoadSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All runs of one variant at one load together.

    Attributes:
        latencies: by metric (ttft_s, tpot_s, itl_s, pause_s, e2e_s); see `graftline.bench.metrics`.
        figures: single figures by metric (output_tokens_per_s, accept_length, ...).
        errors: how many requests ended with each code.
        tree_origins: how many requests began with each kind of tree.
    """

    variant: str
    load: str
    num_requests: int
    num_failed: int
    latencies: dict[str, Summary]
    figures: dict[str, float]
    errors: dict[str, int]
    tree_origins: dict[str, int]


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """A metric of a variant over the first variant's, same load.

    Attributes:
        value: median over rounds of the ratio within a round.
        low, high: 95 % bootstrap interval of it (rounds, and the requests in them, drawn with replacement).
        base_median, variant_median: medians over rounds of the metric itself.
    """

    metric: str
    variant: str
    base: str
    load: str
    value: float
    low: float | None
    high: float | None
    base_median: float
    variant_median: float


class SameOutput(msgspec.Struct, frozen=True):
    """How many requests of a variant gave the very token ids that the first variant gave."""

    variant: str
    base: str
    load: str
    num_same: int
    num_compared: int


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """One invocation of the benchmark, as written to JSON."""

    schema: str = SCHEMA
    command: str
    started_at: str
    method: str
    machine: MachineFacts
    workload: Workload
    variants: tuple[VariantFacts, ...]
    runs: tuple[Run, ...]
    summaries: tuple[LoadSummary, ...]
    ratios: tuple[Ratio, ...] = ()
    same_outputs: tuple[SameOutput, ...] = ()


def write_result(path: Path, result: BenchResult) -> None:
    """Writes `result` as JSON, folders included; a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.part")
    scratch.write_bytes(msgspec.json.encode(result) + b"\n")
    scratch.replace(path)


def read_result(path: Path) -> BenchResult:
    """Reads what `write_result` wrote.

    Raises:
        InvalidRequestError: not readable, no benchmark result, or of another schema version.
    """
    try:
        content = path.read_bytes()
        raw: Any = msgspec.json.decode(content)
        schema = raw.get("schema") if isinstance(raw, dict) else None
        if schema != SCHEMA:
            raise InvalidRequestError("result", f"{path} says schema {schema!r}, not {SCHEMA!r}")
        return msgspec.json.decode(content, type=BenchResult)
    except OSError as error:
        raise InvalidRequestError("result", f"cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise InvalidRequestError("result", f"{path} is no benchmark result: {error}") from error
