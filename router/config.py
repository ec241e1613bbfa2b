"""What a router can be told, frozen at start."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from graftline.errors import InvalidRequestError
from graftline.proto.address import parse_address, parse_peer
from graftline.proto.channel import ANONYMOUS, Access
from graftline.proto.server import ServerTls
from graftline.tracing import NO_TRACER, Tracer


class PolicyName(Enum):
    """How a worker is picked among those that may serve a request."""

    LEAST_LOADED = "least_loaded"
    ROUND_ROBIN = "round_robin"
    POWER_OF_TWO = "power_of_two"
    PREFIX_AFFINITY = "prefix_affinity"


@dataclass(frozen=True, slots=True)
class WorkerLists:
    """Addresses (host:port) by role. A name with several DNS records is written `dns:host:port`."""

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HealthConfig:
    """When a worker counts as gone, hung or broken.

    Attributes:
        watch_interval_s: asked of workers between two load messages.
        hang_timeout_s: no message for this long means hung.
        stall_timeout_s: messages, but no progress with work at hand, for this long means hung too. A worker whose
            stages answer heartbeats progresses, however long a step takes.
        connect_timeout_s: for Describe and the first Watch message.
        reconnect_max_s: longest pause between two attempts to reach a worker.
        breaker_failures: consecutive failed requests that open a worker's breaker.
        breaker_open_s: first pause of an open breaker; doubles up to `breaker_open_max_s`.
    """

    watch_interval_s: float = 0.5
    hang_timeout_s: float = 2.5
    stall_timeout_s: float = 2.5
    connect_timeout_s: float = 3.0
    reconnect_max_s: float = 0.3
    breaker_failures: int = 5
    breaker_open_s: float = 1.0
    breaker_open_max_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a served request is wanted to keep to; requests that do are counted (goodput).

    Attributes:
        first_token_s: from the request's arrival to its first token.
        per_token_s: mean of the tokens after it.
    """

    first_token_s: float = 1.0
    per_token_s: float = 0.1

    def met(self, first_token_s: float, rest_s: float, num_rest: int) -> bool:
        """Whether a choice with `num_rest` tokens in the `rest_s` after its first kept to them."""
        return first_token_s <= self.first_token_s and rest_s <= num_rest * self.per_token_s


@dataclass(frozen=True, slots=True)
class RequestConfig:
    """Bounds of requests.

    Attributes:
        max_open_requests: more are refused with RESOURCE_EXHAUSTED.
        retry_after_s: the hint that goes with it.
        max_requests_per_s: admitted over time, bursts of one second's worth included; None: no limit.
        default_max_tokens: output tokens when the client names none; None: all that the context leaves.
        max_attempts: tries of one choice that may fail in a row, without a token gained, before the client hears of it.
        max_preemptions: times a decode may push a choice out before that counts as failure.
        pair_wait_s: how long a new request waits for a usable pair.
        resume_wait_s: how long a stream that has begun waits for one.
        silence_timeout_s: without a word from its decode for so long an attempt is given up; waiting in a queue counts.
        max_unread_tokens: output a slow client may leave waiting before it is cut.
        write_timeout_s: one message to a client may take this long before it is cut.
        stream_keep_alive_s: an HTTP stream that is silent for so long carries a comment, and its status with it.
        max_prompt_chars: longer texts are refused before anything looks at them.
    """

    max_open_requests: int = 8192
    retry_after_s: float = 1.0
    max_requests_per_s: float | None = None
    default_max_tokens: int | None = None
    max_attempts: int = 5
    max_preemptions: int = 64
    pair_wait_s: float = 2.0
    resume_wait_s: float = 30.0
    silence_timeout_s: float = 600.0
    max_unread_tokens: int = 16_384
    write_timeout_s: float = 30.0
    stream_keep_alive_s: float = 15.0
    max_prompt_chars: int = 32 * 1024 * 1024
    objectives: Objectives = field(default_factory=Objectives)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """A router.

    Attributes:
        listen: gRPC address; port 0 lets the OS choose.
        http_listen: OpenAI HTTP, health and metrics; None: no HTTP.
        workers: fixed lists.
        workers_file: JSON or TOML with lists `prefill` and `decode`, read again when it changes.
        worker_access: token and TLS shown to workers.
        tokens: bearer tokens accepted from clients (gRPC and HTTP); empty: everybody may call.
        answers_sglang: beside its own service, answer the one that SGLang's gateways call.
        sglang_tokenizer_dir: where those load the tokenizer from; the router writes what is missing.
        tracer: where requests' spans go; whoever made it closes it.
    """

    listen: str = "127.0.0.1:0"
    http_listen: str | None = None
    advertise: str | None = None
    workers: WorkerLists = field(default_factory=WorkerLists)
    workers_file: Path | None = None
    discovery_interval_s: float = 1.0
    policy: PolicyName = PolicyName.LEAST_LOADED
    health: HealthConfig = field(default_factory=HealthConfig)
    requests: RequestConfig = field(default_factory=RequestConfig)
    worker_access: Access = ANONYMOUS
    tls: ServerTls | None = None
    tokens: tuple[str, ...] = field(default=(), repr=False)
    drain_grace_s: float = 30.0
    tokenizer_threads: int = 2
    answers_sglang: bool = False
    sglang_tokenizer_dir: Path | None = None
    tracer: Tracer = NO_TRACER

    def __post_init__(self) -> None:
        parse_address(self.listen, field="listen")
        if self.http_listen is not None:
            parse_address(self.http_listen, field="http_listen")
        for role, addresses in (("prefill", self.workers.prefill), ("decode", self.workers.decode)):
            for address in addresses:
                parse_peer(address.removeprefix("dns:"), field=f"workers.{role}")
        for name in ("max_open_requests", "max_attempts", "max_unread_tokens"):
            if getattr(self.requests, name) < 1:
                raise InvalidRequestError(f"requests.{name}", f"{getattr(self.requests, name)} is not at least 1")
        rate = self.requests.max_requests_per_s
        if rate is not None and not rate > 0:
            raise InvalidRequestError("requests.max_requests_per_s", f"{rate} is not positive")
        for name in ("watch_interval_s", "hang_timeout_s", "stall_timeout_s", "connect_timeout_s"):
            if getattr(self.health, name) <= 0:
                raise InvalidRequestError(f"health.{name}", f"{getattr(self.health, name)} is not positive")
        if self.health.hang_timeout_s <= self.health.watch_interval_s:
            raise InvalidRequestError(
                "health.hang_timeout_s",
                f"{self.health.hang_timeout_s} s is not above watch_interval_s = {self.health.watch_interval_s} s",
            )
