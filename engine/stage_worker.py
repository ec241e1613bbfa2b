"""Runs one stage: a thread that computes plans in order, one that obeys control messages, one that answers heartbeats.

Who answers heartbeats does nothing else: a long step or a slow order must not make a live stage look dead.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from graftline.engine.busy_clock import BusyClock
from graftline.engine.device_figures import DeviceFigures
from graftline.engine.links import Sender, StageLinks
from graftline.engine.plan import (
    CancelSends,
    Control,
    DigestDone,
    DigestUnits,
    ForgetPeer,
    Heartbeat,
    Message,
    PairPeer,
    SendDone,
    SendOrder,
    SentPool,
    StageAlive,
    StageFailed,
    StepPlan,
    Stop,
)
from graftline.engine.process_memory import resident_bytes
from graftline.engine.stage import Stage
from graftline.engine.stage_stream import StageStream
from graftline.engine.step_gate import StepGate
from graftline.engine.transfer_port import Sending, TransferPort
from graftline.errors import PeerUnavailableError

logger = logging.getLogger(__name__)

_MOST_SENDS = 16  # orders that are given to the port together


class SharedSender:
    """Lets several threads send on one link."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._lock = threading.Lock()

    def send(self, message: Message, payload: Tensor | None = None) -> None:
        """See `Sender`."""
        with self._lock:
            self._sender.send(message, payload)


