"""A prefill engine and a decode engine in this process, joined as the services join them, without any service.

`with local_pair(model) as pair: pair.generate(ids, 20)`. Leaving the block asserts that every pool of both is whole.
"""

import itertools
import os
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any

import torch
from faulty_port import Network

from graftline.engine.config import EngineConfig, Role, StageMode
from graftline.engine.decode_engine import DecodeScheduler
from graftline.engine.kv_pool import KvPool
from graftline.engine.pipeline import StageCommand
from graftline.engine.prefill_engine import PrefillScheduler
from graftline.engine.request import (
    DraftTree,
    FinishReason,
    Request,
    RequestId,
    RequestKey,
    Sampling,
    Stopping,
    Token,
    TreeOrigin,
)
from graftline.engine.service_api import (
    DecodeCancelled,
    DecodeEvent,
    DecodeFailed,
    DecodeFinished,
    Drained,
    EngineLoad,
    FirstToken,
    HandoffCounts,
    Preempted,
    PrefillEvent,
    PrefillFailed,
    PrefillFinished,
    Reserved,
    Scheduled,
    SpeculationCounts,
    Tokens,
)
from graftline.engine.tree_shape import NO_SPECULATION, TreeShape
from graftline.engine.worker_engine import WorkerEngine, start_decode_engine, start_prefill_engine
from graftline.errors import GraftlineError
from graftline.worker.facts import encode_peer, stage_layouts

Event = PrefillEvent | DecodeEvent
PREFILL, DECODE = "prefill-1", "decode-1"
EVENT_TIMEOUT_S = 60.0
# The engine tests also run on a GPU: GRAFTLINE_TEST_DEVICE=cuda:0.
DEVICE = os.environ.get("GRAFTLINE_TEST_DEVICE", "cpu")


