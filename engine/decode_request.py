"""The state of one request on a decode engine, and the arithmetic of its rounds."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeAlias

from graftline.engine.pages import num_pages_for
from graftline.engine.plan import PageChange, Segment, SegmentOutcome, SlotOpening
from graftline.engine.request import DraftTree, FinishReason, PageId, Request, SlotId, Token
from graftline.engine.round_results import RoundOutcome
from graftline.engine.service_api import DecodeEvent, SpeculationCounts, Tokens

Outcome: TypeAlias = SegmentOutcome | RoundOutcome


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
        output_len: output tokens so far, those of earlier attempts included.
        left: tokens that may still be emitted.
        limit_len: most tokens of prompt and output together.
        opened: whether the stages know the slot.
        told_pages: pages that the stages know.
        launched: rounds under way, oldest first: nodes that each verifies, None for all of the tree that the one
            before it leaves.
        ended: nothing more is wanted of it; what it holds is given back once no round is under way.
        preempt_wanted: an older request needs its pages.
        preempt_forced: preempted whatever happens, as soon as no round is under way.
        stranded_beats: heartbeats since nothing but the end of a quarantine can make room for it.
        rounds, drafted, accepted, first_round_drafted, first_round_accepted: see `counts`.
        ending_ids: tokens that end it.
    """

    request: Request
    deliver: Callable[[DecodeEvent], None]
    limit_len: int
    phase: Phase = Phase.WAITING
    pages: list[PageId] = field(default_factory=list)
    slot: SlotId = field(default_factory=lambda: SlotId(-1))
    committed: int = 0
    output_len: int = 0
    left: int = 0
    opened: bool = False
    told_pages: int = 0
    launched: deque[int | None] = field(default_factory=deque)
    cancelled: bool = False
    ended: bool = False
    preempt_wanted: bool = False
    preempt_forced: bool = False
    order: int = 0
    verified_nodes: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    first_round_drafted: int = 0
    first_round_accepted: int = 0
    stranded_beats: int = 0
    ending_ids: frozenset[int] = field(init=False)
    _plain_from: float = field(init=False)  # output length
    _grown: "DraftTree | Outcome" = field(default_factory=lambda: DraftTree.root_only(0))
    _unmoved: "Outcome | None" = None  # its accepted nodes are still to be moved by the stages
    _carried: Segment | None = None

    def __post_init__(self) -> None:
        request = self.request
        self.ending_ids = request.stopping.ending_ids
        self._plain_from = request.stopping.min_tokens if self.ending_ids else 0
        if request.logprobs is not None or request.sampling.logit_bias:
            self._plain_from = math.inf

    @property
    def tree(self) -> DraftTree:
        """What was grown last; its root is the bonus token."""
        if not isinstance(self._grown, DraftTree):
            self._grown = self._grown.tree() or DraftTree.root_only(self._grown.ids[-1])
        return self._grown

    @property
    def counts(self) -> SpeculationCounts:
        """What speculation did so far."""
        return SpeculationCounts(
            self.rounds, self.drafted, self.accepted, self.first_round_drafted, self.first_round_accepted
        )

    @property
    def in_flight(self) -> bool:
        """Whether a round is under way."""
        return bool(self.launched)

    @property
    def wants_rounds(self) -> bool:
        """Whether another round is of use, as far as the host knows: each under way emits one token at least."""
        return self.left > len(self.launched) and not self.ended and not self.cancelled

    @property
    def is_plain(self) -> bool:
        """Whether its rounds need no more than tokens: no logprobs, no bias, no ending forbidden from here on."""
        return self.output_len >= self._plain_from

    def start(self, first_token: Token, tree: DraftTree) -> None:
        """The handoff is complete: the prompt is committed, the tree's root is the first token."""
        assert tree.tokens[0] == first_token.token_id, "the tree's root is not the first token"
        self.phase = Phase.RUNNING
        self.committed = len(self.request.token_ids)
        self.output_len = self.request.num_earlier_tokens + 1
        self.left = self._left()
        self._grown = tree

    def next_tree(self) -> DraftTree:
        """What of the tree is worth verifying."""
        return self.tree.pruned(self.max_depth())

    def most_under_way(self, path_len: int) -> int:
        """Most tokens that the rounds under way may emit.

        Args:
            path_len: most that one emits which verifies what the one before it leaves.
        """
        num_carried = self.launched.count(None)
        most = num_carried * path_len
        if num_carried < len(self.launched):
            most += (len(self.launched) - num_carried) * (1 + self.next_tree().depth)
        return most

    def max_depth(self) -> int:
        """Depth below which drafts are of no use: a round emits at most depth + 1 tokens."""
        return max(0, self.left - 1)

    def ending_before_start(self) -> Ending | None:
        """Whether the first token ended the request already."""
        token_id = self.tree.tokens[0]
        if token_id in self.ending_ids:
            return Ending(FinishReason.STOP, token_id)
        return Ending(FinishReason.LENGTH) if self.left <= 0 else None

    def missing_pages(self, page_size: int) -> int:
        """Pages that it may come to take beyond those it has."""
        positions = len(self.request.token_ids) + self.request.stopping.max_tokens - self.request.num_earlier_tokens
        return max(0, num_pages_for(min(positions, self.limit_len), page_size) - len(self.pages))

    def opening(self) -> SlotOpening:
        """What the last stage must know."""
        return SlotOpening.of(self.request, int(self.slot))

    def page_change(self) -> PageChange | None:
        """Pages that the stages do not know yet."""
        if self.told_pages == len(self.pages):
            return None
        change = PageChange(int(self.slot), self.told_pages, [int(page) for page in self.pages[self.told_pages :]])
        self.told_pages = len(self.pages)
        return change

    def segment(self, num_nodes: int, grow: bool) -> Segment:
        """The rows of the next round: the first `num_nodes` of the tree."""
        self.launched.append(num_nodes)
        accepted = [] if self._unmoved is None else self._unmoved.accepted
        self._unmoved = None
        tree = self.next_tree()
        return Segment(
            slot=int(self.slot),
            start=self.committed,
            tokens=list(tree.tokens[:num_nodes]),
            parents=list(tree.parents[:num_nodes]),
            first_sampled=0,
            next_token=-1,
            accepted=accepted,
            grow=grow,
        )

    def carried_segment(self, grow: bool) -> Segment:
        """The rows of a round launched before the one under way was read: whatever tree that one leaves."""
        self.launched.append(None)
        if self._carried is None or self._carried.grow != grow:
            self._carried = Segment(int(self.slot), 0, [], None, 0, -1, [], grow, carry=True)
        return self._carried

    def landed(self, most_nodes: int) -> None:
        """The oldest round under way is over, which verified so many nodes of the tree at most."""
        nodes = self.launched.popleft()
        self.verified_nodes = min(most_nodes, max(1, self._grown.num_nodes) if nodes is None else nodes)

    def apply(self, outcome: Outcome) -> tuple[Tokens, Ending | None]:
        """Takes a round's outcome in.

        Returns:
            Tokens to emit, cut where the request ends, and how it ends, if it does.
        """
        ids, room = outcome.ids, self.left
        self.committed += len(ids)
        ending: Ending | None = None
        if len(ids) >= room:
            ids, ending = ids[:room], Ending(FinishReason.LENGTH)
        if not self.ending_ids.isdisjoint(ids):
            end = next(index for index, token_id in enumerate(ids) if token_id in self.ending_ids)
            ids, ending = ids[: end + 1], Ending(FinishReason.STOP, ids[end])
        self._count(len(ids))
        self.output_len += len(ids)
        self.left = self._left()
        self._unmoved = None if None in self.launched else outcome
        self._grown = outcome
        return Tokens(tuple(ids), outcome.logprobs[: len(ids)]), ending

    def _left(self) -> int:
        by_limit = self.limit_len - (self.committed + 1)
        return min(self.request.stopping.max_tokens - self.output_len, by_limit)

    def _count(self, num_emitted: int) -> None:
        drafted, accepted = self.verified_nodes - 1, num_emitted - 1
        if self.rounds == 0:
            self.first_round_drafted, self.first_round_accepted = drafted, accepted
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
