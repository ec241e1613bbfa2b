"""The decode engine: reserves pages for handoffs, runs rounds of verify, commit, extend and grow.

Only this thread schedules. Running requests are split over as many microbatches as there are stages; each
has at most one round under way, so that every stage has work while the others compute.
"""

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from graftline.engine.arrival_check import ArrivalChecks
from graftline.engine.config import EngineConfig
from graftline.engine.decode_request import DecodeRequest, Ending, Outcome, Phase
from graftline.engine.device_rounds import round_size
from graftline.engine.engine_thread import EngineThread
from graftline.engine.microbatch import Microbatch, MicrobatchSet
from graftline.engine.pages import PageAllocator, num_pages_for
from graftline.engine.plan import (
    DigestDone,
    PageChange,
    Report,
    RoundResult,
    Segment,
    SlotOpening,
    StepPlan,
    StepResult,
)
from graftline.engine.quarantine import Quarantine
from graftline.engine.rates import DecodeTotals, RecentRate
from graftline.engine.request import DraftTree, Request, RequestKey, SlotId, Token
from graftline.engine.request_check import check_request
from graftline.engine.round_results import round_outcomes
from graftline.engine.service_api import (
    DecodeCancelled,
    DecodeEvent,
    DecodeFailed,
    DecodeFailure,
    DecodeFinished,
    Destination,
    EngineLoad,
    Preempted,
    Reserved,
)
from graftline.engine.slots import SlotPool
from graftline.engine.step_pipeline import StepPipeline
from graftline.engine.waiting_line import WaitingLine
from graftline.errors import OutOfCapacityError, PeerUnavailableError
from graftline.kernels.round_open import RoundLayout

logger = logging.getLogger(__name__)

# Who is let in with too little room to grow is preempted a few rounds later, its prompt computed in vain. So each
# preemption doubles the room that is asked for, and each request that ends lessens it again.
MAX_GROWTH_PAGES = 16


@dataclass(frozen=True, slots=True)
class _Reserve:
    request: Request
    deliver: Callable[[DecodeEvent], None]


@dataclass(frozen=True, slots=True)
class _Release:
    key: RequestKey


@dataclass(frozen=True, slots=True)
class _Quarantine:
    key: RequestKey
    peer: str


@dataclass(frozen=True, slots=True)
class _ForgetPeer:
    peer: str


@dataclass(frozen=True, slots=True)
class _Start:
    key: RequestKey
    first_token: Token
    tree: DraftTree
    kv_digest: bytes


@dataclass(frozen=True, slots=True)
class _Cancel:
    key: RequestKey


_Command = _Reserve | _Release | _Quarantine | _ForgetPeer | _Start | _Cancel


