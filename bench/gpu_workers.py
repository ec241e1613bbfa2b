"""A prefill and a decode worker in processes of their own, without services: for measurements over several GPUs.

The pair is driven as services drive it, over pipes. KV moves through the transfer engine, hidden states as the
configuration says. Seconds are of the monotonic clock, which all processes of a host share.
"""

import itertools
import multiprocessing
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from graftline.bench.gpu_pair import TimedAnswer
from graftline.bench.stage_use import Sign, SignLog
from graftline.engine.config import EngineConfig, Role
from graftline.engine.request import DraftTree, Request, RequestId, RequestKey, Sampling, Stopping, Token
from graftline.engine.service_api import (
    DecodeFinished,
    FirstToken,
    HandoffCounts,
    PrefillFinished,
    Reserved,
    Scheduled,
    Tokens,
)
from graftline.engine.worker_engine import WorkerEngine, start_decode_engine, start_prefill_engine
from graftline.garbage import keep_what_is_there
from graftline.worker.config import TransferConfig
from graftline.worker.facts import encode_peer, stage_layouts
from graftline.worker.process import die_with_parent, end_process, set_up_logging
from graftline.worker.stage_main import stage_command
from graftline.worker.transfer import PortFactory

_PEER = "decode"
_START_TIMEOUT_S = 240.0
_EVENT_TIMEOUT_S = 120.0
_ANSWER_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 20.0


# --- the process of a worker ------------------------------------------------------------------------------------------


def _host(channel: Connection, config_text: str, transfer_text: str) -> None:
    """Runs one engine and does what it is told."""
    die_with_parent(last_words_s=0)
    config = EngineConfig.from_json(config_text)
    set_up_logging(config.role.value)
    transfer = msgspec.json.decode(transfer_text, type=TransferConfig)
    start = start_prefill_engine if config.role is Role.PREFILL else start_decode_engine
    try:
        engine: WorkerEngine[Any] = start(config, PortFactory(transfer), stage_command(transfer), _START_TIMEOUT_S)
    except Exception as error:
        channel.send(("failed", f"{type(error).__name__}: {error}"))
        raise
    outbox = _Outbox(channel)
    keep_what_is_there()
    signs: SignLog | None = None
    channel.send(("ready", list(engine.layouts)))
    while True:
        try:
            name, values = channel.recv()
        except EOFError:
            end_process(1)
        if name == "stop":
            engine.stop(_STOP_TIMEOUT_S)
            outbox.put(("stopped", None))
            outbox.close()
            end_process(0)
        elif name == "watch":
            signs = SignLog(engine.stage_load)
        elif name == "signs":
            assert signs is not None, "nothing was watched"
            outbox.put(("signs", signs.finish()))
        else:
            _obey(engine, outbox, name, values)


def _obey(engine: WorkerEngine[Any], outbox: "_Outbox", name: str, values: tuple[Any, ...]) -> None:
    scheduler: Any = engine.scheduler
    match name:
        case "pair":
            scheduler.pair(*values)
        case "submit":
            index, request, real_tree = values
            scheduler.submit(request, _PEER, real_tree, outbox.events_of(index))
        case "destination":
            scheduler.set_destination(*values)
        case "reserve":
            index, request = values
            scheduler.reserve(request, outbox.events_of(index))
        case "start":
            scheduler.start(*values)
        case _:
            raise ValueError(f"a worker was told {name!r}")


class _Outbox:
    """Sends what several threads have to say, in order; what waits goes in one piece."""

    def __init__(self, channel: Connection) -> None:
        self._channel = channel
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, name="outbox", daemon=True)
        self._thread.start()

    def put(self, item: Any) -> None:
        self._waiting.put(item)

    def events_of(self, index: int) -> Callable[[Any], None]:
        """Takes a request's events; each is stamped as it comes."""
        return lambda event: self._waiting.put(("event", (index, time.monotonic(), event)))

    def close(self) -> None:
        """Waits until all is sent."""
        self._waiting.put(None)
        self._thread.join(_ANSWER_TIMEOUT_S)

    def _send(self) -> None:
        while True:
            items = [self._waiting.get()]
            while not self._waiting.empty():
                items.append(self._waiting.get())
            said = [item for item in items if item is not None]
            if said:
                self._channel.send(("said", said))
            if len(said) < len(items):
                return


