"""The life of one choice: attempts on pairs of workers until it ends, each going on where the last one stopped.

A failed attempt costs the client nothing but time: the next one prefills prompt and emitted tokens elsewhere, and
sampling, a pure function of seed and position, continues with the very tokens the first would have had.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

import grpc
from grpc import aio

from graftline.errors import (
    CancelledRequestError,
    GraftlineError,
    InternalError,
    InvalidRequestError,
    OutOfCapacityError,
    PeerUnavailableError,
    PreemptedError,
)
from graftline.proto.channel import Metadata
from graftline.proto.status import Failure, Leg, failure_from_rpc
from graftline.proto.v1.common_pb2 import Usage
from graftline.proto.v1.decode_pb2 import (
    DecodeFinished,
    DecodeServiceGenerateRequest,
    DecodeServiceGenerateResponse,
    DecodeTokens,
)
from graftline.proto.v1.router_pb2 import GenerateFinish
from graftline.router.config import RequestConfig
from graftline.router.figures import SpeculationFigures
from graftline.router.observer import RequestObserver
from graftline.router.pairing import Claim, Pair, Pairing, WorkerKey, worker_key
from graftline.router.parameters import Plan
from graftline.router.policy import Demand
from graftline.router.registry import Registry
from graftline.router.transcript import Delta, Ending, Transcript

# The pauses of all attempts together outlast the longest reconnecting pause of a channel between two workers.
RETRY_PAUSE_S = 0.1
RETRY_PAUSE_MAX_S = 1.0
# Breakers close by the clock, which nobody announces.
PAIR_POLL_S = 0.1
# After the last token only figures are missing.
FINISH_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """What a choice needs of the router: workers, how to pick among them, how to call them, and bounds."""

    registry: Registry
    pairing: Pairing
    metadata: Metadata
    limits: RequestConfig


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
    ) -> None:
        self._fleet = fleet
        self._plan = plan
        self._choice = seat.index
        self._request_id = seat.request_id
        self._deadline = deadline
        self._emit = emit
        self._observer = observer
        self._transcript = Transcript(plan, seat.index)
        self._figures = SpeculationFigures()
        self._sampling = plan.sampling(seat.number)
        self._stopping = plan.stopping()
        self._excluded: set[WorkerKey] = set()
        self._attempt = 0
        self._num_failures = 0
        self._last_error: GraftlineError | None = None
        self._num_preemptions = 0
        self._cached_tokens = 0

    async def run(self) -> None:
        """Generates until the choice has ended and its last delta was emitted.

        Raises:
            GraftlineError: nothing more can be tried.
        """
        while True:
            demand = self._demand()
            pair = await self._pick(demand)
            self._attempt += 1
            with Claim(pair, len(demand.token_ids)) as claim:
                failure = await self._try(claim, demand)
                if failure is None:
                    return
                self._judge(failure, claim)

    # --- one attempt ---------------------------------------------------------------------------------------

    async def _try(self, claim: Claim, demand: Demand) -> Failure | None:
        """One call of a decode. None: the choice has ended and said so."""
        self._figures.attempt_started(_draft_nodes(claim.pair))
        decode = claim.pair.decode.decode
        call: aio.UnaryStreamCall[DecodeServiceGenerateRequest, DecodeServiceGenerateResponse] = decode.Generate(
            self._request(claim.pair, demand), timeout=self._remaining_s(), metadata=self._fleet.metadata
        )
        claim.attach(call.cancel)
        try:
            failure = await self._follow(call, claim)
        except asyncio.CancelledError:
            failure = _revoked(claim)
        except aio.AioRpcError as error:
            failure = failure_from_rpc(error)
        finally:
            call.cancel()
        if failure is None or self._transcript.ending is None:
            return failure
        # Every token came; only the decode's report is missing.
        self._finish(claim.pair, None)
        return None

    async def _follow(
        self, call: "aio.UnaryStreamCall[DecodeServiceGenerateRequest, DecodeServiceGenerateResponse]", claim: Claim
    ) -> Failure | None:
        num_messages = 0
        while True:
            message = await self._read(call)
            if not isinstance(message, DecodeServiceGenerateResponse):
                ended = PeerUnavailableError("the decode ended its stream without finishing")
                return Failure(ended, grpc.StatusCode.UNAVAILABLE, Leg.DECODE)
            if message.HasField("finished"):
                claim.pair.decode.breaker.succeeded()
                claim.handed_over()
                self._finish(claim.pair, message.finished)
                return None
            num_messages += 1
            if num_messages == 1:
                claim.prompt_computed()
            elif num_messages == 2:
                claim.handed_over()
            self._take(message.tokens)
            ending = self._transcript.ending
            if ending is not None and ending.stop_string:
                claim.pair.decode.breaker.succeeded()
                self._finish(claim.pair, None)
                return None

    async def _read(
        self, call: "aio.UnaryStreamCall[DecodeServiceGenerateRequest, DecodeServiceGenerateResponse]"
    ) -> object:
        if self._transcript.ending is None:
            return await call.read()
        try:
            async with asyncio.timeout(FINISH_WAIT_S):
                return await call.read()
        except TimeoutError:
            return None

    def _request(self, pair: Pair, demand: Demand) -> DecodeServiceGenerateRequest:
        return DecodeServiceGenerateRequest(
            request_id=self._request_id,
            attempt=self._attempt,
            prefill_address=pair.prefill.peer_address,
            token_ids=demand.token_ids,
            num_prompt_tokens=len(self._plan.prompt_ids),
            sampling=self._sampling,
            stopping=self._stopping,
            logprobs=self._plan.parameters.logprobs,
        )

    def _take(self, tokens: DecodeTokens) -> None:
        self._figures.tokens_came(len(tokens.token_ids))
        delta = self._transcript.take(tokens)
        if delta.token_ids:
            self._observer.tokens_came(self._choice, len(delta.token_ids), self._attempt)
            self._emit(delta)

    def _finish(self, pair: Pair, report: DecodeFinished | None) -> None:
        self._figures.attempt_ended(report.speculation if report is not None else None)
        text = ""
        if report is not None:
            stop_token_id = report.stop_token_id if report.HasField("stop_token_id") else None
            text = self._transcript.end(Ending(report.reason, stop_token_id=stop_token_id))
            self._cached_tokens = min(report.usage.cached_tokens, len(self._plan.prompt_ids))
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
        self._emit(Delta(self._choice, text, [], [], finish))

    # --- between attempts ----------------------------------------------------------------------------------

    def _judge(self, failure: Failure, claim: Claim) -> None:
        """Keeps score of a failed attempt and rules its worker out for the next one.

        Raises:
            GraftlineError: another attempt would be pointless, or was one too many.
        """
        self._figures.attempt_ended(failure.speculation)
        error = failure.error
        if isinstance(error, InvalidRequestError):
            raise error
        if failure.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise CancelledRequestError("the deadline passed") from error
        self._last_error = error
        leg = failure.leg or Leg.DECODE
        self._observer.attempt_failed(leg, error)
        if isinstance(error, PreemptedError):
            self._num_preemptions += 1
            if self._num_preemptions > self._fleet.limits.max_preemptions:
                raise OutOfCapacityError(f"preempted {self._num_preemptions} times") from error
            return
        worker = claim.pair.on(leg)
        self._excluded.add(worker_key(worker))
        if claim.revoked is None and not isinstance(error, OutOfCapacityError):
            worker.breaker.failed()
        self._num_failures += 1
        if self._num_failures >= self._fleet.limits.max_attempts:
            raise _final(error, self._num_failures)
        if (
            isinstance(error, OutOfCapacityError)
            and not self._transcript.token_ids
            and self._pick_now(self._demand()) is None
        ):
            raise error

    def _demand(self) -> Demand:
        """What an attempt that starts now needs."""
        prompt_ids, emitted_ids = self._plan.prompt_ids, self._transcript.token_ids
        token_ids = (*prompt_ids, *emitted_ids) if emitted_ids else prompt_ids
        return Demand(token_ids, len(prompt_ids) + self._plan.max_tokens)

    async def _pick(self, demand: Demand) -> Pair:
        """A pair for the next attempt; waits for one within bounds.

        Raises:
            PeerUnavailableError: none came up in time.
        """
        pair = self._pick_now(demand)
        if pair is not None:
            return pair
        limits = self._fleet.limits
        wait_s = limits.resume_wait_s if self._transcript.token_ids else limits.pair_wait_s
        try:
            async with asyncio.timeout(wait_s):
                return await self._wait_for_pair(demand, wait_s)
        except TimeoutError:
            raise PeerUnavailableError(self._why_none()) from self._last_error

    async def _wait_for_pair(self, demand: Demand, wait_s: float) -> Pair:
        if self._excluded:
            # Nobody else can take it: those that failed get another chance, after a pause.
            pause_s = min(RETRY_PAUSE_S * 2 ** (self._num_failures - 1), RETRY_PAUSE_MAX_S, wait_s / 2)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1))
            self._excluded.clear()
        while True:
            pair = self._pick_now(demand)
            if pair is not None:
                return pair
            try:
                async with asyncio.timeout(PAIR_POLL_S):
                    await self._fleet.registry.wait_for_change()
            except TimeoutError:
                continue

    def _pick_now(self, demand: Demand) -> Pair | None:
        return self._fleet.pairing.pick(self._fleet.registry.workers, self._plan.model, demand, self._excluded)

    def _why_none(self) -> str:
        last = f"; the last attempt failed with: {self._last_error}" if self._last_error else ""
        return (
            f"no usable pair of workers for {self._plan.model.model_id!r}: {self._fleet.registry.why_no_pair()}{last}"
        )

    def _remaining_s(self) -> float | None:
        if self._deadline is None:
            return None
        return max(0.0, self._deadline - asyncio.get_running_loop().time())


def _revoked(claim: Claim) -> Failure:
    """The call was cancelled because a worker was lost; when it was not, the task itself is being cancelled."""
    task = asyncio.current_task()
    if claim.revoked is None or (task is not None and task.cancelling()):
        raise
    leg, reason = claim.revoked
    return Failure(PeerUnavailableError(reason), grpc.StatusCode.UNAVAILABLE, leg)


def _final(error: GraftlineError, num_failures: int) -> GraftlineError:
    if isinstance(error, InternalError | OutOfCapacityError):
        return error
    return PeerUnavailableError(f"{num_failures} attempts failed, the last one with: {error}")


def _draft_nodes(pair: Pair) -> int:
    description = pair.decode.description
    nodes = description.fingerprint.get("draft_nodes", "") if description else ""
    return int(nodes) if nodes.isdigit() else 0
