"""The asynchronous client."""

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self, Unpack

import tenacity
from grpc import aio

from graftline.client.request import GenerateOptions, Prompt, request_of
from graftline.client.results import Collector, Completion, Delta, ModelInfo, delta_of, models_of
from graftline.client.retry import Deadline, RetryPolicy
from graftline.errors import InternalError
from graftline.proto.channel import Access, ClientTls, open_channel
from graftline.proto.status import error_from_rpc
from graftline.proto.v1.router_pb2 import (
    GenerateRequest,
    GenerateResponse,
    GetStatusRequest,
    GetStatusResponse,
    ListModelsRequest,
)
from graftline.proto.v1.router_pb2_grpc import RouterServiceStub

_Call = aio.UnaryStreamCall[GenerateRequest, GenerateResponse]


class AsyncClient:
    """Calls one router.

    Args:
        target: host:port.
        token: bearer token, when the router wants one.
        tls: certificates; None: plain text.
        timeout_s: deadline of a request when a call names none; None: no deadline.
        retry: for requests that the router did not begin to answer.
    """

    def __init__(
        self,
        target: str,
        *,
        token: str | None = None,
        tls: ClientTls | None = None,
        timeout_s: float | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        self._access = Access(token, tls)
        self._channel = open_channel(target, self._access)
        self._stub = RouterServiceStub(self._channel)
        self._timeout_s = timeout_s
        self._retry = retry or RetryPolicy()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connection and what is open on it."""
        await self._channel.close()

    async def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncIterator[Delta]:
        """Streams what is generated. Leaving the loop early cancels the request; use `contextlib.aclosing` for it.

        Args:
            timeout_s: deadline for all of it, in seconds; by default the client's.

        Raises:
            GraftlineError: as a class of `graftline.errors`.
        """
        request = request_of(prompt, options)
        deadline = Deadline(self._timeout_s if timeout_s is None else timeout_s)
        call, message = await self._begun(request, deadline)
        try:
            while isinstance(message, GenerateResponse):
                yield delta_of(message)
                message = await call.read()
        except aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        finally:
            call.cancel()

    async def complete(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """The whole answer. Arguments and errors as `generate`."""
        collector = Collector()
        async for delta in self.generate(prompt, timeout_s=timeout_s, **options):
            collector.add(delta)
        return collector.completion()

    async def models(self) -> tuple[ModelInfo, ...]:
        """What can be asked for."""
        try:
            answer = await self._stub.ListModels(
                ListModelsRequest(), timeout=self._timeout_s, metadata=self._access.metadata
            )
        except aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        return models_of(answer)

    async def status(self) -> GetStatusResponse:
        """Workers, their health and load, as the router sees them."""
        try:
            answer: GetStatusResponse = await self._stub.GetStatus(
                GetStatusRequest(), timeout=self._timeout_s, metadata=self._access.metadata
            )
        except aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        return answer

    async def _begun(self, request: GenerateRequest, deadline: Deadline) -> tuple[_Call, object]:
        """A call whose first message has come."""
        return await tenacity.AsyncRetrying(**self._retry.settings())(self._begin, request, deadline)

    async def _begin(self, request: GenerateRequest, deadline: Deadline) -> tuple[_Call, object]:
        call: _Call = self._stub.Generate(request, timeout=deadline.remaining_s(), metadata=self._access.metadata)
        try:
            message = await call.read()
        except aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        except BaseException:
            call.cancel()
            raise
        if not isinstance(message, GenerateResponse):
            raise InternalError("the router answered with an empty stream")
        return call, message
