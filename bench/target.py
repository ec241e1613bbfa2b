"""Where requests are sent: the face every system under test shows, and the one for a running router."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

import grpc

from graftline.bench.prompt_set import Prompt
from graftline.bench.records import Handoff, Speculation
from graftline.proto.channel import ANONYMOUS, Access, open_channel
from graftline.proto.status import error_from_rpc
from graftline.proto.v1.common_pb2 import FinishReason, TreeOrigin
from graftline.proto.v1.router_pb2 import ChatMessage, GenerateFinish, GenerateRequest
from graftline.proto.v1.router_pb2_grpc import RouterServiceStub


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request, the same for every system. `temperature` 0 is greedy."""

    prompt: Prompt
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Finish:
    """What a system says at the end of a request."""

    reason: str
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    attempts: int = 1
    speculation: Speculation | None = None
    handoff: Handoff | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a stream. The last one carries `finish`."""

    token_ids: tuple[int, ...] = field(default=())
    finish: Finish | None = None


class Target(Protocol):
    """A system that answers requests."""

    def stream(self, request: BenchRequest, timeout_s: float) -> AsyncGenerator[Message]:
        """Sends `request` and gives its messages as they arrive; the last one carries `finish`.

        Raises:
            GraftlineError: the request failed, or took longer than `timeout_s`.
        """


class RouterTarget:
    """A router that runs already.

    Args:
        address: host:port.
        access: token and TLS, where the router asks for them.
        model: which model to ask for; empty for the only one.
    """

    def __init__(self, address: str, access: Access = ANONYMOUS, model: str = "") -> None:
        self.address = address
        self._access = access
        self._model = model
        self._channel = open_channel(address, access)
        self._stub = RouterServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def stream(self, request: BenchRequest, timeout_s: float) -> AsyncGenerator[Message]:
        """See `Target`."""
        call = self._stub.Generate(
            _as_proto(request, self._model), timeout=timeout_s, metadata=self._access.metadata, wait_for_ready=True
        )
        try:
            async for response in call:
                finish = _finish(response.finish) if response.HasField("finish") else None
                yield Message(tuple(response.token_ids), finish)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
        finally:
            call.cancel()


def _as_proto(request: BenchRequest, model: str) -> GenerateRequest:
    made = GenerateRequest(
        model=model,
        temperature=request.temperature,
        seed=request.seed,
        max_tokens=request.max_tokens,
        ignore_eos=request.ignore_eos,
    )
    prompt = request.prompt
    if prompt.messages:
        made.chat.messages.extend(ChatMessage(role=turn.role, content=turn.content) for turn in prompt.messages)
    elif prompt.token_ids:
        made.tokens.token_ids.extend(prompt.token_ids)
    else:
        made.text = prompt.text
    return made


def _finish(finish: GenerateFinish) -> Finish:
    speculation = finish.speculation
    handoff = finish.handoff
    return Finish(
        reason=FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower(),
        num_prompt_tokens=finish.usage.prompt_tokens,
        num_cached_tokens=finish.usage.cached_tokens,
        attempts=finish.attempts,
        speculation=Speculation(
            rounds=speculation.rounds,
            drafted=speculation.drafted,
            accepted=speculation.accepted,
            first_round_drafted=speculation.first_round_drafted,
            first_round_accepted=speculation.first_round_accepted,
            tree_origin=TreeOrigin.Name(speculation.tree_origin).removeprefix("TREE_ORIGIN_").lower(),
        )
        if finish.HasField("speculation")
        else None,
        handoff=Handoff(
            bytes=handoff.bytes,
            write_s=handoff.write_s,
            queue_s=handoff.queue_s,
            prefill_s=handoff.prefill_s,
            chunks=handoff.chunks,
        )
        if finish.HasField("handoff")
        else None,
    )
