"""One stage alone, without scheduler or links: requests with a chosen past, and steps as fast as they can be launched.

What it takes is the compute side of a round: the floor under what a worker needs.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from graftline.bench.gpu_rates import wait
from graftline.engine.config import EngineConfig
from graftline.engine.decode_request import Outcome
from graftline.engine.device_rounds import round_size
from graftline.engine.memory_plan import DTYPES
from graftline.engine.models.checkpoint import read_model_config
from graftline.engine.plan import PageChange, RoundResult, Segment, SlotOpening, StepPlan, StepReport, StepResult
from graftline.engine.round_results import round_outcomes
from graftline.engine.stage_builder import BuiltStage, build_stage
from graftline.kernels.attention_backend import settle_backend

_RESULT_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Rounds of one kind.

    Attributes:
        wall_s: seconds a round, from the first launch until the device is done with the last.
        launch_s: seconds of them that the host took to launch one.
        emitted: tokens a round and request.
    """

    batch: int
    context: int
    rounds: int
    wall_s: float
    launch_s: float
    emitted: float


@dataclass(slots=True)
class _Heard:
    """Results in order of their steps."""

    results: list[StepResult | RoundResult] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, message: StepReport) -> None:
        if isinstance(message, StepResult | RoundResult):
            with self.changed:
                self.results.append(message)
                self.changed.notify_all()

    def wait_for(self, count: int) -> list[StepResult | RoundResult]:
        with self.changed:
            arrived = self.changed.wait_for(lambda: len(self.results) >= count, _RESULT_TIMEOUT_S)
            if not arrived:
                raise RuntimeError(f"{len(self.results)} of {count} results after {_RESULT_TIMEOUT_S:g} s")
            return self.results


class StageAlone:
    """A one-stage worker's stage with weights and pools.

    Args:
        config: of one stage; its pools must hold what is opened.
    """

    def __init__(self, config: EngineConfig) -> None:
        assert config.num_stages == 1, "a stage alone has all layers"
        self.config = config
        self.device = torch.device(config.devices[0])
        self._built: BuiltStage = build_stage(config, 0)
        self.stage = self._built.stage
        self._heard = _Heard()
        self._steps = 0
        self._expected = 0
        self._next: list[Segment] = []
        self._fill(self._built)

    @property
    def attention_name(self) -> str:
        """How its planned steps attend."""
        head_dim = read_model_config(Path(self.config.model)).head_dim
        dtype = DTYPES[self.config.dtype]
        return settle_backend(self.config.attention_backend, self.device, dtype, head_dim).value

    def _fill(self, built: BuiltStage) -> None:
        """Random keys and values: zeros would flatter a device that clocks by the power it takes."""
        for pool in (built.pools.target, built.pools.draft):
            if pool is not None and pool.num_bytes:
                pool.data.normal_()

    def open(self, batch: int, context: int, room: int, tokens: Sequence[int] = (1,)) -> None:
        """Requests 0 .. batch-1 with `context` committed tokens and room for `room` more; those before are forgotten.

        Args:
            tokens: last token of the requests, in turn.
        """
        page_size = self.config.page_size
        each = -(-(context + room) // page_size)
        assert batch * each <= self.config.num_pages, f"{batch} requests of {each} pages in {self.config.num_pages}"
        self._openings = [SlotOpening(slot, 0.0, 0, 1.0, 0.0, 0, {}, [], 0, -1) for slot in range(batch)]
        self._pages = [PageChange(slot, 0, list(range(slot * each, (slot + 1) * each))) for slot in range(batch)]
        grow = self.config.tree.speculates
        self._next = [
            Segment(slot, context, [tokens[slot % len(tokens)]], [-1], 0, -1, [], grow) for slot in range(batch)
        ]

    def rounds(self, count: int) -> RoundTimes:
        """Runs `count` decode rounds of the open requests; with rounds of fixed shape none waits for the one before."""
        batch, context = len(self._next), self._next[0].start
        heard_before = len(self._heard.results)
        carries = self.stage.rounds is not None
        size = round_size(batch, self.config.max_running) if carries else 0
        launch_s = 0.0
        wait(self.device)
        started = time.perf_counter()
        with torch.inference_mode():
            for index in range(count):
                segments = self._next
                if carries and index:
                    segments = [
                        Segment(segment.slot, 0, [], None, 0, -1, [], segment.grow, carry=True) for segment in segments
                    ]
                launched = time.perf_counter()
                self._execute(segments, size)
                launch_s += time.perf_counter() - launched
                if not carries:
                    self._next = _following(self._next, self._outcomes(self._heard.wait_for(self._expected)[-1]))
        wait(self.device)
        wall_s = (time.perf_counter() - started) / count
        results = [self._outcomes(result) for result in self._heard.wait_for(self._expected)[heard_before:]]
        emitted = sum(len(outcome.ids) for outcomes in results for outcome in outcomes)
        if carries:
            for outcomes in results:
                self._next = _following(self._next, outcomes)
        return RoundTimes(batch, context, count, wall_s, launch_s / count, emitted / count / batch)

    def prefill(self, chunks: Sequence[int]) -> float:
        """Seconds of a prompt in chunks of these sizes, for one request, until its first token is known."""
        total = sum(chunks)
        self.open(1, 0, total + 1)
        heard, start = self._expected, 0
        wait(self.device)
        started = time.perf_counter()
        with torch.inference_mode():
            for size in chunks:
                is_last = start + size == total
                tokens = [(start + index) % 1000 for index in range(size)]
                segment = Segment(
                    0, start, tokens, None, size - 1 if is_last else size, -1 if is_last else 1, [], False
                )
                self._execute([segment], 0)
                start += size
        self._heard.wait_for(heard + len(chunks))
        wait(self.device)
        return time.perf_counter() - started

    def _outcomes(self, result: StepResult | RoundResult) -> Sequence[Outcome]:
        if isinstance(result, StepResult):
            return result.outcomes
        assert self.stage.rounds is not None
        return round_outcomes(result, self.stage.rounds.state.layout)

    def _execute(self, segments: list[Segment], round_size: int) -> None:
        plan = StepPlan(self._steps, 0, self._openings, self._pages, segments, False, round_size)
        self._openings, self._pages = [], []
        self._steps += 1
        self._expected += 1
        self.stage.execute(plan, None, self._heard.take)


def _following(segments: Sequence[Segment], outcomes: Sequence[Outcome]) -> list[Segment]:
    """The next round's rows, as a scheduler would state them."""
    following = []
    for segment, outcome in zip(segments, outcomes, strict=True):
        if outcome.error:
            raise RuntimeError(f"slot {segment.slot}: {outcome.error}")
        tree = outcome.tree()
        tokens = [outcome.ids[-1]] if tree is None else list(tree.tokens)
        parents = [-1] if tree is None else list(tree.parents)
        start = segment.start + len(outcome.accepted)
        following.append(Segment(segment.slot, start, tokens, parents, 0, -1, list(outcome.accepted), segment.grow))
    return following
