"""A router over fake workers, and short ways to ask it something."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from router_fakes import FakeWorker, started

from graftline.proto.channel import open_channel
from graftline.proto.v1.common_pb2 import WorkerRole
from graftline.proto.v1.router_pb2 import ChatMessage, ChatPrompt, GenerateFinish, GenerateRequest, TokenPrompt
from graftline.proto.v1.router_pb2_grpc import RouterServiceStub
from graftline.router.config import HealthConfig, RequestConfig, RouterConfig, WorkerLists
from graftline.router.server import Router, running_router

QUICK_HEALTH = HealthConfig(
    watch_interval_s=0.05, hang_timeout_s=0.5, stall_timeout_s=0.5, connect_timeout_s=0.5, reconnect_max_s=0.1
)
QUICK_REQUESTS = RequestConfig(pair_wait_s=0.3, resume_wait_s=3.0)


@dataclass
class Answer:
    """Everything one choice received."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish: GenerateFinish | None = None
    messages: int = 0


@dataclass
class Harness:
    """A running router with its workers."""

    router: Router
    stub: Any

    def generate(self, timeout: float | None = 10, **fields: Any) -> Any:
        return self.stub.Generate(request(**fields), timeout=timeout)

    async def answers(self, timeout: float | None = 10, **fields: Any) -> list[Answer]:
        """All choices, in order."""
        answers: dict[int, Answer] = {}
        async for message in self.generate(timeout, **fields):
            answer = answers.setdefault(message.choice, Answer())
            assert answer.finish is None, "nothing follows the finish of a choice"
            answer.text += message.text
            answer.token_ids += message.token_ids
            answer.logprobs += message.logprobs
            answer.messages += 1
            if message.HasField("finish"):
                answer.finish = message.finish
        assert all(answer.finish is not None for answer in answers.values()), "every choice has its finish"
        return [answers[choice] for choice in sorted(answers)]

    async def answer(self, timeout: float | None = 10, **fields: Any) -> Answer:
        (answer,) = await self.answers(timeout, **fields)
        return answer

    async def until_quiescent(self, timeout_s: float = 2) -> None:
        """Waits for requests that are on their way out, then checks."""
        await until(lambda: self.router.admission.num_open == 0, timeout_s)
        self.assert_quiescent()

    def assert_quiescent(self) -> None:
        """No request is counted anywhere any more."""
        assert self.router.admission.num_open == 0
        for worker in self.router.registry.workers:
            assert (worker.open_requests, worker.pending_tokens, worker.claims) == (0, 0, set()), worker.address


async def until(condition: Callable[[], object], timeout_s: float = 2) -> None:
    """Polls a condition that nothing announces.

    Raises:
        TimeoutError: it did not come true in time.
    """
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def request(**fields: Any) -> GenerateRequest:
    """A GenerateRequest; `chat` takes (role, content) tuples, `ids` token ids."""
    chat = fields.pop("chat", None)
    ids = fields.pop("ids", None)
    made = GenerateRequest(**fields)
    if chat is not None:
        made.chat.CopyFrom(ChatPrompt(messages=[ChatMessage(role=role, content=text) for role, text in chat]))
    if ids is not None:
        made.tokens.CopyFrom(TokenPrompt(token_ids=ids))
    return made


def config_for(*workers: FakeWorker, **changes: Any) -> RouterConfig:
    lists = WorkerLists(
        tuple(w.address for w in workers if w.role == WorkerRole.WORKER_ROLE_PREFILL),
        tuple(w.address for w in workers if w.role == WorkerRole.WORKER_ROLE_DECODE),
    )
    base = RouterConfig(workers=lists, health=QUICK_HEALTH, requests=QUICK_REQUESTS, drain_grace_s=0)
    return replace(base, **changes)


@asynccontextmanager
async def harness(*workers: FakeWorker, **changes: Any) -> AsyncIterator[Harness]:
    """Workers and a router over them, ready for requests; checks for leaks at the end."""
    async with (
        started(*workers),
        running_router(config_for(*workers, **changes)) as router,
        open_channel(router.address) as channel,
    ):
        await router.wait_until_usable(5)
        made = Harness(router, RouterServiceStub(channel))
        yield made
