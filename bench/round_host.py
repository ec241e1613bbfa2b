"""What a decode round costs the host besides compute: a real scheduler over stages that only hand out tokens.

`python -m graftline.bench.round_host --out results/round_host.json` needs no GPU and takes some seconds. Microbatches
and rounds ahead are those of two stages on two GPUs. Processor time in microseconds: of the scheduler's thread, events
delivered, and of the messages between it and the last stage, which two processes share.
"""

import argparse
import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median

import torch
from torch import Tensor

from graftline.engine.config import EngineConfig, Role, StageChannel
from graftline.engine.decode_engine import DecodeScheduler
from graftline.engine.plan import Control, RoundResult, StepPlan, decode, encode
from graftline.engine.request import DraftTree, Request, RequestId, RequestKey, Sampling, Stopping, Token
from graftline.engine.round_results import round_result
from graftline.engine.service_api import DecodeEvent, Reserved
from graftline.engine.step_pipeline import StepPipeline
from graftline.engine.tree_shape import TreeShape
from graftline.worker.options import MAX_VERIFY_ROWS

TREE = TreeShape(5, 4, 16)
_VOCAB_SIZE = 49152
_CONTEXT_LEN = 8192
_PROMPT_LEN = 100
_PAGE_SIZE = 16
_RATE = 0.7  # of drafts that hold
_WARM_UP_ROUNDS = 100
_PARTS = 5  # rounds are measured in so many parts, of which the median counts
_DIFFERENT_ROUNDS = 64
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Found:
    """Microseconds of processor time a round; `request_us` is all of it for one request.

    Attributes:
        scheduler_us: results taken in, tokens delivered, the next round planned.
        plan_us: a plan encoded and decoded.
        result_us: a result made of what a device left, encoded and decoded.
        result_bytes: of an encoded result.
    """

    requests: int
    microbatch: int
    tokens_a_request: float
    scheduler_us: float
    plan_us: float
    result_us: float
    result_bytes: int

    @property
    def request_us(self) -> float:
        return (self.scheduler_us + self.plan_us + self.result_us) / self.microbatch


class _Stages(StepPipeline):
    """Answers rounds in a thread of its own, one at a time, as they would come from the last stage.

    Args:
        outputs: what rounds leave, in turn.

    Attributes:
        answer: takes a result.
        result_bytes: of the last one, encoded.
    """

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        self.answer: Callable[[RoundResult], None] = lambda _: None
        self._outputs = outputs
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._steps = 0
        self._clock = 0
        self._marks: list[tuple[float, float, float]] = []
        self._num_marks = threading.Condition()
        self.result_bytes = 0
        self.thread = threading.Thread(target=self._run, name="stages", daemon=True)

    @property
    def num_in_flight(self) -> int:
        return 1

    def submit(self, plan: StepPlan) -> None:
        self._clock = self._clock or time.pthread_getcpuclockid(threading.get_ident())
        self._plans.put(plan)

    def finished(self, step: int) -> None:
        pass

    def tell(self, control: Control, stages: list[int] | None = None) -> None:
        pass

    def beat(self) -> None:
        pass

    def marks(self, count: int) -> list[tuple[float, float, float]]:
        """Waits for so many rounds; seconds, at the begin of each, of the scheduler, of plans and of results."""
        with self._num_marks:
            if not self._num_marks.wait_for(lambda: len(self._marks) >= count, _TIMEOUT_S):
                raise RuntimeError(f"{len(self._marks)} of {count} rounds after {_TIMEOUT_S:g} s")
            return self._marks[:count]

    def stop(self) -> None:
        """Ends the thread."""
        self._plans.put(None)
        self.thread.join(_TIMEOUT_S)

    def _run(self) -> None:
        plan_s = result_s = 0.0
        while (plan := self._plans.get()) is not None:
            with self._num_marks:
                self._marks.append((time.clock_gettime(self._clock), plan_s, result_s))
                self._num_marks.notify_all()
            started = time.thread_time()
            there = decode(encode(plan))
            planned = time.thread_time()
            assert isinstance(there, StepPlan)
            sent = encode(round_result(there, self._outputs[self._steps % len(self._outputs)]))
            result = decode(sent)
            assert isinstance(result, RoundResult)
            plan_s += planned - started
            result_s += time.thread_time() - planned
            self._steps += 1
            self.result_bytes = len(sent)
            self.answer(result)


