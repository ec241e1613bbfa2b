"""What stage 0 tells every stage to do, and what comes back: the only words stages exchange.

A `StepPlan` travels down the pipeline with the hidden states; the last stage answers with a `StepTokens`
(as soon as tokens are sampled, when the plan asks for it) and a `StepResult`, or a `RoundResult`. Control
messages and the reports they cause travel beside the plans. Everything is a typed msgpack struct: nothing
here is decoded into anything but these classes. Plans carry values, never references to live state.
"""

from enum import Enum
from typing import TypeAlias

import msgspec

from graftline.engine.request import DraftTree, Request, Token, TokenLogprob


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A message of a stage link."""


class SlotOpening(msgspec.Struct, frozen=True, array_like=True):
    """A request takes a slot: what the last stage must know to sample for it.

    Attributes:
        min_ending_position: `ending_ids` cannot be drawn for absolute positions below this one.
        logprobs: number of top logprobs, or -1 for none at all.
    """

    slot: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    logit_bias: dict[int, float]
    ending_ids: list[int]
    min_ending_position: int
    logprobs: int

    @classmethod
    def of(cls, request: Request, slot: int) -> "SlotOpening":
        """How tokens are drawn for a request."""
        sampling, stopping = request.sampling, request.stopping
        return cls(
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


class PageChange(msgspec.Struct, frozen=True, array_like=True):
    """Pages of a slot's table from `first_index` on; the table ends behind them."""

    slot: int
    first_index: int
    page_ids: list[int]


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """One request's rows in a step.

    Attributes:
        slot: whose rows these are.
        start: committed length L; the rows' KV goes to positions L, L+1, ... in row order.
        tokens: [rows] token ids.
        parents: [rows] of a draft tree to verify, or None for a chain of real tokens (a prompt chunk).
        first_sampled: rows from this one on are sampled: 0 for a tree, the last row of a final chunk, `rows`
            for a middle chunk.
        next_token: the prompt token behind a middle chunk, else -1.
        accepted: nodes accepted in the slot's previous round, the root first: their KV is moved to the end of
            the committed part before anything else. Empty when nothing was verified before.
        grow: whether a tree is wanted from the outcome.
        carry: start, tokens, parents and accepted nodes are those that the slot's last round left on the device; the
            fields here are empty (rounds of fixed shape only).
    """

    slot: int
    start: int
    tokens: list[int]
    parents: list[int] | None
    first_sampled: int
    next_token: int
    accepted: list[int]
    grow: bool
    carry: bool = False

    @property
    def num_rows(self) -> int:
        """Rows this segment adds to the step."""
        return len(self.tokens)


