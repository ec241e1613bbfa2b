"""The first act of a decode round of fixed shape: what its sequences left behind becomes the rows of a verify."""

from dataclasses import dataclass

import torch
from torch import Tensor

from graftline.kernels.tree_walk import MAX_NODES, tree_rows


@dataclass(frozen=True, slots=True)
class RoundLayout:
    """Columns of the table that keeps what a round leaves: committed length, nodes, accepted path, tokens, parents.

    Attributes:
        path_len: most tokens a round emits for a request.
        nodes: V of the trees.
    """

    path_len: int
    nodes: int

    @property
    def accepted_at(self) -> int:
        """First column of the accepted nodes; those of the length and of the number of nodes lie before it."""
        return 2

    @property
    def tokens_at(self) -> int:
        """First column of the tree's tokens."""
        return self.accepted_at + self.path_len

    @property
    def parents_at(self) -> int:
        """First column of the tree's parents."""
        return self.tokens_at + self.nodes

    @property
    def width(self) -> int:
        """Columns."""
        return self.parents_at + self.nodes


@dataclass(frozen=True, slots=True)
class OpenRounds:
    """Sequences of a round, as of its begin. All tensors are contiguous.

    Attributes:
        start: [sequences] int32 committed length L.
        accepted: [sequences, path_len] int32 nodes of the last round whose KV is not moved yet, padded with -1.
        accepted_start: [sequences] int32 length that was committed before these.
        num_nodes: [sequences] int64 nodes to verify, at most V; 0 for padding.
        tokens: [sequences, V] int64; V of the round may be less than that of the table.
        parents: [sequences, V] int64.
        page_tables: [sequences, max_pages] int32.
        positions: [sequences * V] int32 L + depth.
        row_slots: [sequences * V] int64 flat slot of every node's KV, -1 for padding.
        visible: [sequences * V] int64 bit masks of a node's ancestors and itself.
    """

    start: Tensor
    accepted: Tensor
    accepted_start: Tensor
    num_nodes: Tensor
    tokens: Tensor
    parents: Tensor
    page_tables: Tensor
    positions: Tensor
    row_slots: Tensor
    visible: Tensor


def open_rounds(
    table: Tensor, pages: Tensor, slots: Tensor, layout: RoundLayout, page_size: int, nodes: int
) -> OpenRounds:
    """Reads the rows of some request slots: one launch on CUDA.

    Args:
        table: [slots, layout.width] int64.
        pages: [slots, max_pages] int32 page ids in order of position.
        slots: [sequences] int64, a row of both tables each.
        nodes: V of the round: larger trees are cut to their first nodes.

    Raises:
        ValueError: shapes or types that do not fit.
    """
    if table.dtype != torch.int64 or table.shape[1:] != (layout.width,) or not table.is_contiguous():
        raise ValueError(f"table: {table.dtype} {tuple(table.shape)} for rows of {layout.width}")
    if pages.dtype != torch.int32 or pages.shape[0] != table.shape[0] or not pages.is_contiguous():
        raise ValueError(f"pages: {pages.dtype} {tuple(pages.shape)} for {table.shape[0]} slots")
    if slots.dtype != torch.int64 or slots.dim() != 1 or not slots.is_contiguous():
        raise ValueError(f"slots: {slots.dtype} {tuple(slots.shape)}, a vector of int64 is wanted")
    if not 1 <= nodes <= layout.nodes <= MAX_NODES:
        raise ValueError(f"nodes: {nodes} of {layout.nodes} are not in 1..{MAX_NODES}")
    if table.is_cuda:
        from graftline.kernels.round_open_triton import open_rounds as kernel

        return kernel(table, pages, slots, layout, page_size, nodes)
    return open_rounds_reference(table, pages, slots, layout, page_size, nodes)


def open_rounds_reference(
    table: Tensor, pages: Tensor, slots: Tensor, layout: RoundLayout, page_size: int, nodes: int
) -> OpenRounds:
    """The specification."""
    rows, page_tables = table[slots], pages[slots]
    start, num_nodes = rows[:, 0].int(), rows[:, 1].clamp(max=nodes)
    accepted = rows[:, layout.accepted_at : layout.tokens_at].int().contiguous()
    parents = rows[:, layout.parents_at : layout.parents_at + nodes].contiguous()
    depths, visible = tree_rows(parents, num_nodes)
    node = torch.arange(nodes, device=table.device)
    return OpenRounds(
        start=start,
        accepted=accepted,
        accepted_start=start - (accepted >= 0).sum(1, dtype=torch.int32),
        num_nodes=num_nodes,
        tokens=rows[:, layout.tokens_at : layout.tokens_at + nodes].contiguous(),
        parents=parents,
        page_tables=page_tables,
        positions=(start.unsqueeze(1) + depths).flatten(),
        row_slots=flat_slots(start, node, node < num_nodes.unsqueeze(1), page_tables, page_size),
        visible=visible.flatten(),
    )


def flat_slots(start: Tensor, local: Tensor, is_real: Tensor, page_tables: Tensor, page_size: int) -> Tensor:
    """[sequences * n] int64 flat slots of positions start + local, -1 where `is_real` [sequences, n] is not."""
    slots = start.long().unsqueeze(1) + local
    pages = page_tables.gather(1, (slots // page_size).clamp(max=page_tables.shape[1] - 1)).long()
    return torch.where(is_real, pages * page_size + slots % page_size, -1).flatten()
