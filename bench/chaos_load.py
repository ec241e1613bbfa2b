"""Callers of a chaos run: each asks one request after another, through one of the routers, and checks every token.

A caller does what a careful client does and no more: when its *router* is out of reach it asks another one, with the
same seed. Everything else has to be hidden by the system.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import Enum
from typing import cast

from graftline.bench.chaos_asks import Ask, AskBook
from graftline.client import AsyncClient, Delta, Finish, FinishReason
from graftline.client.retry import RetryPolicy
from graftline.errors import GraftlineError

_CALL_TIMEOUT_S = 90.0
_PATIENCE_S = 180.0
_PAUSE_S = 0.2
_ONE_TRY = RetryPolicy(attempts=1)


class Fate(Enum):
    """How a request ended for its caller."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    LOST = "lost"
    WRONG = "wrong"


@dataclass(slots=True)
class Outcome:
    """What a caller saw of one request; seconds on the monotonic clock.

    Attributes:
        longest_gap_s: between two messages of one choice, in the call that was answered.
        retries: calls made again because their router went away.
        failures: calls that failed although their router lived, in words.
        finish: of choice 0, when it finished.
    """

    ask: Ask
    started_s: float
    fate: Fate = Fate.LOST
    detail: str = ""
    first_token_s: float | None = None
    longest_gap_s: float = 0.0
    ended_s: float = 0.0
    num_tokens: int = 0
    retries: int = 0
    failures: list[str] = field(default_factory=list)
    finish: Finish | None = None


class WrongAnswerError(Exception):
    """An answer differs from the plain model's."""


class Callers:
    """Runs requests through several routers.

    Args:
        addresses: of the routers.
        was_disturbed: whether a router was in trouble at any time since then (monotonic seconds).
        on_outcome: hears every end.
    """

    def __init__(
        self,
        book: AskBook,
        addresses: Sequence[str],
        was_disturbed: Callable[[int, float], bool],
        on_outcome: Callable[[Outcome], None],
    ) -> None:
        self._book = book
        self._clients = [AsyncClient(address, retry=_ONE_TRY) for address in addresses]
        self._was_disturbed = was_disturbed
        self._on_outcome = on_outcome
        self._next = 0
        self.stopping = False

    async def run(self, num_callers: int, num_requests: int | None, pace_s: float = 0.0) -> None:
        """Until `num_requests` were asked, or for None until `stopping` is set.

        Args:
            pace_s: what a caller waits between two requests.
        """

        async def caller() -> None:
            while not self.stopping and (num_requests is None or self._next < num_requests):
                number, self._next = self._next, self._next + 1
                self._on_outcome(await self._settle(self._book.ask(number)))
                if pace_s:
                    await asyncio.sleep(pace_s)

        async with asyncio.TaskGroup() as group:
            for _ in range(num_callers):
                group.create_task(caller())

    async def close(self) -> None:
        """Closes the connections."""
        for client in self._clients:
            await client.close()

    async def _settle(self, ask: Ask) -> Outcome:
        """Calls until the request is answered, left, or beyond patience."""
        outcome = Outcome(ask, time.monotonic())
        router = ask.number % len(self._clients)
        while time.monotonic() - outcome.started_s < _PATIENCE_S:
            called_s = time.monotonic()
            try:
                await self._call(router, outcome)
            except WrongAnswerError as error:
                outcome.fate, outcome.detail = Fate.WRONG, str(error)
            except GraftlineError as error:
                if self._was_disturbed(router, called_s):
                    outcome.retries += 1
                else:
                    outcome.failures.append(f"router-{router} {type(error).__name__}: {error}")
                router = (router + 1) % len(self._clients)
                await asyncio.sleep(_PAUSE_S)
                continue
            outcome.ended_s = time.monotonic()
            return outcome
        outcome.ended_s, outcome.detail = time.monotonic(), "; ".join(outcome.failures[-3:]) or "out of patience"
        return outcome

    async def _call(self, router: int, outcome: Outcome) -> None:
        """One call to its end or to the caller's leaving. Raises WrongAnswerError or what the client raises."""
        ask = outcome.ask
        reading = _Reading(ask, outcome)
        try:
            async with asyncio.timeout(ask.leave_after_s):
                stream = self._clients[router].generate(
                    list(ask.prompt),
                    timeout_s=_CALL_TIMEOUT_S,
                    max_tokens=ask.max_tokens,
                    temperature=ask.sampling.temperature,
                    top_k=ask.sampling.top_k,
                    top_p=ask.sampling.top_p,
                    seed=ask.sampling.seed,
                    stop_token_ids=list(ask.stop_token_ids),
                    ignore_eos=True,
                    n=ask.num_choices,
                )
                async with aclosing(cast(AsyncGenerator[Delta, None], stream)) as deltas:
                    async for delta in deltas:
                        reading.take(delta.choice, delta.token_ids, delta.finish)
                        if ask.leave_after_tokens is not None and reading.num_tokens >= ask.leave_after_tokens:
                            outcome.fate = Fate.CANCELLED
                            return
        except TimeoutError:
            outcome.fate = Fate.CANCELLED
            return
        reading.check_end()
        outcome.fate = Fate.FINISHED


