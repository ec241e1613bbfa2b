"""The state of one request on a decode engine, and the arithmetic of its rounds."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from graftline.engine.plan import PageChange, Segment, SegmentOutcome, SlotOpening
from graftline.engine.request import DraftTree, FinishReason, PageId, Request, SlotId, Token
from graftline.engine.service_api import DecodeEvent, SpeculationCounts


class Phase(Enum):
    """Where a request stands."""

    WAITING = auto()
    RESERVED = auto()
    RUNNING = auto()


@dataclass(frozen=True, slots=True)
class Ending:
    """Why and with which token a request ended."""

    reason: FinishReason
    stop_token_id: int | None = None


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """One request; owned by the engine's thread.

    Attributes:
        committed: L, positions whose KV is final.
        tree: what the next round verifies; its root is the bonus token.
        accepted: nodes accepted in the last round, still to be moved by the stages.
        output_len: output tokens so far, those of earlier attempts included.
        limit_len: most tokens of prompt and output together.
        opened: whether the stages know the slot.
        told_pages: pages that the stages know.
    """

    request: Request
    deliver: Callable[[DecodeEvent], None]
    limit_len: int
    phase: Phase = Phase.WAITING
    pages: list[PageId] = field(default_factory=list)
    slot: SlotId = field(default_factory=lambda: SlotId(-1))
    committed: int = 0
    tree: DraftTree = field(default_factory=lambda: DraftTree.root_only(0))
    accepted: list[int] = field(default_factory=list)
    output_len: int = 0
    opened: bool = False
    told_pages: int = 0
    in_flight: bool = False
    cancelled: bool = False
    preempt_wanted: bool = False
    order: int = 0
    verified_nodes: int = 0
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    arrived_s: float = field(default_factory=time.monotonic)

    def start(self, first_token: Token, tree: DraftTree) -> None:
        """The handoff is complete: the prompt is committed, the tree's root is the first token."""
        assert tree.tokens[0] == first_token.token_id, "the tree's root is not the first token"
        self.phase = Phase.RUNNING
        self.committed = len(self.request.token_ids)
        self.output_len = self.request.num_earlier_tokens + 1
        self.tree = tree.pruned(self.max_depth())

    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        by_limit = self.limit_len - (self.committed + 1)
        return min(self.request.stopping.max_tokens - self.output_len, by_limit)

    def max_depth(self) -> int:
        """Depth below which drafts are of no use: a round emits at most depth + 1 tokens."""
        return max(0, self.remaining() - 1)

    def ending_before_start(self) -> Ending | None:
        """Whether the first token ended the request already."""
        token_id = self.tree.tokens[0]
        if token_id in self.request.stopping.ending_ids:
            return Ending(FinishReason.STOP, token_id)
        return Ending(FinishReason.LENGTH) if self.remaining() <= 0 else None

    def opening(self) -> SlotOpening:
        """What the last stage must know."""
        return slot_opening(self.request, int(self.slot))

    def page_change(self) -> PageChange | None:
        """Pages that the stages do not know yet."""
        if self.told_pages == len(self.pages):
            return None
        change = PageChange(int(self.slot), self.told_pages, [int(page) for page in self.pages[self.told_pages :]])
        self.told_pages = len(self.pages)
        return change

    def segment(self, num_nodes: int, grow: bool) -> Segment:
        """The rows of the next round: the first `num_nodes` of the tree."""
        self.verified_nodes = num_nodes
        accepted, self.accepted = self.accepted, []
        return Segment(
            slot=int(self.slot),
            start=self.committed,
            tokens=list(self.tree.tokens[:num_nodes]),
            parents=list(self.tree.parents[:num_nodes]),
            first_sampled=0,
            next_token=-1,
            accepted=accepted,
            grow=grow,
        )

    def apply(self, outcome: SegmentOutcome) -> tuple[tuple[Token, ...], Ending | None]:
        """Takes a round's outcome in.

        Returns:
            Tokens to emit, cut where the request ends, and how it ends, if it does.
        """
        ending_ids = self.request.stopping.ending_ids
        emitted: list[Token] = []
        ending: Ending | None = None
        room = self.remaining()
        for sampled in outcome.tokens:
            emitted.append(sampled.to_token())
            if sampled.token_id in ending_ids:
                ending = Ending(FinishReason.STOP, sampled.token_id)
            elif len(emitted) == room:
                ending = Ending(FinishReason.LENGTH)
            if ending is not None:
                break
        self._count(len(emitted))
        self.output_len += len(emitted)
        self.committed += len(outcome.accepted)
        self.accepted = outcome.accepted
        tree = outcome.tree() or DraftTree.root_only(outcome.tokens[-1].token_id)
        self.tree = tree if ending is not None else tree.pruned(self.max_depth())
        return tuple(emitted), ending

    def _count(self, num_emitted: int) -> None:
        before, drafted, accepted = self.counts, self.verified_nodes - 1, num_emitted - 1
        is_first = before.rounds == 0
        self.counts = SpeculationCounts(
            rounds=before.rounds + 1,
            drafted=before.drafted + drafted,
            accepted=before.accepted + accepted,
            first_round_drafted=drafted if is_first else before.first_round_drafted,
            first_round_accepted=accepted if is_first else before.first_round_accepted,
        )


def slot_opening(request: Request, slot: int) -> SlotOpening:
    """How the last stage samples for a request."""
    sampling, stopping = request.sampling, request.stopping
    return SlotOpening(
        slot=slot,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        logit_bias=dict(sampling.logit_bias),
        ending_ids=sorted(stopping.ending_ids),
        min_ending_position=request.num_prompt_tokens + stopping.min_tokens,
        logprobs=-1 if request.logprobs is None else request.logprobs,
    )
