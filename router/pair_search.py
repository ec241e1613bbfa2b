"""Finds the next pair for one choice: rules out workers that failed it, waits for others within bounds."""

import asyncio
import random
from collections.abc import Iterable
from dataclasses import dataclass

from graftline.errors import GraftlineError, OutOfCapacityError, PeerUnavailableError
from graftline.router.config import RequestConfig
from graftline.router.model import ServedModel
from graftline.router.pairing import Pair, Pairing, WorkerKey, has_outgrown, prefills_of, serves, too_small, worker_key
from graftline.router.policy import Demand
from graftline.router.registry import Registry
from graftline.router.worker import Weights, Worker
from graftline.tracing import NO_TRACER, Tracer

# The pauses of all attempts together outlast the longest reconnecting pause of a channel between two workers.
RETRY_PAUSE_S = 0.1
RETRY_PAUSE_MAX_S = 1.0
# Breakers close by the clock, which nobody announces.
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Fleet:
    """What choices need of the router: workers, how to pick among them, how to call them, and bounds."""

    registry: Registry
    pairing: Pairing
    limits: RequestConfig
    tracer: Tracer = NO_TRACER


class PairSearch:
    """Remembers which workers failed a choice, and why the last one did."""

    def __init__(self, fleet: Fleet, model: ServedModel) -> None:
        self._fleet = fleet
        self._model = model
        self._excluded: set[WorkerKey] = set()
        self._num_pauses = 0
        self._last_error: GraftlineError | None = None
        self._weights: Weights | None = None  # that its tokens come from

    def failed(self, error: GraftlineError, worker: Worker | None) -> None:
        """An attempt failed, and `worker` is to blame (None: nobody)."""
        self._last_error = error
        if worker is not None:
            self._excluded.add(worker_key(worker))

    def progressed(self) -> None:
        """The choice got further: pauses are short again."""
        self._num_pauses = 0

    def begun_with(self, weights: Weights) -> None:
        """The choice has tokens of these weights: only workers that have them may go on with it."""
        self._weights = weights

    def find_now(self, demand: Demand) -> Pair | None:
        """The best pair that can be used this moment."""
        return self._fleet.pairing.pick(self._workers, self._model, demand, self._excluded)

    async def find(self, demand: Demand, *, has_begun: bool) -> Pair:
        """The best pair, waited for when there is none.

        Args:
            has_begun: the choice has tokens, and waits for longer.

        Raises:
            OutOfCapacityError: every prefill has as many requests as it takes, and the choice has not begun.
            PeerUnavailableError: none came up in time, or none ever can; the message tells the state of every worker.
        """
        pair = self.find_now(demand)
        if pair is not None:
            return pair
        self._require_hope(demand)
        if not has_begun:
            self._require_room()
        wait_s = self._fleet.limits.resume_wait_s if has_begun else self._fleet.limits.pair_wait_s
        try:
            async with asyncio.timeout(wait_s):
                if self._excluded:
                    await self._pause(wait_s / 2)
                return await self._next_pair(demand)
        except TimeoutError:
            raise PeerUnavailableError(self._why_none(demand)) from self._last_error

    async def _pause(self, max_s: float) -> None:
        """Nobody else can take it: after a pause, those that failed get another chance."""
        pause_s = min(RETRY_PAUSE_S * 2**self._num_pauses, RETRY_PAUSE_MAX_S, max_s)
        self._num_pauses += 1
        await asyncio.sleep(pause_s * random.uniform(0.5, 1))
        self._excluded.clear()

    async def _next_pair(self, demand: Demand) -> Pair:
        while True:
            pair = self.find_now(demand)
            if pair is not None:
                return pair
            self._require_hope(demand)
            try:
                async with asyncio.timeout(POLL_S):
                    await self._fleet.registry.wait_for_change()
            except TimeoutError:
                continue

    def _require_hope(self, demand: Demand) -> None:
        if has_outgrown(self._workers, self._model, demand):
            raise PeerUnavailableError(f"no prefill can hold what there is so far: {self._why_none(demand)}")

    @property
    def _workers(self) -> Iterable[Worker]:
        """Those that may go on with the choice, as far as is known."""
        workers = self._fleet.registry.workers
        return workers if self._weights is None else [worker for worker in workers if not self._has_others(worker)]

    def _has_others(self, worker: Worker) -> bool:
        return worker.description is not None and worker.description.weights != self._weights

    def _require_room(self) -> None:
        up = [worker for worker in prefills_of(self._fleet.registry.workers, self._model) if worker.is_available]
        full = [worker for worker in up if worker.is_full]
        if full and len(full) == len(up):
            num_open = sum(worker.open_requests for worker in full)
            raise OutOfCapacityError(
                f"{num_open} requests are at prefills already, the most they take",
                retry_after_s=self._fleet.limits.retry_after_s,
            )

    def _why_none(self, demand: Demand) -> str:
        why = self._fleet.registry.why_no_pair()
        ours = [worker for worker in self._workers if serves(worker, self._model)]
        if len(ours) < sum(serves(worker, self._model) for worker in self._fleet.registry.workers):
            why += "; what has begun goes on with the weights it began with, which some do not have"
        small = [worker.address for worker in ours if too_small(worker, demand)]
        if small:
            have, most = len(demand.token_ids), demand.max_total_tokens
            why += f"; too small for the {have} tokens there are, or {most} in the end: {', '.join(small)}"
        last = f"; the last attempt failed with: {self._last_error}" if self._last_error else ""
        return f"no usable pair of workers for {self._model.model_id!r}: {why}{last}"
