"""Grows draft trees without a word to the host: fixed shapes, every choice taken on the device.

The same trees as `engine/drafter.py`'s: candidates in the order they come up, the beam of a level being its K best.
"""

import torch
from torch import Tensor

from graftline.engine.draft_module import DraftModule
from graftline.engine.draft_scratch import scratch_pages_for
from graftline.engine.kv_pool import KvPool
from graftline.engine.tree_shape import TreeShape
from graftline.kernels.sample import top_k
from graftline.kernels.tree_batch import MAX_TAIL, TreeBatch
from graftline.kernels.tree_growth import select_children, select_tree


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
        count, width, device = outputs.shape[0], self._width, outputs.device
        tables = self._scratch_tables(starts, page_tables)
        scores, draft_ids = top_k(self._layer.logits(outputs), width)
        tokens = self._layer.target_ids(draft_ids)
        candidates = [(scores, tokens, torch.full_like(tokens, -1))]
        beam = torch.arange(width, device=device).expand(count, width)
        visible = torch.zeros(count, width, dtype=torch.int64, device=device)
        hidden = outputs.repeat_interleave(width, dim=0)
        num_candidates = width
        for level in range(self._shape.depth - 1):
            own = torch.arange(level * width, (level + 1) * width, device=device)
            visible = visible | (torch.ones_like(own) << own)
            batch = self._batch(level, own, visible, starts, tables)
            hidden = self._layer.forward(hidden, tokens.flatten(), batch, self._pool)
            child_scores, child_ids = top_k(self._layer.logits(hidden), width)
            child_tokens = self._layer.target_ids(child_ids).view(count, width, width)
            parents = beam.repeat_interleave(width, dim=1)
            best, tokens, scores, all_scores = select_children(
                scores, child_scores.view(count, width, width), child_tokens
            )
            candidates.append((all_scores, child_tokens.flatten(1), parents))
            beam = num_candidates + best
            num_candidates += width * width
            parent = best // width
            visible = visible.gather(1, parent)
            hidden = hidden.view(count, width, -1)
            hidden = hidden.gather(1, parent.unsqueeze(-1).expand(-1, -1, hidden.shape[-1])).flatten(0, 1)
        return self._best(candidates, bonus_tokens, starts)

    def _batch(self, level: int, own: Tensor, visible: Tensor, starts: Tensor, tables: Tensor) -> TreeBatch:
        width, size = self._width, self._page_size
        slots = starts.long().unsqueeze(1) + own
        pages = tables.gather(1, slots // size)
        # A root past the head's reach is cut to itself below; its rows only must not leave the tables.
        position = (starts + level).clamp(max=self._layer.position_limit - 1)
        return TreeBatch(
            positions=position.repeat_interleave(width),
            row_slots=(pages.long() * size + slots % size).flatten(),
            visible=visible.flatten(),
            starts=starts,
            page_tables=tables,
            rows_each=width,
            num_tail=(level + 1) * width,
            page_size=size,
        )

    def _scratch_tables(self, starts: Tensor, page_tables: Tensor) -> Tensor:
        """Page tables whose part from the last partial page on is scratch, that page copied over."""
        if not self._pages_a_tree:
            return page_tables
        count, columns = page_tables.shape
        device = page_tables.device
        full = (starts // self._page_size).long().unsqueeze(1)  # [trees, 1]
        first = self._pool.num_pages + torch.arange(count, device=device) * self._pages_a_tree
        source = page_tables.gather(1, full.clamp(max=columns - 1)).squeeze(1).long()
        self._pool.data.index_copy_(0, first, self._pool.data.index_select(0, source))
        index = torch.arange(columns + self._pages_a_tree, device=device).unsqueeze(0)
        scratch = first.unsqueeze(1) + (index - full).clamp(0, self._pages_a_tree - 1)
        own = torch.cat((page_tables, page_tables.new_zeros(count, self._pages_a_tree)), dim=1)
        return torch.where(index < full, own, scratch.int())

    def _best(
        self, candidates: list[tuple[Tensor, Tensor, Tensor]], bonus_tokens: Tensor, starts: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        scores, tokens, parents = (torch.cat(parts, dim=1) for parts in zip(*candidates, strict=True))
        picks, nodes = select_tree(scores, parents, self._num_drafts)
        count, missing = picks.shape[0], self._shape.nodes - 1 - self._num_drafts
        filler = tokens.new_zeros(count, missing)
        roots = bonus_tokens.unsqueeze(1)
        tree_tokens = torch.cat((roots, tokens.gather(1, picks), filler), dim=1)
        tree_parents = torch.cat((torch.full_like(roots, -1), nodes, filler), dim=1)
        reaches = starts + self._shape.depth < self._layer.position_limit
        return tree_tokens, tree_parents, torch.where(reaches, 1 + self._num_drafts, 1)
