"""Links between stage processes, over torch.distributed.

Messages travel on gloo groups in host memory, one group a link, so that a blocked receive on one link never holds up
another. Hidden states go with them as `engine/links_payload.py` does it.
"""

import logging
import os
import struct
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from graftline.engine.config import StageChannel
from graftline.engine.links_payload import (
    ID_BYTES,
    MAX_UNFINISHED_SENDS,
    DirectPayloads,
    HostPayloads,
    Payloads,
    device_identity,
    receive_tensor,
    send_tensor,
)
from graftline.engine.links_peer import SLOT_ALIGNED, SLOT_BYTES, PeerPayloads, meet_peer
from graftline.engine.plan import Message, decode, encode
from graftline.errors import InternalError, InvalidRequestError
from graftline.kernels.peer_memory import PeerMemory, peer_memory_of

logger = logging.getLogger(__name__)

# How long a receive on an idle link may wait: liveness is watched by heartbeats, not by this.
IDLE_LINK_TIMEOUT = timedelta(days=30)

MAX_MESSAGE_BYTES = 64 << 20

# First frame of a message: lengths, then as much of the message as fits. Plans and results of rounds take one send.
_HEADER = struct.Struct("<IBII")
_FRAME_BYTES = 8192
_DTYPES = {1: torch.float32, 2: torch.bfloat16, 3: torch.float16}
_DTYPE_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class DistributedLink:
    """One direction between two ranks of a torch.distributed job.

    Args:
        group: a two-rank gloo group used by this link alone.
        source, target: global ranks.
        payloads: how hidden states go; through the same group by default.
    """

    def __init__(self, group: dist.ProcessGroup, source: int, target: int, payloads: Payloads | None = None) -> None:
        self._group = group
        self._source = source
        self._target = target
        self.payloads = payloads or HostPayloads(group, source, target, torch.device("cpu"))
        self._frame = torch.zeros(_FRAME_BYTES, dtype=torch.uint8)
        self._frame_bytes = self._frame.numpy().data  # the same memory

    def send(self, message: Message, payload: Tensor | None = None) -> None:
        """See `Sender`."""
        self.prepare(message, payload)()

    def prepare(self, message: Message, payload: Tensor | None = None) -> Callable[[], None]:
        """See `PreparingSender`."""
        code, rows, columns = 0, 0, 0
        ship: Callable[[], None] | None = None
        if payload is not None:
            code, (rows, columns) = _DTYPE_CODES[payload.dtype], payload.shape
            ship = self.payloads.put(payload) if payload.numel() else None
        body = encode(message)
        return partial(self._ship, _HEADER.pack(len(body), code, rows, columns) + body, ship)

    def _ship(self, text: bytes, ship_payload: Callable[[], None] | None) -> None:
        head, rest = text[:_FRAME_BYTES], text[_FRAME_BYTES:]
        self._frame_bytes[: len(head)] = head
        send_tensor(self._frame, self._target, self._group)
        if rest:
            send_tensor(torch.frombuffer(bytearray(rest), dtype=torch.uint8), self._target, self._group)
        if ship_payload is not None:
            ship_payload()

    def receive(self) -> tuple[Message, Tensor | None]:
        """See `Receiver`."""
        receive_tensor(self._frame, self._source, self._group)
        length, code, rows, columns = _HEADER.unpack_from(self._frame_bytes)
        if length > MAX_MESSAGE_BYTES:
            raise InternalError(f"a stage message of {length} bytes")
        body = bytes(self._frame_bytes[_HEADER.size : _HEADER.size + length])
        missing = length - len(body)
        if missing:
            rest = torch.empty(missing, dtype=torch.uint8)
            receive_tensor(rest, self._source, self._group)
            body += rest.numpy().tobytes()
        payload = None
        if code:
            is_empty = rows == 0 or columns == 0
            dtype = _DTYPES[code]
            payload = torch.empty(rows, columns, dtype=dtype) if is_empty else self.payloads.take(rows, columns, dtype)
        try:
            return decode(body), payload
        except msgspec.DecodeError as error:
            raise InternalError(f"a stage message that is none: {error}") from error


