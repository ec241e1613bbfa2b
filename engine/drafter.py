"""The draft head at work: extend over real features, grow trees from the last output.

Row p of the drafter takes the target's feature at position p and the token at p + 1; its output stands for the
feature at p + 1 and its logits predict the token at p + 2 (EAGLE, Li et al. 2024; EAGLE-3, Li et al. 2025).
Only rows [0, L) are state. Growing writes scratch pages behind the pool's own, which nobody else sees.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graftline.engine.device_growth import DeviceGrowth, grows_on_device
from graftline.engine.device_rounds import RoundDrafter, round_sizes
from graftline.engine.draft_module import DraftModule
from graftline.engine.draft_scratch import scratch_pages_for
from graftline.engine.growth_graphs import GrowthGraphs
from graftline.engine.kv_pool import KvPool
from graftline.engine.pages import num_pages_for
from graftline.engine.request import DraftTree
from graftline.engine.tree_shape import TreeShape
from graftline.kernels.attention_batch import AttentionBatch, SegmentRows, build_attention_batch
from graftline.kernels.draft_growth import DraftGrowth
from graftline.kernels.sample import top_k
from graftline.kernels.tree_growth import select_children, select_tree
from graftline.kernels.upload import upload


@dataclass(frozen=True, slots=True)
class GrowthRoot:
    """Where a tree starts.

    Attributes:
        bonus_token: the root.
        start: committed length L; drafter rows [0, L) are final.
        page_ids: the request's pages in order of position.
    """

    bonus_token: int
    start: int
    page_ids: Sequence[int]


def tree_of(row: Sequence[int]) -> DraftTree:
    """A tree from a row of `Drafter.grow_unseen`: nodes, then tokens, then parents."""
    count, nodes = row[0], (len(row) - 1) // 2
    return DraftTree(tuple(row[1 : 1 + count]), tuple(row[1 + nodes : 1 + nodes + count]))


class Drafter:
    """Grows trees of one shape; lives on the last stage."""

    def __init__(self, layer: DraftModule, pool: KvPool, shape: TreeShape) -> None:
        self._layer = layer
        self._pool = pool
        self._shape = shape
        self._device_growth = DeviceGrowth(layer, pool, shape) if grows_on_device(shape) else None
        self._graphs: GrowthGraphs | None = None
        self._page_size = pool.geometry.page_size
        self._pages_a_tree = scratch_pages_for(shape, self._page_size, 1)
        self._max_trees = pool.scratch_pages // self._pages_a_tree if self._pages_a_tree else 0

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """What the drafter wants of the target; see `DraftHeadConfig.feature_layers`."""
        return self._layer.feature_layers

    @property
    def for_rounds(self) -> RoundDrafter:
        """The same for rounds of fixed shape, whose trees must fit them."""
        assert self._device_growth is not None, f"{self._shape} does not fit rounds of fixed shape"
        return RoundDrafter(self._layer, self._pool, self._device_growth)

    def capture_growth(self, max_trees: int, dtype: torch.dtype, device: torch.device) -> int:
        """Captures growths of up to `max_trees` trees, or of as many as grow at once, if the head can be captured; see
        `GrowthGraphs`.

        Returns:
            Bytes of device memory that the graphs took.
        """
        if self._device_growth is None or not self._shape.speculates or not self._layer.is_capturable:
            return 0
        most = min(max_trees, self._max_trees or max_trees)
        max_pages = num_pages_for(self._layer.position_limit, self._page_size)
        self._graphs = GrowthGraphs(self._device_growth, self._layer.hidden_size, dtype, max_pages, device)
        return self._graphs.capture(round_sizes(most))

    def extend(self, features: Tensor, next_tokens: Tensor, batch: AttentionBatch) -> Tensor:
        """Makes drafter rows final.

        Args:
            features: [rows, num_features * target_hidden].
            next_tokens: [rows] int64, the token behind every row's position.
            batch: chains starting at each request's committed drafter length.

        Returns:
            [rows, hidden] outputs.
        """
        return self._layer.forward(self._layer.fuse(features), next_tokens, batch, self._pool)

    def grow(self, outputs: Tensor, roots: Sequence[GrowthRoot]) -> list[DraftTree]:
        """A tree per root.

        Args:
            outputs: [roots, hidden] drafter output of every root's last final row.
            roots: where the trees start.
        """
        if self._pages_a_tree == 0:
            return self._grow(outputs, roots)
        trees: list[DraftTree] = []
        for first in range(0, len(roots), self._max_trees):
            part = slice(first, first + self._max_trees)
            trees += self._grow(outputs[part], roots[part])
        return trees

    def _grow(self, outputs: Tensor, roots: Sequence[GrowthRoot]) -> list[DraftTree]:
        within = [
            index for index, root in enumerate(roots) if root.start + self._shape.depth < self._layer.position_limit
        ]
        trees = [DraftTree.root_only(root.bonus_token) for root in roots]
        if within:
            grown = [roots[index] for index in within]
            found = self._grow_within(outputs[within], grown)
            for index, tree in zip(within, found, strict=True):
                trees[index] = tree
        return trees

    def _grow_within(self, outputs: Tensor, roots: Sequence[GrowthRoot]) -> list[DraftTree]:
        if outputs.is_cuda and self._device_growth is not None:
            return self._grow_on_device(outputs, roots)
        tables = self._scratch_tables(roots)
        if self._layer.growth is None:
            return _Growth(self._layer, self._pool, self._shape, tables).run(outputs, roots)
        return self._grow_at_once(self._layer.growth, outputs, roots, tables)

    def _grow_on_device(self, outputs: Tensor, roots: Sequence[GrowthRoot]) -> list[DraftTree]:
        bonus = upload([root.bonus_token for root in roots], torch.int64, outputs.device)
        found = self.grow_unseen(outputs, bonus, [root.start for root in roots], [root.page_ids for root in roots])
        return [tree_of(row) for row in found.tolist()]  # one wait for all of it

    @property
    def grows_unseen(self) -> bool:
        """Whether it can grow trees without a word to the host."""
        return self._device_growth is not None and self._layer.is_capturable and self._shape.speculates

    def grow_unseen(
        self, outputs: Tensor, bonus_tokens: Tensor, starts: Sequence[int], page_ids: Sequence[Sequence[int]]
    ) -> Tensor:
        """Trees of roots that only the device knows; the host does not wait for them.

        Args:
            outputs: [trees, hidden] drafter output of every root's last final row.
            bonus_tokens: [trees] int64 roots.
            starts: committed length L of each.
            page_ids: of each, in order of position.

        Returns:
            [trees, 1 + 2 V] int64: nodes, then tokens, then parents of every tree; 1 node where the head does not
            reach. The next growth may overwrite it.
        """
        assert self._device_growth is not None, f"{self._shape} does not grow on the device"
        most = self._max_trees or len(starts)
        parts = [slice(first, first + most) for first in range(0, len(starts), most)]
        if len(parts) == 1:
            return self._grow_part(self._device_growth, outputs, bonus_tokens, starts, page_ids)
        grown = [
            self._grow_part(
                self._device_growth, outputs[part], bonus_tokens[part], starts[part], page_ids[part]
            ).clone()
            for part in parts
        ]
        return torch.cat(grown)

    def _grow_part(
        self,
        growth: DeviceGrowth,
        outputs: Tensor,
        bonus_tokens: Tensor,
        starts: Sequence[int],
        page_ids: Sequence[Sequence[int]],
    ) -> Tensor:
        if self._graphs is not None and len(starts) <= self._graphs.max_trees:
            return self._graphs.grow(outputs, bonus_tokens, starts, page_ids)
        columns = max(map(len, page_ids))
        padded = [[*map(int, pages), *[0] * (columns - len(pages))] for pages in page_ids]
        device = outputs.device
        tokens, parents, counts = growth.grow(
            outputs, bonus_tokens, upload(starts, torch.int32, device), upload(padded, torch.int32, device)
        )
        return torch.cat((counts.unsqueeze(1), tokens, parents), dim=1)

    def _grow_at_once(
        self, growth: DraftGrowth, outputs: Tensor, roots: Sequence[GrowthRoot], tables: Sequence[Sequence[int]]
    ) -> list[DraftTree]:
        depth, width = self._shape.depth, min(self._shape.branching, self._layer.vocab_size)
        tokens, parents = growth.grow(
            outputs,
            [root.start for root in roots],
            tables,
            *self._pool.layer_kv(self._pool.layers[0]),
            depth=depth,
            width=width,
            num_drafts=self._shape.num_drafts(width),
        )
        return [
            DraftTree((root.bonus_token, *tree_tokens), (-1, *tree_parents))
            for root, tree_tokens, tree_parents in zip(roots, tokens.tolist(), parents.tolist(), strict=True)
        ]

    def _scratch_tables(self, roots: Sequence[GrowthRoot]) -> list[list[int]]:
        """Page tables whose part from the last partial page on is scratch, that page's rows copied over."""
        tables = []
        for index, root in enumerate(roots):
            first = self._pool.num_pages + index * self._pages_a_tree
            scratch = list(range(first, first + self._pages_a_tree))
            full_pages, partial_rows = divmod(root.start, self._page_size)
            if partial_rows and scratch:
                source = root.page_ids[full_pages]
                self._pool.data[scratch[0], :, :, :partial_rows] = self._pool.data[source, :, :, :partial_rows]
            tables.append([*root.page_ids[:full_pages], *scratch])
        return tables


