"""Padded draft trees: depths and ancestors of their nodes, and the walk along what was sampled.

On CUDA, both are parts of larger launches: `graftline.kernels.round_open` and `round_walk`.
"""

import torch
from torch import Tensor

MAX_NODES = 64


def tree_rows(parents: Tensor, num_nodes: Tensor) -> tuple[Tensor, Tensor]:
    """What an attention over trees must know of every node.

    Args:
        parents: [trees, V] int32 or int64, V <= 64: parents[i] < i; -1 for the root. Padding may hold anything.
        num_nodes: [trees] int32 or int64, the real nodes; those behind them are padding.

    Returns:
        ([trees, V] int32 depths, the root's is 0; [trees, V] int64 bit masks of a node's ancestors and itself).
        Padding has depth 0 and sees nothing.

    Raises:
        ValueError: shapes or types that do not fit.
    """
    check_trees(parents, num_nodes)
    trees, nodes = parents.shape
    depths = torch.zeros((trees, nodes), dtype=torch.int32)
    visible = torch.zeros((trees, nodes), dtype=torch.int64)
    for tree, (links, count) in enumerate(zip(parents.tolist(), num_nodes.tolist(), strict=True)):
        paths: list[list[int]] = []
        for node in range(count):
            paths.append([*(paths[links[node]] if links[node] >= 0 else []), node])
            depths[tree, node] = len(paths[node]) - 1
            visible[tree, node] = sum(_bit(ancestor) for ancestor in paths[node])
    return depths.to(parents.device), visible.to(parents.device)


def _bit(node: int) -> int:
    """Value of a node's bit in an int64: the last one is the sign."""
    return 1 << node if node < MAX_NODES - 1 else -(1 << node)


def walk_trees(
    tokens: Tensor, parents: Tensor, num_nodes: Tensor, sampled: Tensor, depth: int
) -> tuple[Tensor, Tensor]:
    """Nodes from the root on whose tokens were sampled at their parents; see `graftline.engine.verify`.

    Args:
        tokens: [trees, V] int64.
        parents: like `tree_rows`.
        num_nodes: likewise; a tree of 0 nodes is padding.
        sampled: [trees, V] int64 token sampled at every node; -1 (no sample) is nobody's token.
        depth: most drafts a path can have.

    Returns:
        ([trees, depth + 1] int32 accepted nodes, ascending, the root first, padded with -1,
        [trees] int32 number of them). Of equal children the first counts.

    Raises:
        ValueError: shapes or types that do not fit.
    """
    check_trees(parents, num_nodes)
    for name, ids in (("tokens", tokens), ("sampled", sampled)):
        if ids.shape != parents.shape or ids.dtype != torch.int64 or not ids.is_contiguous():
            raise ValueError(f"{name}: {ids.dtype} {tuple(ids.shape)} for trees {tuple(parents.shape)}")
    if depth < 0:
        raise ValueError(f"depth: {depth} is below 0")
    accepted = torch.full((parents.shape[0], depth + 1), -1, dtype=torch.int32)
    counts = torch.zeros(parents.shape[0], dtype=torch.int32)
    trees = zip(tokens.tolist(), parents.tolist(), num_nodes.tolist(), sampled.tolist(), strict=True)
    for tree, (drafts, links, count, samples) in enumerate(trees):
        path = [0] if count > 0 else []
        for node in range(1, count):
            if len(path) <= depth and links[node] == path[-1] and drafts[node] == samples[path[-1]] >= 0:
                path.append(node)
        accepted[tree, : len(path)] = torch.tensor(path, dtype=torch.int32)
        counts[tree] = len(path)
    return accepted.to(parents.device), counts.to(parents.device)


def check_trees(parents: Tensor, num_nodes: Tensor) -> None:
    """Raises ValueError unless these describe trees as `tree_rows` wants them."""
    whole = (torch.int32, torch.int64)
    if parents.dim() != 2 or parents.dtype not in whole or not 1 <= parents.shape[1] <= MAX_NODES:
        raise ValueError(f"parents: {parents.dtype} {tuple(parents.shape)}, integers [trees, 1 … {MAX_NODES}] wanted")
    if num_nodes.shape != parents.shape[:1] or num_nodes.dtype not in whole:
        raise ValueError(f"num_nodes: {num_nodes.dtype} {tuple(num_nodes.shape)} for {parents.shape[0]} trees")
    if not parents.is_contiguous() or not num_nodes.is_contiguous():
        raise ValueError(f"parents, num_nodes: strides {parents.stride()}, {num_nodes.stride()} are not contiguous")
