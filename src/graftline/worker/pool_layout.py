"""A stage's pools in the words of the transfer layer."""

from collections.abc import Iterator

from graftline.engine.kv_pool import KvPool
from graftline.engine.transfer_port import StagePools
from graftline.kv_transfer.layout import BufferKey, BufferKind, BufferLayout, StageLayout


def stage_layout(pools: StagePools, session_id: str) -> StageLayout:
    """Every buffer of a stage. Scratch pages are not part of it."""
    buffers = list(_buffers(pools.target, BufferKind.K, BufferKind.V))
    if pools.draft is not None:
        buffers += _buffers(pools.draft, BufferKind.DRAFT_K, BufferKind.DRAFT_V)
    return StageLayout(pools.stage, session_id, tuple(buffers))


def pool_region(pool: KvPool) -> tuple[int, int]:
    """Address and length in bytes of a pool's memory."""
    return pool.data.data_ptr(), pool.num_bytes


def _buffers(pool: KvPool, keys: BufferKind, values: BufferKind) -> Iterator[BufferLayout]:
    geometry = pool.geometry
    address = pool.data.data_ptr()
    for index in range(geometry.num_layers):
        for kind in (keys, values):
            yield BufferLayout(
                key=BufferKey(kind, pool.first_layer + index),
                dtype=str(geometry.dtype).removeprefix("torch."),
                base_address=address,
                unit_bytes=geometry.entry_bytes,
                unit_stride_bytes=geometry.page_bytes,
                num_units=pool.num_pages,
            )
            address += geometry.entry_bytes
