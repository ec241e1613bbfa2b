"""Turns what happens to a request into metrics."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import Counter

from graftline.errors import CancelledRequestError, GraftlineError
from graftline.metrics import (
    ATTEMPTS_FAILED,
    CACHED_TOKENS,
    COMPLETION_TOKENS,
    END_TO_END,
    FIRST_ROUND_ACCEPTED,
    FIRST_ROUND_DRAFTED,
    FIRST_ROUNDS,
    INTER_TOKEN,
    OBJECTIVE,
    PROMPT_TOKENS,
    REQUESTS_ENDED,
    REQUESTS_OPEN,
    REQUESTS_STARTED,
    RESUME_GAP,
    SPECULATION_ACCEPTED,
    SPECULATION_DRAFTED,
    SPECULATION_ROUNDS,
    STREAMS_RESUMED,
    TIME_TO_FIRST_TOKEN,
    WITHIN_OBJECTIVE,
    Metrics,
)
from graftline.proto.status import Leg
from graftline.proto.v1.common_pb2 import FinishReason, TreeOrigin
from graftline.proto.v1.router_pb2 import GenerateFinish
from graftline.router.config import Objectives

_OUTCOMES = {FinishReason.FINISH_REASON_STOP: "stop", FinishReason.FINISH_REASON_LENGTH: "length"}


class ModelInstruments:
    """The instruments of one model, looked up once: a look-up by labels costs more than the count itself."""

    def __init__(self, metrics: Metrics, model_id: str, objectives: Objectives) -> None:
        self.objectives = objectives
        metrics.gauge(OBJECTIVE).labels("first_token").set(self.objectives.first_token_s)
        metrics.gauge(OBJECTIVE).labels("per_token").set(self.objectives.per_token_s)
        self.within_objective = metrics.counter(WITHIN_OBJECTIVE).labels(model_id)
        self._metrics = metrics
        self._model_id = model_id
        self.started = metrics.counter(REQUESTS_STARTED).labels(model_id)
        self.open = metrics.gauge(REQUESTS_OPEN)
        self.resumed = metrics.counter(STREAMS_RESUMED).labels(model_id)
        self.resume_gap = metrics.histogram(RESUME_GAP)
        self.prompt_tokens = metrics.counter(PROMPT_TOKENS).labels(model_id)
        self.cached_tokens = metrics.counter(CACHED_TOKENS).labels(model_id)
        self.completion_tokens = metrics.counter(COMPLETION_TOKENS).labels(model_id)
        self.rounds = metrics.counter(SPECULATION_ROUNDS).labels(model_id)
        self.drafted = metrics.counter(SPECULATION_DRAFTED).labels(model_id)
        self.accepted = metrics.counter(SPECULATION_ACCEPTED).labels(model_id)
        self.time_to_first_token = metrics.histogram(TIME_TO_FIRST_TOKEN).labels(model_id)
        self.inter_token = metrics.histogram(INTER_TOKEN).labels(model_id)
        self.end_to_end = metrics.histogram(END_TO_END).labels(model_id)
        self._ended: dict[str, Counter] = {}
        self._first_round: dict[int, tuple[Counter, Counter, Counter]] = {}

    def ended(self, outcome: str) -> Counter:
        """Requests that ended so."""
        counter = self._ended.get(outcome)
        if counter is None:
            counter = self._ended[outcome] = self._metrics.counter(REQUESTS_ENDED).labels(self._model_id, outcome)
        return counter

    def first_round(self, origin: int) -> tuple[Counter, Counter, Counter]:
        """First rounds from trees of this origin, their drafted and their accepted tokens."""
        pair = self._first_round.get(origin)
        if pair is None:
            name = TreeOrigin.Name(origin).removeprefix("TREE_ORIGIN_").lower()  # type: ignore[arg-type]
            pair = self._first_round[origin] = (
                self._metrics.counter(FIRST_ROUNDS).labels(self._model_id, name),
                self._metrics.counter(FIRST_ROUND_DRAFTED).labels(self._model_id, name),
                self._metrics.counter(FIRST_ROUND_ACCEPTED).labels(self._model_id, name),
            )
        return pair

    def attempt_failed(self, leg: Leg, error: GraftlineError) -> None:
        """An attempt failed."""
        self._metrics.counter(ATTEMPTS_FAILED).labels(leg.value, type(error).__name__).inc()


@dataclass(slots=True)
class _Pace:
    """When a choice's first token came, and how many have come in all."""

    first_at: float
    num_tokens: int