@dataclass(frozen=True, slots=True)
class StageStar:
    """The links between stage 0 and one other stage, as far as this rank is an end of them."""

    control: DistributedLink | None
    results: DistributedLink | None
    reports: DistributedLink | None


@dataclass(frozen=True, slots=True)
class StageEnds:
    """This rank's ends.

    Attributes:
        upstream: from the stage before this one.
        downstream: to the stage behind it.
        stars: of every stage > 0 its links with stage 0, of which a rank may use its own, and rank 0 all.
        returns: ways from the last stage to the earlier ones: all on the last stage, its own on an earlier one.
    """

    upstream: DistributedLink | None
    downstream: DistributedLink | None
    stars: list[StageStar]
    returns: list[Payloads]

    @property
    def _ways(self) -> list[Payloads]:
        return [*(link.payloads for link in (self.upstream, self.downstream) if link is not None), *self.returns]

    @property
    def ring_bytes(self) -> int:
        """Memory of this rank's device that others write to."""
        return sum(way.ring_bytes for way in self._ways if isinstance(way, PeerPayloads))

    @property
    def by_memory(self) -> bool:
        """What this rank hands to other devices, or takes from them, goes through their memory: no kernel waits for a
        peer, as NCCL's do. Hidden states that are larger than a slot still go by NCCL; they wait for steps before
        theirs alone, so that waiting for them ends.
        """
        return all(isinstance(way, PeerPayloads) for way in self._ways)


def connect_stages(
    num_stages: int,
    rank: int,
    device: torch.device,
    channel: StageChannel = StageChannel.AUTO,
    *,
    return_bytes: int = 0,
    memory: PeerMemory | None = None,
) -> StageEnds:
    """Builds the links of a pipeline; every rank must call it, after `init_process_group`.

    Args:
        device: of this rank's stage.
        channel: how hidden states are to go; "auto" decides for every two neighbours.
        return_bytes: of the largest round that goes back from the last stage to the earlier ones, see
            `engine/round_returns.py`; 0: none does.
        memory: of this rank's device, for ways through memory of the other one; by default a GPU's where there is one.

    Raises:
        InvalidRequestError: a direct channel between two stages on one GPU, or NCCL without GPUs.
        PeerUnavailableError: a neighbour is gone.
    """
    if channel is StageChannel.NCCL and device.type != "cuda":
        raise InvalidRequestError("stage_channel", f"nccl: stages on {device.type}")
    meeting = _Meeting(rank, device, memory or peer_memory_of(device), channel is not StageChannel.NCCL)
    pairs = [(stage, stage + 1) for stage in range(num_stages - 1)]
    with nullcontext() if device.type == "cpu" else torch.cuda.device(device):
        direct = [_goes_direct(channel, *pair, device.type) for pair in _gpus_of(pairs, num_stages, device)]
        chain = [_chain_link(pair, goes, meeting) for pair, goes in zip(pairs, direct, strict=True)]
        stars = [
            StageStar(control=_link(0, stage, rank), results=_link(stage, 0, rank), reports=_link(stage, 0, rank))
            for stage in range(1, num_stages)
        ]
        ways = _return_ways(num_stages, meeting, return_bytes) if return_bytes else []
    upstream = chain[rank - 1] if rank > 0 else None
    downstream = chain[rank] if rank < num_stages - 1 else None
    return StageEnds(upstream, downstream, stars, ways)


