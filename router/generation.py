"""The life of a request in the router: check, tokenize, run its choices, hand out what they generate."""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from types import TracebackType
from typing import TypeVar

from graftline.errors import (
    CancelledRequestError,
    GraftlineError,
    InternalError,
    InvalidRequestError,
    PeerUnavailableError,
    PromptTooLongError,
)
from graftline.metrics import REQUESTS_REFUSED, SLOW_CONSUMERS_CUT, TOKENIZE, Metrics
from graftline.proto import validation
from graftline.proto.v1.router_pb2 import GenerateRequest
from graftline.router.admission import Admission
from graftline.router.choice import ChoiceRun, Seat
from graftline.router.model import ServedModel, UnknownModelError
from graftline.router.observer import ModelInstruments, RequestObserver
from graftline.router.outbox import Outbox, SlowConsumerError
from graftline.router.pair_search import Fleet
from graftline.router.parameters import Parameters, Plan
from graftline.router.text.chat_template import Message
from graftline.router.traces import request_attributes
from graftline.router.transcript import Delta
from graftline.tracing import Carrier, Span

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Up to here encoding takes about as long as the way to another thread and back, 0.1 ms, and 0.2 ms in the worst case
# found (docs/router.md): nothing would be won by it, for this request or for the others that wait meanwhile.
INLINE_PROMPT_CHARS = 256


class Generation:
    """An open request: its id and, by iteration, what it generates.

    Attributes:
        prompt_tokens: of all its prompts, each counted once.
    """

    def __init__(
        self, request_id: str, model: ServedModel, num_choices: int, prompt_tokens: int, outbox: Outbox
    ) -> None:
        self.request_id = request_id
        self.model = model
        self.num_choices = num_choices
        self.prompt_tokens = prompt_tokens
        self.is_aborted = False
        self._outbox = outbox

    def abort(self) -> None:
        """Its caller wants no more: iteration raises CancelledRequestError after what waits already."""
        self.is_aborted = True
        self._outbox.fail(CancelledRequestError("aborted by its caller"))

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        delta = await self._outbox.get()
        if delta is None:
            raise StopAsyncIteration
        return delta


class _Running:
    """The choices of an admitted request, under way for as long as the block is open.

    Args:
        outboxes: holds the request's as long.
        observers: of each plan; they see the end.
    """

    def __init__(
        self,
        fleet: Fleet,
        metrics: Metrics,
        outboxes: set[Outbox],
        plans: Sequence[Plan],
        observers: Sequence[RequestObserver],
        deadline: float | None,
        span: Span,
    ) -> None:
        self._metrics = metrics
        self._outboxes = outboxes
        self._observers = observers
        self._request_id = request_id = os.urandom(16).hex()
        span.set({"graftline.request_id": request_id})
        self._model = plans[0].model
        self._prompt_tokens = sum(len(plan.prompt_ids) for plan in plans)
        seats = [
            (plan, observer, number)
            for plan, observer in zip(plans, observers, strict=True)
            for number in range(plan.parameters.num_choices)
        ]
        self._outbox = outbox = Outbox(len(seats), fleet.limits.max_unread_tokens)
        self._runs = [
            ChoiceRun(
                fleet,
                plan,
                Seat(index, number, request_id if len(seats) == 1 else f"{request_id}.{index}"),
                deadline,
                outbox.put,
                observer,
                span,
            )
            for index, (plan, observer, number) in enumerate(seats)
        ]
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Generation:
        self._outboxes.add(self._outbox)
        await self._tasks.__aenter__()
        self._running = [self._tasks.create_task(_run(run, self._outbox)) for run in self._runs]
        return Generation(self._request_id, self._model, len(self._runs), self._prompt_tokens, self._outbox)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._outboxes.discard(self._outbox)
        for task in self._running:
            task.cancel()
        failure = error if isinstance(error, Exception) else None
        try:
            # A task group would wrap a failure, which goes on as it is.
            await self._tasks.__aexit__(*((kind, error, trace) if failure is None else (None, None, None)))
            if failure is not None:
                self._note(failure)
        finally:
            for observer in self._observers:
                observer.ended()

    def _note(self, failure: Exception) -> None:
        if isinstance(failure, SlowConsumerError):
            self._metrics.counter(SLOW_CONSUMERS_CUT).inc()
        for observer in self._observers:
            observer.failed(failure)


async def _run(run: ChoiceRun, outbox: Outbox) -> None:
    try:
        await run.run()
    except GraftlineError as error:
        outbox.fail(error)
    except Exception as error:
        logger.exception("a request failed")
        outbox.fail(InternalError(f"{type(error).__name__}: {error}"))