class RequestObserver:
    """Follows one admitted request; `ended` must be called exactly once.

    Args:
        num_choices: so many have to finish for it to end well.
    """

    def __init__(
        self,
        instruments: ModelInstruments,
        received_at: float,
        clock: Callable[[], float] = time.monotonic,
        num_choices: int = 1,
    ) -> None:
        self._instruments = instruments
        self._num_unfinished = num_choices
        self._received_at = received_at
        self._clock = clock
        self._last_token_at: dict[int, float] = {}
        self._last_attempt: dict[int, int] = {}
        self._paces: dict[int, _Pace] = {}
        self._outcome = "cancelled"
        instruments.started.inc()
        instruments.open.inc()

    def tokens_came(self, choice: int, num_tokens: int, attempt: int) -> None:
        """Tokens of a choice go to the client."""
        now = self._clock()
        instruments = self._instruments
        instruments.completion_tokens.inc(num_tokens)
        last_at = self._last_token_at.get(choice)
        if last_at is None:
            instruments.time_to_first_token.observe(now - self._received_at)
            self._paces[choice] = _Pace(now, num_tokens)
        elif attempt == self._last_attempt[choice]:
            instruments.inter_token.observe_times((now - last_at) / num_tokens, num_tokens)
        else:
            instruments.resumed.inc()
            instruments.resume_gap.observe(now - last_at)
        if last_at is not None:
            self._paces[choice].num_tokens += num_tokens
        self._last_token_at[choice] = now
        self._last_attempt[choice] = attempt

    def attempt_failed(self, leg: Leg, error: GraftlineError) -> None:
        """An attempt failed."""
        self._instruments.attempt_failed(leg, error)

    def choice_finished(self, finish: GenerateFinish) -> None:
        """A choice ended well."""
        instruments, usage, stats = self._instruments, finish.usage, finish.speculation
        instruments.prompt_tokens.inc(usage.prompt_tokens)
        if usage.cached_tokens:
            instruments.cached_tokens.inc(usage.cached_tokens)
        if stats.rounds:
            instruments.rounds.inc(stats.rounds)
            instruments.drafted.inc(stats.drafted)
            instruments.accepted.inc(stats.accepted)
            first_rounds, drafted, accepted = instruments.first_round(stats.tree_origin)
            first_rounds.inc()
            drafted.inc(stats.first_round_drafted)
            accepted.inc(stats.first_round_accepted)
        self._num_unfinished -= 1
        if not self._num_unfinished:
            self._outcome = _OUTCOMES.get(finish.reason, "stop")

    def failed(self, error: Exception) -> None:
        """The request failed. One that ends without finishing or failing was cancelled by its client."""
        is_cancel = isinstance(error, CancelledRequestError)
        self._outcome = "cancelled" if is_cancel else type(error).__name__

    def ended(self) -> None:
        """The request left, whatever ended it."""
        instruments = self._instruments
        instruments.open.dec()
        instruments.end_to_end.observe(self._clock() - self._received_at)
        instruments.ended(self._outcome).inc()
        if self._outcome in _OUTCOMES.values() and all(map(self._kept_pace, self._paces)):
            instruments.within_objective.inc()

    def _kept_pace(self, choice: int) -> bool:
        pace = self._paces[choice]
        rest_s = self._last_token_at[choice] - pace.first_at
        return self._instruments.objectives.met(pace.first_at - self._received_at, rest_s, pace.num_tokens - 1)
