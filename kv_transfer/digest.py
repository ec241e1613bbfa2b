"""Digests of a request's KV, equal on both sides of a good handoff whatever pages it lies in.

For debugging only: it reads all the bytes. Host memory only.
"""

import ctypes
import hashlib
from collections.abc import Collection, Mapping, Sequence

from graftline.kv_transfer.layout import BufferKey, BufferKind, StageLayout, UnitKind

_DIGEST_BYTES = 16


def digest_pages(
    stage: StageLayout,
    kinds: Collection[BufferKind],
    page_ids: Sequence[int],
    num_tokens: int,
    page_size: int,
) -> dict[BufferKey, bytes]:
    """One digest a buffer over the first `num_tokens` positions.

    Args:
        stage: where the buffers lie.
        kinds: which buffers; all are made of pages.
        page_ids: the request's pages, in order of position.
        num_tokens: positions that count; the rest of the last page is not looked at.
        page_size: tokens a page; a page of a buffer is `page_size` rows of equal size.
    """
    assert num_tokens <= len(page_ids) * page_size, f"{num_tokens} tokens do not fit {len(page_ids)} pages"
    digests: dict[BufferKey, bytes] = {}
    for buffer in stage.buffers:
        if buffer.key.kind not in kinds:
            continue
        assert buffer.key.kind.unit is UnitKind.PAGE, f"{buffer.key} is not made of pages"
        row_bytes, rest = divmod(buffer.unit_bytes, page_size)
        assert rest == 0, f"{buffer.unit_bytes} bytes are not {page_size} rows"
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for index in range(-(-num_tokens // page_size)):
            num_rows = min(page_size, num_tokens - index * page_size)
            digest.update(_memory(buffer.unit_address(page_ids[index]), num_rows * row_bytes))
        digests[buffer.key] = digest.digest()
    return digests


def digest_slot(stage: StageLayout, kinds: Collection[BufferKind], slot_id: int) -> dict[BufferKey, bytes]:
    """One digest a buffer of a request's slot."""
    return {
        buffer.key: hashlib.blake2b(
            _memory(buffer.unit_address(slot_id), buffer.unit_bytes), digest_size=_DIGEST_BYTES
        ).digest()
        for buffer in stage.buffers
        if buffer.key.kind in kinds
    }


def differing(ours: Mapping[BufferKey, bytes], theirs: Mapping[BufferKey, bytes]) -> tuple[BufferKey, ...]:
    """The buffers whose digests differ or that only one side has, sorted."""
    return tuple(sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)))


def _memory(address: int, num_bytes: int) -> memoryview:
    """A view of raw memory, without a copy."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address))
