"""One-way, ordered message links between stages: a message, and with a plan the hidden states beside it.

`LocalLink` joins two threads and passes tensors by reference. `GlooLink` joins two processes through a
torch.distributed group of its own, so that a blocked receive on one link never holds up another.
"""

import queue
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from graftline.engine.plan import Message, decode, encode
from graftline.errors import InternalError, PeerUnavailableError

# How long a receive on an idle link may wait: liveness is watched by heartbeats, not by this.
IDLE_LINK_TIMEOUT = timedelta(days=30)

MAX_MESSAGE_BYTES = 64 << 20


class Sender(Protocol):
    """The near end of a link."""

    def send(self, message: Message, payload: Tensor | None = None) -> None:
        """Sends a message, with an optional 2-D payload.

        Raises:
            PeerUnavailableError: the other end is gone.
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
    """A link between two threads of one process."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Message, Tensor | None] | _Closed] = queue.SimpleQueue()

    def send(self, message: Message, payload: Tensor | None = None) -> None:
        """See `Sender`."""
        self._queue.put((message, payload))

    def receive(self) -> tuple[Message, Tensor | None]:
        """See `Receiver`."""
        item = self._queue.get()
        if isinstance(item, _Closed):
            self._queue.put(item)
            raise PeerUnavailableError("the link was closed")
        return item

    def close(self) -> None:
        """Every receive from now on, once what was sent is read, raises."""
        self._queue.put(_Closed())


MAX_UNSENT = 4096


class QueuedSender:
    """Sends on a link from a thread of its own: an end that reads nothing holds up nobody here.

    A send on a gloo link waits until the other end receives it.

    Args:
        on_failure: told once why the link is of no use any more.
    """

    def __init__(self, sender: Sender, name: str, on_failure: Callable[[str], None]) -> None:
        self._sender = sender
        self._on_failure = on_failure
        self._failure: str | None = None
        self._unsent: queue.SimpleQueue[tuple[Message, Tensor | None] | _Closed] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def send(self, message: Message, payload: Tensor | None = None) -> None:
        """See `Sender`; raises as well when too much is unsent."""
        if self._failure is None and self._unsent.qsize() >= MAX_UNSENT:
            self._failure = f"{MAX_UNSENT} messages are unsent"
        if self._failure is not None:
            raise PeerUnavailableError(self._failure)
        self._unsent.put((message, payload))

    def close(self, timeout_s: float) -> bool:
        """Ends the thread once everything is sent; whether it did in time."""
        self._unsent.put(_Closed())
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not isinstance(item := self._unsent.get(), _Closed):
            try:
                self._sender.send(*item)
            except PeerUnavailableError as error:
                self._failure = str(error)
                self._on_failure(self._failure)
                return


# First frame of a message: lengths, then as much of the message as fits. Small plans take one send.
_HEADER = struct.Struct("<IBII")
_FRAME_BYTES = 2048
_DTYPES = {1: torch.float32, 2: torch.bfloat16, 3: torch.float16}
_DTYPE_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class GlooLink:
    """One direction between two ranks of a torch.distributed job, through host memory.

    Args:
        group: a two-rank gloo group used by this link alone.
        source, target: global ranks.
    """

    def __init__(self, group: dist.ProcessGroup, source: int, target: int) -> None:
        self._group = group
        self._source = source
        self._target = target
        self._frame = torch.zeros(_FRAME_BYTES, dtype=torch.uint8)

    def send(self, message: Message, payload: Tensor | None = None) -> None:
        """See `Sender`."""
        body = encode(message)
        code, rows, columns = 0, 0, 0
        if payload is not None:
            code, (rows, columns) = _DTYPE_CODES[payload.dtype], payload.shape
        head = _HEADER.pack(len(body), code, rows, columns) + body[: _FRAME_BYTES - _HEADER.size]
        self._frame[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self._send(self._frame)
        rest = body[_FRAME_BYTES - _HEADER.size :]
        if rest:
            self._send(torch.frombuffer(bytearray(rest), dtype=torch.uint8))
        if payload is not None and payload.numel():
            self._send(payload.contiguous().cpu())

    def receive(self) -> tuple[Message, Tensor | None]:
        """See `Receiver`."""
        self._receive(self._frame)
        frame = self._frame.numpy().tobytes()
        length, code, rows, columns = _HEADER.unpack_from(frame)
        if length > MAX_MESSAGE_BYTES:
            raise InternalError(f"a stage message of {length} bytes")
        body = frame[_HEADER.size : _HEADER.size + length]
        missing = length - len(body)
        if missing:
            rest = torch.empty(missing, dtype=torch.uint8)
            self._receive(rest)
            body += rest.numpy().tobytes()
        payload = None
        if code:
            payload = torch.empty(rows, columns, dtype=_DTYPES[code])
            if payload.numel():
                self._receive(payload)
        try:
            return decode(body), payload
        except msgspec.DecodeError as error:
            raise InternalError(f"a stage message that is none: {error}") from error

    def _send(self, tensor: Tensor) -> None:
        try:
            dist.send(tensor, dst=self._target, group=self._group)
        except RuntimeError as error:
            raise PeerUnavailableError(f"stage {self._target} is gone: {error}") from error

    def _receive(self, tensor: Tensor) -> None:
        try:
            dist.recv(tensor, src=self._source, group=self._group)
        except RuntimeError as error:
            raise PeerUnavailableError(f"stage {self._source} is gone: {error}") from error


@dataclass(frozen=True, slots=True)
class StageLinks:
    """What one stage is joined by. `upstream` brings plans, `downstream` takes them on (none on the last stage).

    Reports of every stage go to stage 0; two threads of a stage report, hence two links.
    """

    upstream: Receiver
    downstream: Sender | None
    control: Receiver
    results: Sender
    reports: Sender


@dataclass(frozen=True, slots=True)
class HubLinks:
    """Stage 0's ends of the links to one stage."""

    control: Sender
    results: Receiver
    reports: Receiver


def connect_gloo_stages(num_stages: int, rank: int) -> tuple[GlooLink | None, GlooLink | None, list["GlooStar"]]:
    """Builds the groups of a pipeline; every rank must call it, after `init_process_group`.

    Returns:
        The link from the stage before this one, the link to the stage behind it, and per stage > 0 its star of
        links with stage 0 (of which this rank may use its own; rank 0 all).
    """

    def link(source: int, target: int) -> GlooLink | None:
        group = dist.new_group([source, target], backend="gloo", timeout=IDLE_LINK_TIMEOUT)
        return GlooLink(group, source, target) if rank in (source, target) else None

    chain = [link(stage, stage + 1) for stage in range(num_stages - 1)]
    stars = [
        GlooStar(control=link(0, stage), results=link(stage, 0), reports=link(stage, 0))
        for stage in range(1, num_stages)
    ]
    upstream = chain[rank - 1] if rank > 0 else None
    downstream = chain[rank] if rank < num_stages - 1 else None
    return upstream, downstream, stars


@dataclass(frozen=True, slots=True)
class GlooStar:
    """The links between stage 0 and one other stage, as far as this rank is an end of them."""

    control: GlooLink | None
    results: GlooLink | None
    reports: GlooLink | None
