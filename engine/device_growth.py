"""Grows draft trees without a word to the host: fixed shapes, every choice taken on the device.

The same trees as `engine/drafter.py`'s: candidates in the order they come up, the beam of a level being its K best.
"""

from torch import Tensor

from graftline.engine.draft_module import DraftModule
from graftline.engine.draft_scratch import scratch_pages_for
from graftline.engine.kv_pool import KvPool
from graftline.engine.tree_shape import TreeShape
from graftline.kernels.growth_levels import (
    Beam,
    Candidates,
    GrowthPlace,
    finish_trees,
    grow_level,
    scratch_tables,
)
from graftline.kernels.sample import top_k
from graftline.kernels.tree_batch import MAX_TAIL, TreeBatch


def grows_on_device(shape: TreeShape) -> bool:
    """Whether masks of 64 bits hold every row of a growth and every node of a tree."""
    return shape.scratch_rows <= MAX_TAIL and shape.nodes <= MAX_TAIL and shape.depth < MAX_TAIL


class DeviceGrowth:
    """Growth of one shape.

    Args:
        pool: of the drafter; its scratch pages hold what growth writes.
    """

    def __init__(self, layer: DraftModule, pool: KvPool, shape: TreeShape) -> None:
        assert grows_on_device(shape), f"{shape} does not fit masks of {MAX_TAIL} bits"
        self._layer = layer
        self._pool = pool
        self._shape = shape
        self._page_size = pool.geometry.page_size
        self._width = min(shape.branching, layer.vocab_size)
        self._pages_a_tree = scratch_pages_for(shape, self._page_size, 1)
        self._num_drafts = shape.num_drafts(self._width)

    def grow(
        self, outputs: Tensor, bonus_tokens: Tensor, starts: Tensor, page_tables: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A tree per root.

        Args:
            outputs: [trees, hidden] drafter output of every root's last final row.
            bonus_tokens: [trees] int64 roots.
            starts: [trees] int32 committed length L.
            page_tables: [trees, max_pages] int32.

        Returns:
            ([trees, V] int64 tokens, [trees, V] int64 parents, [trees] int64 nodes): 1 node where the draft head does
            not reach.
        """
        width, shape = self._width, self._shape
        tables = self._tables(starts, page_tables)
        place = GrowthPlace(starts, tables, self._page_size, self._layer.position_limit)
        candidates = Candidates.empty(outputs.shape[0], width + (shape.depth - 1) * width * width, outputs.device)
        scores, ids = top_k(self._layer.logits(outputs), width)
        beam = grow_level(None, scores, ids, self._layer.to_target, candidates, 0, 0, place)
        hidden, base = outputs, width
        for level in range(shape.depth - 1):
            hidden = self._layer.forward(
                hidden, beam.tokens, self._batch(level, beam, place), self._pool, beam.parent_rows
            )
            scores, ids = top_k(self._layer.logits(hidden), width)
            beam = grow_level(beam, scores, ids, self._layer.to_target, candidates, base, level + 1, place)
            base += width * width
        reach = self._layer.position_limit - shape.depth
        return finish_trees(candidates, bonus_tokens, self._num_drafts, shape.nodes, starts, reach)

    def _batch(self, level: int, beam: Beam, place: GrowthPlace) -> TreeBatch:
        return TreeBatch(
            positions=beam.positions,
            row_slots=beam.row_slots,
            visible=beam.visible,
            starts=place.starts,
            page_tables=place.page_tables,
            rows_each=self._width,
            num_tail=(level + 1) * self._width,
            page_size=self._page_size,
        )

    def _tables(self, starts: Tensor, page_tables: Tensor) -> Tensor:
        """Page tables with room for what growth writes."""
        if not self._pages_a_tree:
            return page_tables
        pool = self._pool
        return scratch_tables(pool.data, pool.num_pages, self._pages_a_tree, starts, page_tables, self._page_size)
