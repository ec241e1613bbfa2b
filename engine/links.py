"""One-way, ordered message links between stages: a message, and with a plan the hidden states beside it.

`LocalLink` joins two threads and passes host tensors by reference, copies of those on GPUs;
`engine/links_distributed.py` joins processes.
"""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from graftline.engine.device_event import mark_stream
from graftline.engine.plan import Message
from graftline.errors import PeerUnavailableError


class Sender(Protocol):
    """The near end of a link."""

    def send(self, message: Message, payload: Tensor | None = None) -> None:
        """Sends a message, with an optional 2-D payload.

        Raises:
            PeerUnavailableError: the other end is gone.
        """


class PreparingSender(Sender, Protocol):
    """A near end whose sends have two halves."""

    def prepare(self, message: Message, payload: Tensor | None = None) -> Callable[[], None]:
        """The half that belongs to the thread (and CUDA stream) that computed the payload, which may be overwritten
        by later work of that stream. What is returned does the rest, once, in the order of the calls.

        Raises:
            PeerUnavailableError: the other end is gone; from either half.
        """


class Receiver(Protocol):
    """The far end of a link."""

    def receive(self) -> tuple[Message, Tensor | None]:
        """The next message, as long as it takes.

        Raises:
            PeerUnavailableError: the other end is gone.
        """


@dataclass(frozen=True, slots=True)
class _Closed:
    """Marks the end of a local link."""


class LocalLink:
    """A link between two threads of one process, whose CUDA streams may differ."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Message, Tensor | None, torch.cuda.Event | None] | _Closed] = (
            queue.SimpleQueue()
        )

    def send(self, message: Message, payload: Tensor | None = None) -> None:
        """See `Sender`. On a GPU, work put on the current stream later may overwrite the payload, as the next replay of
        a graph does; elsewhere it must stay as it is until the receiver's work with it is done.
        """
        if payload is not None and payload.is_cuda:
            payload = payload.clone(memory_format=torch.contiguous_format)
        self._queue.put((message, payload, _written(payload)))

    def receive(self) -> tuple[Message, Tensor | None]:
        """See `Receiver`."""
        item = self._queue.get()
        if isinstance(item, _Closed):
            self._queue.put(item)
            raise PeerUnavailableError("the link was closed")
        message, payload, written = item
        if payload is not None and written is not None:
            stream = torch.cuda.current_stream(payload.device)
            stream.wait_event(written)
            payload.record_stream(stream)
        return message, payload

    @property
    def is_sending(self) -> bool:
        """Something waits for the other end."""
        return not self._queue.empty()

    def close(self) -> None:
        """Every receive from now on, once what was sent is read, raises."""
        self._queue.put(_Closed())


def _written(payload: Tensor | None) -> torch.cuda.Event | None:
    """When a payload on a GPU is complete; None for one in host memory, which is."""
    if payload is None or not payload.is_cuda:
        return None
    return mark_stream(payload.device)


MAX_UNSENT = 4096


class QueuedSender:
    """Sends on a link from a thread of its own: an end that reads nothing holds up nobody here.

    A send between processes waits until the other end receives it.

    Args:
        on_failure: told once why the link is of no use any more.
    """

    def __init__(self, sender: PreparingSender, name: str, on_failure: Callable[[str], None]) -> None:
        self._sender = sender
        self._on_failure = on_failure
        self._failure: str | None = None
        self._is_shipping = False
        self._unsent: queue.SimpleQueue[Callable[[], None] | _Closed] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def send(self, message: Message, payload: Tensor | None = None) -> None:
        """See `Sender`; raises as well when too much is unsent. One thread may send, or several without payloads."""
        if self._failure is None and self._unsent.qsize() >= MAX_UNSENT:
            self._failure = f"{MAX_UNSENT} messages are unsent"
        if self._failure is not None:
            raise PeerUnavailableError(self._failure)
        self._unsent.put(self._sender.prepare(message, payload))

    @property
    def is_sending(self) -> bool:
        """Something has not been received by the other end yet."""
        return self._is_shipping or not self._unsent.empty()

    def close(self, timeout_s: float) -> bool:
        """Ends the thread once everything is sent; whether it did in time."""
        self._unsent.put(_Closed())
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not isinstance(ship := self._unsent.get(), _Closed):
            self._is_shipping = True
            try:
                ship()
            except Exception as error:  # such as a fault of the GPU whose payload was waited for
                is_known = isinstance(error, PeerUnavailableError)
                self._failure = str(error) if is_known else f"{type(error).__name__}: {error}"
                self._on_failure(self._failure)
                return
            finally:
                self._is_shipping = False


@dataclass(frozen=True, slots=True)
class StageLinks:
    """What one stage is joined by. `upstream` brings plans, `downstream` takes them on (none on the last stage).

    Reports of every stage go to stage 0; two threads of a stage report, hence two links.
    """

    upstream: Receiver
    downstream: QueuedSender | LocalLink | None
    control: Receiver
    results: Sender
    reports: Sender


@dataclass(frozen=True, slots=True)
class HubLinks:
    """Stage 0's ends of the links to one stage."""

    control: PreparingSender
    results: Receiver
    reports: Receiver
