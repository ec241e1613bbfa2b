"""A worker as the router knows it: what it said about itself, its load, and the requests this router has on it."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from grpc import aio

from graftline.proto.channel import Metadata
from graftline.proto.status import Leg
from graftline.proto.v1.common_pb2 import WorkerIdentity, WorkerRole
from graftline.proto.v1.decode_pb2_grpc import DecodeServiceStub
from graftline.proto.v1.router_pb2 import WorkerStatus
from graftline.proto.v1.worker_pb2 import DescribeResponse, Limits, WatchResponse
from graftline.proto.v1.worker_pb2_grpc import WorkerServiceStub
from graftline.router.breaker import Breaker
from graftline.router.decode_stream import DecodeStream
from graftline.router.model import ServedModel

if TYPE_CHECKING:
    from graftline.router.pairing import Claim


MIN_IDLE_REPORTS = 4

Weights = tuple[str, str]


class Role(Enum):
    """What a worker does."""

    PREFILL = WorkerRole.WORKER_ROLE_PREFILL
    DECODE = WorkerRole.WORKER_ROLE_DECODE

    @property
    def leg(self) -> Leg:
        """The leg of a request this role serves."""
        return Leg.PREFILL if self is Role.PREFILL else Leg.DECODE


@dataclass(frozen=True, slots=True)
class Description:
    """What a worker said about itself; valid for one incarnation. What every request asks for is worked out once.

    Attributes:
        fit: equal for workers with equal fingerprints, and only for those.
        page_size: token positions a page; 1 when the worker does not say.
        draft_nodes: nodes of a draft tree, root included; 0 without speculation.
        weights: what the weights are and how they are stored. A stream goes on with the tokens it would have had only
            where they are equal: under one name there may be an older and a newer model.
    """

    identity: WorkerIdentity
    fingerprint: Mapping[str, str]
    model: ServedModel
    limits: Limits
    num_stages: int
    fit: str = field(init=False)
    page_size: int = field(init=False)
    draft_nodes: int = field(init=False)
    weights: Weights = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fit", repr(sorted(self.fingerprint.items())))
        object.__setattr__(self, "page_size", _count(self.fingerprint.get("page_size"), 1))
        object.__setattr__(self, "draft_nodes", _count(self.fingerprint.get("draft_nodes"), 0))
        weights = self.fingerprint.get("model_hash", ""), self.fingerprint.get("dtype", "")
        object.__setattr__(self, "weights", weights)

    @classmethod
    def of(cls, response: DescribeResponse, model: ServedModel) -> "Description":
        """From the worker's own answer."""
        return cls(response.identity, dict(response.fingerprint.fields), model, response.limits, response.num_stages)


class Worker:
    """State of one worker. The follower of the registry writes it; claims count on it.

    Attributes:
        reason: why it is not available; empty when it is.
        is_lost: it cannot be used, and has not said since that it serves or drains.
        open_requests: requests this router has on it.
        pending_tokens: prompt tokens of those that still wait for their first token (prefill).
        calls: its attempts travel on it (decode).
    """

    def __init__(
        self,
        address: str,
        role: Role,
        channel: aio.Channel,
        breaker: Breaker,
        metadata: Metadata = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address
        self.role = role
        self.channel = channel
        self.service = WorkerServiceStub(channel)
        self.calls = DecodeStream(DecodeServiceStub(channel), metadata)
        self.breaker = breaker
        self.description: Description | None = None
        self.load = WatchResponse()
        self.reason = "not reached yet"
        self.is_lost = False
        self.open_requests = 0
        self.pending_tokens = 0
        self.claims: set[Claim] = set()
        self._clock = clock
        self._progressed_at = clock()
        self._num_idle_reports = 0

    @property
    def incarnation(self) -> str:
        """Of the process that answered last; empty before the first answer."""
        return self.description.identity.incarnation if self.description else ""

    @property
    def peer_address(self) -> str:
        """The address peers should use: what the worker advertises."""
        return (self.description.identity.address if self.description else "") or self.address

    @property
    def is_available(self) -> bool:
        """May be picked for new requests."""
        return not self.reason and not self.breaker.is_open

    @property
    def is_full(self) -> bool:
        """A prefill that would refuse what came on top of this router's own requests.

        Those are counted until the decode has gone on by itself, a little longer than the prefill has them: what runs
        counts twice.
        """
        limits = self.description.limits if self.description else None
        if limits is None or not limits.max_queued or self.role is not Role.PREFILL:
            return False
        return self.open_requests >= limits.max_queued + 2 * limits.max_running

    def described(self, description: Description) -> None:
        """The worker answered. A new incarnation has lost every request of the old one."""
        if description.identity.incarnation != self.incarnation:
            self.revoke_claims("restarted")
            self.breaker.reset()
            self.load = WatchResponse()
        self.description = description

    def reported(self, load: WatchResponse) -> None:
        """A load message arrived."""
        self._num_idle_reports += 1
        if load.progress != self.load.progress or not self._has_work(load):
            self._progressed_at = self._clock()
            self._num_idle_reports = 0
        self.load = load

    def stalled_for_s(self) -> float:
        """Seconds since it last advanced, or had nothing to do; 0 while too few reports say so.

        Several are asked for because this process may have stood still itself, which makes reports late.
        """
        return 0.0 if self._num_idle_reports < MIN_IDLE_REPORTS else self._clock() - self._progressed_at

    def available_again(self) -> None:
        """It serves."""
        self.reason, self.is_lost = "", False

    def lost(self, reason: str) -> None:
        """It cannot be used, and what runs on it must move."""
        self.reason, self.is_lost = reason, True
        self.revoke_claims(reason)

    def refuses_new(self, reason: str) -> None:
        """It takes nothing new; what runs on it goes on."""
        self.reason, self.is_lost = reason, False

    def revoke_claims(self, reason: str) -> None:
        """Moves every request away."""
        for claim in tuple(self.claims):
            claim.revoke(self, reason)

    def status(self) -> WorkerStatus:
        """For GetStatus."""
        description = self.description
        status = WorkerStatus(
            identity=description.identity if description else WorkerIdentity(role=self.role.value),
            available=self.is_available,
            reason=self.reason or ("its circuit breaker is open" if self.breaker.is_open else ""),
            num_stages=description.num_stages if description else 0,
            load=self.load,
            open_requests=self.open_requests,
        )
        status.identity.address = self.address
        if description:
            status.fingerprint.fields.update(description.fingerprint)
        return status

    def _has_work(self, load: WatchResponse) -> bool:
        # A decode's queue waits for prefills; only running requests make rounds.
        return load.running > 0 or (self.role is Role.PREFILL and load.queued > 0)


def _count(text: str | None, default: int) -> int:
    return int(text) if text and text.isascii() and text.isdigit() and int(text) > 0 else default