# --- the driving process ----------------------------------------------------------------------------------------------


class WorkerProcess:
    """A worker's process, as its driver sees it.

    Args:
        heard: takes (index of the request, second, event).
    """

    def __init__(
        self, config: EngineConfig, transfer: TransferConfig, heard: Callable[[tuple[int, float, Any]], None]
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._channel, theirs = context.Pipe()
        texts = (config.to_json(), msgspec.json.encode(transfer).decode())
        self._process = context.Process(target=_host, args=(theirs, *texts), name=config.role.value)
        self._process.start()
        theirs.close()
        self._role = config.role.value
        self._heard = heard
        self._answers: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.layouts: list[bytes] = []

    def await_ready(self) -> None:
        """Until it serves. Raises RuntimeError when it does not."""
        if not self._channel.poll(_START_TIMEOUT_S):
            raise RuntimeError(f"the {self._role} was not ready within {_START_TIMEOUT_S:g} s")
        try:
            kind, value = self._channel.recv()
        except EOFError:
            raise RuntimeError(f"the {self._role} ended while it started") from None
        if kind != "ready":
            raise RuntimeError(f"the {self._role} did not start: {value}")
        self.layouts = value
        threading.Thread(target=self._listen, name=f"{self._role}-listener", daemon=True).start()

    def tell(self, name: str, *values: Any) -> None:
        """Has something done."""
        with self._lock:
            self._channel.send((name, values))

    @contextmanager
    def watched(self, signs: list[Sign]) -> Iterator[None]:
        """Adds every sign of life that its stages give while the block is open."""
        self.tell("watch")
        yield
        self.tell("signs")
        kind, value = self._answers.get(timeout=_ANSWER_TIMEOUT_S)
        assert kind == "signs"
        signs += value

    def stop(self) -> None:
        """Ends the process, by force if need be."""
        with suppress(OSError):  # it may be gone
            self.tell("stop")
        self._process.join(_STOP_TIMEOUT_S + _ANSWER_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _listen(self) -> None:
        while True:
            try:
                _, said = self._channel.recv()
            except (EOFError, OSError):
                self._heard((-1, time.monotonic(), f"the {self._role} process is gone"))
                return
            for kind, value in said:
                if kind == "event":
                    self._heard(value)
                else:
                    self._answers.put((kind, value))


@dataclass(slots=True)
class Handoff:
    """What moved for a request, in seconds of the monotonic clock.

    Attributes:
        finished_s: when every write was acknowledged.
    """

    counts: HandoffCounts = field(default_factory=HandoffCounts)
    finished_s: float = 0.0


@dataclass(slots=True)
class PairAnswer(TimedAnswer):
    """An answer with its handoff; without one for a single token.

    Attributes:
        started_s: when the decode was told to begin.
    """

    handoff: Handoff = field(default_factory=Handoff)
    started_s: float = 0.0

    @property
    def decode_tpot_s(self) -> float:
        """Seconds a token behind the first one, from the decode's start on."""
        return (self.arrivals[-1][0] - self.started_s) / max(1, len(self.ids) - 1)


class _Starts:
    """Has a decode begin requests when so many have come that are awaited."""

    def __init__(self, decode: WorkerProcess, num_awaited: int) -> None:
        self._decode = decode
        self._num_awaited = num_awaited
        self._waiting: list[tuple[PairAnswer, RequestKey, Token, DraftTree]] = []

    def add(self, answer: PairAnswer, key: RequestKey, first_token: Token, tree: DraftTree) -> None:
        """A request whose KV has arrived."""
        self._waiting.append((answer, key, first_token, tree))
        if len(self._waiting) < self._num_awaited:
            return
        for waiting, *values in self._waiting:
            waiting.started_s = time.monotonic()
            self._decode.tell("start", *values)
        self._waiting.clear()


class WorkerPair:
    """Two workers; see `worker_pair`."""

    def __init__(self, prefill: EngineConfig, decode: EngineConfig, transfer: TransferConfig) -> None:
        self._events: queue.SimpleQueue[tuple[int, float, Any]] = queue.SimpleQueue()
        self._ids = itertools.count()
        self.prefill = WorkerProcess(prefill, transfer, self._events.put)
        self.decode = WorkerProcess(decode, transfer, self._events.put)

    def await_ready(self) -> None:
        """Until both serve and are paired."""
        self.prefill.await_ready()
        self.decode.await_ready()
        self.prefill.tell("pair", _PEER, encode_peer(stage_layouts(self.decode.layouts)))

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        real_tree: bool = True,
        concurrency: int = 0,
        together: bool = False,
    ) -> list[PairAnswer]:
        """Every answer has `max_tokens` tokens.

        Args:
            concurrency: requests under way at a time; 0: all.
            together: no decode begins before the KV of all prompts has arrived; needs more tokens than one, and room
                for all of them at a time.

        Raises:
            RuntimeError: a request ended in another way than by its length, or nothing happened for long.
        """
        requests = [self._request(prompt, max_tokens) for prompt in prompts]
        answers = [PairAnswer(0.0) for _ in requests]
        assert not together or (concurrency in (0, len(requests)) and max_tokens > 1), "they would wait for ever"
        starts = _Starts(self.decode, len(requests) if together else 1)
        waiting = iter(range(len(requests)))
        for index in itertools.islice(waiting, concurrency or len(requests)):
            self._submit(index, requests[index], answers[index], real_tree)
        while not all(answer.ended for answer in answers):
            try:
                index, second, event = self._events.get(timeout=_EVENT_TIMEOUT_S)
            except queue.Empty:
                raise RuntimeError(f"no event for {_EVENT_TIMEOUT_S:g} s") from None
            if index < 0:
                raise RuntimeError(str(event))
            self._take(index, requests[index], answers[index], second, event, starts)
            if answers[index].ended and (following := next(waiting, None)) is not None:
                self._submit(following, requests[following], answers[following], real_tree)
        return answers

    def _request(self, prompt: Sequence[int], max_tokens: int) -> Request:
        key = RequestKey(RequestId(f"request-{next(self._ids)}"), 0)
        stopping = Stopping(max_tokens, 0, frozenset(), frozenset())
        return Request(key, tuple(prompt), len(prompt), Sampling(), stopping, None)

    def _submit(self, index: int, request: Request, answer: PairAnswer, real_tree: bool) -> None:
        answer.submitted_s = time.monotonic()
        self.prefill.tell("submit", index, request, real_tree)

    def _take(
        self, index: int, request: Request, answer: PairAnswer, second: float, event: Any, starts: _Starts
    ) -> None:
        is_short = request.stopping.max_tokens == 1
        match event:
            case Scheduled():
                if not is_short:
                    self.decode.tell("reserve", index, request)
            case Reserved(destination):
                self.prefill.tell("destination", request.key, destination)
            case FirstToken(token):
                _arrived(answer, [token.token_id], second)
            case PrefillFinished(tree=tree, handoff=counts):
                answer.handoff = Handoff(counts, second)
                if is_short:
                    answer.ended = True
                else:
                    starts.add(answer, request.key, Token(answer.ids[0]), tree)
            case Tokens(ids):
                _arrived(answer, ids, second)
            case DecodeFinished(speculation=speculation):
                answer.speculation, answer.ended = speculation, True
            case _:
                raise RuntimeError(f"{event} for {request.key}")


def _arrived(answer: PairAnswer, ids: Sequence[int], second: float) -> None:
    answer.ids += ids
    answer.arrivals.append((second, len(ids)))


@contextmanager
def worker_pair(
    prefill: EngineConfig, decode: EngineConfig, transfer: TransferConfig | None = None
) -> Iterator[WorkerPair]:
    """Starts both workers side by side; ends them with the block.

    Raises:
        RuntimeError: one did not start.
    """
    pair = WorkerPair(prefill, decode, transfer or TransferConfig())
    with ExitStack() as stack:
        stack.callback(pair.prefill.stop)
        stack.callback(pair.decode.stop)
        pair.await_ready()
        yield pair