def leave_job(timeout_s: float, *, abort: bool = False) -> bool:
    """Takes this process out of its torch.distributed job.

    NCCL's end has been seen to hang, and a receive that nobody answers never ends: the wait is bounded, and what hangs
    is left to the end of the process.

    Args:
        abort: ends what is under way on the groups first.

    Returns:
        Whether it was done in time.
    """
    if not dist.is_initialized():
        return True

    def leave() -> None:
        try:
            if abort:
                dist.distributed_c10d._abort_process_group()
            else:
                dist.destroy_process_group()
        except RuntimeError as error:
            logger.warning("torch.distributed did not end well: %s", error)

    thread = threading.Thread(target=leave, name="leave-job", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        logger.warning("torch.distributed did not let go within %.1f s", timeout_s)
    return not thread.is_alive()


def _new_group(source: int, target: int, backend: str) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group([source, target], backend=backend, timeout=IDLE_LINK_TIMEOUT)
    return group


def _link(source: int, target: int, rank: int) -> DistributedLink | None:
    group = _new_group(source, target, "gloo")
    return DistributedLink(group, source, target) if rank in (source, target) else None


@dataclass(frozen=True, slots=True)
class _Meeting:
    """How this rank makes ways between devices.

    Attributes:
        memory: of its device, None where there is none that a peer can reach.
        tries_memory: ways through memory of the other device are wanted, where there is such; alike on all ranks.
    """

    rank: int
    device: torch.device
    memory: PeerMemory | None
    tries_memory: bool

    def between(self, source: int, target: int, slot_bytes: int, max_unfinished: int) -> Payloads | None:
        """A way for what lies on devices; None on other ranks than the two. Every rank must call it."""
        group = _new_group(source, target, _backend(self.device))
        words = _new_group(source, target, "gloo") if self.tries_memory else None
        if self.rank not in (source, target):
            return None
        direct = DirectPayloads(group, source, target, self.device, max_unfinished)
        direct.meet(self.rank)
        if words is None:
            return direct
        ends = (words, self.rank, source, target)
        return meet_peer(*ends, self.memory, direct, slots=max_unfinished, slot_bytes=slot_bytes)


def _chain_link(pair: tuple[int, int], goes_direct: bool, meeting: _Meeting) -> DistributedLink | None:
    source, target = pair
    group = _new_group(source, target, "gloo")
    way = meeting.between(source, target, SLOT_BYTES, MAX_UNFINISHED_SENDS) if goes_direct else None
    if meeting.rank not in pair:
        return None
    return DistributedLink(group, source, target, way or HostPayloads(group, source, target, meeting.device))


def _return_ways(num_stages: int, meeting: _Meeting, return_bytes: int) -> list[Payloads]:
    """Ways of their own: what goes back must not wait behind hidden states that go forth. Every round fits into a slot:
    an earlier stage takes it with the next plan of its microbatch, which may never come, and a kernel of NCCL's would
    hold a multiprocessor of the last stage until then.
    """
    if meeting.device.type == "cuda" and not dist.is_nccl_available():
        raise InvalidRequestError("overlap", "rounds ahead of the host need NCCL between stages on several GPUs")
    last = num_stages - 1
    # One round of every microbatch can be on its way at most: no send ever waits here.
    slot_bytes = -(-return_bytes // SLOT_ALIGNED) * SLOT_ALIGNED
    ways = [meeting.between(last, stage, slot_bytes, num_stages + 2) for stage in range(last)]
    return [way for way in ways if way is not None]


def _backend(device: torch.device) -> str:
    if device.type != "cuda":
        return "gloo"
    # There are only sends and receives: no multicast buffers. When a peer dies, heartbeats end this process in order;
    # the group's own watchdog would abort it.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    return "nccl"


def _gpus_of(
    pairs: list[tuple[int, int]], num_stages: int, device: torch.device
) -> list[tuple[tuple[int, bytes], tuple[int, bytes]]]:
    """Every pair's ranks with the identities of their GPUs."""
    own = torch.frombuffer(bytearray(device_identity(device)), dtype=torch.uint8)
    gathered = [torch.empty(ID_BYTES, dtype=torch.uint8) for _ in range(num_stages)]
    dist.all_gather(gathered, own)
    names = [identity.numpy().tobytes() for identity in gathered]
    return [((first, names[first]), (second, names[second])) for first, second in pairs]


def _goes_direct(channel: StageChannel, first: tuple[int, bytes], second: tuple[int, bytes], device_type: str) -> bool:
    shares_gpu = device_type == "cuda" and first[1] == second[1]
    if channel in (StageChannel.DIRECT, StageChannel.NCCL) and shares_gpu:
        raise InvalidRequestError("stage_channel", f"{channel.value}: stages {first[0]} and {second[0]} share a GPU")
    if channel is StageChannel.AUTO:
        return device_type == "cuda" and not shares_gpu and dist.is_nccl_available()
    return channel in (StageChannel.DIRECT, StageChannel.NCCL)
