"""Hurts the processes of a cluster on schedule, restarts those that ended as a supervisor would, and takes notes.

A supervisor may do one thing: start a process that has ended again, at its address. Whatever needs more than that is
trouble, and so is a process that ends without having been hurt.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass

from graftline.bench.chaos_faults import Fault, FaultKind, Lane
from graftline.bench.chaos_gauges import stage_pids
from graftline.bench.chaos_load import Outcome
from graftline.bench.chaos_records import FaultRecord, Trouble
from graftline.child import Child
from graftline.client import AsyncClient
from graftline.errors import GraftlineError
from graftline.launcher import Cluster

_POLL_S = 0.05
_STATUS_TIMEOUT_S = 2.0
_BACK_S = 90.0
_NOTICE_S = 15.0
_SERVED_S = 60.0
_ORPHANS_S = 8.0
_ENDS_S = 45.0
_RESTART_TRIES = 3
# A call through a router that came back may still fail on a connection of before.
_AFTERMATH_S = 3.0

_END_THE_PROCESS = {
    FaultKind.KILL,
    FaultKind.KILL_FIRST,
    FaultKind.KILL_LATER,
    FaultKind.FREEZE_LATER,
    FaultKind.TERMINATE,
}
_STATUS_OF_END = {
    FaultKind.KILL: -signal.SIGKILL,
    FaultKind.KILL_FIRST: -signal.SIGKILL,
    FaultKind.KILL_LATER: 1,
    FaultKind.FREEZE_LATER: 1,
    FaultKind.TERMINATE: 0,
}


@dataclass(slots=True)
class _Notes:
    """A fault under observation; see `FaultRecord`."""

    number: int
    kind: FaultKind
    target: str
    address: str
    at_s: float
    hurt_s: float
    noticed_s: float | None = None
    ended_s: float | None = None
    spawned_s: float | None = None
    ready_s: float | None = None
    usable_s: float | None = None
    served_s: float | None = None

    def record(self) -> FaultRecord:
        """What goes to the file."""
        return FaultRecord(
            self.number,
            self.kind.value,
            self.target,
            round(self.at_s, 3),
            *(
                None if value is None else round(value, 3)
                for value in (self.noticed_s, self.ended_s, self.ready_s, self.usable_s, self.served_s)
            ),
        )


View = Mapping[str, tuple[bool, str]]
"""By a worker's address: may be used, and its incarnation."""