def measure(requests: int, rounds: int) -> Found:
    """So many requests at once in two microbatches.

    Raises:
        RuntimeError: rounds stopped.
    """
    count = -(-rounds // _PARTS) * _PARTS
    stages = _Stages([_output(requests, Random(index)) for index in range(_DIFFERENT_ROUNDS)])
    scheduler = DecodeScheduler(_config(requests), stages, _CONTEXT_LEN, _VOCAB_SIZE)
    stages.answer = scheduler.thread.put
    scheduler.thread.start()
    stages.thread.start()
    try:
        for index in range(requests):
            _begin(scheduler, index)
        marks = stages.marks(_WARM_UP_ROUNDS + count + 1)[_WARM_UP_ROUNDS:]
        totals = scheduler.totals
        tokens_a_request = totals.output_tokens / totals.request_rounds
        microbatch = round(totals.request_rounds / totals.rounds)
    finally:
        stages.stop()
        scheduler.thread.stop(_TIMEOUT_S)
    size = count // _PARTS
    parts = [
        [(after - before) / size * 1e6 for before, after in zip(marks[at], marks[at + size], strict=True)]
        for at in range(0, count, size)
    ]
    scheduler_us, plan_us, result_us = (round(median(figures), 1) for figures in zip(*parts, strict=True))
    return Found(requests, microbatch, tokens_a_request, scheduler_us, plan_us, result_us, stages.result_bytes)


def _config(requests: int) -> EngineConfig:
    return EngineConfig(
        model="none",
        role=Role.DECODE,
        draft_head="none",
        layer_split=(1, 1),
        stage_channel=StageChannel.DIRECT,
        page_size=_PAGE_SIZE,
        num_pages=requests * (_CONTEXT_LEN // _PAGE_SIZE),
        max_running=requests,
        tree=TREE,
        device_rounds=True,
        max_verify_rows=MAX_VERIFY_ROWS,
    )


def _begin(scheduler: DecodeScheduler, index: int) -> None:
    key = RequestKey(RequestId(f"request-{index}"), 0)
    stopping = Stopping(_CONTEXT_LEN, eos_token_ids=frozenset({0}))

    def deliver(event: DecodeEvent) -> None:
        if isinstance(event, Reserved):
            scheduler.start(key, Token(1), DraftTree.root_only(1))

    scheduler.reserve(Request(key, (1,) * _PROMPT_LEN, _PROMPT_LEN, Sampling(), stopping), deliver)


def _output(sequences: int, draw: Random) -> Tensor:
    """What a round leaves: [sequences, path_len + columns of `RoundLayout`]."""
    rows = []
    for _ in range(sequences):
        accepted = 1
        while accepted < TREE.path_len and draw.random() < _RATE:
            accepted += 1
        filler = [-1] * (TREE.path_len - accepted)
        emitted = [draw.randrange(1, _VOCAB_SIZE) for _ in range(accepted)]
        tokens = [emitted[-1], *(draw.randrange(1, _VOCAB_SIZE) for _ in range(TREE.nodes - 1))]
        parents = [-1, *range(TREE.depth), *[0] * (TREE.nodes - 1 - TREE.depth)]
        rows.append([*emitted, *filler, 0, TREE.nodes, *range(accepted), *filler, *tokens, *parents])
    return torch.tensor(rows, dtype=torch.int64)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints; writes JSON where asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", default="8,32", help="requests at once, in two microbatches")
    parser.add_argument("--rounds", type=int, default=1000, help="that are measured")
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = [measure(int(requests), options.rounds) for requests in options.requests.split(",")]
    for figures in found:
        print(
            f"{figures.requests} requests, {figures.microbatch} a round: scheduler {figures.scheduler_us:.0f} us, "
            f"plan {figures.plan_us:.0f}, result {figures.result_us:.0f} ({figures.result_bytes} bytes); "
            f"{figures.request_us:.1f} us a request"
        )
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps([asdict(figures) for figures in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