class DecodeScheduler:
    """See `graftline.engine.service_api.DecodeEngine`.

    Args:
        context_len: most tokens of prompt and output that the model and the pool can hold.
        vocab_size: token ids are below this.
        has_state: the model keeps recurrent state: peers write to slots too.
    """

    def __init__(
        self,
        config: EngineConfig,
        pipeline: StepPipeline,
        context_len: int,
        vocab_size: int,
        has_state: bool = False,
    ) -> None:
        self._config = config
        self._has_state = has_state
        self._path_len = config.tree.path_len
        self._round_layout = RoundLayout(config.tree.longest_path_len, config.tree.nodes)
        self._pipeline = pipeline
        self._context_len = context_len
        self._vocab_size = vocab_size
        self._pages = PageAllocator(config.num_pages)
        self._slots = SlotPool(config.max_running)
        self._quarantine = Quarantine(self._pages, self._slots, config.quarantine_s)
        self._requests: dict[RequestKey, DecodeRequest] = {}
        self._said: deque[tuple[Callable[[DecodeEvent], None], DecodeEvent]] = deque()
        self._line: WaitingLine[DecodeRequest] = WaitingLine()
        self._batches = MicrobatchSet(config.num_stages, config.rounds_ahead)
        self._steps = itertools.count()
        self._orders = itertools.count()
        self._arrivals = ArrivalChecks(pipeline, config.num_stages, has_state=has_state)
        self._rounds_since_preemption = 0
        self._growth_pages = 1  # kept for each request that has pages, before another gets any
        self._failed: str | None = None
        self._token_rate = RecentRate()
        self._recent_rounds = RecentRate(window_s=30.0)
        self._recent_accepted = RecentRate(window_s=30.0)
        self.totals = DecodeTotals()
        self._load = self._snapshot()
        self.thread: EngineThread[_Command] = EngineThread(
            "decode-engine",
            handle=self._handle,
            schedule=self._schedule,
            beat=self._beat,
            fail=self._fail,
            beat_s=config.heartbeat_s,
        )

    # --- asked by services, from any thread --------------------------------------------------------------------

    def reserve(self, request: Request, deliver: Callable[[DecodeEvent], None]) -> None:
        """See `DecodeEngine.reserve`."""
        check_request(request, self._context_len, self._vocab_size)
        if self._failed is not None:
            raise PeerUnavailableError(f"the decode engine failed: {self._failed}")
        if self._load.queued >= self._config.max_queued:
            raise OutOfCapacityError(f"{self._load.queued} requests are waiting already", retry_after_s=1.0)
        self.thread.put(_Reserve(request, deliver))

    def release(self, key: RequestKey) -> None:
        """See `DecodeEngine.release`."""
        self.thread.put(_Release(key))

    def quarantine(self, key: RequestKey, peer_incarnation: str) -> None:
        """See `DecodeEngine.quarantine`."""
        self.thread.put(_Quarantine(key, peer_incarnation))

    def forget_peer(self, peer_incarnation: str) -> None:
        """See `DecodeEngine.forget_peer`."""
        self.thread.put(_ForgetPeer(peer_incarnation))

    def start(self, key: RequestKey, first_token: Token, tree: DraftTree, kv_digest: bytes = b"") -> None:
        """See `DecodeEngine.start`."""
        self.thread.put(_Start(key, first_token, tree, kv_digest))

    def cancel(self, key: RequestKey) -> None:
        """See `DecodeEngine.cancel`."""
        self.thread.put(_Cancel(key))

    def load(self) -> EngineLoad:
        """A snapshot, as of the last turn of the loop."""
        return self._load

    # --- the engine's thread -----------------------------------------------------------------------------------

    def _handle(self, item: "_Command | Report") -> None:
        match item:
            case StepResult() | RoundResult():
                self._apply(item)
            case _Reserve(request, deliver):
                self._enqueue(request, deliver)
            case _Start(key, first_token, tree, kv_digest):
                self._begin(key, first_token, tree, kv_digest)
            case DigestDone():
                self._take_digest(item)
            case _Release(key):
                self._give_back(key)
            case _Quarantine(key, peer):
                self._set_aside(key, peer)
            case _ForgetPeer(peer):
                self._quarantine.forget_peer(peer)
            case _Cancel(key):
                self._cancel(key)
            case _:
                raise TypeError(f"{type(item).__name__} in a decode engine's inbox")

    def _schedule(self) -> None:
        self._reserve_from_line()
        while any(self._launch(batch) for batch in list(self._batches.ready())):
            pass
        self._load = self._snapshot()
        self._deliver()

    def _beat(self) -> None:
        self._quarantine.expire()
        self._refuse_stranded()
        self._pipeline.beat()
        self._load = self._snapshot()

    def _fail(self, reason: str) -> None:
        """Ends everybody. What late writes and stages may still do to the pages harms nobody: no one gets them."""
        self._failed = reason
        for request in list(self._requests.values()):
            self._forget(request)
            if not request.ended:
                self._say(request, DecodeFailed(reason, DecodeFailure.ENGINE_LOST))
        self._load = self._snapshot()
        self._deliver()

    def _say(self, request: DecodeRequest, event: DecodeEvent) -> None:
        """Delivers an event at the end of this turn: the stages' next rounds do not wait for who hears of the last."""
        self._said.append((request.deliver, event))

    def _deliver(self) -> None:
        while self._said:
            deliver, event = self._said.popleft()
            deliver(event)

    # --- reservations ------------------------------------------------------------------------------------------

    def _enqueue(self, request: Request, deliver: Callable[[DecodeEvent], None]) -> None:
        if self._failed is not None:
            deliver(DecodeFailed(self._failed, DecodeFailure.ENGINE_LOST))
            return
        if request.key in self._requests:
            deliver(DecodeFailed(f"{request.key} is reserved already"))
            return
        if len(self._line) >= self._config.max_queued:
            deliver(DecodeFailed(f"{len(self._line)} requests are waiting already", DecodeFailure.OUT_OF_CAPACITY))
            return
        waiting = DecodeRequest(request, deliver, self._context_len, order=next(self._orders))
        self._requests[request.key] = waiting
        self._line.append(waiting)

    def _reserve_from_line(self) -> None:
        while self._slots.num_free and len(self._line):
            request = self._line.take(partial(self._fits, self._pages.num_available - self._growth_room()))
            if request is None:
                return
            request.pages = self._pages.allocate(self._prompt_pages(request))
            request.slot = self._slots.take()
            request.phase = Phase.RESERVED
            self._say(request, Reserved(Destination(tuple(request.pages), request.slot)))

    def _refuse_stranded(self) -> None:
        """Ends the wait of those for whom no one who ends makes room, but the end of a quarantine alone."""
        pages = self._pages.gauges()
        usable = pages.total - pages.quarantined
        num_holders = len(self._requests) - len(self._line)
        has_slots = num_holders > 0 or self._slots.num_free > 0
        for request in list(self._line):
            is_stranded = self._prompt_pages(request) > usable or not has_slots
            request.stranded_beats = request.stranded_beats + 1 if is_stranded else 0
            if request.stranded_beats * self._config.heartbeat_s > self._config.quarantine_wait_s:
                reason = f"{pages.quarantined} of {pages.total} pages are in quarantine: a prefill was lost"
                logger.warning("%s is refused: %s", request.request.key, reason)
                self._forget(request)
                self._say(request, DecodeFailed(reason, DecodeFailure.OUT_OF_CAPACITY))

    def _fits(self, num_pages: int, request: DecodeRequest) -> bool:
        return self._prompt_pages(request) <= num_pages

    def _growth_room(self) -> int:
        """Pages that are left to those who have some already."""
        if self._growth_pages == 1:
            return len(self._requests) - len(self._line)
        page_size, most = self._config.page_size, self._growth_pages
        holders = (request for request in self._requests.values() if request.phase is not Phase.WAITING)
        return sum(min(most, request.missing_pages(page_size)) for request in holders)

    def _prompt_pages(self, request: DecodeRequest) -> int:
        return num_pages_for(len(request.request.token_ids), self._config.page_size)

    def _give_back(self, key: RequestKey) -> None:
        request = self._requests.get(key)
        if request is None or request.phase is Phase.RUNNING:
            return
        self._forget(request)

    def _set_aside(self, key: RequestKey, peer: str) -> None:
        request = self._requests.get(key)
        if request is None or request.phase is Phase.RUNNING:
            return
        if request.phase is Phase.RESERVED:
            logger.warning("%d pages of %s go into quarantine", len(request.pages), key)
            slot = request.slot if self._has_state else None
            self._quarantine.add(peer, request.pages, slot)
            request.pages = []
            self._forget(request, keep_slot=slot is not None)
            return
        self._forget(request)

    def _forget(self, request: DecodeRequest, *, keep_slot: bool = False) -> None:
        """The one path on which everything a request holds is given back; a slot in quarantine is not yet."""
        del self._requests[request.request.key]
        if request.phase is Phase.WAITING:
            self._line.remove(request)
            return
        self._batches.remove(request)
        self._pages.release(request.pages)
        if not keep_slot:
            self._slots.give_back(request.slot)

    # --- running -----------------------------------------------------------------------------------------------

    def _begin(self, key: RequestKey, first_token: Token, tree: DraftTree, kv_digest: bytes) -> None:
        request = self._requests.get(key)
        if request is None or request.phase is not Phase.RESERVED:
            logger.warning("%s was started but is not reserved", key)
            return
        request.start(first_token, self._usable(tree, first_token))
        if kv_digest:
            self._arrivals.begin(request, kv_digest)
        else:
            self._enter(request)

    def _enter(self, request: DecodeRequest) -> None:
        """The request's rounds may begin."""
        ending = request.ending_before_start()
        if ending is not None:
            self._end(request, ending)
        else:
            self._batches.add(request)

    def _take_digest(self, done: DigestDone) -> None:
        checked = self._arrivals.take(done)
        if checked is None:
            return
        request, is_whole = checked
        if self._requests.get(request.request.key) is not request:
            return  # cancelled meanwhile
        if is_whole:
            self._enter(request)
            return
        self.totals.failures += 1
        self._forget(request)
        self._say(request, DecodeFailed("the KV that arrived is not what was sent", DecodeFailure.KV_DIFFERS))

    def _usable(self, tree: DraftTree, first_token: Token) -> DraftTree:
        """The tree a peer sent as deep as rounds take it, if it is one for this first token and this model; any tree
        keeps output exact.
        """
        fits = tree.tokens[0] == first_token.token_id and tree.num_nodes <= self._config.tree.nodes
        if fits and all(0 <= token_id < self._vocab_size for token_id in tree.tokens):
            return tree.pruned(self._config.tree.longest_path_len - 1)
        logger.warning("a draft tree of %d nodes is not for this model: it is left out", tree.num_nodes)
        return DraftTree.root_only(first_token.token_id)

    def _cancel(self, key: RequestKey) -> None:
        request = self._requests.get(key)
        if request is None or request.phase is not Phase.RUNNING:
            return
        request.cancelled = True
        if not request.in_flight:
            self._drop_cancelled(request)

    def _drop_cancelled(self, request: DecodeRequest) -> None:
        self._forget(request)
        self._say(request, DecodeCancelled())

    def _end(self, request: DecodeRequest, ending: Ending) -> None:
        self._retire(request)
        self._growth_pages = max(1, self._growth_pages - 1)
        self._say(request, DecodeFinished(ending.reason, ending.stop_token_id, request.counts))

    def _retire(self, request: DecodeRequest) -> None:
        """Nothing more is wanted of a request. A round launched ahead still writes to its pages: they wait for it."""
        request.ended = True
        if not request.in_flight:
            self._forget(request)

    def _preempt(self, request: DecodeRequest) -> None:
        assert not request.in_flight, "a request in flight cannot lose its pages"
        logger.info("%s is preempted after %d output tokens", request.request.key, request.output_len)
        self.totals.preemptions += 1
        if not request.preempt_forced:
            self._growth_pages = min(2 * self._growth_pages, MAX_GROWTH_PAGES)
        self._forget(request)
        self._say(request, Preempted(request.counts))

    def _launch(self, batch: Microbatch) -> bool:
        """Starts a round of a microbatch, if it has anyone who can run; whether it did."""
        if batch.steps:
            wanted_pages = self._pages_of_next(batch)
            if wanted_pages is None:
                return False
            is_fixed = True
        else:
            wanted_pages = {}
            is_fixed = self._config.device_rounds and all(request.is_plain for request in batch.members)
        openings: list[SlotOpening] = []
        changes: list[PageChange] = []
        segments: list[Segment] = []
        for request in batch.members.copy():
            if not request.wants_rounds or request not in batch.members:
                continue  # among others: preempted for the sake of one before it
            if request.in_flight:
                segment: Segment | None = self._carry_on(request, wanted_pages[request.slot])
            else:
                segment = self._start_over(request)
            if segment is None:
                continue
            if not request.opened:
                openings.append(request.opening())
                request.opened = True
            change = request.page_change()
            if change is not None:
                changes.append(change)
            segments.append(segment)
        if segments:
            size = round_size(len(segments), self._config.max_running) if is_fixed else 0
            plan = StepPlan(next(self._steps), batch.index, openings, changes, segments, False, size)
            nodes = self._config.round_nodes(size) if is_fixed else self._config.tree.nodes
            batch.launched(plan.step, nodes=nodes, carries=is_fixed)
            self._pipeline.submit(plan)
        return bool(segments)

    def _pages_of_next(self, batch: Microbatch) -> dict[SlotId, int] | None:
        """Pages, by slot, for a round behind those under way, all of whose drafts may be accepted.

        Returns:
            None when it may not start before the one under way was read: without taking anything from anybody, with
            room for the worst case of both, and when no one waits for the microbatch to land: to be preempted, or
            moved.
        """
        if not batch.carries or self._batches.is_overfull(batch):
            return None
        wanted: dict[SlotId, int] = {}
        missing = 0
        is_under_way = False
        path_len, nodes, page_size = self._path_len, self._config.tree.nodes, self._config.page_size
        for request in batch.members:
            if request.preempt_wanted or request.preempt_forced or not request.is_plain:
                return None
            if not request.wants_rounds:
                continue
            if request.in_flight:
                is_under_way = True
                positions = request.committed + request.most_under_way(path_len) + nodes
            else:
                positions = request.committed + request.next_tree().num_nodes
            num_pages = wanted[request.slot] = num_pages_for(positions, page_size)
            missing += max(0, num_pages - len(request.pages))
        return wanted if is_under_way and missing <= self._pages.num_available else None

    def _carry_on(self, request: DecodeRequest, num_pages: int) -> Segment:
        if num_pages > len(request.pages):
            request.pages += self._pages.allocate(num_pages - len(request.pages))
        return request.carried_segment(grow=self._config.tree.speculates)

    def _start_over(self, request: DecodeRequest) -> Segment | None:
        """A round from what the host knows; None when the request must wait, or was preempted."""
        num_nodes = self._make_room(request)
        return None if num_nodes == 0 else request.segment(num_nodes, grow=self._config.tree.speculates)

    def _make_room(self, request: DecodeRequest) -> int:
        """Nodes of the request's tree that its pages can hold, after getting more pages as far as possible.

        Returns:
            0 when the request must wait, or was preempted itself.
        """
        page_size = self._config.page_size
        tree = request.next_tree()
        missing = num_pages_for(request.committed + tree.num_nodes, page_size) - len(request.pages)
        if missing > 0:
            request.pages += self._pages.allocate(min(missing, self._pages.num_available))
        nodes = min(tree.num_nodes, len(request.pages) * page_size - request.committed)
        if nodes > 0:
            return nodes
        victim = self._batches.youngest()
        if victim.in_flight:
            victim.preempt_wanted = True  # once it has landed
            return 0
        self._preempt(victim)
        return 0 if victim is request else self._make_room(request)

    def _apply(self, result: StepResult | RoundResult) -> None:
        self._pipeline.finished(result.step)
        batch, nodes = self._batches.landed(result.microbatch, result.step)
        by_slot: dict[int, DecodeRequest] = {request.slot: request for request in batch.members}
        outcomes: Sequence[Outcome] = (
            result.outcomes if isinstance(result, StepResult) else round_outcomes(result, self._round_layout)
        )
        totals = self.totals
        request_rounds, output_tokens = totals.request_rounds, totals.output_tokens
        for outcome in outcomes:
            request = by_slot[outcome.slot]
            request.landed(nodes)
            self._apply_outcome(request, outcome)
        totals.rounds += 1
        self._recent_rounds.add(totals.request_rounds - request_rounds)
        self._token_rate.add(totals.output_tokens - output_tokens)
        self._recent_accepted.add(totals.output_tokens - output_tokens)
        self._preempt_wanted(batch)
        self._force_preemption(batch)
        self._batches.level(batch)

    def _apply_outcome(self, request: DecodeRequest, outcome: Outcome) -> None:
        if request.ended:
            if not request.in_flight:
                self._forget(request)
            return
        if request.cancelled:
            if not request.in_flight:
                self._drop_cancelled(request)
            return
        if outcome.error:
            self.totals.failures += 1
            self._retire(request)
            self._say(request, DecodeFailed(outcome.error))
            return
        tokens, ending = request.apply(outcome)
        self._count(request, len(tokens.ids))
        self._say(request, tokens)
        if ending is not None:
            self._end(request, ending)

    def _count(self, request: DecodeRequest, num_tokens: int) -> None:
        totals = self.totals
        totals.request_rounds += 1
        totals.output_tokens += num_tokens
        totals.drafted += request.verified_nodes - 1
        totals.accepted += num_tokens - 1
        if request.rounds == 1:
            totals.first_rounds += 1
            totals.first_round_drafted += request.first_round_drafted
            totals.first_round_accepted += request.first_round_accepted

    def _preempt_wanted(self, batch: Microbatch) -> None:
        """Who was in flight when an older request needed its pages gives way now, if there still are none."""
        for request in [member for member in batch.members if not member.in_flight and not member.cancelled]:
            is_needed = request.preempt_wanted and self._pages.num_available == 0
            request.preempt_wanted = False
            if is_needed or request.preempt_forced:
                self._preempt(request)

    def _force_preemption(self, batch: Microbatch) -> None:
        """The test hook that makes preemption the common path."""
        if not self._config.preempt_every:
            return
        self._rounds_since_preemption += 1
        if self._rounds_since_preemption >= self._config.preempt_every and batch.members:
            self._rounds_since_preemption = 0
            batch.members[-1].preempt_forced = True
            self._preempt_wanted(batch)

    # --- looking in --------------------------------------------------------------------------------------------

    def _snapshot(self) -> EngineLoad:
        rounds = self._recent_rounds.total()
        return EngineLoad(
            queued=len(self._line),
            queued_tokens=sum(len(request.request.token_ids) for request in self._line),
            running=self._batches.num_requests,
            pages=self._pages.gauges(),
            slots_total=self._config.max_running,
            slots_free=self._slots.num_free,
            progress=self.totals.rounds,
            tokens_per_s=self._token_rate.per_second(),
            accept_length=self._recent_accepted.total() / rounds if rounds else 0.0,
            failed=self._failed,
            computing=self._pipeline.num_in_flight > 0,
            taken_s=time.monotonic(),
        )

    def check_quiescent(self) -> None:
        """Asserts that an idle engine holds nothing; call it only when no request is open."""
        self._pages.check_invariants()
        gauges = self._pages.gauges()
        assert not self._requests, f"requests left: {list(self._requests)}"
        assert not self._line
        assert self._batches.num_requests == 0
        assert gauges.used == 0, f"{gauges.used} pages are still used"
        assert self._slots.num_free == self._config.max_running
