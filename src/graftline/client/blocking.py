"""The blocking twin of the asynchronous client, for scripts and threads."""

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
import tenacity

from graftline.client.request import GenerateOptions, Prompt, request_of
from graftline.client.results import Collector, Completion, Delta, ModelInfo, delta_of, models_of
from graftline.client.retry import Deadline, RetryPolicy
from graftline.errors import InternalError
from graftline.proto.channel import Access, ClientTls, open_sync_channel
from graftline.proto.status import error_from_rpc
from graftline.proto.v1.router_pb2 import (
    GenerateRequest,
    GenerateResponse,
    GetStatusRequest,
    GetStatusResponse,
    ListModelsRequest,
)
from graftline.proto.v1.router_pb2_grpc import RouterServiceStub


class Client:
    """Calls one router; thread-safe. Arguments as `AsyncClient`."""

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
        self._channel = open_sync_channel(target, self._access)
        self._stub = RouterServiceStub(self._channel)
        self._timeout_s = timeout_s
        self._retry = retry or RetryPolicy()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection and what is open on it."""
        self._channel.close()

    def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Iterator[Delta]:
        """Streams what is generated; closing the generator cancels the request.

        Raises:
            GraftlineError: as a class of `graftline.errors`.
        """
        request = request_of(prompt, options)
        deadline = Deadline(self._timeout_s if timeout_s is None else timeout_s)
        call, message = tenacity.Retrying(**self._retry.settings())(self._begin, request, deadline)
        try:
            while message is not None:
                yield delta_of(message)
                message = next(call, None)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
        finally:
            call.cancel()

    def complete(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """The whole answer. Arguments and errors as `generate`."""
        collector = Collector()
        for delta in self.generate(prompt, timeout_s=timeout_s, **options):
            collector.add(delta)
        return collector.completion()

    def models(self) -> tuple[ModelInfo, ...]:
        """What can be asked for."""
        try:
            answer = self._stub.ListModels(ListModelsRequest(), timeout=self._timeout_s, metadata=self._access.metadata)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
        return models_of(answer)

    def status(self) -> GetStatusResponse:
        """Workers, their health and load, as the router sees them."""
        try:
            return self._stub.GetStatus(GetStatusRequest(), timeout=self._timeout_s, metadata=self._access.metadata)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error

    def _begin(self, request: GenerateRequest, deadline: Deadline) -> tuple[Any, GenerateResponse | None]:
        call = self._stub.Generate(request, timeout=deadline.remaining_s(), metadata=self._access.metadata)
        try:
            message = next(call, None)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
        except BaseException:
            call.cancel()
            raise
        if message is None:
            raise InternalError("the router answered with an empty stream")
        return call, message
