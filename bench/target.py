"""Where requests are sent: the face every system under test shows, and the one for a running router."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self, cast

from graftline import client
from graftline.bench.prompt_set import Prompt
from graftline.bench.records import Handoff, Speculation
from graftline.client.retry import RetryPolicy
from graftline.proto.channel import ANONYMOUS, Access

_NO_RETRY = RetryPolicy(attempts=1)


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
    """A router that runs already. Nothing is retried on the client's side: that would hide failures.

    Args:
        address: host:port.
        access: token and TLS, where the router asks for them.
        model: which model to ask for; empty for the only one.
    """

    def __init__(self, address: str, access: Access = ANONYMOUS, model: str = "") -> None:
        self.address = address
        self._model = model
        self._client = client.AsyncClient(address, token=access.token, tls=access.tls, retry=_NO_RETRY)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    async def stream(self, request: BenchRequest, timeout_s: float) -> AsyncGenerator[Message, None]:
        """See `Target`."""
        deltas = self._client.generate(
            _prompt(request.prompt),
            timeout_s=timeout_s,
            model=self._model,
            temperature=request.temperature,
            seed=request.seed,
            max_tokens=request.max_tokens,
            ignore_eos=request.ignore_eos,
        )
        async with aclosing(cast(AsyncGenerator[client.Delta, None], deltas)) as open_deltas:
            async for delta in open_deltas:
                yield Message(delta.token_ids, _finish(delta.finish) if delta.finish else None)


def _prompt(prompt: Prompt) -> client.Prompt:
    if prompt.messages:
        return [client.Message(turn.role, turn.content) for turn in prompt.messages]
    return prompt.token_ids or prompt.text


def _finish(finish: client.Finish) -> Finish:
    speculation, handoff = finish.speculation, finish.handoff
    return Finish(
        reason=finish.reason.value,
        num_prompt_tokens=finish.usage.prompt_tokens,
        num_cached_tokens=finish.usage.cached_tokens,
        attempts=finish.attempts,
        speculation=Speculation(
            rounds=speculation.rounds,
            drafted=speculation.drafted,
            accepted=speculation.accepted,
            first_round_drafted=speculation.first_round_drafted,
            first_round_accepted=speculation.first_round_accepted,
            tree_origin=speculation.tree_origin.value,
        ),
        handoff=Handoff(
            bytes=handoff.num_bytes,
            write_s=handoff.write_s,
            queue_s=handoff.queue_s,
            prefill_s=handoff.prefill_s,
            chunks=handoff.chunks,
        ),
    )
