"""KV memory of one stage: one allocation per pool, page-major, so that a page's bytes lie together.

`[num_pages][layers of the stage][k, v][page_size][kv_heads][head_dim]`: a run of neighbouring pages is one
contiguous copy whenever both sides of a handoff own the same layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graftline.engine.pool_memory import PoolMemory


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """What one page of a pool holds."""

    num_layers: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def entry_bytes(self) -> int:
        """Bytes of one layer's keys (or values) in one page."""
        return self.page_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.num_layers * 2 * self.entry_bytes


class KvPool:
    """Pages of some layers of a model; a stage without layers that keep KV has pages of 0 bytes.

    Args:
        layers: global ids of the layers, in the order in which they lie in a page.

    Attributes:
        data: [num_pages + scratch_pages, num_layers, 2, page_size, num_kv_heads, head_dim]; scratch pages lie
            behind the others and are never handed out by an allocator.
    """

    def __init__(
        self,
        geometry: KvGeometry,
        num_pages: int,
        *,
        layers: Sequence[int],
        scratch_pages: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        assert len(layers) == geometry.num_layers, f"{len(layers)} layers in pages of {geometry.num_layers}"
        self.geometry = geometry
        self.num_pages = num_pages
        self.scratch_pages = scratch_pages
        self.layers = tuple(layers)
        # Zeros, not empty: garbage read through a bug must at least be the same garbage in every run.
        shape = (geometry.num_layers, 2, geometry.page_size, geometry.num_kv_heads, geometry.head_dim)
        memory = PoolMemory((num_pages + scratch_pages, *shape), geometry.dtype, torch.device(device))
        self.data = memory.data
        self._memory = memory

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool, scratch included."""
        return self.data.numel() * self.data.element_size()

    def layer_kv(self, layer: int) -> tuple[Tensor, Tensor]:
        """Strided views `[pages, page_size, num_kv_heads, head_dim]` of a global layer's keys and values."""
        index = self.layers.index(layer)
        return self.data[:, index, 0], self.data[:, index, 1]

    def as_bytes(self) -> Tensor:
        """`[pages, planes, page_size, token_bytes]` uint8 view; a plane is one layer's keys or values."""
        shape = self.data.shape
        token_bytes = shape[4] * shape[5] * self.data.element_size()
        return self.data.view(torch.uint8).view(shape[0], shape[1] * 2, shape[3], token_bytes)
