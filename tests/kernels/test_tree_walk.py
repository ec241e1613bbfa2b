"""Padded trees: ancestors, depths and walks, against the engine's own way of looking at a tree."""

import random

import pytest
import torch
from kernel_cases import random_parents
from torch import Tensor

from graftline.engine.verify import accepted_path
from graftline.kernels.attention_batch import SegmentRows
from graftline.kernels.tree_walk import tree_rows, walk_trees


def padded(trees: list[list[int]], width: int, filling: int) -> Tensor:
    return torch.tensor([[*tree, *[filling] * (width - len(tree))] for tree in trees])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("filling", [-1, 0, 7, 99])
def test_rows(dtype: torch.dtype, filling: int) -> None:
    trees = [random_parents(9, 1), [-1], [-1, 0, 1, 2, 3, 4, 5], [], [-1, 0, 0, 0]]
    parents, counts = padded(trees, 9, filling).to(dtype), torch.tensor([len(tree) for tree in trees])
    depths, visible = tree_rows(parents, counts)
    for tree, links in enumerate(trees):
        expected = SegmentRows(0, len(links), [0] * 9, links).depths() if links else []
        assert depths[tree].tolist() == expected + [0] * (9 - len(links))
        for node in range(9):
            mask = visible[tree, node].item()
            ancestors = [other for other in range(9) if mask >> other & 1]
            assert ancestors == (_path(links, node) if node < len(links) else [])


def _path(links: list[int], node: int) -> list[int]:
    return [] if node < 0 else [*_path(links, links[node]), node]


def test_the_last_node_of_the_largest_tree_has_the_sign_bit() -> None:
    parents = torch.arange(-1, 63).view(1, 64)
    count = torch.tensor([64])
    depths, visible = tree_rows(parents, count)
    assert (int(depths[0, 63]), int(visible[0, 63]), int(visible[0, 62])) == (63, -1, 2**63 - 1)


@pytest.mark.parametrize("seed", range(6))
def test_walks_are_those_of_the_engine(seed: int) -> None:
    """Few tokens, so that siblings share some and paths get long."""
    draw = random.Random(seed)
    trees = [random_parents(draw.randint(1, 8), draw.randint(0, 99)) for _ in range(5)] + [[]]
    parents, counts = padded(trees, 8, 0), torch.tensor([len(tree) for tree in trees], dtype=torch.int32)
    tokens = torch.tensor([[draw.randint(0, 2) for _ in range(8)] for _ in trees])
    sampled = torch.tensor([[draw.randint(-1 if seed == 5 else 0, 2) for _ in range(8)] for _ in trees])
    depth = draw.choice([0, 2, 7])
    accepted, num_accepted = walk_trees(tokens, parents, counts, sampled, depth)
    for tree, links in enumerate(trees):
        samples = sampled[tree].tolist()
        path = accepted_path(tokens[tree].tolist()[: len(links)], links, samples)[: depth + 1] if links else []
        assert accepted[tree].tolist() == path + [-1] * (depth + 1 - len(path))
        assert int(num_accepted[tree]) == len(path)


def test_no_sample_is_nobodys_token() -> None:
    arguments = torch.tensor([[5, -1]]), torch.tensor([[-1, 0]]), torch.tensor([2]), torch.tensor([[-1, 3]])
    accepted, count = walk_trees(*arguments, 1)
    assert accepted.tolist() == [[0, -1]]
    assert count.tolist() == [1]


def test_misfits_are_named() -> None:
    parents, count = torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, dtype=torch.int32)
    square = torch.zeros(2, 2, dtype=torch.int64)
    for bad, message in ((parents.float(), "float32"), (square.T, "strides")):
        with pytest.raises(ValueError, match=message):
            tree_rows(bad, count)
    with pytest.raises(ValueError, match="65"):
        tree_rows(torch.zeros(2, 65, dtype=torch.int64), count)
    with pytest.raises(ValueError, match="num_nodes"):
        tree_rows(parents, count[:1])
    with pytest.raises(ValueError, match="tokens"):
        walk_trees(parents.int(), parents, count, parents, 1)
    with pytest.raises(ValueError, match="sampled"):
        walk_trees(parents, parents, count, parents[:, :2], 1)
    with pytest.raises(ValueError, match="depth"):
        walk_trees(parents, parents, count, parents, -1)
