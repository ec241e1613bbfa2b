"""How hidden states get from one stage process to the next.

`HostPayloads` goes through (pinned) host memory and works everywhere, also between two stages on one GPU, which NCCL
refuses. `DirectPayloads` hands tensors to a torch.distributed group where they lie: NCCL for GPUs, gloo for CPUs; on
one host `engine/links_peer.py` stands in front of it. None knows messages: sizes travel with those, on a link of their
own, so that a receive is posted only when something is on its way.
"""

import hashlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from graftline.engine.device_event import send_to_host
from graftline.errors import PeerUnavailableError

# Sends that may be unfinished; before one more the compute stream (not the host, on a GPU) waits for the oldest.
MAX_UNFINISHED_SENDS = 4
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
ID_BYTES = 32


class Payloads(Protocol):
    """One direction between two neighbouring stages."""

    def put(self, payload: Tensor) -> Callable[[], None]:
        """Takes a 2-D tensor on the current CUDA stream; work put on that stream later may overwrite it.

        Returns:
            What completes the send; called once, in order, once the message that announces the payload was sent.

        Raises:
            PeerUnavailableError: the other end is gone; from either half.
        """

    def take(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """The next payload, on the stage's device, complete for what the current CUDA stream does from now on.

        Raises:
            PeerUnavailableError: the other end is gone.
        """


class HostPayloads:
    """Through host memory, over a gloo group that may carry messages too.

    Args:
        group: the two ranks.
        source, target: their global ranks.
        device: of this end.
    """

    def __init__(self, group: dist.ProcessGroup, source: int, target: int, device: torch.device) -> None:
        self._group = group
        self._source = source
        self._target = target
        self._device = device

    def put(self, payload: Tensor) -> Callable[[], None]:
        """See `Payloads`."""
        if not payload.is_cuda:
            copied = payload.clone(memory_format=torch.contiguous_format)
            return lambda: send_tensor(copied, self._target, self._group)
        host, arrived = send_to_host(payload)

        def ship() -> None:
            arrived.synchronize()
            send_tensor(host, self._target, self._group)

        return ship

    def take(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """See `Payloads`."""
        is_cuda = self._device.type == "cuda"
        host = torch.empty(rows, columns, dtype=dtype, pin_memory=is_cuda)
        receive_tensor(host, self._source, self._group)
        return host.to(self._device, non_blocking=True)


class DirectPayloads:
    """By the device's own backend. With NCCL both halves are work of the current CUDA stream, and no host waits.

    Args:
        group: the two ranks; this link alone uses it.
        source, target: their global ranks.
        device: of this end.
        max_unfinished: sends that may be; see `MAX_UNFINISHED_SENDS`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        source: int,
        target: int,
        device: torch.device,
        max_unfinished: int = MAX_UNFINISHED_SENDS,
    ) -> None:
        self._group = group
        self._source = source
        self._target = target
        self._device = device
        self._max_unfinished = max_unfinished
        self._unfinished: deque[tuple[dist.Work, Tensor]] = deque()

    def put(self, payload: Tensor) -> Callable[[], None]:
        """See `Payloads`."""
        while len(self._unfinished) >= self._max_unfinished:
            _finish(self._unfinished.popleft()[0], self._target)
        copied = payload.clone(memory_format=torch.contiguous_format)
        try:
            work = dist.isend(copied, dst=self._target, group=self._group)
        except RuntimeError as error:
            raise _gone(self._target, error) from error
        assert work is not None, "this rank is one of the two"
        self._unfinished.append((work, copied))
        return nothing_left

    def take(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """See `Payloads`."""
        payload = torch.empty(rows, columns, dtype=dtype, device=self._device)
        try:
            work = dist.irecv(payload, src=self._source, group=self._group)
        except RuntimeError as error:
            raise _gone(self._source, error) from error
        assert work is not None, "this rank is one of the two"
        _finish(work, self._source)
        return payload

    def meet(self, rank: int) -> None:
        """Both ends exchange one element, so that the connection is made now and not by the first round."""
        if rank == self._source:
            self.put(torch.zeros(1, 1, device=self._device))()
        else:
            self.take(1, 1, torch.float32)


def send_tensor(tensor: Tensor, target: int, group: dist.ProcessGroup) -> None:
    """Sends a host tensor and waits until the other end takes it. Raises PeerUnavailableError."""
    try:
        dist.send(tensor, dst=target, group=group)
    except RuntimeError as error:
        raise _gone(target, error) from error


def receive_tensor(tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Fills a host tensor with what comes next. Raises PeerUnavailableError."""
    try:
        dist.recv(tensor, src=source, group=group)
    except RuntimeError as error:
        raise _gone(source, error) from error


def device_identity(device: torch.device) -> bytes:
    """`ID_BYTES` bytes that name a physical GPU among all hosts; zeros for a CPU."""
    if device.type != "cuda":
        return bytes(ID_BYTES)
    name = f"{BOOT_ID.read_text().strip()} {torch.cuda.get_device_properties(device).uuid}"
    return hashlib.sha256(name.encode()).digest()


def _finish(work: dist.Work, peer: int) -> None:
    """A wait of the host for gloo, of the current CUDA stream for NCCL."""
    try:
        work.wait()
    except RuntimeError as error:
        raise _gone(peer, error) from error


def _gone(peer: int, error: RuntimeError) -> PeerUnavailableError:
    return PeerUnavailableError(f"stage {peer} is gone: {error}")


def nothing_left() -> None:
    """All of the send is done."""