class Ward:
    """All processes of one cluster.

    Args:
        say: hears one line an event.
    """

    def __init__(self, cluster: Cluster, say: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._say = say
        self._begun_s = time.monotonic()
        self._notes: list[_Notes] = []
        self._open: dict[str, _Notes] = {}
        self._doomed: dict[Child, FaultKind] = {}
        self._routers = [AsyncClient(address, timeout_s=_STATUS_TIMEOUT_S) for address in cluster.addresses("router")]
        self._disturbed_until_s = [0.0 for _ in self._routers]
        self.troubles: list[Trouble] = []
        self._stopping = asyncio.Event()

    @property
    def records(self) -> tuple[FaultRecord, ...]:
        """Every fault so far."""
        return tuple(notes.record() for notes in self._notes)

    def was_disturbed(self, router: int, since_s: float) -> bool:
        """Whether a router was in trouble at any time since then."""
        return self._disturbed_until_s[router] >= since_s

    def trouble(self, what: str, detail: str) -> None:
        """Notes what must not happen."""
        self._say(f"TROUBLE {what}: {detail}")
        self.troubles.append(Trouble(what, detail))

    def heard(self, outcome: Outcome) -> None:
        """An answer: which workers serve (again)?"""
        if outcome.finish is None:
            return
        served_by = {outcome.finish.prefill_address, outcome.finish.decode_address}
        for notes in self._open.values():
            spawned_s = notes.spawned_s
            if notes.served_s is not None or spawned_s is None or outcome.started_s < spawned_s:
                continue
            if notes.address in served_by:
                notes.served_s = outcome.ended_s - spawned_s

    # --- supervision -----------------------------------------------------------------------------------------

    async def supervise(self, name: str) -> None:
        """Starts a process again whenever it ended; until cancelled."""
        while True:
            child = self._cluster.children[name]
            status = await child.wait()
            kind = self._doomed.pop(child, None)
            notes = self._open.get(name)
            if notes is not None:
                notes.ended_s = time.monotonic() - notes.hurt_s
            if kind is None:
                self.trouble("a process ended by itself", f"{name} with status {status}\n{child.tail(8)}")
            elif status != _STATUS_OF_END[kind]:
                self.trouble("an end with the wrong status", f"{name} after {kind.value}: {status}\n{child.tail(8)}")
            await self._expect_no_orphans(name, child)
            await self._start_again(name, notes)

    async def _expect_no_orphans(self, name: str, child: Child) -> None:
        """Stages of a worker that ended must end by themselves."""
        deadline_s = time.monotonic() + _ORPHANS_S
        while left := await asyncio.to_thread(stage_pids, child.pid):
            if time.monotonic() > deadline_s:
                self.trouble("stages outlived their worker", f"{name}: processes {left} after {_ORPHANS_S:g} s")
                return
            await asyncio.sleep(_POLL_S)

    async def _start_again(self, name: str, notes: _Notes | None) -> None:
        for tries_left in reversed(range(_RESTART_TRIES)):
            spawned_s = time.monotonic()
            if notes is not None:
                notes.spawned_s = spawned_s
            try:
                await self._cluster.restart(name)
            except GraftlineError as error:
                if not tries_left:
                    self.trouble("a process could not be started again", f"{name}: {error}")
                    raise
                self._say(f"{name} did not start, once more: {str(error).splitlines()[0]}")
                continue
            if notes is not None:
                notes.ready_s = time.monotonic() - spawned_s
            return

    # --- faults ----------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """No new faults from now on."""
        self._stopping.set()

    async def inflict_all(self, lane: Lane, faults: Iterable[Fault]) -> None:
        """One fault after the other, each once the one before has healed, until `stop`."""
        for fault in faults:
            if await self._stops_within(fault.pause_s):
                return
            await self._inflict(lane, fault)

    async def _stops_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        return self._stopping.is_set()

    async def _inflict(self, lane: Lane, fault: Fault) -> None:
        name = f"{lane.value}-{fault.target}"
        child = self._cluster.children[name]
        now_s = time.monotonic()
        notes = _Notes(len(self._notes), fault.kind, name, child.address, now_s - self._begun_s, now_s)
        self._notes.append(notes)
        self._open[name] = notes
        if lane is Lane.ROUTER:
            self._disturbed_until_s[fault.target] = float("inf")
        try:
            await self._hurt(child, fault)
            if lane is Lane.ROUTER:
                await self._until_router_is_back(fault.target, child, notes)
            else:
                await self._until_worker_is_back(name, child, fault, notes)
            self._say(_sentence(notes))
        finally:
            del self._open[name]
            if lane is Lane.ROUTER:
                self._disturbed_until_s[fault.target] = time.monotonic() + _AFTERMATH_S

    async def _hurt(self, child: Child, fault: Fault) -> None:
        if fault.kind in _END_THE_PROCESS:
            self._doomed[child] = fault.kind
        match fault.kind:
            case FaultKind.KILL:
                child.kill_group()
            case FaultKind.KILL_FIRST:
                child.send_signal(signal.SIGKILL)
            case FaultKind.KILL_LATER:
                await _signal_last_stage(child, signal.SIGKILL)
            case FaultKind.FREEZE_LATER:
                await _signal_last_stage(child, signal.SIGSTOP)
            case FaultKind.TERMINATE:
                child.send_signal(signal.SIGTERM)
            case FaultKind.FREEZE:
                child.send_signal(signal.SIGSTOP)
            case FaultKind.FREEZE_ALL:
                os.killpg(child.pid, signal.SIGSTOP)

    async def _until_worker_is_back(self, name: str, child: Child, fault: Fault, notes: _Notes) -> None:
        old, address = child.ready["incarnation"], child.address
        if fault.kind in _END_THE_PROCESS:
            # A drain takes its grace before anybody has to act.
            await self._note_notice(notes, address, old, _NOTICE_S)
            async with _bounded(_ENDS_S, lambda: self.trouble("a hurt worker did not end", name)):
                await child.wait()
        else:
            watching = asyncio.ensure_future(self._note_notice(notes, address, old, fault.freeze_s))
            await asyncio.sleep(fault.freeze_s)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGCONT)
            await watching
            notes.spawned_s = time.monotonic()
        began_s = notes.spawned_s or time.monotonic()
        ended = fault.kind in _END_THE_PROCESS
        is_back = await self._seen(
            lambda view: address in view and view[address][0] and (not ended or view[address][1] != old), _BACK_S
        )
        if not is_back:
            self.trouble("a worker did not come back", f"{name} after {fault.kind.value}")
            return
        began_s = notes.spawned_s or began_s
        notes.usable_s = time.monotonic() - began_s
        deadline_s = time.monotonic() + _SERVED_S
        while notes.served_s is None and time.monotonic() < deadline_s:
            if await self._stops_within(_POLL_S):
                return

    async def _until_router_is_back(self, index: int, child: Child, notes: _Notes) -> None:
        name = f"router-{index}"
        if notes.kind is FaultKind.FREEZE:
            await asyncio.sleep(2.0)
            child.send_signal(signal.SIGCONT)
            notes.spawned_s = time.monotonic()
        else:
            async with _bounded(_ENDS_S, lambda: self.trouble("a hurt router did not end", name)):
                await child.wait()
        deadline_s = time.monotonic() + _BACK_S
        while time.monotonic() < deadline_s:
            view = await self._view_of(self._routers[index])
            if view and any(usable for usable, _ in view.values()) and notes.spawned_s is not None:
                notes.usable_s = time.monotonic() - notes.spawned_s
                return
            await asyncio.sleep(_POLL_S)
        self.trouble("a router did not come back", name)

    async def _note_notice(self, notes: _Notes, address: str, incarnation: str | None, wait_s: float) -> None:
        hurt_s = notes.hurt_s
        if await self._seen(lambda view: address in view and view[address] != (True, incarnation), wait_s):
            notes.noticed_s = time.monotonic() - hurt_s

    async def _seen(self, check: Callable[[View], bool], wait_s: float) -> bool:
        """Whether every router that answers sees it so within `wait_s`."""
        deadline_s = time.monotonic() + wait_s
        while True:
            views = await asyncio.gather(*(self._view_of(router) for router in self._routers))
            answered = [view for view in views if view]
            if answered and all(check(view) for view in answered):
                return True
            if time.monotonic() > deadline_s:
                return False
            await asyncio.sleep(_POLL_S)

    async def _view_of(self, router: AsyncClient) -> View:
        """What a router knows; empty when it does not answer."""
        try:
            status = await router.status()
        except GraftlineError:
            return {}
        return {
            worker.identity.address: (worker.available, worker.identity.incarnation)
            for worker in status.workers
            if worker.identity.address
        }

    # --- the end ---------------------------------------------------------------------------------------------

    async def all_usable(self, wait_s: float) -> bool:
        """Whether every router can use every worker within `wait_s`."""
        addresses = [*self._cluster.addresses("prefill"), *self._cluster.addresses("decode")]
        return await self._seen(lambda view: all(address in view and view[address][0] for address in addresses), wait_s)

    async def close(self) -> None:
        """Closes the connections."""
        for router in self._routers:
            await router.close()


@contextlib.asynccontextmanager
async def _bounded(seconds: float, on_timeout: Callable[[], None]) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        on_timeout()


async def _signal_last_stage(child: Child, number: signal.Signals) -> None:
    later = await asyncio.to_thread(stage_pids, child.pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(later[-1] if later else child.pid, number)


def _sentence(notes: _Notes) -> str:
    parts = [f"{notes.kind.value} of {notes.target}"]
    for what, value in (
        ("noticed", notes.noticed_s),
        ("ended", notes.ended_s),
        ("ready", notes.ready_s),
        ("usable", notes.usable_s),
        ("served", notes.served_s),
    ):
        if value is not None:
            parts.append(f"{what} {value:.2f} s")
    return ", ".join(parts)
