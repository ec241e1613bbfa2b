"""The last acts of a decode round of fixed shape: the walk along what was sampled, and what the next round reads."""

from dataclasses import dataclass

import torch
from torch import Tensor

from graftline.kernels.round_open import OpenRounds, RoundLayout, flat_slots
from graftline.kernels.tree_walk import walk_trees


@dataclass(frozen=True, slots=True)
class WalkedRounds:
    """What the walks found, and the rows that make the drafter's KV of the accepted paths final.

    Attributes:
        accepted: [sequences, path_len] int32 accepted nodes, the root first, padded with -1.
        emitted: [sequences, path_len] int64 tokens sampled at these, padded with -1.
        bonus: [sequences] int64 the last of them, the next root; 0 for padding.
        start: [sequences] int32 committed length behind the walk.
        nodes: [sequences * path_len] int64 row of the verify of every place of a path; the root's for padding.
        next_tokens: [sequences * path_len] int64 `emitted`, 0 for padding.
        positions: [sequences * path_len] int32, at most the limit.
        row_slots: [sequences * path_len] int64 flat slots, -1 for padding.
        visible: [sequences * path_len] int64 bit masks: every row sees those before it and itself.
        last: [sequences] int64 row of [sequences * path_len] of the last accepted node; the first for padding.
    """

    accepted: Tensor
    emitted: Tensor
    bonus: Tensor
    start: Tensor
    nodes: Tensor
    next_tokens: Tensor
    positions: Tensor
    row_slots: Tensor
    visible: Tensor
    last: Tensor


def walk_rounds(opened: OpenRounds, sampled: Tensor, page_size: int, position_limit: int) -> WalkedRounds:
    """Walks every sequence's tree; see `graftline.kernels.tree_walk.walk_trees`. One launch on CUDA.

    Args:
        opened: the round.
        sampled: [sequences, V] int64 token sampled at every node; -1 is nobody's token.
        position_limit: rows at this position or behind it are given the last one before it.

    Raises:
        ValueError: shapes or types that do not fit.
    """
    if sampled.shape != opened.tokens.shape or sampled.dtype != torch.int64 or not sampled.is_contiguous():
        raise ValueError(f"sampled: {sampled.dtype} {tuple(sampled.shape)} for trees {tuple(opened.tokens.shape)}")
    if position_limit < 1:
        raise ValueError(f"position_limit: {position_limit} leaves no position")
    if sampled.is_cuda:
        from graftline.kernels.round_walk_triton import walk_rounds as kernel

        return kernel(opened, sampled, page_size, position_limit)
    return walk_rounds_reference(opened, sampled, page_size, position_limit)


def walk_rounds_reference(opened: OpenRounds, sampled: Tensor, page_size: int, position_limit: int) -> WalkedRounds:
    """The specification."""
    count, nodes = sampled.shape
    path_len, device = opened.accepted.shape[1], sampled.device
    accepted, num_accepted = walk_trees(opened.tokens, opened.parents, opened.num_nodes, sampled, path_len - 1)
    path, is_real = accepted.long().clamp(min=0), accepted >= 0
    emitted = torch.where(is_real, sampled.gather(1, path), -1)
    last = (num_accepted.long() - 1).clamp(min=0)
    place, first = torch.arange(path_len, device=device), torch.arange(count, device=device).unsqueeze(1)
    return WalkedRounds(
        accepted=accepted,
        emitted=emitted,
        bonus=emitted.gather(1, last.unsqueeze(1)).squeeze(1).clamp(min=0),
        start=opened.start + num_accepted,
        nodes=(first * nodes + path).flatten(),
        next_tokens=emitted.clamp(min=0).flatten(),
        positions=(opened.start.unsqueeze(1) + place).clamp(max=position_limit - 1).int().flatten(),
        row_slots=flat_slots(opened.start, place, is_real, opened.page_tables, page_size),
        visible=torch.where(is_real, (torch.ones_like(place) << (place + 1)) - 1, 0).flatten(),
        last=first.squeeze(1) * path_len + last,
    )


def close_rounds(
    table: Tensor,
    slots: Tensor,
    padding_slot: int,
    layout: RoundLayout,
    walked: WalkedRounds,
    tokens: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
) -> Tensor:
    """Keeps what a round left, for the next one and for the host; slots of padding get nothing to verify.

    Args:
        table: [slots, layout.width] int64, written.
        slots: [sequences] int64.
        padding_slot: the slot of sequences that are none.
        tokens: [sequences, V] int64 of the next trees, contiguous.
        parents: [sequences, V] int64, likewise.
        num_nodes: [sequences] int64, likewise.

    Returns:
        [sequences, path_len + layout.width] int64: the emitted tokens, then the rows as written.

    Raises:
        ValueError: shapes that do not fit.
    """
    expected = (slots.shape[0], layout.nodes)
    if tokens.shape != expected or parents.shape != expected or num_nodes.shape != slots.shape:
        raise ValueError(
            f"tokens {tuple(tokens.shape)}, parents {tuple(parents.shape)}, num_nodes {tuple(num_nodes.shape)} for "
            f"{expected[0]} trees of {expected[1]}"
        )
    if table.is_cuda:
        from graftline.kernels.round_walk_triton import close_rounds as kernel

        return kernel(table, slots, padding_slot, layout, walked, tokens, parents, num_nodes)
    return close_rounds_reference(table, slots, padding_slot, walked, tokens, parents, num_nodes)


def close_rounds_reference(
    table: Tensor,
    slots: Tensor,
    padding_slot: int,
    walked: WalkedRounds,
    tokens: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
) -> Tensor:
    """The specification."""
    is_real = (slots != padding_slot).unsqueeze(1)
    counts = torch.stack((walked.start.long(), num_nodes), dim=1) * is_real
    accepted = torch.where(is_real, walked.accepted.long(), -1)
    packed = torch.cat((counts, accepted, tokens, parents), dim=1)
    table.index_copy_(0, slots, packed)
    return torch.cat((walked.emitted, packed), dim=1)
