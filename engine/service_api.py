"""What the gRPC services of a worker ask of the engine, and what they hear back.

Engines run in their own thread. Every method here is thread-safe, returns at once and never blocks on
compute; everything that happens later arrives as an event through the `deliver` callback given with the
request, called from the engine's thread (services hop to their event loop themselves). After a terminal
event nothing is delivered any more for that key, and nothing of the request is held.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import msgspec

from graftline.engine.request import (
    DraftTree,
    FinishReason,
    PageId,
    Request,
    RequestKey,
    SlotId,
    Token,
    TokenLogprob,
    TreeOrigin,
)


@dataclass(frozen=True, slots=True)
class SpeculationCounts:
    """What speculation did for one request (accept length = (accepted + rounds) / rounds)."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    first_round_drafted: int = 0
    first_round_accepted: int = 0


@dataclass(frozen=True, slots=True)
class HandoffCounts:
    """What moved for one request and how long the parts took, in bytes and seconds."""

    num_bytes: int = 0
    write_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    chunks: int = 0


# --- prefill -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a decode wants a request: its page ids in order of position, and its slot."""

    page_ids: tuple[PageId, ...]
    slot_id: SlotId


@dataclass(frozen=True, slots=True)
class Scheduled:
    """The request got compute; its destination is wanted now."""

    cached_tokens: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token of this attempt was sampled."""

    token: Token


@dataclass(frozen=True, slots=True)
class PrefillFinished:
    """Terminal: every writing stage had its last write acknowledged. `kv_digest` is of all that was written, if the
    worker digests.
    """

    tree: DraftTree
    tree_origin: TreeOrigin
    handoff: HandoffCounts
    kv_digest: bytes = b""


class PrefillFailure(Enum):
    """Why a prefill failed."""

    INVALID_REQUEST = "invalid-request"
    OUT_OF_CAPACITY = "out-of-capacity"
    NOT_PAIRED = "not-paired"
    TRANSFER_FAILED = "transfer-failed"
    DRAINING = "draining"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """Terminal. `drained` is False when bytes may still land in the destination."""

    code: PrefillFailure
    reason: str
    drained: bool


@dataclass(frozen=True, slots=True)
class Drained:
    """Terminal, after a cancel: no write of this request can land any more."""


PrefillEvent = Scheduled | FirstToken | PrefillFinished | PrefillFailed | Drained


class PrefillEngine(Protocol):
    """The prefill side."""

    def submit(
        self, request: Request, decode_incarnation: str, real_tree: bool, deliver: Callable[[PrefillEvent], None]
    ) -> None:
        """Queues a request.

        Raises:
            InvalidRequestError: a bad field, or a prompt that no pool of this worker can ever hold.
            OutOfCapacityError: the queue is full.
            PeerUnavailableError: the engine failed, or `decode_incarnation` is not paired.
        """

    def set_destination(self, key: RequestKey, destination: Destination) -> None:
        """Tells where the request goes. Late or repeated calls are ignored."""

    def cancel(self, key: RequestKey) -> None:
        """Ends the request with `Drained`; ignored when it has ended already."""


# --- decode --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reserved:
    """Pages and slot are set aside: tell the prefill."""

    destination: Destination


class Tokens(msgspec.Struct, frozen=True):
    """Tokens of one round, in order.

    Attributes:
        logprobs: one for every token, or none when the request wants none.
    """

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()

    @classmethod
    def of(cls, *tokens: Token) -> "Tokens":
        """These tokens."""
        logprobs = tuple(token.logprob for token in tokens if token.logprob is not None)
        return cls(tuple(token.token_id for token in tokens), logprobs)

    @property
    def tokens(self) -> tuple[Token, ...]:
        """One by one."""
        if not self.logprobs:
            return tuple(map(Token, self.ids))
        return tuple(map(Token, self.ids, self.logprobs))


@dataclass(frozen=True, slots=True)
class DecodeFinished:
    """Terminal. `stop_token_id` is the emitted token that ended the request, when one did."""

    reason: FinishReason
    stop_token_id: int | None
    speculation: SpeculationCounts


@dataclass(frozen=True, slots=True)
class Preempted:
    """Terminal for this attempt: its pages were taken; prefill prompt + emitted tokens again to go on."""

    speculation: SpeculationCounts


class DecodeFailure(Enum):
    """Why decoding failed."""

    OUT_OF_CAPACITY = "out-of-capacity"
    """The line is full, or what is missing is in quarantine: another decode may have room."""
    ENGINE_LOST = "engine-lost"
    """The engine cannot go on; nobody's request is at fault."""
    KV_DIFFERS = "kv-differs"
    """What arrived is not what the prefill sent."""
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class DecodeFailed:
    """Terminal."""

    reason: str
    code: DecodeFailure = DecodeFailure.INTERNAL


@dataclass(frozen=True, slots=True)
class DecodeCancelled:
    """Terminal, after a cancel of a running request: its pages are free again."""


DecodeEvent = Reserved | Tokens | DecodeFinished | Preempted | DecodeFailed | DecodeCancelled


class DecodeEngine(Protocol):
    """The decode side. A request is reserved, then either started, released or quarantined."""

    def reserve(self, request: Request, deliver: Callable[[DecodeEvent], None]) -> None:
        """Waits in line for pages and a slot; answers `Reserved`.

        Raises:
            InvalidRequestError: a bad field, or a request that the pool can never hold.
            OutOfCapacityError: the line is full.
            PeerUnavailableError: the engine failed.
        """

    def release(self, key: RequestKey) -> None:
        """Gives a reservation (or a place in line) back at once: nobody writes to its pages any more."""

    def quarantine(self, key: RequestKey, peer_incarnation: str) -> None:
        """Gives a reservation back whose pages the prefill may still write: they stay out of use until
        `forget_peer(peer_incarnation)` or until the transport's own timeout has certainly passed.
        """

    def forget_peer(self, peer_incarnation: str) -> None:
        """That incarnation is gone: its quarantined pages are free."""

    def start(self, key: RequestKey, first_token: Token, tree: DraftTree, kv_digest: bytes = b"") -> None:
        """Everything arrived: decode. `first_token` was delivered by the service itself already.

        With a digest, what arrived is compared with it first, and `DecodeFailed(KV_DIFFERS)` is a possible end.
        """

    def cancel(self, key: RequestKey) -> None:
        """Ends a *started* request with `DecodeCancelled`; ignored when it has ended already."""


# --- both ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PoolGauges:
    """Pages of one pool: `total == free + used + cached + quarantined`."""

    total: int
    free: int
    used: int
    cached: int
    quarantined: int


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A snapshot for load reports and metrics; cheap to take from any thread.

    Attributes:
        progress: steps or rounds since start.
        computing: whether a step is under way.
        failed: why the engine cannot go on, or None.
        taken_s: when the snapshot was taken, on the monotonic clock; an old one means a stuck loop.
    """

    queued: int
    queued_tokens: int
    running: int
    pages: PoolGauges
    slots_total: int
    slots_free: int
    progress: int
    tokens_per_s: float
    accept_length: float
    failed: str | None
    computing: bool = False
    taken_s: float = 0.0