class StepPlan(_Message, frozen=True):
    """One forward through all stages. Applied in this order: openings, pages, accepted nodes, rows.

    Attributes:
        step: counts up over all plans of one pipeline.
        microbatch: the group this round belongs to.
        early_tokens: answer with `StepTokens` before the drafter runs.
        round_size: sequences that a round of fixed shape is padded to; 0 for a step of as many rows as it says.
    """

    step: int
    microbatch: int
    openings: list[SlotOpening]
    pages: list[PageChange]
    segments: list[Segment]
    early_tokens: bool
    round_size: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of a step that is no round of fixed shape."""
        return sum(segment.num_rows for segment in self.segments)


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    """An emitted token with its logprobs, when the request wants them."""

    token_id: int
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None

    def to_token(self) -> Token:
        """The same for the services."""
        if self.logprob is None:
            return Token(self.token_id)
        return Token(self.token_id, TokenLogprob(self.logprob, tuple(self.top or ())))


class SegmentOutcome(msgspec.Struct, frozen=True, array_like=True):
    """What a step meant for one request.

    Attributes:
        accepted: verified nodes that hold, the root first; empty for a prompt chunk.
        tokens: emitted tokens, one per accepted node (or one for a final chunk, none for a middle one). The
            last one is the next bonus token.
        tree_tokens, tree_parents: the next draft tree, its root included; both empty when none was grown.
        error: why this request must fail (no finite logit), else "".
    """

    slot: int
    accepted: list[int]
    tokens: list[SampledToken]
    tree_tokens: list[int]
    tree_parents: list[int]
    error: str = ""

    @property
    def ids(self) -> list[int]:
        """Of the emitted tokens."""
        return [token.token_id for token in self.tokens]

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """Of the emitted tokens, when the request wants them."""
        return tuple(logprob for token in self.tokens if (logprob := token.to_token().logprob) is not None)

    @property
    def num_nodes(self) -> int:
        """Nodes of the grown tree; 0 for none."""
        return len(self.tree_tokens)

    def tree(self) -> DraftTree | None:
        """The grown tree, if one was."""
        if not self.tree_tokens:
            return None
        return DraftTree(tuple(self.tree_tokens), tuple(self.tree_parents))

    def with_tree(self, tree: DraftTree) -> "SegmentOutcome":
        """The same, and the tree that was grown."""
        return SegmentOutcome(self.slot, self.accepted, self.tokens, list(tree.tokens), list(tree.parents), self.error)


class StepTokens(_Message, frozen=True):
    """Tokens of a step before its drafts are grown; `StepResult` repeats them."""

    step: int
    outcomes: list[SegmentOutcome]


class StepResult(_Message, frozen=True):
    """The end of a step, from the last stage."""

    step: int
    microbatch: int
    outcomes: list[SegmentOutcome]


class RoundResult(_Message, frozen=True):
    """The end of a round of fixed shape, from the last stage; `engine/round_results.py` reads and writes it.

    Attributes:
        slots: of its requests.
        rows: [slots, width] int32: the emitted tokens of each, padded with -1, and its row of `RoundState`.
    """

    step: int
    microbatch: int
    slots: list[int]
    rows: bytes


# --- control and reports -------------------------------------------------------------------------------------


class Heartbeat(_Message, frozen=True):
    """Stage 0 is alive; answered with `StageAlive`."""

    sequence: int


class Stop(_Message, frozen=True):
    """End the stage."""


class StageReady(_Message, frozen=True):
    """A stage has built its pools. `layout` is opaque to the engine: the service's own encoding of where its
    pools lie. `graph_bytes` is what its captured graphs took of its GPU, `ring_bytes` what stages on other GPUs write
    to.
    """

    stage: int
    layout: bytes
    graph_bytes: int = 0
    ring_bytes: int = 0


class StageAlive(_Message, frozen=True):
    """Answer to a heartbeat.

    Attributes:
        busy_s: seconds of compute since start.
        steps: steps computed since start.
        resident_bytes: main memory of the stage's process, shared by all stages that are threads of it.
        device_bytes: GPU memory held by the stage's process; 0 on CPU.
        working: a step is being computed, or its output has not left yet.
        cpu_s: processor time of the computing thread since start; 0 where the system does not say.
        order_beats: heartbeats answered since the control message that is being obeyed was begun.
    """

    stage: int
    sequence: int
    busy_s: float
    steps: int
    resident_bytes: int = 0
    device_bytes: int = 0
    working: bool = False
    cpu_s: float = 0.0
    order_beats: int = 0


class StageFailed(_Message, frozen=True):
    """A stage cannot go on."""

    stage: int
    reason: str


class PairPeer(_Message, frozen=True):
    """A peer's pools may be written to from now on; `layout` is opaque to the engine."""

    peer: str
    layout: bytes


class ForgetPeer(_Message, frozen=True):
    """No write to this peer is wanted any more."""

    peer: str


class SentPool(Enum):
    """What an order moves: pages of the target's layers, pages of the drafter, or a slot's recurrent state."""

    TARGET = "target"
    DRAFT = "draft"
    STATE = "state"


class SendOrder(_Message, frozen=True):
    """Write pages (or a slot's state) of one request to a peer once a step's output is there.

    Attributes:
        order: counts up over all orders of one pipeline; answered by one `SendDone` from every stage.
        owner: names the request and attempt, for `CancelSends`.
        after_step: the data exist once this step was computed.
        runs: (first own page or slot, first of the peer's, how many follow each other on both sides).
    """

    order: int
    owner: str
    peer: str
    after_step: int
    pool: SentPool
    runs: list[tuple[int, int, int]]


class CancelSends(_Message, frozen=True):
    """Drop what an owner still has queued. Every order is answered all the same."""

    owner: str


class SendDone(_Message, frozen=True):
    """A stage is done with an order.

    Attributes:
        error: "" when the peer acknowledged every byte.
        drained: after an error, whether late bytes are impossible.
        digest: of what was written, when the worker digests; see `kv_transfer.digest`.
    """

    order: int
    stage: int
    num_bytes: int
    seconds: float
    error: str = ""
    drained: bool = True
    digest: bytes = b""


class DigestUnits(_Message, frozen=True):
    """Digest what a peer wrote into pages and slots of one request; answered by one `DigestDone` from every stage.

    Attributes:
        check: counts up over all checks of one pipeline.
        units: (pool, ids in it).
    """

    check: int
    units: list[tuple[SentPool, list[int]]]


class DigestDone(_Message, frozen=True):
    """A stage's part of a digest; empty when the stage has no transfer layer."""

    check: int
    stage: int
    digest: bytes


Control: TypeAlias = Heartbeat | Stop | PairPeer | ForgetPeer | SendOrder | CancelSends | DigestUnits
StepReport: TypeAlias = StepTokens | StepResult | RoundResult
Report: TypeAlias = StageReady | StageAlive | StageFailed | StepReport | SendDone | DigestDone
Message: TypeAlias = StepPlan | Control | Report

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Bytes of a message."""
    return _ENCODER.encode(message)


def decode(data: bytes | memoryview) -> Message:
    """A message from bytes.

    Raises:
        msgspec.DecodeError: the bytes are not one of the messages above.
    """
    return _DECODER.decode(data)