class _Reading:
    """What came of one call so far, compared with what must come."""

    def __init__(self, ask: Ask, outcome: Outcome) -> None:
        self._ask = ask
        self._outcome = outcome
        self._ids: dict[int, list[int]] = {choice: [] for choice in range(ask.num_choices)}
        self._finishes: dict[int, Finish] = {}
        self._last_s: dict[int, float] = {}
        outcome.first_token_s, outcome.longest_gap_s, outcome.num_tokens = None, 0.0, 0

    @property
    def num_tokens(self) -> int:
        """Of all choices."""
        return sum(map(len, self._ids.values()))

    def take(self, choice: int, token_ids: Sequence[int], finish: Finish | None) -> None:
        """A message. Raises WrongAnswerError."""
        now_s = time.monotonic()
        if token_ids:
            if self._outcome.first_token_s is None:
                self._outcome.first_token_s = now_s
            with contextlib.suppress(KeyError):
                gap_s = now_s - self._last_s[choice]
                self._outcome.longest_gap_s = max(self._outcome.longest_gap_s, gap_s)
            self._last_s[choice] = now_s
        ids = self._ids.get(choice)
        if ids is None:
            raise WrongAnswerError(f"request {self._ask.number}: a choice {choice} that nobody asked for")
        if choice in self._finishes:
            raise WrongAnswerError(f"request {self._ask.number}: more of choice {choice} after its end")
        ids += token_ids
        if tuple(ids) != self._ask.expected[: len(ids)]:
            raise WrongAnswerError(
                f"request {self._ask.number}, {self._ask.sampling}: {ids} is not {list(self._ask.expected)}"
            )
        self._outcome.num_tokens = self.num_tokens
        if finish is not None:
            self._finishes[choice] = finish
            if choice == 0:
                self._outcome.finish = finish

    def check_end(self) -> None:
        """The stream has ended. Raises WrongAnswerError."""
        ask = self._ask
        stopped = bool(ask.expected) and ask.expected[-1] in ask.stop_token_ids
        reason = FinishReason.STOP if stopped else FinishReason.LENGTH
        for choice, ids in self._ids.items():
            finish = self._finishes.get(choice)
            if finish is None:
                raise WrongAnswerError(f"request {ask.number}: choice {choice} has no end")
            if tuple(ids) != ask.expected:
                raise WrongAnswerError(f"request {ask.number}: {len(ids)} of {len(ask.expected)} tokens")
            usage = finish.usage
            counts = (finish.reason, usage.prompt_tokens, usage.completion_tokens)
            if counts != (reason, len(ask.prompt), len(ids)):
                raise WrongAnswerError(f"request {ask.number}: {counts} with {len(ids)} tokens, {reason} expected")
            if not 0 <= usage.cached_tokens < max(1, len(ask.prompt)) + 1:
                raise WrongAnswerError(f"request {ask.number}: {usage.cached_tokens} cached tokens")