class End(Enum):
    """How a request ended."""

    FINISHED = auto()
    CANCELLED = auto()
    FAILED = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a test wants of a pair.

    Attributes:
        on_event: called with the call and every event, before the call acts on it; may cancel.
        edit_tree: what the decode gets in place of the tree that the prefill grew.
    """

    token_ids: Sequence[int]
    max_tokens: int = 16
    sampling: Sampling = field(default_factory=Sampling)
    min_tokens: int = 0
    eos_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    real_tree: bool = True
    on_event: Callable[["Call", Event], None] | None = None
    edit_tree: Callable[[DraftTree], DraftTree] | None = None

    def stopping(self) -> Stopping:
        return Stopping(self.max_tokens, self.min_tokens, self.stop_ids, self.eos_ids)


@dataclass(slots=True)
class Answer:
    """What came of it. Lists have an entry per attempt that got so far."""

    end: End
    reason: FinishReason | str | None
    tokens: list[Token]
    speculation: list[SpeculationCounts]
    handoffs: list[HandoffCounts]
    origins: list[TreeOrigin]
    cached: list[int]
    num_attempts: int
    events: list[Event]

    @property
    def ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    @property
    def total(self) -> SpeculationCounts:
        """Counts of all attempts, first rounds excepted."""
        return SpeculationCounts(
            sum(counts.rounds for counts in self.speculation),
            sum(counts.drafted for counts in self.speculation),
            sum(counts.accepted for counts in self.speculation),
        )


class _Pages(Enum):
    NONE = auto()
    IN_LINE = auto()
    EXPOSED = auto()
    RUNNING = auto()
    RETURNED = auto()


class Call:
    """One request on its way through both engines; acts on events as the decode's service would."""

    def __init__(self, pair: "LocalPair", ask: Ask, request_id: str) -> None:
        self.pair = pair
        self.ask = ask
        self._id = RequestId(request_id)
        self._attempt = -1
        self._first: Token | None = None
        self._leg_open = False
        self._pages = _Pages.NONE
        self._failure: str | None = None
        self.cancelling = False
        self.answer = Answer(End.FAILED, None, [], [], [], [], [], 0, [])
        self.ended = False

    @property
    def key(self) -> RequestKey:
        return RequestKey(self._id, self._attempt)

    def begin(self) -> None:
        """Submits the next attempt."""
        self._attempt += 1
        self.answer.num_attempts += 1
        self._first, self._pages = None, _Pages.NONE
        ids = (*self.ask.token_ids, *self.answer.ids)
        self._request = Request(
            self.key, ids, len(self.ask.token_ids), self.ask.sampling, self.ask.stopping(), self.ask.logprobs
        )
        self.pair.prefill.submit(self._request, DECODE, self.ask.real_tree, self._deliver(self._attempt))
        self._leg_open = True

    def cancel(self) -> None:
        """As when the caller goes away."""
        if self.ended or self.cancelling:
            return
        self.cancelling = True
        if self._pages is _Pages.RUNNING:
            self.pair.decode.cancel(self.key)
        else:
            self.pair.prefill.cancel(self.key)

    def _deliver(self, attempt: int) -> Callable[[Event], None]:
        return lambda event: self.pair.events.put((self, attempt, event))

    def take(self, attempt: int, event: Event) -> None:
        """Acts on an event of an engine."""
        if self.ended and isinstance(event, Reserved):
            return  # it crossed the release of a request that failed meanwhile
        assert not self.ended, f"{event} after the end of {self.key}"
        assert attempt == self._attempt, f"{event} of attempt {attempt} during {self._attempt}"
        self.answer.events.append(event)
        if self.ask.on_event is not None:
            self.ask.on_event(self, event)
        match event:
            case Scheduled(cached_tokens):
                self.answer.cached.append(cached_tokens)
                self._reserve()
            case Reserved(destination) if self._pages is _Pages.IN_LINE:
                self._pages = _Pages.EXPOSED
                self.pair.prefill.set_destination(self.key, destination)
            case FirstToken(token):
                self._first = token
                self.answer.tokens.append(token)
            case PrefillFinished():
                self._finish_prefill(event)
            case PrefillFailed(code, reason, drained):
                self._failure = self._failure or f"{code.value}: {reason}"
                self._close_leg(drained)
            case Drained():
                self._close_leg(drained=True)
            case Tokens():
                self.answer.tokens += event.tokens
            case _:
                self._end_decode(event)

    def _reserve(self) -> None:
        if self.cancelling or self._first_is_last:
            return
        self._pages = _Pages.IN_LINE
        try:
            self.pair.decode.reserve(self._request, self._deliver(self._attempt))
        except GraftlineError as error:
            self._pages = _Pages.NONE
            self._failure = str(error)
            self.pair.prefill.cancel(self.key)

    @property
    def _first_is_last(self) -> bool:
        return self._request.num_earlier_tokens + 1 >= self.ask.max_tokens

    def _finish_prefill(self, finished: PrefillFinished) -> None:
        self.answer.handoffs.append(finished.handoff)
        self.answer.origins.append(finished.tree_origin)
        assert self._first is not None, "a prefill finished before its first token"
        stop = self._first.token_id in self.ask.stopping().ending_ids
        if self.cancelling or self._failure is not None:
            self._close_leg(drained=True)
        elif stop or self._first_is_last:
            self._release()
            self._end(End.FINISHED, FinishReason.STOP if stop else FinishReason.LENGTH)
        else:
            self._leg_open, self._pages = False, _Pages.RUNNING
            tree = finished.tree if self.ask.edit_tree is None else self.ask.edit_tree(finished.tree)
            self.pair.decode.start(self.key, self._first, tree)

    def _close_leg(self, drained: bool) -> None:
        """The prefill is over without a handoff."""
        self._leg_open = False
        if drained or self._pages is not _Pages.EXPOSED:
            self._release()
        else:
            self.pair.decode.quarantine(self.key, PREFILL)
        self._end(End.CANCELLED if self.cancelling else End.FAILED, self._failure)

    def _release(self) -> None:
        if self._pages in (_Pages.IN_LINE, _Pages.EXPOSED):
            self.pair.decode.release(self.key)
        self._pages = _Pages.RETURNED

    def _end_decode(self, event: Event) -> None:
        match event:
            case DecodeFinished(reason, _, counts):
                self.answer.speculation.append(counts)
                self._end(End.FINISHED, reason)
            case Preempted(counts):
                self.answer.speculation.append(counts)
                if self.cancelling:
                    self._end(End.CANCELLED, None)
                else:
                    self.begin()
            case DecodeCancelled():
                self._end(End.CANCELLED, None)
            case DecodeFailed(reason) if self._leg_open:
                self._failure, self._pages = reason, _Pages.RETURNED
                self.pair.prefill.cancel(self.key)
            case DecodeFailed(reason):
                self._end(End.FAILED, reason)
            case _:
                raise AssertionError(f"{event} in phase {self._pages}")

    def _end(self, end: End, reason: FinishReason | str | None) -> None:
        self.answer.end, self.answer.reason = end, reason
        self.ended = True


