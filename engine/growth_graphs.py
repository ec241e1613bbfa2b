"""Growth of a prefill's trees, captured: one launch where there would be some forty a level, behind a first token.

The host knows lengths and pages here, unlike in a decode's rounds: they travel in one copy. It need not know the roots.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from graftline.engine.device_growth import DeviceGrowth
from graftline.engine.graph_capture import FixedWork, GraphPool
from graftline.kernels.upload import pad_rows, upload_into


class GrowthGraphs:
    """Growths of a few sizes; trees that are missing to a size are padding.

    Args:
        hidden_size: columns of the drafter's outputs.
        dtype: their type.
        max_pages: of a root.
    """

    def __init__(
        self, growth: DeviceGrowth, hidden_size: int, dtype: torch.dtype, max_pages: int, device: torch.device
    ) -> None:
        self._growth = growth
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._max_pages = max_pages
        self._device = device
        self._sizes: list[_Size] = []
        self._graph_pool = GraphPool(device)

    @property
    def max_trees(self) -> int:
        """Trees of the largest growth there is; 0 before `capture`."""
        return max((size.trees for size in self._sizes), default=0)

    def capture(self, sizes: Sequence[int]) -> int:
        """Warms growths of these many trees up and, on CUDA, captures them. Only padding grows.

        Returns:
            Bytes of device memory that the graphs took.
        """
        for trees in sorted(sizes):
            outputs = torch.zeros(trees, self._hidden_size, dtype=self._dtype, device=self._device)
            bonus = torch.zeros(trees, dtype=torch.int64, device=self._device)
            numbers = torch.zeros(trees, 1 + self._max_pages, dtype=torch.int32, device=self._device)
            work = self._graph_pool.fix(partial(self._run, outputs, bonus, numbers))
            self._sizes.append(_Size(trees, outputs, bonus, numbers, work))
        return sum(size.work.num_bytes for size in self._sizes)

    def grow(
        self, outputs: Tensor, bonus_tokens: Tensor, starts: Sequence[int], tables: Sequence[Sequence[int]]
    ) -> Tensor:
        """Trees of some roots.

        Args:
            outputs: [trees, hidden] drafter output of every root's last final row, at most `max_trees`.
            bonus_tokens: [trees] int64 roots.
            starts: committed length L of each.
            tables: page ids of each.

        Returns:
            [trees, 1 + 2 V] int64: nodes, then tokens, then parents of every tree. The next growth overwrites it.
        """
        count = len(starts)
        size = next(size for size in self._sizes if size.trees >= count)
        rows = [[start, *table[: self._max_pages]] for start, table in zip(starts, tables, strict=True)]
        numbers = pad_rows([*rows, *[[0]] * (size.trees - count)])
        upload_into(size.numbers[:, : len(numbers[0])], numbers)
        size.bonus[:count] = bonus_tokens
        size.outputs[:count] = outputs
        return size.work.launch()[:count]

    def _run(self, outputs: Tensor, bonus: Tensor, numbers: Tensor) -> Tensor:
        lengths, tables = numbers[:, 0].contiguous(), numbers[:, 1:].contiguous()
        tokens, parents, counts = self._growth.grow(outputs, bonus, lengths, tables)
        return torch.cat((counts.unsqueeze(1), tokens, parents), dim=1)


@dataclass(frozen=True, slots=True)
class _Size:
    """A growth of one number of trees, and where its inputs lie.

    Attributes:
        bonus: [trees] int64 tokens.
        numbers: [trees, 1 + max_pages] int32: committed length, then page ids; those that no committed slot reaches are
            what was there before.
    """

    trees: int
    outputs: Tensor
    bonus: Tensor
    numbers: Tensor
    work: FixedWork
