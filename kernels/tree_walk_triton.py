"""Triton kernels of `graftline.kernels.tree_walk`: one program a tree."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _tree_rows_kernel(parents_ptr, num_nodes_ptr, depths_ptr, visible_ptr, nodes, BLOCK: tl.constexpr):
    tree = tl.program_id(0).to(tl.int64)
    count = tl.minimum(tl.load(num_nodes_ptr + tree), nodes).to(tl.int32)
    node = tl.arange(0, BLOCK)
    real = node < count
    ancestor = tl.where(real, node, -1)
    depth = tl.zeros((BLOCK,), tl.int32)
    seen = tl.zeros((BLOCK,), tl.int64)
    # Everyone climbs at once, as far as the deepest must.
    while tl.max(ancestor) >= 0:
        climbing = ancestor >= 0
        seen = tl.where(climbing, seen | (tl.full((BLOCK,), 1, tl.int64) << tl.maximum(ancestor, 0).to(tl.int64)), seen)
        parent = tl.load(parents_ptr + tree * nodes + ancestor, mask=climbing, other=-1).to(tl.int32)
        parent = tl.minimum(parent, ancestor - 1)  # no padding value can make it go round
        depth += (climbing & (parent >= 0)).to(tl.int32)
        ancestor = tl.where(climbing, parent, -1)
    tl.store(depths_ptr + tree * nodes + node, depth, mask=node < nodes)
    tl.store(visible_ptr + tree * nodes + node, seen, mask=node < nodes)


@triton.jit
def _walk_trees_kernel(
    tokens_ptr, parents_ptr, num_nodes_ptr, sampled_ptr, path_ptr, num_accepted_ptr, nodes, depth, BLOCK: tl.constexpr,
):  # fmt: skip
    tree = tl.program_id(0).to(tl.int64)
    count = tl.minimum(tl.load(num_nodes_ptr + tree), nodes).to(tl.int32)
    node = tl.arange(0, BLOCK)
    drafted = (node > 0) & (node < count)
    tokens = tl.load(tokens_ptr + tree * nodes + node, mask=drafted, other=-1)
    parents = tl.load(parents_ptr + tree * nodes + node, mask=drafted, other=-1).to(tl.int32)
    path_ptr += tree * (depth + 1)
    place = 0
    at = tl.where(count > 0, 0, BLOCK)
    while (at < BLOCK) & (place <= depth):
        tl.store(path_ptr + place, at)
        place += 1
        sample = tl.load(sampled_ptr + tree * nodes + at)
        fits = drafted & (parents == at) & (tokens == sample) & (sample >= 0)
        at = tl.min(tl.where(fits, node, BLOCK))
    tl.store(num_accepted_ptr + tree, place)
    for rest in range(place, depth + 1):
        tl.store(path_ptr + rest, -1)


def tree_rows(parents: Tensor, num_nodes: Tensor) -> tuple[Tensor, Tensor]:
    """See `graftline.kernels.tree_walk.tree_rows`."""
    trees, nodes = parents.shape
    depths = torch.empty((trees, nodes), dtype=torch.int32, device=parents.device)
    visible = torch.empty((trees, nodes), dtype=torch.int64, device=parents.device)
    if trees:
        _tree_rows_kernel[(trees,)](
            parents,
            num_nodes,
            depths,
            visible,
            nodes,
            BLOCK=triton.next_power_of_2(nodes),
            num_warps=1,
        )
    return depths, visible


def walk_trees(
    tokens: Tensor, parents: Tensor, num_nodes: Tensor, sampled: Tensor, depth: int
) -> tuple[Tensor, Tensor]:
    """See `graftline.kernels.tree_walk.walk_trees`."""
    trees, nodes = parents.shape
    accepted = torch.empty((trees, depth + 1), dtype=torch.int32, device=parents.device)
    counts = torch.empty(trees, dtype=torch.int32, device=parents.device)
    if trees:
        _walk_trees_kernel[(trees,)](
            tokens, parents, num_nodes, sampled, accepted, counts, nodes, depth,
            BLOCK=triton.next_power_of_2(nodes), num_warps=1,
        )  # fmt: skip
    return accepted, counts
