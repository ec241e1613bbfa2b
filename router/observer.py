"""Turns what happens to a request into metrics."""

import time
from collections.abc import Callable

from graftline.errors import CancelledRequestError, GraftlineError
from graftline.metrics import (
    ATTEMPTS_FAILED,
    CACHED_TOKENS,
    COMPLETION_TOKENS,
    END_TO_END,
    FIRST_ROUND_ACCEPTED,
    FIRST_ROUND_DRAFTED,
    INTER_TOKEN,
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
    Metrics,
)
from graftline.proto.status import Leg
from graftline.proto.v1.common_pb2 import FinishReason, TreeOrigin
from graftline.proto.v1.router_pb2 import GenerateFinish

_OUTCOMES = {FinishReason.FINISH_REASON_STOP: "stop", FinishReason.FINISH_REASON_LENGTH: "length"}


class ModelInstruments:
    """The instruments of one model, looked up once."""

    def __init__(self, metrics: Metrics, model_id: str) -> None:
        self.metrics = metrics
        self.model_id = model_id
        self.started = metrics.counter(REQUESTS_STARTED).labels(model_id)
        self.open = metrics.gauge(REQUESTS_OPEN)
        self.resumed = metrics.counter(STREAMS_RESUMED).labels(model_id)
        self.resume_gap = metrics.histogram(RESUME_GAP)
        self.completion_tokens = metrics.counter(COMPLETION_TOKENS).labels(model_id)
        self.time_to_first_token = metrics.histogram(TIME_TO_FIRST_TOKEN).labels(model_id)
        self.inter_token = metrics.histogram(INTER_TOKEN).labels(model_id)
        self.end_to_end = metrics.histogram(END_TO_END).labels(model_id)


class RequestObserver:
    """Follows one admitted request; `ended` must be called exactly once."""

    def __init__(
        self, instruments: ModelInstruments, received_at: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._instruments = instruments
        self._received_at = received_at
        self._clock = clock
        self._last_token_at: dict[int, float] = {}
        self._last_attempt: dict[int, int] = {}
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
        elif attempt == self._last_attempt[choice]:
            instruments.inter_token.observe((now - last_at) / num_tokens)
        else:
            instruments.resumed.inc()
            instruments.resume_gap.observe(now - last_at)
        self._last_token_at[choice] = now
        self._last_attempt[choice] = attempt

    def attempt_failed(self, leg: Leg, error: GraftlineError) -> None:
        """An attempt failed."""
        self._instruments.metrics.counter(ATTEMPTS_FAILED).labels(leg.value, type(error).__name__).inc()

    def choice_finished(self, finish: GenerateFinish) -> None:
        """A choice ended well."""
        metrics, model = self._instruments.metrics, self._instruments.model_id
        metrics.counter(PROMPT_TOKENS).labels(model).inc(finish.usage.prompt_tokens)
        metrics.counter(CACHED_TOKENS).labels(model).inc(finish.usage.cached_tokens)
        stats = finish.speculation
        metrics.counter(SPECULATION_ROUNDS).labels(model).inc(stats.rounds)
        metrics.counter(SPECULATION_DRAFTED).labels(model).inc(stats.drafted)
        metrics.counter(SPECULATION_ACCEPTED).labels(model).inc(stats.accepted)
        origin = TreeOrigin.Name(stats.tree_origin).removeprefix("TREE_ORIGIN_").lower()
        metrics.counter(FIRST_ROUND_DRAFTED).labels(model, origin).inc(stats.first_round_drafted)
        metrics.counter(FIRST_ROUND_ACCEPTED).labels(model, origin).inc(stats.first_round_accepted)
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
        instruments.metrics.counter(REQUESTS_ENDED).labels(instruments.model_id, self._outcome).inc()