class _Growth:
    """One growth of several trees, level by level.

    Candidates are numbered in the order they come up, so that a parent's number is below its children's. The
    beam of a level is the K candidates that are run through the draft layer to get the next level's.
    """

    def __init__(self, layer: DraftModule, pool: KvPool, shape: TreeShape, tables: list[list[int]]) -> None:
        self._layer = layer
        self._pool = pool
        self._shape = shape
        self._tables = tables

    def run(self, outputs: Tensor, roots: Sequence[GrowthRoot]) -> list[DraftTree]:
        width = min(self._shape.branching, self._layer.vocab_size)
        count = len(roots)
        scores, draft_ids = top_k(self._layer.logits(outputs), width)
        tokens = self._layer.target_ids(draft_ids)  # [trees, K], like scores
        candidates = _Candidates(scores, tokens, torch.full_like(tokens, -1))
        beam = torch.arange(width, device=tokens.device).expand(count, width)  # candidate numbers
        hidden = outputs.repeat_interleave(width, dim=0)  # [trees * K, hidden], the beam's features
        parents = [[-1] * width for _ in roots]
        rows: list[list[int]] = [[] for _ in roots]  # per tree: parent row of every row grown so far
        for level in range(self._shape.depth - 1):
            for tree_rows, tree_parents in zip(rows, parents, strict=True):
                tree_rows += tree_parents
            hidden = self._level(hidden, tokens, roots, rows)
            child_scores, child_ids = top_k(self._layer.logits(hidden), width)
            child_tokens = self._layer.target_ids(child_ids).reshape(count, width, width)
            best, tokens, scores, all_scores = select_children(
                scores, child_scores.reshape(count, width, width), child_tokens
            )
            first = candidates.count
            candidates = candidates.joined(all_scores, child_tokens.flatten(1), beam.repeat_interleave(width, dim=1))
            beam = first + best
            hidden = hidden.reshape(count, width, -1)
            hidden = hidden.gather(1, (best // width).unsqueeze(-1).expand(-1, -1, hidden.shape[-1])).flatten(0, 1)
            parents = (best // width + level * width).tolist()
        return candidates.best_trees(roots, self._shape.nodes - 1)

    def _level(self, hidden: Tensor, tokens: Tensor, roots: Sequence[GrowthRoot], rows: Sequence[list[int]]) -> Tensor:
        """Runs one level's beams: [trees * K, hidden] features and [trees, K] tokens -> [trees * K, hidden]."""
        width = tokens.shape[1]
        if width == 1:  # a chain: the rows before are as good as committed ones
            segments = [
                SegmentRows(root.start + len(tree_rows) - 1, 1, table)
                for root, table, tree_rows in zip(roots, self._tables, rows, strict=True)
            ]
        else:
            segments = [
                SegmentRows(root.start, len(tree_rows), table, tree_rows)
                for root, table, tree_rows in zip(roots, self._tables, rows, strict=True)
            ]
        batch = build_attention_batch(segments, self._pool.geometry.page_size, hidden.device)
        return self._layer.forward_newest(hidden, tokens.flatten(), batch, self._pool, width)


@dataclass(frozen=True, slots=True)
class _Candidates:
    """All nodes considered so far, [trees, candidates] each, in the order they came up.

    Attributes:
        scores: cumulative log-probabilities.
        parents: number of the parent candidate, -1 for children of the root.
    """

    scores: Tensor
    tokens: Tensor
    parents: Tensor

    @property
    def count(self) -> int:
        return self.scores.shape[1]

    def joined(self, scores: Tensor, tokens: Tensor, parents: Tensor) -> "_Candidates":
        return _Candidates(
            torch.cat((self.scores, scores), dim=1),
            torch.cat((self.tokens, tokens), dim=1),
            torch.cat((self.parents, parents), dim=1),
        )

    def best_trees(self, roots: Sequence[GrowthRoot], num_drafts: int) -> list[DraftTree]:
        picks, parents = select_tree(self.scores, self.parents, min(num_drafts, self.count))
        tokens = self.tokens.gather(1, picks)
        return [
            DraftTree((root.bonus_token, *tree_tokens), (-1, *tree_parents))
            for root, tree_tokens, tree_parents in zip(roots, tokens.tolist(), parents.tolist(), strict=True)
        ]
