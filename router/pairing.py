"""Which prefill and decode may serve a request together, and one attempt's hold on such a pair."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from graftline.proto.status import Leg
from graftline.router.model import ServedModel
from graftline.router.policy import Demand, Policy
from graftline.router.worker import Role, Weights, Worker

WorkerKey = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill and a decode that fit together."""

    prefill: Worker
    decode: Worker

    @property
    def weights(self) -> Weights:
        """What both compute with now."""
        assert self.decode.description is not None, "only described workers are paired"
        return self.decode.description.weights

    def on(self, leg: Leg) -> Worker:
        """The worker of a leg."""
        return self.prefill if leg is Leg.PREFILL else self.decode


def worker_key(worker: Worker) -> WorkerKey:
    """Identity for exclusions: a restarted worker is a new one."""
    return worker.address, worker.incarnation


def mismatched_fields(prefill: Worker, decode: Worker) -> tuple[str, ...]:
    """Names of the fingerprint fields in which two workers differ; empty when they may be paired."""
    if prefill.description is None or decode.description is None:
        return ("description",)
    if prefill.description.fit == decode.description.fit:
        return ()
    ours, theirs = prefill.description.fingerprint, decode.description.fingerprint
    return tuple(sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)))


def _fit(worker: Worker) -> str | None:
    """Equal for a prefill and a decode that may be paired; None, which fits no decode, before it has said."""
    return worker.description.fit if worker.description else None


def serves(worker: Worker, model: ServedModel) -> bool:
    """True for a worker that serves this very model."""
    return worker.description is not None and worker.description.model.identity == model.identity


class Pairing:
    """Picks pairs: first a decode that has a usable prefill, then the prefill."""

    def __init__(self, policies: dict[Role, Policy]) -> None:
        self._prefills = policies[Role.PREFILL]
        self._decodes = policies[Role.DECODE]

    def pick(
        self, workers: Iterable[Worker], model: ServedModel, demand: Demand, excluded: set[WorkerKey]
    ) -> Pair | None:
        """The pair for a request, or None when no two available, compatible workers can hold it."""
        prefills: list[Worker] = []
        decodes: list[Worker] = []
        for worker in workers:
            if not worker.is_available or worker.is_full or (excluded and worker_key(worker) in excluded):
                continue
            if worker.role is Role.PREFILL:
                if _holds_prompt(worker, demand):
                    prefills.append(worker)
            elif serves(worker, model) and _holds_all(worker, demand):
                decodes.append(worker)
        fits = {_fit(prefill) for prefill in prefills}
        decodes = [decode for decode in decodes if _fit(decode) in fits]
        if not decodes:
            return None
        decode = self._decodes.pick(decodes, demand)
        partners = [prefill for prefill in prefills if _fit(prefill) == _fit(decode)]
        return Pair(self._prefills.pick(partners, demand), decode)

    def forget(self, worker: Worker) -> None:
        """The worker restarted or is gone."""
        (self._prefills if worker.role is Role.PREFILL else self._decodes).forget(worker)


class Claim:
    """One attempt's hold on its pair: counts it on both workers exactly once, whatever ends it.

    The prefill leg ends when the handoff is over (a token after the first one came), the decode leg with the
    attempt. `revoke` is how a lost worker ends the attempts that run on it.
    """

    def __init__(self, pair: Pair, num_tokens: int) -> None:
        self.pair = pair
        self.revoked: tuple[Leg, str] | None = None
        self._num_tokens = num_tokens
        self._stop: Callable[[], object] | None = None
        self._held: list[Worker] = []
        self._probed: list[Worker] = []  # whose breakers wait for what becomes of this

    def __enter__(self) -> Self:
        for worker in (self.pair.prefill, self.pair.decode):
            worker.open_requests += 1
            worker.claims.add(self)
            if worker.breaker.start():
                self._probed.append(worker)
            self._held.append(worker)
        self.pair.prefill.pending_tokens += self._num_tokens
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release(self.pair.prefill)
        self._release(self.pair.decode)
        self._stop = None

    def attach(self, stop: Callable[[], object]) -> None:
        """What ends the attempt when a worker is lost; called at once if one already is."""
        self._stop = stop
        if self.revoked is not None:
            stop()

    def prompt_computed(self) -> None:
        """The first token came: the prompt no longer waits."""
        self.pair.prefill.pending_tokens -= self._num_tokens
        self._num_tokens = 0

    def handed_over(self) -> None:
        """The decode goes on by itself: what happens to the prefill no longer matters here."""
        if self.pair.prefill in self._held:
            self.pair.prefill.breaker.succeeded()
            self._release(self.pair.prefill)

    def revoke(self, worker: Worker, reason: str) -> None:
        """A worker was lost."""
        if self.revoked is None:
            self.revoked = (worker.role.leg, f"{worker.role.leg.value} {worker.address}: {reason}")
            if self._stop is not None:
                self._stop()

    def _release(self, worker: Worker) -> None:
        if worker not in self._held:
            return
        self._held.remove(worker)
        worker.claims.discard(self)
        worker.open_requests -= 1
        if worker in self._probed:
            worker.breaker.undecided()
        if worker is self.pair.prefill:
            self.prompt_computed()


def has_outgrown(workers: Iterable[Worker], model: ServedModel, demand: Demand) -> bool:
    """True when the prefills of a model are known, be they up or not, and none of them can hold a request's tokens."""
    known = list(workers)
    if any(worker.description is None for worker in known if worker.role is Role.PREFILL):
        return False
    prefills = prefills_of(known, model)
    return bool(prefills) and not any(_holds_prompt(prefill, demand) for prefill in prefills)


def prefills_of(workers: Iterable[Worker], model: ServedModel) -> list[Worker]:
    """The prefills, up or not, that go with a decode of a model."""
    known = list(workers)
    decodes = [worker for worker in known if worker.role is Role.DECODE and serves(worker, model)]
    prefills = [worker for worker in known if worker.role is Role.PREFILL]
    return [prefill for prefill in prefills if any(not mismatched_fields(prefill, decode) for decode in decodes)]


def too_small(worker: Worker, demand: Demand) -> bool:
    """True for a worker whose pool cannot hold what it would have to."""
    return not (_holds_prompt if worker.role is Role.PREFILL else _holds_all)(worker, demand)


def _holds_prompt(prefill: Worker, demand: Demand) -> bool:
    limit = prefill.description.limits.max_request_tokens if prefill.description else 0
    return not limit or len(demand.token_ids) < limit


def _holds_all(decode: Worker, demand: Demand) -> bool:
    limit = decode.description.limits.max_request_tokens if decode.description else 0
    return not limit or demand.max_total_tokens <= limit
