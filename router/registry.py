"""The workers this router knows: one task follows each of them, and says when it may be used and when it is lost.

A worker is described once per incarnation and then watched. It is lost when the connection breaks, when its
messages stop, when it makes no progress with work at hand, or when it says so itself; requests on a lost
worker are moved at once.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence

import grpc
import tenacity
from grpc import aio

from graftline.errors import GraftlineError, IncompatibleError, PeerUnavailableError
from graftline.metrics import WORKER_AVAILABLE, WORKER_LOST, WORKER_OPEN_REQUESTS, Metrics
from graftline.proto.channel import Access, open_channel
from graftline.proto.status import error_from_rpc
from graftline.proto.v1.worker_pb2 import DescribeRequest, WatchRequest, WatchResponse, WorkerState
from graftline.router.breaker import Breaker
from graftline.router.config import HealthConfig
from graftline.router.model import ModelStore, ServedModel
from graftline.router.pairing import mismatched_fields, prefills_of, serves
from graftline.router.sources import WorkerSource
from graftline.router.worker import Description, Role, Worker

logger = logging.getLogger(__name__)

_Known = tuple[Role, str]
_PAUSE_AFTER_LOSS_S = 0.05
SILENT_TURNS = 4


class Registry:
    """Owns the workers. `run` must be running for anything to change."""

    def __init__(
        self,
        sources: Sequence[WorkerSource],
        models: ModelStore,
        health: HealthConfig,
        access: Access,
        metrics: Metrics,
        *,
        discovery_interval_s: float,
        forget: Callable[[Worker], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources = sources
        self._models = models
        self._health = health
        self._access = access
        self._metrics = metrics
        self._discovery_interval_s = discovery_interval_s
        self._forget = forget
        self._clock = clock
        self._workers: dict[_Known, Worker] = {}
        self._retired: set[Worker] = set()
        self._changed = asyncio.Event()
        # Longest request and longest prompt by model; forgotten when a description changes.
        self._max_tokens: dict[tuple[str, str], tuple[int, int]] = {}
        # The model of all decodes, if they have one: it is asked for by every request, and forgotten likewise.
        self._only_model: tuple[ServedModel, ...] = ()

    @property
    def workers(self) -> Iterable[Worker]:
        """Every worker that is listed now."""
        return self._workers.values()

    def models(self) -> Sequence[ServedModel]:
        """Models of the decodes that may be used now, or could be a moment ago; one a name and card."""
        if self._only_model:
            return self._only_model
        found: dict[tuple[str, str], ServedModel] = {}
        decodes = [w for w in self._workers.values() if w.role is Role.DECODE and w.description]
        for worker in sorted(decodes, key=lambda w: not w.is_available):
            if worker.description:
                found.setdefault(worker.description.model.identity, worker.description.model)
        models = tuple(found.values())
        self._only_model = models if len(models) == 1 else ()
        return models

    def max_request_tokens(self, model: ServedModel) -> int:
        """Longest prompt plus output the model and any known decode of it can hold."""
        return self._longest(model)[0]

    def max_prompt_tokens(self, model: ServedModel) -> int:
        """Longest prompt any known prefill of the model can hold, an output token included."""
        return self._longest(model)[1]

    def _longest(self, model: ServedModel) -> tuple[int, int]:
        known = self._max_tokens.get(model.identity)
        if known is None:
            workers = self._workers.values()
            decodes = [worker for worker in workers if worker.role is Role.DECODE and serves(worker, model)]
            longest = _largest(decodes, model), _largest(prefills_of(workers, model), model)
            known = min(model.context_length, longest[0]), min(model.context_length, longest[1])
            self._max_tokens[model.identity] = known
        return known

    def _forget_models(self) -> None:
        """What was found out about them may have changed."""
        self._max_tokens.clear()
        self._only_model = ()

    def has_pair(self) -> bool:
        """True when some two available workers may be paired."""
        usable = [worker for worker in self._workers.values() if worker.is_available]
        return any(
            not mismatched_fields(prefill, decode)
            for prefill in usable
            for decode in usable
            if prefill.role is Role.PREFILL and decode.role is Role.DECODE
        )

    def why_no_pair(self) -> str:
        """The state of every worker, and the fields that keep available ones from being paired."""
        states = [
            f"{worker.role.leg.value} {worker.address}: {worker.status().reason or 'available'}"
            for worker in self._workers.values()
        ]
        usable = [worker for worker in self._workers.values() if worker.is_available]
        differing = {
            field
            for prefill in usable
            for decode in usable
            if prefill.role is Role.PREFILL and decode.role is Role.DECODE
            for field in mismatched_fields(prefill, decode)
        }
        mismatch = f"; some differ in {', '.join(sorted(differing))}" if differing else ""
        return f"{'; '.join(states) or 'none is listed'}{mismatch}"

    async def wait_for_change(self) -> None:
        """Until something about a worker changed."""
        await self._changed.wait()

    async def run(self) -> None:
        """Discovers and follows workers until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                for key in await self._listed():
                    if key not in self._workers:
                        self._workers[key] = worker = self._new_worker(*key)
                        tasks.create_task(self._follow(worker), name=f"follow {worker.address}")
                await asyncio.sleep(self._discovery_interval_s)

    async def _listed(self) -> list[_Known]:
        """Asks the sources; workers no longer named get nothing new and go when their last request has."""
        listed: dict[_Known, None] = {}
        for source in self._sources:
            lists = await source.workers()
            listed.update({(Role.PREFILL, address): None for address in lists.prefill})
            listed.update({(Role.DECODE, address): None for address in lists.decode})
        for key in self._workers.keys() - listed.keys():
            worker = self._workers.pop(key)
            self._forget_models()
            worker.refuses_new("no longer listed")
            self._retired.add(worker)
            self._announce(worker)
        return list(listed)

    def _new_worker(self, role: Role, address: str) -> Worker:
        breaker = Breaker(
            self._health.breaker_failures, self._health.breaker_open_s, self._health.breaker_open_max_s, self._clock
        )
        return Worker(address, role, open_channel(address, self._access), breaker, self._access.metadata, self._clock)

    async def _follow(self, worker: Worker) -> None:
        """Follows a worker, and carries the calls to it meanwhile, until it is retired and has nothing open."""
        async with asyncio.TaskGroup() as tasks:
            carrying = tasks.create_task(worker.calls.run(), name=f"calls to {worker.address}")
            try:
                await self._follow_until_done(worker)
            finally:
                carrying.cancel()
                worker.revoke_claims("the router forgot it")
                self._forget(worker)
                self._retired.discard(worker)
                self._drop_metrics(worker)
                await worker.channel.close()

    async def _follow_until_done(self, worker: Worker) -> None:
        """Describes and watches it again and again."""
        while not self._is_done(worker):
            try:
                await self._describe(worker)
                await self._watch(worker)
            except PeerUnavailableError as error:
                self._lose(worker, str(error))
                await asyncio.sleep(_PAUSE_AFTER_LOSS_S)
            except Exception as error:
                # A border to a foreign process: whatever one worker sends must not end the router.
                logger.exception("following %s failed", worker.address)
                self._lose(worker, f"following it failed: {type(error).__name__}")
                await asyncio.sleep(self._health.reconnect_max_s)

    async def _describe(self, worker: Worker) -> None:
        """Asks until it answers, with bounded pauses."""
        retrying = tenacity.AsyncRetrying(
            wait=tenacity.wait_exponential(multiplier=0.05, max=self._health.reconnect_max_s)
            + tenacity.wait_random(0, 0.05),
            retry=tenacity.retry_if_exception_type((GraftlineError, aio.AioRpcError)),
            stop=lambda _: self._is_done(worker),
            after=lambda state: self._note_unreachable(worker, state),
            reraise=True,
        )
        try:
            description: Description = await retrying(self._ask_description, worker)
        except (GraftlineError, aio.AioRpcError) as error:
            raise PeerUnavailableError(str(error)) from error
        if description.identity.incarnation != worker.incarnation:
            self._forget(worker)
        worker.described(description)
        self._forget_models()

    async def _ask_description(self, worker: Worker) -> Description:
        known = worker.description.model.card_hash if worker.description else ""
        request = DescribeRequest(known_card_hash=known if self._models.has(known) else "")
        response = await worker.service.Describe(
            request, timeout=self._health.connect_timeout_s, metadata=self._access.metadata
        )
        if response.identity.role != worker.role.value:
            raise IncompatibleError(("role",), f"{worker.address} is not a {worker.role.leg.value}")
        return Description.of(response, await self._models.load(response.model_card))

    async def _watch(self, worker: Worker) -> None:
        """Follows load messages; raises PeerUnavailableError when the worker is lost, returns to describe anew."""
        call = worker.service.Watch(
            WatchRequest(interval_s=self._health.watch_interval_s), metadata=self._access.metadata
        )
        reading: asyncio.Task[object] | None = None
        try:
            while not self._is_done(worker):
                # A task, so that waiting for it can time out without ending the stream.
                reading = asyncio.create_task(call.read())
                await self._wait_for_word(reading)
                message = reading.result()
                if not isinstance(message, WatchResponse):
                    raise PeerUnavailableError("it ended its watch")
                if message.incarnation != worker.incarnation:
                    return
                self._take(worker, message)
        except aio.AioRpcError as error:
            raise PeerUnavailableError(f"connection lost: {error_from_rpc(error)}") from error
        finally:
            call.cancel()
            if reading is not None:
                reading.cancel()

    async def _wait_for_word(self, reading: "asyncio.Task[object]") -> None:
        """Waits in several short turns: if this process itself stands still for long, that is one turn only."""
        for _ in range(SILENT_TURNS):
            done, _ = await asyncio.wait({reading}, timeout=self._health.hang_timeout_s / SILENT_TURNS)
            if done:
                return
        raise PeerUnavailableError(f"hung: no word for {self._health.hang_timeout_s:g} s")

    def _take(self, worker: Worker, message: WatchResponse) -> None:
        worker.reported(message)
        stalled_s = worker.stalled_for_s()
        if message.state == WorkerState.WORKER_STATE_FAILED:
            self._lose(worker, "it failed")
        elif stalled_s > self._health.stall_timeout_s:
            self._lose(worker, f"hung: no progress for {stalled_s:.1f} s with {message.running} running")
        elif worker in self._retired:
            worker.refuses_new("no longer listed")
        elif message.state == WorkerState.WORKER_STATE_SERVING:
            worker.available_again()
        else:
            worker.refuses_new(WorkerState.Name(message.state).removeprefix("WORKER_STATE_").lower())
        self._announce(worker)

    def _lose(self, worker: Worker, reason: str) -> None:
        if not worker.is_lost:  # told once, however often it is found so
            # Quoted: the reason may be a peer's own words.
            logger.warning("%s %s is lost: %r", worker.role.leg.value, worker.address, reason)
            self._metrics.counter(WORKER_LOST).labels(worker.role.leg.value, worker.address).inc()
        worker.lost(reason)
        self._announce(worker)

    def _note_unreachable(self, worker: Worker, state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, grpc.RpcError):
            error = error_from_rpc(error)
        worker.lost(f"cannot be reached: {error}")
        self._announce(worker)

    def _is_done(self, worker: Worker) -> bool:
        return worker in self._retired and not worker.claims

    def _announce(self, worker: Worker) -> None:
        """Wakes who waits for a usable pair, and shows the state in the metrics."""
        self._changed.set()
        self._changed = asyncio.Event()
        labels = (worker.role.leg.value, worker.address)
        self._metrics.gauge(WORKER_AVAILABLE).labels(*labels).set(1 if worker.is_available else 0)
        self._metrics.gauge(WORKER_OPEN_REQUESTS).labels(*labels).set(worker.open_requests)
        # Shown as 0 from the start: an alert cannot see the growth of what was not there.
        self._metrics.counter(WORKER_LOST).labels(*labels)

    def _drop_metrics(self, worker: Worker) -> None:
        labels = (worker.role.leg.value, worker.address)
        for gauge in (WORKER_AVAILABLE, WORKER_OPEN_REQUESTS):
            self._metrics.gauge(gauge).remove(*labels)
        # The counter goes too: addresses that come and go (a DNS name's) must not pile up.
        self._metrics.counter(WORKER_LOST).remove(*labels)


def _largest(workers: Iterable[Worker], model: ServedModel) -> int:
    """The largest stated limit of tokens a request; 0 stands for none."""
    described = (worker.description for worker in workers if worker.description)
    limits = (description.limits.max_request_tokens or model.context_length for description in described)
    return max(limits, default=model.context_length)
