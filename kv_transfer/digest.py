"""A digest of what one request was handed, equal on both sides of a good handoff whatever stages and pages it lies in.

Each unit of each buffer is hashed with the names that both sides know it by: the buffer's key and the unit's id at the
receiver. The hashes are combined by XOR, so that any split over stages, orders and chunks gives the same digest.

For debugging only: it reads all the bytes. Host memory only.
"""

import ctypes
import hashlib
from collections.abc import Collection, Sequence

from graftline.kv_transfer.layout import BufferKind, StageLayout

DIGEST_BYTES = 16
EMPTY = bytes(DIGEST_BYTES)


def digest_units(stage: StageLayout, kinds: Collection[BufferKind], units: Sequence[tuple[int, int]]) -> bytes:
    """The digest of one stage's part.

    Args:
        stage: where the buffers lie.
        kinds: which buffers.
        units: (unit id here, unit id at the receiver) pages or slots; equal ones at the receiver itself.
    """
    total = EMPTY
    for buffer in stage.buffers:
        if buffer.key.kind not in kinds:
            continue
        for here, there in units:
            digest = hashlib.blake2b(f"{buffer.key}/{there}/".encode(), digest_size=DIGEST_BYTES)
            digest.update(_memory(buffer.unit_address(here), buffer.unit_bytes))
            total = combined(total, digest.digest())
    return total


def combined(one: bytes, other: bytes) -> bytes:
    """The digest of two parts together; `EMPTY` adds nothing."""
    return (int.from_bytes(one) ^ int.from_bytes(other)).to_bytes(DIGEST_BYTES)


def _memory(address: int, num_bytes: int) -> memoryview:
    """A view of raw memory, without a copy."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address))
