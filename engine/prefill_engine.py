"""The prefill engine: plans prompt chunks, orders full pages to be sent while later chunks compute, ends jobs.

Only this thread schedules. A job ends in one place (`_settle`), once no step computes into its pages and no
stage sends from them.
"""

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from graftline.engine.chunk_share import share_chunk
from graftline.engine.config import EngineConfig
from graftline.engine.engine_thread import EngineThread
from graftline.engine.pages import PageAllocator, num_pages_for, prefix_keys
from graftline.engine.plan import (
    CancelSends,
    ForgetPeer,
    PageChange,
    PairPeer,
    Report,
    Segment,
    SegmentOutcome,
    SendDone,
    SendOrder,
    SentPool,
    SlotOpening,
    StepPlan,
    StepResult,
    StepTokens,
)
from graftline.engine.prefill_job import PrefillJob
from graftline.engine.rates import PrefillTotals, RecentRate
from graftline.engine.request import DraftTree, Request, RequestKey, SlotId, TreeOrigin
from graftline.engine.request_check import check_request
from graftline.engine.service_api import (
    Destination,
    Drained,
    EngineLoad,
    FirstToken,
    PrefillEvent,
    PrefillFailed,
    PrefillFailure,
    PrefillFinished,
    Scheduled,
)
from graftline.engine.slots import SlotPool
from graftline.engine.step_pipeline import StepPipeline
from graftline.engine.transfer_port import page_runs
from graftline.engine.waiting_line import WaitingLine
from graftline.errors import OutOfCapacityError, PeerUnavailableError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Submit:
    job: PrefillJob


@dataclass(frozen=True, slots=True)
class _SetDestination:
    key: RequestKey
    destination: Destination


@dataclass(frozen=True, slots=True)
class _Cancel:
    key: RequestKey


@dataclass(frozen=True, slots=True)
class _Pair:
    peer: str
    layout: bytes


@dataclass(frozen=True, slots=True)
class _Forget:
    peer: str


_Command = _Submit | _SetDestination | _Cancel | _Pair | _Forget


