"""Pools of bytes with random geometry: what the copy plans are tried on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from graftline.kv_transfer.layout import BufferKey, BufferKind, BufferLayout, StageLayout, WorkerLayout

Bytes = npt.NDArray[np.uint8]


@dataclass
class Pools:
    """The memory of one worker: one array a stage, filled with random bytes, and where its buffers lie."""

    layout: WorkerLayout
    arrays: list[Bytes]

    def unit(self, key: BufferKey, unit_id: int) -> Bytes:
        """A view of one unit, found without the code under test."""
        stage, buffer = self.layout.by_key()[key]
        array = self.arrays[stage.stage]
        offset = buffer.base_address - array.ctypes.data + unit_id * buffer.unit_stride_bytes
        return array[offset : offset + buffer.unit_bytes]

    def snapshot(self) -> list[Bytes]:
        return [array.copy() for array in self.arrays]


@dataclass
class PoolShape:
    """How to lay a worker's buffers out."""

    keys_of_stages: list[list[BufferKey]]
    num_units: int
    unit_bytes: dict[BufferKey, int]
    page_major: bool = True
    gap: Callable[[], int] = lambda: 0
    sessions: list[str] = field(default_factory=list)


def build_pools(shape: PoolShape, rng: np.random.Generator) -> Pools:
    """Page-major: every unit holds all entries side by side (with gaps). Otherwise every buffer has a region."""
    arrays, stages = [], []
    for index, keys in enumerate(shape.keys_of_stages):
        gaps = [shape.gap() for _ in keys]
        widths = [shape.unit_bytes[key] + gap for key, gap in zip(keys, gaps, strict=True)]
        array = rng.integers(0, 256, size=sum(widths) * shape.num_units + 64, dtype=np.uint8)
        base = array.ctypes.data + 32
        buffers, offset = [], 0
        for key, width in zip(keys, widths, strict=True):
            stride = sum(widths) if shape.page_major else width
            buffers.append(BufferLayout(key, "uint8", base + offset, shape.unit_bytes[key], stride, shape.num_units))
            offset += width if shape.page_major else width * shape.num_units
        session = shape.sessions[index] if shape.sessions else f"session-{index}"
        stages.append(StageLayout(index, session, tuple(buffers)))
        arrays.append(array)
    return Pools(WorkerLayout(tuple(stages)), arrays)


def page_keys(num_layers: int, num_draft_layers: int = 0) -> list[BufferKey]:
    """k and v of every layer, then the drafter's."""
    target = [BufferKey(kind, layer) for layer in range(num_layers) for kind in (BufferKind.K, BufferKind.V)]
    kinds = (BufferKind.DRAFT_K, BufferKind.DRAFT_V)
    return target + [BufferKey(kind, layer) for layer in range(num_draft_layers) for kind in kinds]


def split(keys: Sequence[BufferKey], cuts: Sequence[int]) -> list[list[BufferKey]]:
    """Cuts a key list into stages before the given positions."""
    ends = [*cuts, len(keys)]
    return [list(keys[start:end]) for start, end in zip([0, *cuts], ends, strict=True)]
