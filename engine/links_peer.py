"""Hidden states between two stages on GPUs of one host: written straight into memory of the other GPU.

The target keeps a ring of slots; the source copies into the next one and counts it as written, in the target's memory;
the target's stream waits for that number, copies out and counts the slot as read, in the source's memory. Hosts wait
for nothing, no kernel does either: one of NCCL's holds a multiprocessor until its peer comes, which
`kernels/resident_layers.py` cannot do without. What does not fit into a slot goes another way, which both ends know
from its size.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from graftline.engine.links_payload import BOOT_ID, Payloads, nothing_left, receive_tensor, send_tensor
from graftline.kernels.cuda_driver import CudaProgramError, refusals
from graftline.kernels.peer_memory import HANDLE_BYTES, PeerMemory

logger = logging.getLogger(__name__)

SLOT_BYTES = 8 << 20
"""Of hidden states: 256 rows of 4096 in bfloat16 with three features."""
SLOT_ALIGNED = 256
_ID_BYTES = 64
_TRIAL_S = 2.0
_POLL_S = 0.001
_TRIAL_PATTERN = 0x5EED_CAFE
_PATTERN_AT, _PATTERN_BYTES = 64, 4  # beside the source's number


@dataclass(frozen=True, slots=True)
class Place:
    """What the two ends share.

    Attributes:
        ring: of slots, on the target.
        written: slots written so far, on the target.
        read: slots read so far, on the source.
    """

    ring: int
    written: int
    read: int


class PeerPayloads:
    """One end of a way; see `meet_peer`.

    Args:
        memory: of this end's device.
        place: as this end addresses it.
        begun: slots that were used already.
        otherwise: takes what is larger than a slot.
        ring_bytes: memory of this end's device that the other one writes to.

    Attributes:
        ring_bytes: likewise.
    """

    def __init__(
        self,
        memory: PeerMemory,
        place: Place,
        slots: int,
        slot_bytes: int,
        begun: int,
        otherwise: Payloads,
        ring_bytes: int = 0,
    ) -> None:
        self.ring_bytes = ring_bytes
        self._memory = memory
        self._place = place
        self._slots = slots
        self._slot_bytes = slot_bytes
        self._count = begun
        self._otherwise = otherwise

    def put(self, payload: Tensor) -> Callable[[], None]:
        """See `Payloads`."""
        num_bytes = payload.numel() * payload.element_size()
        if num_bytes > self._slot_bytes:
            return self._otherwise.put(payload)
        payload = payload.contiguous()
        if self._count >= self._slots:
            self._memory.await_at_least(self._place.read, self._count - self._slots + 1)
        self._memory.copy(self._slot(), payload.data_ptr(), num_bytes)
        self._count += 1
        self._memory.write(self._place.written, self._count)
        return nothing_left

    def take(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """See `Payloads`."""
        num_bytes = rows * columns * dtype.itemsize
        if num_bytes > self._slot_bytes:
            return self._otherwise.take(rows, columns, dtype)
        payload = torch.empty(rows, columns, dtype=dtype, device=self._memory.device)
        self._memory.await_at_least(self._place.written, self._count + 1)
        self._memory.copy(payload.data_ptr(), self._slot(), num_bytes)
        self._count += 1
        self._memory.write(self._place.read, self._count)
        return payload

    def _slot(self) -> int:
        return self._place.ring + self._count % self._slots * self._slot_bytes


def meet_peer(
    group: dist.ProcessGroup,
    rank: int,
    source: int,
    target: int,
    memory: PeerMemory | None,
    otherwise: Payloads,
    *,
    slots: int,
    slot_bytes: int,
) -> Payloads:
    """Both ends of a way find out whether they reach each other's memory, and try it; both must call it.

    Args:
        group: the two ranks' gloo group, in which nothing else is on its way.
        memory: of this end's device; None: there is none to be had.
        otherwise: the way for large payloads, and for all of them where the ends do not reach each other.

    Returns:
        `PeerPayloads` on both ends, or `otherwise` on both.

    Raises:
        PeerUnavailableError: the other end is gone.
    """
    is_source = rank == source
    other = target if is_source else source
    assert slot_bytes % SLOT_ALIGNED == 0
    ring_bytes = SLOT_ALIGNED if is_source else slots * slot_bytes + SLOT_ALIGNED
    own, handle, trouble = _share(memory, ring_bytes)
    boot_id = BOOT_ID.read_bytes().strip()[:_ID_BYTES].ljust(_ID_BYTES)
    hello = _swapped(group, is_source, other, boot_id + handle)
    if not trouble and hello[:_ID_BYTES] != boot_id:
        trouble = f"stage {other} is on another host"
    theirs, opened, place = hello[_ID_BYTES:], 0, None
    if not trouble and not any(theirs):
        trouble = f"stage {other} shares no memory"
    if not trouble and memory is not None:
        try:
            opened = memory.open(theirs)
            ring, read = (opened, own) if is_source else (own, opened)
            place = Place(ring, ring + slots * slot_bytes, read)
        except CudaProgramError as error:
            trouble = str(error)
    if _agreed(group, is_source, other, place is not None) and place is not None and memory is not None:
        trouble = _try(memory, place, is_source)
        if _agreed(group, is_source, other, not trouble):
            logger.info("stages %d and %d write into each other's memory", source, target)
            return PeerPayloads(memory, place, slots, slot_bytes, 1, otherwise, ring_bytes)
        # What was shared stays: something of the trial may still be on its way.
    else:
        _give_back(memory, own, opened, lambda: _swapped(group, is_source, other, b"\0"))
    logger.info(
        "stages %d and %d do not write into each other's memory: %s",
        source,
        target,
        trouble or f"stage {other} says why",
    )
    return otherwise


def _share(memory: PeerMemory | None, num_bytes: int) -> tuple[int, bytes, str]:
    """Memory that the other end may open: its address (0: there is none), its handle, of zeros where it has none, and
    why.
    """
    address, trouble = 0, "there is no memory that others can open (on a GPU: no cuda-bindings)"
    try:
        if memory is not None:
            address = memory.allocate(num_bytes)
            return address, memory.export(address), ""
    except CudaProgramError as error:
        trouble = str(error)
    return address, bytes(HANDLE_BYTES), trouble


def _give_back(memory: PeerMemory | None, own: int, opened: int, meet: Callable[[], object]) -> None:
    """Frees what was shared for a way that nothing has gone by.

    Args:
        own, opened: addresses of this end's memory and of the other's, 0 for none.
        meet: returns once the other end has called it too: by then it has let go of ours.
    """
    try:
        if memory is not None and opened:
            memory.let_go(opened)
    except CudaProgramError as error:
        logger.warning("memory of another stage is kept open: %s", error)
    meet()
    try:
        if memory is not None and own:
            memory.free(own)
    except CudaProgramError as error:
        logger.warning("memory that was shared in vain is kept: %s", error)


def _try(memory: PeerMemory, place: Place, is_source: bool) -> str:
    """Uses the first slot, with the hosts waiting for numbers, so that what does not arrive holds up no stream. The
    streams are told to wait only for what is there.

    Returns:
        What went wrong, else nothing.
    """
    try:
        with refusals():
            if is_source:
                own = place.read + _PATTERN_AT
                memory.write(own, _TRIAL_PATTERN)
                memory.copy(place.ring, own, _PATTERN_BYTES)
                memory.write(place.written, 1)
                return _awaited(memory, place.read)
            trouble = _awaited(memory, place.written)
            if not trouble and memory.read(place.ring) != _TRIAL_PATTERN:
                trouble = "what arrived is not what was sent"
            memory.write(place.read, 1)
    except CudaProgramError as error:
        return str(error)
    return trouble


def _awaited(memory: PeerMemory, address: int) -> str:
    deadline = time.monotonic() + _TRIAL_S
    while memory.read(address) != 1:
        if time.monotonic() > deadline:
            return f"nothing arrived within {_TRIAL_S:g} s"
        time.sleep(_POLL_S)
    memory.await_at_least(address, 1)
    return ""


def _agreed(group: dist.ProcessGroup, is_source: bool, other: int, is_well: bool) -> bool:
    """Whether both ends are well."""
    return _swapped(group, is_source, other, bytes([is_well])) == b"\1" and is_well


def _swapped(group: dist.ProcessGroup, is_source: bool, other: int, words: bytes) -> bytes:
    """Sends some bytes and receives as many."""
    ours = torch.frombuffer(bytearray(words), dtype=torch.uint8)
    theirs = torch.empty_like(ours)
    if is_source:
        send_tensor(ours, other, group)
        receive_tensor(theirs, other, group)
    else:
        receive_tensor(theirs, other, group)
        send_tensor(ours, other, group)
    return theirs.numpy().tobytes()