@dataclass(slots=True)
class LocalPair:
    """Two running engines.

    Attributes:
        events: what both engines delivered and nobody acted on yet.
    """

    prefill_engine: WorkerEngine[PrefillScheduler]
    decode_engine: WorkerEngine[DecodeScheduler]
    network: Network
    events: "queue.SimpleQueue[tuple[Call, int, Event]]" = field(default_factory=queue.SimpleQueue)
    _ids: "itertools.count[int]" = field(default_factory=itertools.count)

    @property
    def prefill(self) -> PrefillScheduler:
        return self.prefill_engine.scheduler

    @property
    def decode(self) -> DecodeScheduler:
        return self.decode_engine.scheduler

    def introduce(self) -> None:
        """Tells the prefill where the decode's pools lie."""
        self.prefill.pair(DECODE, encode_peer(stage_layouts(self.decode_engine.layouts)))

    def submit(self, ask: Ask) -> Call:
        """Starts a request."""
        call = Call(self, ask, f"request-{next(self._ids)}")
        call.begin()
        return call

    def finish(self, calls: Sequence[Call], timeout_s: float = EVENT_TIMEOUT_S) -> list[Answer]:
        """Acts on events until all these calls ended."""
        self.pump(lambda: all(call.ended for call in calls), timeout_s)
        return [call.answer for call in calls]

    def pump(self, done: Callable[[], bool], timeout_s: float = EVENT_TIMEOUT_S) -> None:
        """Acts on events until `done()`; fails when none comes for so long."""
        while not done():
            self.pump_one(timeout_s)

    def pump_one(self, timeout_s: float = EVENT_TIMEOUT_S) -> None:
        """Acts on the next event; one for a request that ended is a fault."""
        call, attempt, event = self.events.get(timeout=timeout_s)
        call.take(attempt, event)

    def run(self, asks: Sequence[Ask], *, concurrency: int = 1_000_000) -> list[Answer]:
        """All requests, at most so many at once; answers in the order of asks."""
        calls: list[Call] = []
        waiting = list(asks)
        while waiting or not all(call.ended for call in calls):
            while waiting and sum(not call.ended for call in calls) < concurrency:
                calls.append(self.submit(waiting.pop(0)))
            open_now = sum(not call.ended for call in calls)
            self.pump(lambda before=open_now: sum(not call.ended for call in calls) < before)  # type: ignore[misc]
        return [call.answer for call in calls]

    def generate(self, token_ids: Sequence[int], max_tokens: int = 16, **others: Any) -> Answer:
        """One request alone."""
        return self.run([Ask(token_ids=token_ids, max_tokens=max_tokens, **others)])[0]

    def assert_quiescent(self, timeout_s: float = 20.0) -> None:
        """Waits until both engines say that nothing is held, then checks it (contract 9)."""
        self.await_load(lambda: _is_idle(self.prefill.load()) and _is_idle(self.decode.load()), timeout_s)
        while not self.events.empty():
            self.pump_one()
        self.prefill.check_quiescent()
        self.decode.check_quiescent()

    def await_load(self, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        """Until load snapshots, which announce nothing, show what is awaited."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"still busy: {self.prefill.load()}, {self.decode.load()}"
            time.sleep(0.002)


def _is_idle(load: EngineLoad) -> bool:
    if load.failed is not None:
        return True
    nothing = (load.queued, load.running, load.pages.used) == (0, 0, 0)
    return nothing and load.slots_free == load.slots_total and not load.computing


@contextmanager
def local_pair(
    model: Path,
    head: Path | None = None,
    *,
    tree: TreeShape | None = None,
    prefill_split: tuple[int, ...] = (4,),
    decode_split: tuple[int, ...] = (4,),
    dtype: str = "float32",
    page_size: int = 4,
    num_pages: int = 64,
    chunk_tokens: int = 16,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    quiescent: bool = True,
) -> Iterator[LocalPair]:
    """Starts both engines with thread stages and pairs them.

    Pools start full of NaN, so that reading anything that was never written shows.

    Args:
        prefill, decode: further fields of that side's configuration.
        quiescent: assert at the end that nothing is held; False for tests that break an engine.
    """
    shape = tree or (TreeShape() if head is not None else NO_SPECULATION)
    config = EngineConfig(
        model=str(model),
        role=Role.PREFILL,
        draft_head=None if head is None else str(head),
        dtype=dtype,
        devices=(DEVICE,),
        layer_split=prefill_split,
        stage_mode=StageMode.THREADS,
        page_size=page_size,
        num_pages=num_pages,
        chunk_tokens=chunk_tokens,
        tree=shape,
        heartbeat_s=0.1,
    )
    network = Network()
    sides = (
        _replaced(config, prefill or {}),
        _replaced(config, {"role": Role.DECODE, "layer_split": decode_split} | (decode or {})),
    )
    command = StageCommand("unused", {})
    engines: list[WorkerEngine[Any]] = []
    try:
        engines.append(start_prefill_engine(sides[0], network.ports(), command, 60))
        engines.append(start_decode_engine(sides[1], network.ports(), command, 60))
        for pools in network.pools:
            _poison(pools.target)
            _poison(pools.draft)
            if pools.states is not None:
                pools.states.data.fill_(0xFF)  # NaN of both types
        pair = LocalPair(engines[0], engines[1], network)
        pair.introduce()
        yield pair
        network.let_go()
        if quiescent:
            pair.assert_quiescent()
    finally:
        network.let_go()
        for engine in engines:
            engine.stop(10)


def _replaced(config: EngineConfig, fields: dict[str, Any]) -> EngineConfig:
    known = {name: getattr(config, name) for name in config.__struct_fields__}
    return EngineConfig(**(known | fields))


def _poison(pool: KvPool | None) -> None:
    if pool is not None:
        pool.data.fill_(torch.nan)
