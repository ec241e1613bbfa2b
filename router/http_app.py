"""The HTTP face of the router: OpenAI's completions, health, metrics."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from graftline.errors import GraftlineError, InternalError, InvalidRequestError, UnauthenticatedError
from graftline.metrics import CONTENT_TYPE, REQUESTS_REFUSED, SPECULATION_ACCEPTED, SPECULATION_ROUNDS, Metrics
from graftline.proto.bearer import BearerTokens
from graftline.router.admission import Admission
from graftline.router.config import RequestConfig
from graftline.router.echoed_id import EchoedId
from graftline.router.event_stream import EventStream
from graftline.router.generation import Generation, Generator
from graftline.router.http_body import Bodies
from graftline.router.model import UnknownModelError
from graftline.router.openai.answer import Answer
from graftline.router.openai.errors import error_body, error_headers, http_status
from graftline.router.openai.request import OpenAiRequest, chat_request, completion_request
from graftline.router.outbox import client_guard
from graftline.router.registry import Registry
from graftline.router.vllm_counters import is_scraper, vllm_exposition
from graftline.tracing import Carrier
from graftline.write_guard import WriteGuard

Translate = Callable[[bytes], OpenAiRequest]

# Bodies up to here are translated on the event loop, longer ones in a thread, beside which others are served.
INLINE_BODY_BYTES = 16 * 1024


class HttpApp:
    """Holds what the routes need; `app` is the ASGI application."""

    def __init__(
        self,
        generator: Generator,
        registry: Registry,
        admission: Admission,
        metrics: Metrics,
        *,
        tokens: Sequence[str],
        limits: RequestConfig,
        executor: Executor,
    ) -> None:
        self._executor = executor
        self._generator = generator
        self._registry = registry
        self._admission = admission
        self._metrics = metrics
        self._accepted = BearerTokens(tokens)
        self._limits = limits
        self._bodies = Bodies()
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._endpoint(chat_request), methods=["POST"]),
                Route("/v1/completions", self._endpoint(completion_request), methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{model:path}", self._model),
                Route("/health", self._health),
                Route("/ready", self._ready),
                Route("/metrics", self._show_metrics),
                Route("/get_server_info", self._server_info),
                Route("/server_info", self._server_info),
            ],
            exception_handlers={HTTPException: _no_such_route, Exception: _failed},
            middleware=[Middleware(EchoedId)],
        )
        # A redirect would go to wherever the caller's Host header says.
        self.app.router.redirect_slashes = False

    def _endpoint(self, translate: Translate) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            is_read = False
            try:
                self._authenticate(request)
                async with self._bodies.read(request) as body:
                    is_read = True
                    is_short = len(body) <= INLINE_BODY_BYTES
                    translated = translate(body) if is_short else await self._in_thread(translate, body)
            except GraftlineError as error:
                self._metrics.counter(REQUESTS_REFUSED).labels(type(error).__name__).inc()
                return _error(error, closes=not is_read)
            return _Completion(self._generator, translated, self._limits, request.headers.items())

        return endpoint

    async def _in_thread(self, translate: Translate, body: bytes) -> OpenAiRequest:
        return await asyncio.get_running_loop().run_in_executor(self._executor, translate, body)

    async def _models(self, request: Request) -> Response:
        try:
            self._authenticate(request)
        except GraftlineError as error:
            return _error(error)
        return _json({"object": "list", "data": self._model_list()})

    async def _model(self, request: Request) -> Response:
        try:
            self._authenticate(request)
            name = request.path_params["model"]
            found = next((model for model in self._model_list() if model["id"] == name), None)
            if found is None:
                raise UnknownModelError("model", f"{name[:200]!r} is not served")
        except GraftlineError as error:
            return _error(error)
        return _json(found)

    def _model_list(self) -> list[dict[str, Any]]:
        models = {model.model_id: model for model in reversed(self._generator.models())}
        return [
            {
                "id": model.model_id,
                "object": "model",
                "created": int(time.time()),
                "owned_by": "graftline",
                "max_model_len": self._registry.max_request_tokens(model),
            }
            for model in models.values()
        ]

    async def _health(self, request: Request) -> Response:
        """Alive: the process answers."""
        return _json({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        """Ready: some pair may serve requests, and this router takes new ones."""
        if self._admission.is_draining:
            return _json({"status": "draining"}, 503)
        if not self._registry.has_pair():
            return _json({"status": "no usable pair of workers", "workers": self._registry.why_no_pair()}, 503)
        return _json({"status": "ok"})

    async def _show_metrics(self, request: Request) -> Response:
        exposition = self._metrics.exposition()
        if not is_scraper(request.headers.get("accept", "")):
            exposition += vllm_exposition(self._metrics)
        return Response(exposition, headers={"content-type": CONTENT_TYPE})

    async def _server_info(self, request: Request) -> Response:
        """Where SGLang's serving benchmark looks for the accept length."""
        rounds, accepted = self._metrics.total(SPECULATION_ROUNDS), self._metrics.total(SPECULATION_ACCEPTED)
        length = (accepted + rounds) / rounds if rounds else None
        return _json({"internal_states": [{"avg_spec_accept_length": length}]})

    def _authenticate(self, request: Request) -> None:
        if self._accepted and not self._accepted.accept(request.headers.get("authorization", "").encode()):
            raise UnauthenticatedError("a bearer token is required in the authorization header")


