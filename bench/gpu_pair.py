"""A prefill and a decode engine in this process, joined as their services join them, and requests timed through both.

Stages are threads; KV moves by plain copies between the pools, on a GPU too. For measurements: a request that does not
simply finish is an error.
"""

import itertools
import queue
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from graftline.engine.config import EngineConfig
from graftline.engine.decode_engine import DecodeScheduler
from graftline.engine.pipeline import StageCommand
from graftline.engine.prefill_engine import PrefillScheduler
from graftline.engine.request import Request, RequestId, RequestKey, Sampling, Stopping, Token
from graftline.engine.service_api import (
    DecodeEvent,
    DecodeFinished,
    FirstToken,
    PrefillEvent,
    PrefillFinished,
    Reserved,
    Scheduled,
    SpeculationCounts,
    Tokens,
)
from graftline.engine.transfer_port import StagePools, TransferPort
from graftline.engine.worker_engine import WorkerEngine, start_decode_engine, start_prefill_engine
from graftline.kv_transfer.in_process import InProcessHub
from graftline.worker.config import TransferConfig, TransportName
from graftline.worker.facts import encode_peer, stage_layouts
from graftline.worker.transfer import PortFactory

_DECODE = "decode"
_START_TIMEOUT_S = 240.0
_EVENT_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 20.0

Event = PrefillEvent | DecodeEvent


class PoolMemory:
    """Copies between the pools of one process by address, whatever device they are on; safe once all are known."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._bytes: list[Tensor] = []

    def add(self, data: Tensor) -> None:
        """A pool."""
        flat = data.view(-1).view(torch.uint8)
        at = bisect_right(self._starts, flat.data_ptr())
        self._starts.insert(at, flat.data_ptr())
        self._bytes.insert(at, flat)

    def copy(self, destination: int, source: int, num_bytes: int) -> None:
        """Has copied when it returns."""
        into, out_of = self._part(destination, num_bytes), self._part(source, num_bytes)
        into.copy_(out_of)
        if into.is_cuda:
            torch.cuda.current_stream(into.device).synchronize()

    def _part(self, address: int, num_bytes: int) -> Tensor:
        at = bisect_right(self._starts, address) - 1
        assert at >= 0, f"no pool holds address {address:#x}"
        first = address - self._starts[at]
        part = self._bytes[at][first : first + num_bytes]
        assert part.shape[0] == num_bytes, f"{num_bytes} bytes at {address:#x} lie in no pool"
        return part


class _KnownPort:
    """A stage's real port; its pools become known to the copies."""

    def __init__(self, port: TransferPort, memory: PoolMemory) -> None:
        self._port = port
        self._memory = memory
        self.pair = port.pair
        self.forget = port.forget
        self.send = port.send
        self.cancel = port.cancel
        self.digest = port.digest
        self.close = port.close

    def open(self, pools: StagePools) -> bytes:
        for pool in (pools.target, pools.draft, pools.states):
            if pool is not None and pool.num_bytes:
                self._memory.add(pool.data)
        return self._port.open(pools)


@dataclass(slots=True)
class TimedAnswer:
    """What came of a request. Seconds are on the monotonic clock.

    Attributes:
        arrivals: (second, tokens that came then), the first token included.
        speculation: rounds of the decode.
    """

    submitted_s: float
    ids: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)
    ended: bool = False

    @property
    def ttft_s(self) -> float:
        """Until the first token."""
        return self.arrivals[0][0] - self.submitted_s

    @property
    def tpot_s(self) -> float:
        """Seconds a token behind the first one."""
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / max(1, len(self.ids) - 1)

    @property
    def total_s(self) -> float:
        """From submission to the last token."""
        return self.arrivals[-1][0] - self.submitted_s


class EnginePair:
    """Two running engines; see `engine_pair`."""

    def __init__(self, prefill: WorkerEngine[PrefillScheduler], decode: WorkerEngine[DecodeScheduler]) -> None:
        self.prefill = prefill
        self.decode = decode
        self._events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        self._ids = itertools.count()
        prefill.scheduler.pair(_DECODE, encode_peer(stage_layouts(decode.layouts)))

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        real_tree: bool = True,
        sampling: Sampling | None = None,
    ) -> list[TimedAnswer]:
        """All prompts at once; every answer has `max_tokens` tokens.

        Raises:
            RuntimeError: a request ended in another way than by its length, or nothing happened for long.
        """
        requests = [self._request(prompt, max_tokens, sampling or Sampling()) for prompt in prompts]
        answers: list[TimedAnswer] = []
        for index, request in enumerate(requests):
            answers.append(TimedAnswer(time.monotonic()))
            self.prefill.scheduler.submit(request, _DECODE, real_tree, self._deliver(index))
        while not all(answer.ended for answer in answers):
            try:
                index, event = self._events.get(timeout=_EVENT_TIMEOUT_S)
            except queue.Empty:
                raise RuntimeError(f"no event for {_EVENT_TIMEOUT_S:g} s: {self._state()}") from None
            self._take(requests[index], answers[index], event, self._deliver(index))
        return answers

    def _request(self, prompt: Sequence[int], max_tokens: int, sampling: Sampling) -> Request:
        key = RequestKey(RequestId(f"request-{next(self._ids)}"), 0)
        stopping = Stopping(max_tokens, 0, frozenset(), frozenset())
        return Request(key, tuple(prompt), len(prompt), sampling, stopping, None)

    def _deliver(self, index: int) -> Callable[[Event], None]:
        return lambda event: self._events.put((index, event))

    def _take(self, request: Request, answer: TimedAnswer, event: Event, deliver: Callable[[Event], None]) -> None:
        decode = self.decode.scheduler
        is_short = request.stopping.max_tokens == 1
        match event:
            case Scheduled():
                if not is_short:
                    decode.reserve(request, deliver)
            case Reserved(destination):
                self.prefill.scheduler.set_destination(request.key, destination)
            case FirstToken(token):
                _arrived(answer, [token.token_id])
            case PrefillFinished(tree=tree):
                if is_short:
                    answer.ended = True
                else:
                    decode.start(request.key, Token(answer.ids[0]), tree)
            case Tokens(ids):
                _arrived(answer, ids)
            case DecodeFinished(speculation=speculation):
                answer.speculation, answer.ended = speculation, True
            case _:
                raise RuntimeError(f"{event} for {request.key}")

    def _state(self) -> str:
        return f"prefill {self.prefill.load()}, decode {self.decode.load()}"


def _arrived(answer: TimedAnswer, ids: Sequence[int]) -> None:
    answer.ids += ids
    answer.arrivals.append((time.monotonic(), len(ids)))


@contextmanager
def engine_pair(prefill: EngineConfig, decode: EngineConfig) -> Iterator[EnginePair]:
    """Starts both engines; stops them at the end.

    Raises:
        InvalidRequestError: a configuration that does not fit the model.
        InternalError: a stage did not start.
    """
    memory = PoolMemory()
    hub = InProcessHub(memory.copy)

    def ports() -> Callable[[int], TransferPort]:
        factory = PortFactory(TransferConfig(transport=TransportName.IN_PROCESS), hub)
        return lambda stage: _KnownPort(factory(stage), memory)

    command = StageCommand("unused", {})
    prefill_engine = start_prefill_engine(prefill, ports(), command, _START_TIMEOUT_S)
    try:
        decode_engine = start_decode_engine(decode, ports(), command, _START_TIMEOUT_S)
        try:
            yield EnginePair(prefill_engine, decode_engine)
        finally:
            decode_engine.stop(_STOP_TIMEOUT_S)
    finally:
        prefill_engine.stop(_STOP_TIMEOUT_S)
