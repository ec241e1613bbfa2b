"""Random segments over recurrent state: chunks and trees, each in a slot of its own."""

from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from graftline.kernels.attention_batch import SegmentRows, build_attention_batch
from graftline.kernels.state_rows import StateRows, build_state_rows

PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class StateSegment:
    """Rows of one slot; `parents` only of a tree."""

    slot: int
    num_rows: int
    parents: list[int] | None = None


def state_rows(segments: list[StateSegment]) -> StateRows:
    batch = build_attention_batch(
        [SegmentRows(0, part.num_rows, range(-(-part.num_rows // PAGE_SIZE)), part.parents) for part in segments],
        PAGE_SIZE,
    )
    return build_state_rows(
        batch,
        [part.num_rows for part in segments],
        [part.slot for part in segments],
        [part.parents is not None for part in segments],
    )


def random_tree(num_nodes: int, seed: int) -> list[int]:
    """Parents of a tree with one root."""
    random = Random(seed)
    return [-1, *(random.randrange(node) for node in range(1, num_nodes))]


def mixed_segments(seed: int) -> list[StateSegment]:
    """Chunks of 1, 2, 7 and trees of 1, 4, 9 nodes, in slots that are not in order."""
    slots = Random(seed).sample(range(8), 6)
    chunks = [StateSegment(slot, count) for slot, count in zip(slots, (1, 2, 7), strict=False)]
    trees = [
        StateSegment(slot, count, random_tree(count, seed + count))
        for slot, count in zip(slots[3:], (1, 4, 9), strict=True)
    ]
    return [chunks[0], trees[1], chunks[2], trees[0], trees[2], chunks[1]]


def strided_slots(num_slots: int, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """[num_slots, *shape] with room between slots, as a slot-major pool of several layers has."""
    size = torch.Size(shape).numel()
    data = torch.randn(num_slots, size + 24, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return data[:, 8 : 8 + size].view(num_slots, *shape)
