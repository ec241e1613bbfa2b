"""Inputs that several kernel tests share."""

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from graftline.kernels.attention_batch import AttentionBatch, SegmentRows, build_attention_batch
from graftline.kernels.tree_batch import TreeBatch
from graftline.kernels.tree_walk import tree_rows


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal values of one generator."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Runs the ops on `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Fills `torch.empty` with NaN, so that an element nobody writes shows."""
    torch.use_deterministic_algorithms(True)
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(False)


class PagedSequences:
    """A page pool with random KV, and sequences that own shuffled pages of it.

    The pool is page-major, [pages, 2 planes + 1 of slack, page_size, kv_heads, head_dim], so that views are strided.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        seed: int = 0,
        slack: int = 64,
    ) -> None:
        pages_each = [-(-(length + slack) // page_size) for length in lengths]
        total = sum(pages_each) + 3
        ids = random.Random(seed).sample(range(total), sum(pages_each))
        self.page_ids = [tuple(ids[sum(pages_each[:i]) : sum(pages_each[: i + 1])]) for i in range(len(pages_each))]
        self.page_size = page_size
        self.pool = normal(total, 3, page_size, kv_heads, head_dim, seed=seed).to(dtype)
        self.k_pages, self.v_pages = self.pool[:, 0], self.pool[:, 2]

    def batch(self, segments: Sequence[tuple[int, int, int, Sequence[int] | None]]) -> AttentionBatch:
        """A batch of (sequence, start, rows, parents)."""
        return build_attention_batch(
            [SegmentRows(start, rows, self.page_ids[index], parents) for index, start, rows, parents in segments],
            self.page_size,
        )

    def tree_batch(
        self, trees: Sequence[tuple[int, Sequence[int]] | None], rows_each: int, num_tail: int | None = None
    ) -> TreeBatch:
        """A round of fixed shape: (start, parents) of every sequence, None for padding."""
        count, page_size = len(trees), self.page_size
        parents = torch.zeros((count, rows_each), dtype=torch.int64)
        starts, nodes = [0] * count, [0] * count
        slots = torch.full((count, rows_each), -1, dtype=torch.int64)
        tables = torch.zeros((count, max(map(len, self.page_ids)) + 2), dtype=torch.int32)
        for index, tree in enumerate(trees):
            if tree is not None:
                starts[index], nodes[index] = tree[0], len(tree[1])
                parents[index, : nodes[index]] = torch.tensor(tree[1])
                tables[index, : len(self.page_ids[index])] = torch.tensor(self.page_ids[index])
                for node in range(nodes[index]):
                    page, offset = divmod(tree[0] + node, page_size)
                    slots[index, node] = self.page_ids[index][page] * page_size + offset
        depths, visible = tree_rows(parents, torch.tensor(nodes))
        begins = torch.tensor(starts, dtype=torch.int32)
        return TreeBatch(
            positions=(begins.unsqueeze(1) + depths).flatten(),
            row_slots=slots.flatten(),
            visible=visible.flatten(),
            starts=begins,
            page_tables=tables,
            rows_each=rows_each,
            num_tail=num_tail or rows_each,
            page_size=page_size,
        )


def random_parents(rows: int, seed: int) -> list[int]:
    """Parents of a random forest whose first node is a root."""
    draw = random.Random(seed)
    return [draw.randint(-1 if row == 0 else 0, row - 1) for row in range(rows)]


def interpreting() -> bool:
    """Triton kernels run under the interpreter in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"
