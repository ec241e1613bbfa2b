"""How a worker is picked among those that may serve a request.

Costs are comparable only among workers of one role. Reported load is up to one watch interval old and includes
what other routers sent; this router's own open requests are known at once. The larger of the two counts.
"""

import itertools
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from graftline.router.config import PolicyName
from graftline.router.worker import Role, Worker

PREFIX_BLOCK_TOKENS = 64
MAX_REMEMBERED_BLOCKS = 65_536
# A worker that decodes each request at a quarter of the best one's speed is as bad as it gets.
MIN_RELATIVE_SPEED = 0.25


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request needs: its ids so far, and the most tokens it can come to hold."""

    token_ids: Sequence[int]
    max_total_tokens: int


class Policy(Protocol):
    """Picks one of at least one candidate of the same role."""

    def pick(self, candidates: Sequence[Worker], demand: Demand) -> Worker:
        """The chosen one."""

    def forget(self, worker: Worker) -> None:
        """The worker restarted or is gone."""


def prefill_cost_tokens(worker: Worker) -> float:
    """Prompt tokens that will be computed before a new request's."""
    return float(max(worker.load.queued_tokens, worker.pending_tokens))


def decode_cost(worker: Worker, demand: Demand, best_speed: float) -> float:
    """Fullness of slots or pages with the request added, scaled up for slow workers.

    Args:
        best_speed: tokens/s of one request on the fastest candidate; 0 when nothing was measured.
    """
    load = worker.load
    limits = worker.description.limits if worker.description else None
    requests = max(load.running + load.queued, worker.open_requests) + 1
    slot_pressure = requests / max(1, limits.max_running if limits else 0)
    page_pressure = 0.0
    if load.pages_total and worker.description:
        wanted_pages = -(-demand.max_total_tokens // worker.description.page_size)
        page_pressure = (load.pages_total - load.pages_free + wanted_pages) / load.pages_total
    speed = request_speed(worker)
    relative_speed = max(MIN_RELATIVE_SPEED, speed / best_speed) if speed and best_speed else 1.0
    return max(slot_pressure, page_pressure) / relative_speed


def request_speed(worker: Worker) -> float:
    """Measured tokens/s of one running request; 0 when unknown."""
    return worker.load.tokens_per_s / worker.load.running if worker.load.running else 0.0


def costs(candidates: Sequence[Worker], demand: Demand) -> list[float]:
    """The cost of each candidate under least_loaded."""
    if candidates[0].role is Role.PREFILL:
        return [prefill_cost_tokens(worker) for worker in candidates]
    best_speed = max(map(request_speed, candidates))
    return [decode_cost(worker, demand, best_speed) for worker in candidates]


class LeastLoaded:
    """The cheapest; of equals, the one with fewer requests of ours, then any."""

    def pick(self, candidates: Sequence[Worker], demand: Demand) -> Worker:
        """See Policy."""
        if len(candidates) == 1:
            return candidates[0]
        ranked = zip(costs(candidates, demand), candidates, strict=True)
        return min(ranked, key=lambda item: (item[0], item[1].open_requests, random.random()))[1]

    def forget(self, worker: Worker) -> None:
        """Remembers nothing."""


class RoundRobin:
    """One after the other, by address."""

    def __init__(self) -> None:
        self._turn = itertools.count()

    def pick(self, candidates: Sequence[Worker], demand: Demand) -> Worker:
        """See Policy."""
        in_order = sorted(candidates, key=lambda worker: worker.address)
        return in_order[next(self._turn) % len(in_order)]

    def forget(self, worker: Worker) -> None:
        """Remembers nothing of workers."""


class PowerOfTwo:
    """The cheaper of two at random: nearly as even as least_loaded, and many routers do not all pick the same."""

    def __init__(self) -> None:
        self._least_loaded = LeastLoaded()

    def pick(self, candidates: Sequence[Worker], demand: Demand) -> Worker:
        """See Policy."""
        drawn = random.sample(candidates, min(2, len(candidates)))
        return self._least_loaded.pick(drawn, demand)

    def forget(self, worker: Worker) -> None:
        """Remembers nothing."""


class PrefixAffinity:
    """For prefills: fewest tokens to compute first, counting what the worker's prefix cache likely holds.

    Remembers which worker was sent which blocks of prompt (a chain of hashes, least recently used ones are
    dropped). A loaded worker loses its advantage by itself: waiting tokens weigh as much as cached ones.
    """

    def __init__(self, block_tokens: int = PREFIX_BLOCK_TOKENS, max_blocks: int = MAX_REMEMBERED_BLOCKS) -> None:
        self._block_tokens = block_tokens
        self._max_blocks = max_blocks
        self._sent: dict[str, OrderedDict[int, None]] = {}

    def pick(self, candidates: Sequence[Worker], demand: Demand) -> Worker:
        """See Policy."""
        blocks = self._block_hashes(demand.token_ids)
        waits = (prefill_cost_tokens(worker) - self._known_tokens(worker, blocks) for worker in candidates)
        ranked = zip(waits, candidates, strict=True)
        chosen = min(ranked, key=lambda item: (item[0], item[1].open_requests, random.random()))[1]
        self._remember(chosen, blocks)
        return chosen

    def forget(self, worker: Worker) -> None:
        """Its cache is empty now."""
        self._sent.pop(worker.address, None)

    def _known_tokens(self, worker: Worker, blocks: Sequence[int]) -> int:
        sent = self._sent.get(worker.address, OrderedDict())
        return self._block_tokens * sum(1 for _ in itertools.takewhile(sent.__contains__, blocks))

    def _remember(self, worker: Worker, blocks: Sequence[int]) -> None:
        sent = self._sent.setdefault(worker.address, OrderedDict())
        # Last block first, so that the start of a prompt, which most others share, is dropped last.
        for block in reversed(blocks):
            sent[block] = None
            sent.move_to_end(block)
        while len(sent) > self._max_blocks:
            sent.popitem(last=False)

    def _block_hashes(self, token_ids: Sequence[int]) -> list[int]:
        hashes: list[int] = []
        chain = 0
        for start in range(0, len(token_ids) - self._block_tokens + 1, self._block_tokens):
            chain = hash((chain, tuple(token_ids[start : start + self._block_tokens])))
            hashes.append(chain)
        return hashes


def make_policies(name: PolicyName) -> dict[Role, Policy]:
    """One policy a role. Prefix affinity is for prefills; decodes are then picked by load."""
    match name:
        case PolicyName.ROUND_ROBIN:
            return {Role.PREFILL: RoundRobin(), Role.DECODE: RoundRobin()}
        case PolicyName.POWER_OF_TWO:
            return {Role.PREFILL: PowerOfTwo(), Role.DECODE: PowerOfTwo()}
        case PolicyName.PREFIX_AFFINITY:
            return {Role.PREFILL: PrefixAffinity(), Role.DECODE: LeastLoaded()}
        case PolicyName.LEAST_LOADED:
            return {Role.PREFILL: LeastLoaded(), Role.DECODE: LeastLoaded()}