class PrefillScheduler:
    """See `graftline.engine.service_api.PrefillEngine`.

    Args:
        context_len: most tokens that the model and the pool can hold.
        vocab_size: token ids are below this.
        has_state: the model keeps recurrent state, which is handed over too. It goes with a whole prompt only, so that
            there is no prefix cache.
    """

    def __init__(
        self,
        config: EngineConfig,
        pipeline: StepPipeline,
        context_len: int,
        vocab_size: int,
        has_state: bool = False,
    ) -> None:
        assert not (has_state and config.prefix_cache), "a prefix cache holds no recurrent state"
        self._config = config
        self._has_state = has_state
        self._pipeline = pipeline
        self._context_len = context_len
        self._vocab_size = vocab_size
        self._pages = PageAllocator(config.num_pages)
        self._slots = SlotPool(config.max_running)
        self._jobs: dict[RequestKey, PrefillJob] = {}
        self._line: WaitingLine[PrefillJob] = WaitingLine()
        self._computing: list[PrefillJob] = []
        self._peers: set[str] = set()
        self._by_step: dict[int, list[PrefillJob]] = {}
        self._by_order: dict[int, PrefillJob] = {}
        self._steps = itertools.count()
        self._orders = itertools.count()
        self._paired: frozenset[str] = frozenset()
        self._failed: str | None = None
        self._token_rate = RecentRate()
        self.totals = PrefillTotals()
        self._load = self._snapshot()
        self.thread: EngineThread[_Command] = EngineThread(
            "prefill-engine",
            handle=self._handle,
            schedule=self._schedule,
            beat=self._beat,
            fail=self._fail,
            beat_s=config.heartbeat_s,
        )

    # --- asked by services, from any thread --------------------------------------------------------------------

    def submit(
        self, request: Request, decode_incarnation: str, real_tree: bool, deliver: Callable[[PrefillEvent], None]
    ) -> None:
        """See `PrefillEngine.submit`."""
        check_request(request, self._context_len, self._vocab_size)
        if self._failed is not None:
            raise PeerUnavailableError(f"the prefill engine failed: {self._failed}")
        if decode_incarnation not in self._paired:
            raise PeerUnavailableError(f"decode {decode_incarnation} is not paired")
        if self._load.queued >= self._config.max_queued:
            raise OutOfCapacityError(f"{self._load.queued} requests are waiting already", retry_after_s=1.0)
        grows = real_tree and self._config.real_trees
        self.thread.put(_Submit(PrefillJob(request, decode_incarnation, grows, deliver)))

    def set_destination(self, key: RequestKey, destination: Destination) -> None:
        """See `PrefillEngine.set_destination`."""
        self.thread.put(_SetDestination(key, destination))

    def cancel(self, key: RequestKey) -> None:
        """See `PrefillEngine.cancel`."""
        self.thread.put(_Cancel(key))

    def pair(self, peer: str, layout: bytes) -> None:
        """A decode's pools may be written to from now on; `layout` goes to the transfer ports unread."""
        self._paired |= {peer}
        self.thread.put(_Pair(peer, layout))

    def forget(self, peer: str) -> None:
        """A decode is gone."""
        self._paired -= {peer}
        self.thread.put(_Forget(peer))

    def load(self) -> EngineLoad:
        """A snapshot, as of the last turn of the loop."""
        return self._load

    # --- the engine's thread -----------------------------------------------------------------------------------

    def _handle(self, item: "_Command | Report") -> None:
        match item:
            case StepTokens():
                self._take_tokens(item)
            case StepResult():
                self._take_result(item)
            case SendDone():
                self._take_send(item)
            case _Submit(job):
                self._enqueue(job)
            case _SetDestination(key, destination):
                self._direct(key, destination)
            case _Cancel(key):
                self._cancel(key)
            case _Pair(peer, layout):
                self._peers.add(peer)
                self._pipeline.tell(PairPeer(peer, layout))
            case _Forget(peer):
                self._peers.discard(peer)
                self._pipeline.tell(ForgetPeer(peer))
            case _:
                raise TypeError(f"{type(item).__name__} in a prefill engine's inbox")

    def _schedule(self) -> None:
        while self._pipeline.num_in_flight < self._config.num_stages:
            self._admit()
            if not self._launch():
                break
        self._load = self._snapshot()

    def _beat(self) -> None:
        self._pipeline.beat()
        self._load = self._snapshot()

    def _fail(self, reason: str) -> None:
        """Ends everybody. A write whose answer is still out may land later."""
        self._failed = reason
        for job in list(self._jobs.values()):
            self._forget(job)
            drained = job.ledger.is_settled and job.ledger.drained
            job.deliver(PrefillFailed(PrefillFailure.INTERNAL, reason, drained))
        self._by_step.clear()
        self._by_order.clear()
        self._load = self._snapshot()

    # --- arriving ----------------------------------------------------------------------------------------------

    def _enqueue(self, job: PrefillJob) -> None:
        if self._failed is not None:
            job.deliver(PrefillFailed(PrefillFailure.INTERNAL, self._failed, drained=True))
            return
        refusal = self._refusal(job)
        if refusal is not None:
            job.deliver(refusal)
            return
        self._jobs[job.request.key] = job
        self._line.append(job)

    def _refusal(self, job: PrefillJob) -> PrefillFailed | None:
        if job.request.key in self._jobs:
            reason = f"{job.request.key} was submitted already"
            return PrefillFailed(PrefillFailure.INVALID_REQUEST, reason, drained=True)
        if len(self._line) >= self._config.max_queued:
            reason = f"{len(self._line)} requests are waiting already"
            return PrefillFailed(PrefillFailure.OUT_OF_CAPACITY, reason, drained=True)
        return None

    def _admit(self) -> None:
        """Gives waiting jobs pages and a slot as long as there are any.

        A decode without room gives its jobs nowhere to go: where there are several, those of one leave some slots and
        pages to the others'.
        """
        waiting = [job for job in self._computing if job.destination is None]
        stranded = Counter(job.peer for job in waiting)
        stranded_pages: Counter[str] = Counter()
        for one in waiting:
            stranded_pages[one.peer] += len(one.pages)
        most, most_pages = self._config.max_running, self._config.num_pages
        if len(self._peers) > 1:
            most, most_pages = (max(1, all_of - max(1, all_of // 4)) for all_of in (most, most_pages))

        barred: set[str] = set()  # whose next one may not begin: those behind it would pass it for ever

        def may_begin(job: PrefillJob) -> bool:
            num_pages = stranded_pages[job.peer] + num_pages_for(job.prompt_len, self._config.page_size)
            is_too_much = stranded[job.peer] >= most or (stranded[job.peer] > 0 and num_pages > most_pages)
            if is_too_much:
                barred.add(job.peer)
            return job.peer not in barred

        while self._slots.num_free and (job := self._line.take(self._find_pages, may_begin)) is not None:
            barred.clear()
            job.slot = self._slots.take()
            job.scheduled_s = time.monotonic()
            self._computing.append(job)
            stranded[job.peer] += 1
            stranded_pages[job.peer] += len(job.pages)
            self.totals.cached_tokens += job.cached
            job.deliver(Scheduled(job.cached))

    def _find_pages(self, job: PrefillJob) -> bool:
        """Takes every page the prompt needs, sharing those whose prefix is known."""
        page_size = self._config.page_size
        wanted = num_pages_for(job.prompt_len, page_size)
        shared = []
        if self._config.prefix_cache:
            if not job.keys:
                job.keys = prefix_keys(job.request.token_ids, page_size, int(self._config.tree.speculates))
            shared = self._pages.find(job.keys)[: (job.prompt_len - 1) // page_size]  # one token must be computed
        self._pages.hold(shared)
        if wanted - len(shared) > self._pages.num_available:
            self._pages.release(reversed(shared))  # as in `_forget`
            return False
        job.pages = shared + self._pages.allocate(wanted - len(shared))
        job.planned = job.cached = len(shared) * page_size
        return True

    def _direct(self, key: RequestKey, destination: Destination) -> None:
        job = self._jobs.get(key)
        if job is None or job.destination is not None or job.is_ending:
            return
        wanted = num_pages_for(job.prompt_len, self._config.page_size)
        if len(destination.page_ids) != wanted:
            reason = f"a destination of {len(destination.page_ids)} pages for a prompt that needs {wanted}"
            self._fail_job(job, PrefillFailed(PrefillFailure.INVALID_REQUEST, reason, drained=True))
            return
        job.destination = destination
        self._order_sends(job)
        self._settle(job)

    # --- computing ---------------------------------------------------------------------------------------------

    def _launch(self) -> bool:
        """Plans one step out of the jobs that have prompt left; whether there was anything to plan."""
        openings: list[SlotOpening] = []
        changes: list[PageChange] = []
        segments: list[Segment] = []
        jobs: list[PrefillJob] = []
        open_jobs = [job for job in self._computing if not (job.is_planned or job.is_ending)]
        shares = share_chunk([job.prompt_len - job.planned for job in open_jobs], self._config.chunk_tokens)
        for job, count in zip(open_jobs, shares, strict=True):
            if count == 0:
                continue
            if job.chunks == 0:
                openings.append(SlotOpening.of(job.request, int(job.slot)))
                changes.append(PageChange(int(job.slot), 0, [int(page) for page in job.pages]))
            segments.append(self._chunk(job, count))
            jobs.append(job)
            job.planned += count
            job.chunks += 1
        if not segments:
            return False
        self._start_step(StepPlan(next(self._steps), 0, openings, changes, segments, early_tokens=True), jobs)
        return True

    def _start_step(self, plan: StepPlan, jobs: list[PrefillJob]) -> None:
        self._by_step[plan.step] = jobs
        self._pipeline.submit(plan)
        self.totals.steps += 1
        self.totals.computed_tokens += plan.num_rows
        self._token_rate.add(plan.num_rows)
        for job in jobs:
            job.steps.add(plan.step)
            job.step_ends.append((job.planned, plan.step))
            self._order_sends(job)

    def _chunk(self, job: PrefillJob, count: int) -> Segment:
        end = job.planned + count
        is_final = end == job.prompt_len
        more_wanted = job.request.stopping.max_tokens > job.request.num_earlier_tokens + 1
        return Segment(
            slot=int(job.slot),
            start=job.planned,
            tokens=list(job.request.token_ids[job.planned : end]),
            parents=None,
            first_sampled=count - 1 if is_final else count,
            next_token=-1 if is_final else job.request.token_ids[end],
            accepted=[],
            grow=is_final and job.real_tree and more_wanted and self._config.tree.speculates,
        )

    def _take_tokens(self, tokens: StepTokens) -> None:
        for outcome in tokens.outcomes:
            job = self._job_of(tokens.step, outcome.slot)
            if not job.is_ending and not outcome.error:
                self._take_first_token(job, outcome)

    def _take_first_token(self, job: PrefillJob, outcome: SegmentOutcome) -> None:
        token = outcome.tokens[0].to_token()
        job.judge_first_token(token)
        job.deliver(FirstToken(token))

    def _take_result(self, result: StepResult) -> None:
        self._pipeline.finished(result.step)
        for outcome in result.outcomes:
            job = self._job_of(result.step, outcome.slot)
            job.steps.discard(result.step)
            if outcome.error:
                self._fail_job(job, PrefillFailed(PrefillFailure.INTERNAL, outcome.error, drained=True))
                continue
            if outcome.tokens and not job.is_ending:
                if job.first_token is None:
                    self._take_first_token(job, outcome)
                job.tree = outcome.tree() or DraftTree.root_only(outcome.tokens[0].token_id)
                if self._config.prefix_cache:
                    self._pages.publish(job.keys, job.pages[: len(job.keys)])
            self._settle(job)
        del self._by_step[result.step]

    def _job_of(self, step: int, slot: int) -> PrefillJob:
        return next(job for job in self._by_step[step] if job.slot == SlotId(slot))

    # --- sending -----------------------------------------------------------------------------------------------

    def _order_sends(self, job: PrefillJob) -> None:
        """Orders what is planned and not yet ordered: full pages, and the last partial one with the prompt's end.
        A stage waits by itself until its step has computed them.
        """
        if job.destination is None or job.is_ending:
            return
        page_size = self._config.page_size
        end = len(job.pages) if job.is_planned else job.planned // page_size
        if job.ends_with_first_token or end == job.sent_pages:
            return
        every_stage = list(range(self._config.num_stages))
        after = job.step_that_computed(min(end * page_size, job.prompt_len))
        targets = job.destination.page_ids
        pages = page_runs(job.pages[job.sent_pages : end], targets[job.sent_pages : end])
        self._order(job, SentPool.TARGET, after, pages, every_stage)
        job.sent_pages = end
        if self._config.tree.speculates:
            self._order(job, SentPool.DRAFT, after, pages, every_stage[-1:])
        if self._has_state and job.is_planned:  # the state is final once, with the last pages
            self._order(job, SentPool.STATE, after, [(job.slot, job.destination.slot_id, 1)], every_stage)

    def _order(
        self, job: PrefillJob, pool: SentPool, after_step: int, runs: list[tuple[int, int, int]], stages: list[int]
    ) -> None:
        number = next(self._orders)
        order = SendOrder(order=number, owner=job.owner, peer=job.peer, after_step=after_step, pool=pool, runs=runs)
        self._by_order[number] = job
        job.ledger.expect(number, len(stages))
        self._pipeline.tell(order, stages)

    def _take_send(self, done: SendDone) -> None:
        job = self._by_order.get(done.order)
        if job is None:
            return
        job.ledger.take(done)
        if done.order not in job.ledger.open_answers:
            del self._by_order[done.order]
        self.totals.sends += 1
        self.totals.sent_bytes += done.num_bytes
        self.totals.send_s += done.seconds
        if done.error and not job.is_ending:
            self.totals.failed_sends += 1
            self._fail_job(job, PrefillFailed(PrefillFailure.TRANSFER_FAILED, job.ledger.error, drained=True))
        else:
            self._settle(job)

    # --- ending ------------------------------------------------------------------------------------------------

    def _cancel(self, key: RequestKey) -> None:
        job = self._jobs.get(key)
        if job is None or job.cancelled:
            return
        job.cancelled = True
        self._stop_sends(job)
        self._settle(job)

    def _fail_job(self, job: PrefillJob, failure: PrefillFailed) -> None:
        if not job.is_ending:
            job.failure = failure
            self.totals.failures += 1
            self._stop_sends(job)
        self._settle(job)

    def _stop_sends(self, job: PrefillJob) -> None:
        if not job.ledger.is_settled:
            self._pipeline.tell(CancelSends(job.owner))

    def _settle(self, job: PrefillJob) -> None:
        """Ends a job that has nothing under way and either all it wanted or no more wants. The only way out."""
        if job.request.key not in self._jobs or not job.is_idle:
            return
        event = self._terminal_event(job)
        if event is None:
            return
        self._forget(job)
        job.deliver(event)

    def _forget(self, job: PrefillJob) -> None:
        """Gives back everything a job holds."""
        del self._jobs[job.request.key]
        if job in self._computing:
            self._computing.remove(job)
            self._slots.give_back(job.slot)
            self._pages.release(reversed(job.pages))  # a prefix is evicted from its end
        else:
            self._line.remove(job)

    def _terminal_event(self, job: PrefillJob) -> PrefillEvent | None:
        if job.cancelled and job.ledger.drained:
            return Drained()
        if job.cancelled:
            return PrefillFailed(PrefillFailure.TRANSFER_FAILED, job.ledger.error, drained=False)
        if job.failure is not None:
            failure = job.failure
            return PrefillFailed(failure.code, failure.reason, drained=job.ledger.drained)
        if job.tree is None:
            return None
        if not job.ends_with_first_token and (job.destination is None or job.sent_pages < len(job.pages)):
            return None
        digest = job.ledger.digest.to_bytes(16) if job.ledger.digest else b""
        return PrefillFinished(job.tree, self._origin(job), job.handoff(), digest)

    def _origin(self, job: PrefillJob) -> TreeOrigin:
        if not self._config.tree.speculates:
            return TreeOrigin.NONE
        is_real = job.tree is not None and job.tree.num_nodes > 1
        return TreeOrigin.REAL if is_real else TreeOrigin.ROOT_ONLY

    # --- looking in --------------------------------------------------------------------------------------------

    def _snapshot(self) -> EngineLoad:
        return EngineLoad(
            queued=len(self._line),
            queued_tokens=sum(job.prompt_len for job in self._line)
            + sum(job.prompt_len - job.planned for job in self._computing),
            running=len(self._computing),
            pages=self._pages.gauges(),
            slots_total=self._config.max_running,
            slots_free=self._slots.num_free,
            progress=self.totals.steps + self.totals.sends,
            tokens_per_s=self._token_rate.per_second(),
            accept_length=0.0,
            failed=self._failed,
            computing=self._pipeline.num_in_flight > 0,
            taken_s=time.monotonic(),
        )

    def check_quiescent(self) -> None:
        """Asserts that an idle engine holds nothing; call it only when no request is open."""
        self._pages.check_invariants()
        assert not self._jobs, f"jobs left: {list(self._jobs)}"
        assert not self._line
        assert not self._computing
        assert not self._by_step
        assert not self._by_order
        gauges = self._pages.gauges()
        assert gauges.used == 0, f"{gauges.used} pages are still used"
        assert self._slots.num_free == self._config.max_running