class Generator:
    """Runs requests. One per router."""

    def __init__(self, fleet: Fleet, admission: Admission, executor: Executor, metrics: Metrics) -> None:
        self._fleet = fleet
        self._admission = admission
        self._executor = executor
        self._metrics = metrics
        self._tokenize_s = metrics.histogram(TOKENIZE)
        self._instruments: dict[str, ModelInstruments] = {}
        self._outboxes: set[Outbox] = set()

    def models(self) -> Sequence[ServedModel]:
        """What can be asked for."""
        return self._fleet.registry.models()

    def model_named(self, name: str) -> ServedModel:
        """The model of a request; an empty name means the only one.

        Raises:
            InvalidRequestError: no such model, or several and no name.
            PeerUnavailableError: no worker has been reached yet.
        """
        models = self.models()
        if not models:
            raise PeerUnavailableError("no decode worker has been reached yet")
        named = [model for model in models if name in {"", model.model_id}]
        if not named:
            known = ", ".join(sorted({model.model_id for model in models}))
            raise UnknownModelError("model", f"{name[:200]!r} is not served; there is {known}")
        if not name and len({model.model_id for model in models}) > 1:
            raise InvalidRequestError("model", "is empty, and several models are served")
        return named[0]

    def end_all(self, reason: str) -> None:
        """Fails what is open: callers read what waits for them already, then a PeerUnavailableError."""
        for outbox in self._outboxes:
            outbox.fail(PeerUnavailableError(reason))

    @asynccontextmanager
    async def open(
        self,
        requests: Sequence[GenerateRequest],
        timeout_s: float | None,
        carrier: Carrier = (),
        prompt_fields: Sequence[str | None] = (),
    ) -> AsyncIterator[Generation]:
        """Admits and runs requests for as long as the block is open; leaving the block ends them everywhere.

        Their choices are numbered through. When one fails all are cancelled.

        Args:
            timeout_s: seconds until the caller's deadline, None for none.
            carrier: the call's metadata or headers, which may name the caller's span.
            prompt_fields: what errors call the prompt of each request, where that is not the name in GenerateRequest.

        Raises:
            GraftlineError: a request is refused; iteration raises what one fails with later.
        """
        received_at = time.monotonic()
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        with self._fleet.tracer.start("graftline.request", carrier) as span, self._admission.places() as places:
            try:
                for request in requests:
                    validation.check_request_id(request.request_id)
                    places.take(request.request_id)
                with span.child("graftline.tokenize"):
                    fields = prompt_fields or (None,) * len(requests)
                    plans = [await self._plan(request, field) for request, field in zip(requests, fields, strict=True)]
            except GraftlineError as error:
                self._metrics.counter(REQUESTS_REFUSED).labels(type(error).__name__).inc()
                raise
            if span.is_recording:
                span.set(request_attributes(plans))
            observers = [
                RequestObserver(self._instruments_of(plan.model), received_at, num_choices=plan.parameters.num_choices)
                for plan in plans
            ]
            running = _Running(self._fleet, self._metrics, self._outboxes, plans, observers, deadline, span)
            async with running as generation:
                yield generation

    async def _plan(self, request: GenerateRequest, field: str | None) -> Plan:
        model = self.model_named(request.model)
        parameters = Parameters.of(request, model)
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise InvalidRequestError("prompt", "is missing: give text, chat or tokens")
        field = field or ("tokens.token_ids" if kind == "tokens" else kind)
        started_at = time.monotonic()
        max_request_tokens = self._fleet.registry.max_request_tokens(model)
        max_prompt_tokens = self._fleet.registry.max_prompt_tokens(model)
        prompt_ids = await self._prompt_ids(request, model, field, min(max_request_tokens, max_prompt_tokens))
        self._tokenize_s.observe(time.monotonic() - started_at)
        return Plan.of(
            model,
            prompt_ids,
            parameters,
            max_request_tokens=max_request_tokens,
            max_prompt_tokens=max_prompt_tokens,
            default_max_tokens=self._fleet.limits.default_max_tokens,
            field=field,
            goes_on=kind != "chat",
        )

    async def _prompt_ids(
        self, request: GenerateRequest, model: ServedModel, field: str, max_tokens: int
    ) -> Sequence[int]:
        """Counts are checked before anything is done for each entry: a message may hold millions of them."""
        match request.WhichOneof("prompt"):
            case "tokens":
                validation.check_prompt_fits(len(request.tokens.token_ids), max_tokens, field=field)
                return tuple(request.tokens.token_ids)
            case "text":
                return await self._encoded(field, len(request.text), model.encode_text, request.text, max_tokens)
            case _:
                validation.check_num_messages(len(request.chat.messages), field=field)
                messages = [Message(message.role, message.content) for message in request.chat.messages]
                num_chars = sum(len(message.content) for message in messages)
                return await self._encoded(field, num_chars, model.encode_chat, messages, max_tokens)

    async def _encoded(
        self, field: str, num_chars: int, encode: Callable[[T, int], list[int]], prompt: T, max_tokens: int
    ) -> list[int]:
        """Encodes short prompts here and long ones in a thread."""
        limit = self._fleet.limits.max_prompt_chars
        if num_chars > limit:
            raise InvalidRequestError(field, f"{num_chars} characters are more than {limit}")
        try:
            if num_chars <= INLINE_PROMPT_CHARS:
                return encode(prompt, max_tokens)
            return await asyncio.get_running_loop().run_in_executor(self._executor, encode, prompt, max_tokens)
        except PromptTooLongError as error:
            raise PromptTooLongError(field, error.problem) from None

    def _instruments_of(self, model: ServedModel) -> ModelInstruments:
        instruments = self._instruments.get(model.model_id)
        if instruments is None:
            objectives = self._fleet.limits.objectives
            instruments = ModelInstruments(self._metrics, model.model_id, objectives)
            self._instruments[model.model_id] = instruments
        return instruments
