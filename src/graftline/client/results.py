"""What the router answers, as frozen values."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from graftline.proto.v1 import common_pb2, router_pb2


class FinishReason(Enum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    UNKNOWN = "unknown"

    @classmethod
    def of(cls, value: int) -> "FinishReason":
        """From the wire; reasons newer than this client are UNKNOWN."""
        known: dict[int, FinishReason] = {
            common_pb2.FINISH_REASON_STOP: cls.STOP,
            common_pb2.FINISH_REASON_LENGTH: cls.LENGTH,
        }
        return known.get(value, cls.UNKNOWN)


class TreeOrigin(Enum):
    """Where the tree of the first decode round came from."""

    NONE = "none"
    REAL = "real"
    ROOT_ONLY = "root-only"
    UNKNOWN = "unknown"

    @classmethod
    def of(cls, value: int) -> "TreeOrigin":
        """From the wire; origins newer than this client are UNKNOWN."""
        known: dict[int, TreeOrigin] = {
            common_pb2.TREE_ORIGIN_NONE: cls.NONE,
            common_pb2.TREE_ORIGIN_REAL: cls.REAL,
            common_pb2.TREE_ORIGIN_ROOT_ONLY: cls.ROOT_ONLY,
        }
        return known.get(value, cls.UNKNOWN)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Logprob of an emitted token under the model's own distribution, and the best (token id, logprob) there."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one choice. `cached_tokens` of the prompt came from a prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Speculation:
    """What speculation did for one choice."""

    rounds: int
    drafted: int
    accepted: int
    first_round_drafted: int
    first_round_accepted: int
    tree_origin: TreeOrigin

    @property
    def accept_length(self) -> float | None:
        """Mean tokens a verify round emitted; None without rounds."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else None


@dataclass(frozen=True, slots=True)
class Handoff:
    """What moved from prefill to decode, in bytes and seconds."""

    num_bytes: int
    write_s: float
    queue_s: float
    prefill_s: float
    chunks: int


@dataclass(frozen=True, slots=True)
class Finish:
    """How a choice ended."""

    reason: FinishReason
    stop_string: str | None
    stop_token_id: int | None
    usage: Usage
    speculation: Speculation
    handoff: Handoff
    attempts: int
    prefill_address: str
    decode_address: str


@dataclass(frozen=True, slots=True)
class Delta:
    """What became final for a choice. `finish` is set on its last delta."""

    request_id: str
    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: Finish | None


@dataclass(frozen=True, slots=True)
class Choice:
    """A whole choice."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: Finish


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer; `text` and `finish` are those of the first choice."""

    request_id: str
    choices: tuple[Choice, ...]

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first choice."""
        return self.choices[0].token_ids

    @property
    def finish(self) -> Finish:
        """Finish of the first choice."""
        return self.choices[0].finish


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that can be asked for."""

    model_id: str
    context_length: int
    vocab_size: int


@dataclass(slots=True)
class _Parts:
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None


class Collector:
    """Puts deltas together to a completion."""

    def __init__(self) -> None:
        self._request_id = ""
        self._parts: dict[int, _Parts] = {}

    def add(self, delta: Delta) -> None:
        """Takes the next delta."""
        self._request_id = delta.request_id
        parts = self._parts.setdefault(delta.choice, _Parts())
        parts.texts.append(delta.text)
        parts.token_ids += delta.token_ids
        parts.logprobs += delta.logprobs
        parts.finish = delta.finish or parts.finish

    def completion(self) -> Completion:
        """The whole; every choice must have its finish."""
        choices = []
        for _, parts in sorted(self._parts.items()):
            assert parts.finish is not None, "a stream that ends well finishes every choice"
            choices.append(Choice("".join(parts.texts), tuple(parts.token_ids), tuple(parts.logprobs), parts.finish))
        return Completion(self._request_id, tuple(choices))


def delta_of(message: router_pb2.GenerateResponse) -> Delta:
    """From the wire."""
    return Delta(
        message.request_id,
        message.choice,
        message.text,
        tuple(message.token_ids),
        _logprobs_of(message.logprobs),
        _finish_of(message.finish) if message.HasField("finish") else None,
    )


def models_of(message: router_pb2.ListModelsResponse) -> tuple[ModelInfo, ...]:
    """From the wire."""
    return tuple(ModelInfo(model.model_id, model.context_length, model.vocab_size) for model in message.models)


def _logprobs_of(entries: Iterable[common_pb2.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(entry.logprob, tuple((top.token_id, top.logprob) for top in entry.top)) for entry in entries
    )


def _finish_of(finish: router_pb2.GenerateFinish) -> Finish:
    usage, stats, handoff = finish.usage, finish.speculation, finish.handoff
    return Finish(
        FinishReason.of(finish.reason),
        finish.stop_string or None,
        finish.stop_token_id if finish.HasField("stop_token_id") else None,
        Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
        Speculation(
            stats.rounds,
            stats.drafted,
            stats.accepted,
            stats.first_round_drafted,
            stats.first_round_accepted,
            TreeOrigin.of(stats.tree_origin),
        ),
        Handoff(handoff.bytes, handoff.write_s, handoff.queue_s, handoff.prefill_s, handoff.chunks),
        finish.attempts,
        finish.prefill_address,
        finish.decode_address,
    )
