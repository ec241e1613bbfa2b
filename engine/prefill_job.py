"""The state of one request on a prefill engine: what is planned, computed, sent and acknowledged."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from graftline.engine.pages import PrefixKey
from graftline.engine.plan import SendDone
from graftline.engine.request import DraftTree, PageId, Request, SlotId, Token
from graftline.engine.service_api import Destination, HandoffCounts, PrefillEvent, PrefillFailed


@dataclass(slots=True)
class SendLedger:
    """Orders of one job that stages have not answered.

    Attributes:
        open_answers: order -> stages that still owe an answer.
    """

    open_answers: dict[int, int] = field(default_factory=dict)
    num_bytes: int = 0
    seconds: float = 0.0
    error: str = ""
    drained: bool = True
    digest: int = 0

    @property
    def is_settled(self) -> bool:
        """Every order was answered by every stage."""
        return not self.open_answers

    def expect(self, order: int, num_stages: int) -> None:
        """An order went out."""
        self.open_answers[order] = num_stages

    def take(self, done: SendDone) -> None:
        """A stage answered."""
        self.open_answers[done.order] -= 1
        if self.open_answers[done.order] == 0:
            del self.open_answers[done.order]
        self.num_bytes += done.num_bytes
        self.seconds += done.seconds
        if done.error and not self.error:
            self.error = f"stage {done.stage}: {done.error}"
        self.drained = self.drained and done.drained
        self.digest ^= int.from_bytes(done.digest)


@dataclass(slots=True, eq=False)
class PrefillJob:
    """One request; owned by the engine's thread.

    Attributes:
        planned: prompt tokens that were planned or came from the prefix cache.
        cached: prompt tokens that came from the prefix cache.
        sent_pages: pages whose KV was ordered to be sent, the drafter's with the target's.
        steps: steps under way that write this job's pages.
        last_step: the step of the final chunk, once planned.
        tree: set once the last stage is done with the final chunk.
        failure: what `Failed` will say once nothing is under way any more.
    """

    request: Request
    peer: str
    real_tree: bool
    deliver: Callable[[PrefillEvent], None]
    arrived_s: float = field(default_factory=time.monotonic)
    scheduled_s: float = 0.0
    first_token_s: float = 0.0
    pages: list[PageId] = field(default_factory=list)
    keys: list[PrefixKey] = field(default_factory=list)
    slot: SlotId = field(default_factory=lambda: SlotId(-1))
    planned: int = 0
    cached: int = 0
    chunks: int = 0
    step_ends: list[tuple[int, int]] = field(default_factory=list)
    sent_pages: int = 0
    steps: set[int] = field(default_factory=set)
    destination: Destination | None = None
    ledger: SendLedger = field(default_factory=SendLedger)
    first_token: Token | None = None
    tree: DraftTree | None = None
    ends_with_first_token: bool = False
    cancelled: bool = False
    failure: PrefillFailed | None = None

    @property
    def owner(self) -> str:
        """Names the job in send orders."""
        return f"{self.request.key.request_id}/{self.request.key.attempt}"

    @property
    def prompt_len(self) -> int:
        """Tokens to compute."""
        return len(self.request.token_ids)

    @property
    def is_planned(self) -> bool:
        """Whether every chunk was planned."""
        return self.planned == self.prompt_len

    @property
    def is_ending(self) -> bool:
        """Whether nothing more is wanted of it but to end."""
        return self.cancelled or self.failure is not None

    @property
    def is_idle(self) -> bool:
        """Nothing computes into its pages and nothing is sent from them."""
        return not self.steps and self.ledger.is_settled

    def judge_first_token(self, token: Token) -> None:
        """The first token is known."""
        self.first_token = token
        self.first_token_s = time.monotonic()
        stopping = self.request.stopping
        self.ends_with_first_token = (
            token.token_id in stopping.ending_ids or self.request.num_earlier_tokens + 1 >= stopping.max_tokens
        )

    def step_that_computed(self, num_tokens: int) -> int:
        """The first step after which the first `num_tokens` positions are there; -1: they were cached."""
        for end, step in self.step_ends:
            if end >= num_tokens:
                return step
        return -1

    def handoff(self) -> HandoffCounts:
        """What it took."""
        return HandoffCounts(
            num_bytes=self.ledger.num_bytes,
            write_s=self.ledger.seconds,
            queue_s=self.scheduled_s - self.arrived_s,
            prefill_s=self.first_token_s - self.scheduled_s,
            chunks=self.chunks,
        )
