"""Draft trees: what counts as one, and what is left of one near a request's end."""

from random import Random

import pytest

from graftline.engine.request import DraftTree


@pytest.mark.parametrize(
    ("tokens", "parents", "problem"),
    [
        ((), (), "0 tokens"),
        ((1, 2), (-1,), "2 tokens and 1 parents"),
        ((1,), (0,), "root's parent is 0"),
        ((1, 2), (-1, 1), "node 1 has parent 1"),
        ((1, 2), (-1, -1), "node 1 has parent -1"),
        ((1, 2, 3), (-1, 2, 0), "node 1 has parent 2"),
    ],
)
def test_what_is_no_tree_is_refused(tokens: tuple[int, ...], parents: tuple[int, ...], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        DraftTree(tokens, parents)


def test_depths_follow_parents() -> None:
    tree = DraftTree((9, 1, 2, 3, 4), (-1, 0, 0, 1, 3))
    assert tree.depths() == (0, 1, 1, 2, 3)
    assert tree.num_nodes == 5
    assert DraftTree.root_only(9) == DraftTree((9,), (-1,))


@pytest.mark.parametrize("seed", range(50))
def test_pruning_keeps_every_node_that_is_not_too_deep(seed: int) -> None:
    """CASES S28: near the end of the context only shallow drafts are of use."""
    draw = Random(seed)
    count = draw.randrange(1, 16)
    tree = DraftTree(tuple(range(100, 100 + count)), (-1, *(draw.randrange(node) for node in range(1, count))))
    paths = {tree.tokens[node]: _path(tree, node) for node in range(count)}
    for max_depth in range(max(tree.depths()) + 2):
        pruned = tree.pruned(max_depth)
        assert set(pruned.tokens) == {token for token, path in paths.items() if len(path) <= max_depth + 1}
        assert list(pruned.tokens) == sorted(pruned.tokens), "the order of nodes is kept"
        for node in range(pruned.num_nodes):
            assert _path(pruned, node) == paths[pruned.tokens[node]]


def _path(tree: DraftTree, node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.append(tree.tokens[node])
        node = tree.parents[node]
    return path