class _Completion(Response):
    """Runs a translated request while it answers it, and ends it when the client goes away in any phase."""

    def __init__(self, generator: Generator, request: OpenAiRequest, limits: RequestConfig, carrier: Carrier) -> None:
        super().__init__()
        self._generator = generator
        self._request = request
        self._limits = limits
        self._carrier = carrier
        self._has_answered = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = EventStream(send)
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(_until_disconnected(receive))
            work = tasks.create_task(self._serve(scope, receive, send, events))
            others = [watch]
            if self._request.stream:
                others.append(tasks.create_task(events.keep_alive(self._limits.stream_keep_alive_s)))
            watch.add_done_callback(lambda _: work.cancel())
            work.add_done_callback(lambda _: [task.cancel() for task in others])

    async def _serve(self, scope: Scope, receive: Receive, send: Send, events: EventStream) -> None:
        try:
            try:
                async with self._generator.open(
                    self._request.requests, None, self._carrier, self._request.prompt_fields
                ) as generation:
                    with client_guard(self._limits.write_timeout_s) as guard:
                        await self._answer(generation, guard, send, events)
            except GraftlineError:
                raise
            except Exception as error:
                raise InternalError(f"{type(error).__name__}: {error}") from error
        except GraftlineError as failure:
            shown = self._request.as_written(failure) if isinstance(failure, InvalidRequestError) else failure
            if events.has_started:
                await events.write(_event(error_body(shown)), more=False)
            elif not self._has_answered:
                events.end()
                await _error(shown)(scope, receive, send)

    async def _answer(self, generation: Generation, guard: WriteGuard, send: Send, events: EventStream) -> None:
        model = generation.model
        answer = Answer(
            self._request, generation.request_id, model.model_id, model.vocabulary, generation.prompt_tokens
        )
        if self._request.stream:
            await self._stream(generation, answer, events, guard)
            return
        async for delta in generation:
            answer.add(delta)
        whole = _json(answer.whole())
        self._has_answered = True
        guard.writing()
        await send({"type": "http.response.start", "status": 200, "headers": whole.raw_headers})
        await send({"type": "http.response.body", "body": whole.body, "more_body": False})
        guard.written()

    async def _stream(self, generation: Generation, answer: Answer, events: EventStream, guard: WriteGuard) -> None:
        opened: set[int] = set()
        async for delta in generation:
            answer.add(delta)
            chunks = answer.chunks(delta)
            if self._request.is_chat and delta.choice not in opened:
                chunks.insert(0, answer.opening(delta.choice))
            opened.add(delta.choice)
            await events.write(b"".join(map(_event, chunks)), guard)
        ending = [_event(answer.usage_chunk())] if self._request.include_usage else []
        await events.write(b"".join([*ending, b"data: [DONE]\n\n"]), guard, more=False)


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(content: Any) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers=headers, media_type="application/json")


async def _no_such_route(request: Request, error: Exception) -> Response:
    """Starlette's own refusals, in OpenAI's shape."""
    assert isinstance(error, HTTPException), "the only kind this is registered for"
    body = error_body(InvalidRequestError("path", f"{request.method} {request.url.path[:200]}: {error.detail}"))
    return _json(body, error.status_code, dict(error.headers or {}))


async def _failed(request: Request, error: Exception) -> Response:
    """Our own fault, in OpenAI's shape; it is logged."""
    return _error(InternalError(f"{type(error).__name__}: {error}"), closes=True)


def _error(error: GraftlineError, *, closes: bool = False) -> Response:
    """An error's response. With `closes` the connection ends behind it, as it must where a body was not read."""
    headers = {**error_headers(error), **({"connection": "close"} if closes else {})}
    return _json(error_body(error), http_status(error), headers)
