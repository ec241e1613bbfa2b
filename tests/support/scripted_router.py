"""A router with a script instead of workers: a real gRPC server whose answers come at known times."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from graftline.errors import GraftlineError
from graftline.proto.server import RpcServer
from graftline.proto.status import rpc_border
from graftline.proto.v1.common_pb2 import FinishReason, HandoffStats, SpeculationStats, TreeOrigin, Usage
from graftline.proto.v1.router_pb2 import GenerateFinish, GenerateRequest, GenerateResponse
from graftline.proto.v1.router_pb2_grpc import RouterServiceServicer, add_RouterServiceServicer_to_server


@dataclass(frozen=True)
class Script:
    """One answer: after `first_s` one token, then messages of `round_tokens` tokens every `round_s` seconds.

    Without speculation stats if `accepted` is None; `error` ends the answer after `error_after` messages.
    """

    first_s: float = 0.05
    round_s: float = 0.02
    round_tokens: int = 1
    num_tokens: int = 9
    first_accepted: int = 2
    token: int = 7
    error: GraftlineError | None = None
    error_after: int = 0


@dataclass
class ScriptedRouter:
    """Picks a script per request; keeps what it was asked."""

    pick: Callable[[GenerateRequest], Script] = lambda _request: Script()
    requests: list[GenerateRequest] = field(default_factory=list)
    num_open: int = 0
    most_open: int = 0
    address: str = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator["ScriptedRouter"]:
        server = RpcServer("127.0.0.1:0")
        server.add(add_RouterServiceServicer_to_server, _Service(self), "graftline.v1.RouterService")
        await server.start()
        self.address = server.address
        try:
            yield self
        finally:
            await server.stop(0)


class _Service(RouterServiceServicer):
    def __init__(self, router: ScriptedRouter) -> None:
        self._router = router

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[GenerateResponse]:
        router = self._router
        router.requests.append(request)
        router.num_open += 1
        router.most_open = max(router.most_open, router.num_open)
        try:
            async with rpc_border(context):
                async for response in _answer(router.pick(request)):
                    yield response
        finally:
            router.num_open -= 1


async def _answer(script: Script) -> AsyncIterator[GenerateResponse]:
    """Due times are absolute, so that delays do not add up."""
    loop = asyncio.get_running_loop()
    due = loop.time() + script.first_s
    sizes = message_sizes(script)
    for number, size in enumerate(sizes):
        if script.error is not None and number >= script.error_after:
            raise script.error
        await asyncio.sleep(due - loop.time())
        yield GenerateResponse(token_ids=[script.token] * size)
        due += script.round_s
    rounds = len(sizes) - 1
    yield GenerateResponse(
        finish=GenerateFinish(
            reason=FinishReason.FINISH_REASON_LENGTH,
            usage=Usage(prompt_tokens=11, completion_tokens=script.num_tokens, cached_tokens=3),
            speculation=SpeculationStats(
                rounds=rounds,
                drafted=3 * rounds,
                accepted=script.num_tokens - 1 - rounds,
                first_round_drafted=3,
                first_round_accepted=script.first_accepted,
                tree_origin=TreeOrigin.TREE_ORIGIN_REAL,
            ),
            handoff=HandoffStats(bytes=1_000_000, write_s=0.001, chunks=2),
            attempts=1,
        )
    )


def message_sizes(script: Script) -> Sequence[int]:
    """Tokens of each message."""
    rest = script.num_tokens - 1
    full, left = divmod(rest, script.round_tokens)
    return [1, *[script.round_tokens] * full, *([left] if left else [])]
