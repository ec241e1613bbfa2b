"""The life of one choice: attempts on pairs of workers until it ends, each going on where the last one stopped.

A failed attempt costs the client nothing but time: the next one prefills prompt and emitted tokens elsewhere, and
sampling, a pure function of seed and position, continues with the very tokens the first would have had.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import grpc

from graftline.errors import (
    CancelledRequestError,
    GraftlineError,
    InternalError,
    InvalidRequestError,
    OutOfCapacityError,
    PeerUnavailableError,
    PreemptedError,
)
from graftline.proto.status import Failure, Leg
from graftline.proto.v1.common_pb2 import Usage
from graftline.proto.v1.decode_pb2 import (
    DecodeFinished,
    DecodeServiceGenerateRequest,
    DecodeServiceGenerateResponse,
    DecodeTokens,
)
from graftline.proto.v1.router_pb2 import GenerateFinish
from graftline.router.decode_stream import DecodeCall
from graftline.router.figures import SpeculationFigures
from graftline.router.observer import RequestObserver
from graftline.router.pair_search import Fleet, PairSearch
from graftline.router.pairing import Claim, Pair, too_small
from graftline.router.parameters import Plan
from graftline.router.policy import Demand
from graftline.router.silence import SilenceTimer
from graftline.router.traces import ChoiceTrace
from graftline.router.transcript import Delta, Ending, Transcript
from graftline.tracing import NO_SPAN, Span

logger = logging.getLogger(__name__)

# Failures in a row are bounded by the config; all of them by this many times as much, so that a request that takes
# its workers down one after another comes to an end however far it gets each time.
FAILURES_FACTOR = 4
# After the last token only figures are missing.
FINISH_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Seat:
    """Which choice this is.

    Attributes:
        index: among everything the caller receives.
        number: among the n choices of its prompt; decides its seed.
        request_id: unique to the choice.
    """

    index: int
    number: int
    request_id: str


class ChoiceRun:
    """One choice of a request.

    Args:
        deadline: of the event loop's clock; None for none.
        emit: takes every delta.
    """

    def __init__(
        self,
        fleet: Fleet,
        plan: Plan,
        seat: Seat,
        deadline: float | None,
        emit: Callable[[Delta], None],
        observer: RequestObserver,
        span: Span = NO_SPAN,
    ) -> None:
        self._fleet = fleet
        self._plan = plan
        self._choice = seat.index
        self._request_id = seat.request_id
        self._deadline = deadline
        self._emit = emit
        self._observer = observer
        self._trace = ChoiceTrace(span, seat.index)
        self._transcript = Transcript(plan, seat.index)
        self._figures = SpeculationFigures()
        self._number = seat.number
        self._search = PairSearch(fleet, plan.model)
        self._attempt = 0
        self._num_failures = 0
        self._num_failures_in_row = 0
        self._num_preemptions = 0
        self._last_progress_s = time.monotonic()
        self._cached_tokens = 0

    async def run(self) -> None:
        """Generates until the choice has ended and its last delta was emitted.

        Raises:
            GraftlineError: nothing more can be tried.
        """
        while True:
            demand = self._demand()
            num_tokens_before = len(self._transcript.token_ids)
            pair = await self._search.find(demand, has_begun=num_tokens_before > 0)
            weights = pair.weights  # now: a worker that restarts may come back with others
            self._attempt += 1
            with Claim(pair, len(demand.token_ids)) as claim, self._trace.attempt(pair, self._attempt):
                failure = await self._try(claim, demand)
                if failure is None:
                    return
                if self._transcript.token_ids:
                    self._search.begun_with(weights)
                self._judge(failure, claim, num_tokens_before)

    # --- one attempt ---------------------------------------------------------------------------------------

    async def _try(self, claim: Claim, demand: Demand) -> Failure | None:
        """One call of a decode. None: the choice has ended and said so."""
        description = claim.pair.decode.description
        self._figures.attempt_started(description.draft_nodes if description else 0)
        with SilenceTimer(self._fleet.limits.silence_timeout_s, claim) as silence:
            attempt = _Attempt(claim, silence)
            attempt.call = claim.pair.decode.calls.call(
                partial(self._fill, self._attempt, claim.pair, demand),
                partial(self._hear, attempt),
                self._remaining_s(),
                self._trace.metadata,
            )
            claim.attach(attempt.call.finish)
            try:
                failure = await attempt.call.ended
            finally:
                attempt.call.finish()
        if attempt.is_told:
            return None
        if self._transcript.ending is not None:
            # Every token came; only the decode's report is missing.
            self._finish(claim.pair, None)
            return None
        return failure or _revoked(claim)

    def _hear(self, attempt: "_Attempt", message: DecodeServiceGenerateResponse) -> None:
        """Takes what the decode says, while it is being read."""
        claim = attempt.claim
        attempt.silence.heard()
        if message.HasField("finished"):
            claim.pair.decode.breaker.succeeded()
            claim.handed_over()
            self._finish(claim.pair, message.finished)
            attempt.is_told = True
            return
        attempt.num_messages += 1
        if attempt.num_messages == 1:
            claim.prompt_computed()
        elif attempt.num_messages == 2:
            claim.handed_over()
        self._take(message.tokens)
        ending = self._transcript.ending
        if ending is None:
            return
        assert attempt.call is not None, "a call hears nothing before it is made"
        if ending.stop_string:
            claim.pair.decode.breaker.succeeded()
            self._finish(claim.pair, None)
            attempt.is_told = True
            attempt.call.finish(answered=True)
        else:
            attempt.call.end_in(FINISH_WAIT_S, None)

    def _fill(self, attempt: int, pair: Pair, demand: Demand, request: DecodeServiceGenerateRequest) -> None:
        """Writes an attempt into the message that takes it to the decode."""
        request.request_id = self._request_id
        request.attempt = attempt
        request.prefill_address = pair.prefill.peer_address
        request.token_ids.extend(demand.token_ids)
        self._plan.fill(request, self._number)

    def _take(self, tokens: DecodeTokens) -> None:
        self._figures.tokens_came(len(tokens.token_ids))
        if not self._transcript.token_ids:
            # Those of the attempt that gave the first token: later ones find in the cache what it computed.
            self._cached_tokens = min(tokens.cached_tokens, len(self._plan.prompt_ids))
        delta = self._transcript.take(tokens)
        if delta.token_ids:
            self._observer.tokens_came(self._choice, len(delta.token_ids), self._attempt)
            self._trace.tokens_came(len(delta.token_ids))
            self._emit(delta)

    def _finish(self, pair: Pair, report: DecodeFinished | None) -> None:
        self._figures.attempt_ended(report.speculation if report is not None else None)
        text = ""
        if report is not None:
            stop_token_id = report.stop_token_id if report.HasField("stop_token_id") else None
            text = self._transcript.end(Ending(report.reason, stop_token_id=stop_token_id))
        ending = self._transcript.ending
        assert ending is not None, "a choice finishes with an ending"
        finish = GenerateFinish(
            reason=ending.reason,
            stop_string=ending.stop_string,
            stop_token_id=ending.stop_token_id,
            usage=Usage(
                prompt_tokens=len(self._plan.prompt_ids),
                completion_tokens=len(self._transcript.token_ids),
                cached_tokens=self._cached_tokens,
            ),
            speculation=self._figures.total,
            handoff=report.handoff if report is not None else None,
            attempts=self._attempt,
            prefill_address=pair.prefill.address,
            decode_address=pair.decode.address,
        )
        self._observer.choice_finished(finish)
        self._trace.finished(finish)
        self._emit(Delta(self._choice, text, [], [], finish))

    # --- between attempts ----------------------------------------------------------------------------------

    def _judge(self, failure: Failure, claim: Claim, num_tokens_before: int) -> None:
        """Keeps score of a failed attempt and rules its worker out for the next one.

        Raises:
            GraftlineError: another attempt would be pointless, or was one too many.
        """
        self._figures.attempt_ended(failure.speculation)
        error, leg = failure.error, failure.leg or Leg.DECODE
        self._trace.failed(leg, error)
        has_outgrown = leg is Leg.PREFILL and too_small(claim.pair.prefill, self._demand())
        if isinstance(error, InvalidRequestError) and not has_outgrown:
            raise error
        if failure.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise CancelledRequestError("the deadline passed") from error
        self._observer.attempt_failed(leg, error)
        worker = claim.pair.on(leg)
        logger.info("attempt %d of %s failed on %s %s: %r", *self._name, leg.value, worker.address, str(error))
        if len(self._transcript.token_ids) > num_tokens_before:
            self._num_failures_in_row = 0
            self._last_progress_s = time.monotonic()
            self._search.progressed()
        self._search.failed(error, None if isinstance(error, PreemptedError) else worker)
        if isinstance(error, PreemptedError):
            self._num_preemptions += 1
            if self._num_preemptions > self._fleet.limits.max_preemptions:
                raise OutOfCapacityError(f"preempted {self._num_preemptions} times") from error
        elif isinstance(error, OutOfCapacityError):
            self._check_patience(error)
        elif isinstance(error, InvalidRequestError):
            return  # its decode prefilled again what had become too much for the prefill: another one may hold it
        else:
            if claim.revoked is None:
                worker.breaker.failed(error)  # one and the same for all that were on a stream which ended
            self._count_failure(error)

    def _count_failure(self, error: GraftlineError) -> None:
        self._num_failures += 1
        self._num_failures_in_row += 1
        limit = self._fleet.limits.max_attempts
        if self._num_failures_in_row >= limit or self._num_failures >= limit * FAILURES_FACTOR:
            raise _final(error, self._num_failures)

    @property
    def _name(self) -> tuple[int, str]:
        return self._attempt, self._request_id

    def _check_patience(self, error: OutOfCapacityError) -> None:
        """Refused for lack of room: a new request tries others at once; a stream that has begun may wait for room."""
        if self._transcript.token_ids:
            stuck_s = time.monotonic() - self._last_progress_s
            is_hopeless = stuck_s > self._fleet.limits.resume_wait_s
        else:
            is_hopeless = self._search.find_now(self._demand()) is None
        if is_hopeless:
            raise error

    def _demand(self) -> Demand:
        """What an attempt that starts now needs."""
        prompt_ids, emitted_ids = self._plan.prompt_ids, self._transcript.token_ids
        token_ids = (*prompt_ids, *emitted_ids) if emitted_ids else prompt_ids
        return Demand(token_ids, len(prompt_ids) + self._plan.max_tokens)

    def _remaining_s(self) -> float | None:
        if self._deadline is None:
            return None
        return max(0.0, self._deadline - asyncio.get_running_loop().time())


@dataclass(slots=True)
class _Attempt:
    """One attempt while it is under way.

    Attributes:
        is_told: the choice has ended in it, and its last delta was emitted.
    """

    claim: Claim
    silence: SilenceTimer
    call: DecodeCall | None = None
    num_messages: int = 0
    is_told: bool = False


def _revoked(claim: Claim) -> Failure:
    """A worker was lost, which ended the call."""
    assert claim.revoked is not None, "nothing else ends a call before the choice"
    leg, reason = claim.revoked
    return Failure(PeerUnavailableError(reason), grpc.StatusCode.UNAVAILABLE, leg)


def _final(error: GraftlineError, num_failures: int) -> GraftlineError:
    if isinstance(error, InternalError | OutOfCapacityError):
        return error
    return PeerUnavailableError(f"{num_failures} attempts failed, the last one with: {error}")