class _Orders:
    """Control messages on their way from the thread that receives them to the one that obeys."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Control] = queue.SimpleQueue()
        self._next: Control | None = None
        self._num_begun = 0
        self._is_obeying = False
        self._seen = 0
        self._beats = 0

    def put(self, message: Control) -> None:
        """Adds a message."""
        self._waiting.put(message)

    def take(self) -> Control:
        """The next message, as long as it takes; the one before is done with."""
        self._is_obeying = False
        message, self._next = self._next or self._waiting.get(), None
        self._num_begun += 1
        self._is_obeying = True
        return message

    def take_sends(self, first: SendOrder) -> list[SendOrder]:
        """An order, and those behind it that have come already, up to a message of another kind."""
        sends = [first]
        with suppress(queue.Empty):
            while len(sends) < _MOST_SENDS:
                message = self._waiting.get_nowait()
                if not isinstance(message, SendOrder):
                    self._next = message
                    break
                sends.append(message)
        return sends

    def beat(self) -> int:
        """A heartbeat came: how many have, since the message was begun that is being obeyed."""
        is_same = self._is_obeying and self._seen == self._num_begun
        self._seen = self._num_begun
        self._beats = self._beats + 1 if is_same else 0
        return self._beats


class StageWorker:
    """The threads of a stage.

    Args:
        stream: on which it computes; the stage was built on it.
        on_end: called by every thread as it ends, with the reason, or None after a `Stop`.
    """

    def __init__(
        self,
        index: int,
        stage: Stage,
        links: StageLinks,
        port: TransferPort,
        gate: StepGate,
        num_threads: int,
        stream: StageStream,
        on_end: Callable[[str | None], None],
    ) -> None:
        self._index = index
        self._stage = stage
        self._links = links
        self._reports = SharedSender(links.reports)
        # Rounds of fixed shape are told by the thread that reads them, planned steps by the one that computes.
        self._results = SharedSender(links.results)
        self._port = port
        self._gate = gate
        self._num_threads = num_threads
        self._on_end = on_end
        self._stream = stream
        self._device = device = stream.device
        self._busy = BusyClock(device)
        self._figures = DeviceFigures(self._busy, f"stage-{index}-figures")
        self._steps = 0
        self._in_step = False
        self._cpu_clock: int | None = None
        self._orders = _Orders()
        self._threads = (
            threading.Thread(target=self._compute, name=f"stage-{index}-compute", daemon=True),
            threading.Thread(target=self._obey, name=f"stage-{index}-obey", daemon=True),
            threading.Thread(target=self._listen, name=f"stage-{index}-control", daemon=True),
        )

    def start(self) -> None:
        """Starts the threads."""
        self._figures.start()
        for thread in self._threads:
            thread.start()

    def join(self, timeout_s: float) -> bool:
        """Waits for the threads to end; whether they did."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _compute(self) -> None:
        torch.set_num_threads(self._num_threads)
        self._cpu_clock = _own_cpu_clock()
        with self._stream.entered(), torch.inference_mode():
            self._end_with(self._compute_plans)
        self._stage.close()

    def _obey(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # the transfer engine copies on the thread's current GPU
        self._end_with(self._obey_orders)

    def _listen(self) -> None:
        try:
            self._end_with(self._take_controls)
        finally:
            self._figures.close()
            self._orders.put(Stop())

    def _end_with(self, loop: Callable[[], None]) -> None:
        """The border of a stage's threads: whatever ends one is reported and ends the stage."""
        reason: str | None = None
        try:
            loop()
        except PeerUnavailableError as error:
            reason = str(error)
        except Exception as error:
            logger.exception("stage %d failed", self._index)
            reason = f"{type(error).__name__}: {error}"
            self._report_failure(reason)
        finally:
            self._gate.close()
        self._on_end(reason)

    def _report_failure(self, reason: str) -> None:
        try:
            self._reports.send(StageFailed(self._index, reason))
        except PeerUnavailableError:
            logger.warning("stage %d could not report its failure", self._index)

    def _compute_plans(self) -> None:
        downstream = self._links.downstream
        while True:
            message, payload = self._links.upstream.receive()
            if isinstance(message, StepPlan):
                self._in_step = True
                self._stage.await_returns(message)
                with self._busy.step():
                    output = self._stage.execute(message, payload, self._results.send)
                self._steps += 1
                if downstream is not None:
                    downstream.send(message, output)
                self._in_step = False
            elif isinstance(message, Stop):
                if downstream is not None:
                    downstream.send(message)
                return
            else:
                raise TypeError(f"{type(message).__name__} on the plan link")

    def _take_controls(self) -> None:
        while True:
            message, _ = self._links.control.receive()
            match message:
                case Heartbeat(sequence=sequence):
                    self._reports.send(self._sign_of_life(sequence))
                case Stop():
                    return  # who called hands it on
                case SendOrder() | DigestUnits() | CancelSends() | PairPeer() | ForgetPeer():
                    self._orders.put(message)
                case _:
                    raise TypeError(f"{type(message).__name__} on the control link")

    def _sign_of_life(self, sequence: int) -> StageAlive:
        downstream = self._links.downstream
        is_sending = downstream is not None and downstream.is_sending
        figures = self._figures.take()
        return StageAlive(
            self._index,
            sequence,
            figures.busy_s,
            self._steps,
            resident_bytes(),
            figures.device_bytes,
            working=self._in_step or is_sending or figures.is_pending,
            cpu_s=_cpu_seconds(self._cpu_clock),
            order_beats=self._orders.beat(),
        )

    def _obey_orders(self) -> None:
        while True:
            message = self._orders.take()
            match message:
                case SendOrder():
                    orders = self._orders.take_sends(message)
                    self._port.send([Sending(order, self._ready(order), self._done) for order in orders])
                case DigestUnits(check=check, units=units):
                    self._reports.send(DigestDone(check, self._index, self._port.digest(units)))
                case CancelSends(owner=owner):
                    self._port.cancel(owner)
                case PairPeer(peer=peer, layout=layout):
                    self._port.pair(peer, layout)
                case ForgetPeer(peer=peer):
                    self._port.forget(peer)
                case Stop():
                    self._port.close()
                    return

    def _ready(self, order: SendOrder) -> Callable[[float], bool]:
        is_draft = order.pool is SentPool.DRAFT
        return lambda timeout_s: self._gate.wait(order.after_step, drafter=is_draft, timeout_s=timeout_s)

    def _done(self, done: SendDone) -> None:
        try:
            self._reports.send(
                SendDone(done.order, self._index, done.num_bytes, done.seconds, done.error, done.drained, done.digest)
            )
        except PeerUnavailableError:
            logger.warning("stage %d could not report order %d", self._index, done.order)


def _own_cpu_clock() -> int | None:
    """The calling thread's processor time, for other threads to read; None where there is no such clock."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return None
    return time.pthread_getcpuclockid(threading.get_ident())


def _cpu_seconds(clock: int | None) -> float:
    if clock is None:
        return 0.0
    try:
        return time.clock_gettime(clock)
    except OSError:  # the thread has ended
        return 0.0
