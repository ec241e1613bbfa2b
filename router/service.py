"""The gRPC face of the router: RouterService."""

from contextlib import AbstractAsyncContextManager
from typing import Any

from graftline.proto.status import rpc_border
from graftline.proto.v1.router_pb2 import (
    GenerateRequest,
    GenerateResponse,
    GetStatusRequest,
    GetStatusResponse,
    ListModelsRequest,
    ListModelsResponse,
    ModelInfo,
)
from graftline.proto.v1.router_pb2_grpc import RouterServiceServicer
from graftline.router.admission import Admission
from graftline.router.generation import Generation, Generator
from graftline.router.outbox import client_guard
from graftline.router.registry import Registry
from graftline.router.transcript import Delta


class RouterService(RouterServiceServicer):
    """Translates between messages and the generator."""

    def __init__(self, generator: Generator, registry: Registry, admission: Admission, write_timeout_s: float) -> None:
        self._generator = generator
        self._registry = registry
        self._admission = admission
        self._write_timeout_s = write_timeout_s

    async def Generate(self, request: GenerateRequest, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        """Streams what is generated; a client that takes too long over a message is cut."""
        async with rpc_border(context), self._opened(request, context) as generation:
            with client_guard(self._write_timeout_s) as guard:
                async for delta in generation:
                    guard.writing()
                    await context.write(_response(generation.request_id, delta))
                    guard.written()

    def _opened(self, request: GenerateRequest, context: Any) -> AbstractAsyncContextManager[Generation]:
        return self._generator.open([request], context.time_remaining(), context.invocation_metadata())

    async def ListModels(self, request: ListModelsRequest, context: Any) -> ListModelsResponse:  # noqa: N802
        """Every model that a known decode serves."""
        models = {model.model_id: model for model in reversed(self._generator.models())}
        return ListModelsResponse(
            models=[
                ModelInfo(
                    model_id=model.model_id,
                    context_length=self._registry.max_request_tokens(model),
                    vocab_size=model.vocab_size,
                )
                for model in models.values()
            ]
        )

    async def GetStatus(self, request: GetStatusRequest, context: Any) -> GetStatusResponse:  # noqa: N802
        """Workers as this router sees them."""
        return GetStatusResponse(
            workers=[worker.status() for worker in self._registry.workers], open_requests=self._admission.num_open
        )


def _response(request_id: str, delta: Delta) -> GenerateResponse:
    return GenerateResponse(
        request_id=request_id,
        choice=delta.choice,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=delta.logprobs,
        finish=delta.finish,
    )
