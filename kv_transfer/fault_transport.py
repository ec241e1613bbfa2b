"""Faults on demand, for tests and chaos runs: a transport around another that delays, fails or spoils chosen writes.

Never in the way of normal service: somebody has to build it with a plan.
"""

import contextlib
import ctypes
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from graftline.errors import InvalidRequestError, TransferFailedError
from graftline.kv_transfer.copy_plan import Copy
from graftline.kv_transfer.transport import GroupedWrite, OneByOne, Refused, Transport, WriteGroup

_FAULT = re.compile(r"(?P<kind>[a-z]+)(:(?P<seconds>\d+(\.\d+)?)s)?@(?P<every>/)?(?P<write>\d+|\*)")


class FaultKind(Enum):
    """What happens to a write."""

    DELAY = "delay"
    """It starts later, and then works."""
    FAIL = "fail"
    """It fails, and nothing was written."""
    LATE = "late"
    """It fails at once, and its bytes land later."""
    LOSE = "lose"
    """Nothing is written and nothing answers: it fails so much later, or at its deadline if that comes first."""
    FLIP = "flip"
    """It reports success, but one byte arrives changed (host memory only)."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault; `seconds` is how much later, for the kinds that have a later."""

    kind: FaultKind
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Which writes go wrong: the n-th of the transport, counted from 1; every n-th; or all that remain."""

    by_write: dict[int, Fault]
    otherwise: Fault | None = None
    every: tuple[tuple[int, Fault], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "FaultPlan":
        """Reads `kind[:SECONDSs]@N`, comma-separated: `delay:2s@3,fail@5,lose:1s@/50,late:1s@*`.

        N is a write; `/N` stands for every N-th one, `*` for all that nothing before it names.

        Raises:
            InvalidRequestError: names the part that cannot be read.
        """
        by_write: dict[int, Fault] = {}
        otherwise: Fault | None = None
        every: list[tuple[int, Fault]] = []
        for part in filter(None, text.split(",")):
            write, periodic, fault = _parse_fault(part.strip())
            if write is None:
                otherwise = fault
            elif periodic:
                every.append((write, fault))
            else:
                by_write[write] = fault
        return cls(by_write, otherwise, tuple(every))

    @property
    def faults(self) -> tuple[Fault, ...]:
        """All that may happen."""
        periodic = (fault for _, fault in self.every)
        return (*self.by_write.values(), *periodic, *((self.otherwise,) if self.otherwise else ()))

    def fault_of(self, write: int) -> Fault | None:
        """The fault of the n-th write, if it has one."""
        if write in self.by_write:
            return self.by_write[write]
        return next((fault for period, fault in self.every if write % period == 0), self.otherwise)


class FaultTransport:
    """A `Transport` that carries out a plan over another one, which it owns from then on."""

    def __init__(self, inner: Transport, plan: FaultPlan) -> None:
        self._inner = inner
        self._plan = plan
        self._lock = threading.Lock()
        self._num_writes = 0
        self._closing = threading.Event()
        self._late: list[threading.Thread] = []
        self._scratch = ctypes.create_string_buffer(bytes(range(256)), 256)
        if any(fault.kind is FaultKind.FLIP for fault in plan.faults):
            inner.register(ctypes.addressof(self._scratch), 256)

    @property
    def session_id(self) -> str:
        """See `Transport`."""
        return self._inner.session_id

    def register(self, address: int, num_bytes: int) -> None:
        """See `Transport`."""
        self._inner.register(address, num_bytes)

    def write(self, session_id: str, copies: Sequence[Copy], deadline_s: float) -> None:
        """See `Transport`; with the fault of this write, if it has one."""
        with self._lock:
            self._num_writes += 1
            fault = self._plan.fault_of(self._num_writes)
        if fault is None:
            self._inner.write(session_id, copies, deadline_s)
        elif fault.kind is FaultKind.FAIL:
            raise TransferFailedError("injected: nothing was written", drained=True)
        elif fault.kind is FaultKind.LATE:
            self._write_late(fault.seconds, session_id, list(copies))
            raise TransferFailedError("injected: the bytes land later", drained=False)
        elif fault.kind is FaultKind.DELAY:
            self._closing.wait(fault.seconds)
            self._inner.write(session_id, copies, deadline_s)
        elif fault.kind is FaultKind.LOSE:
            self._closing.wait(min(fault.seconds, max(0.0, deadline_s - time.monotonic())))
            raise TransferFailedError("injected: nothing was written and nobody answered", drained=False)
        else:
            self._inner.write(session_id, copies, deadline_s)
            self._inner.write(session_id, [self._spoiled_byte(copy) for copy in copies[:1]], deadline_s)

    def begin(self, session_id: str, writes: Sequence[GroupedWrite], refused: Refused | None = None) -> WriteGroup:
        """See `Transport`; writes are counted one by one."""
        return OneByOne(self.write, session_id, writes, refused)

    def forget(self, session_id: str) -> None:
        """See `Transport`."""
        self._inner.forget(session_id)

    def close(self) -> None:
        """See `Transport`. Cuts delays short and lets late writes land first."""
        self._closing.set()
        for thread in self._late:
            thread.join()
        self._inner.close()

    def _write_late(self, seconds: float, session_id: str, copies: list[Copy]) -> None:
        def land() -> None:
            self._closing.wait(seconds)
            with contextlib.suppress(TransferFailedError):  # the failure was reported already
                self._inner.write(session_id, copies, time.monotonic() + 60.0)

        thread = threading.Thread(target=land, daemon=True, name="late write")
        self._late = [other for other in self._late if other.is_alive()] + [thread]
        thread.start()

    def _spoiled_byte(self, copy: Copy) -> Copy:
        """Another value for the first byte of a copy."""
        true_value = ctypes.string_at(copy.src_address, 1)[0]
        return Copy(ctypes.addressof(self._scratch) + (true_value + 1) % 256, copy.dst_address, 1)


def _parse_fault(part: str) -> tuple[int | None, bool, Fault]:
    """The write (None for all others), whether every such one is meant, and what happens to it."""
    match = _FAULT.fullmatch(part)
    if match is None or match["kind"] not in {kind.value for kind in FaultKind}:
        raise InvalidRequestError("fault plan", f"{part!r} is not kind[:SECONDSs]@N, @/N or @*")
    kind = FaultKind(match["kind"])
    needs_seconds = kind in (FaultKind.DELAY, FaultKind.LATE, FaultKind.LOSE)
    if needs_seconds != (match["seconds"] is not None):
        raise InvalidRequestError("fault plan", f"{part!r} {'lacks' if needs_seconds else 'takes no'} seconds")
    periodic = match["every"] is not None
    write = None if match["write"] == "*" else int(match["write"])
    if write == 0 or (periodic and write is None):
        raise InvalidRequestError("fault plan", f"{part!r}: writes count from 1")
    return write, periodic, Fault(kind, float(match["seconds"] or 0))
