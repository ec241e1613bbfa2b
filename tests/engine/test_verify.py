"""The walk along a tree against a search of all paths."""

from random import Random

import pytest

from graftline.engine.verify import accepted_path


def first_path(tokens: list[int], parents: list[int], sampled: list[int]) -> list[int]:
    """Recursively: from the root on, the first child whose token was sampled at its parent."""

    def walk(node: int) -> list[int]:
        for child, parent in enumerate(parents):
            if parent == node and tokens[child] == sampled[node]:
                return [node, *walk(child)]
        return [node]

    return walk(0)


@pytest.mark.parametrize("vocab", [1, 2, 3])
def test_random_trees_with_equal_siblings(vocab: int) -> None:
    """So few token ids that siblings often carry the same one."""
    draw = Random(vocab)
    for _ in range(300):
        count = draw.randrange(1, 20)
        parents = [-1, *(draw.randrange(node) for node in range(1, count))]
        tokens, sampled = ([draw.randrange(vocab) for _ in range(count)] for _ in range(2))
        path = accepted_path(tokens, parents, sampled)
        assert path == first_path(tokens, parents, sampled)
        assert all(tokens[node] == sampled[parents[node]] for node in path[1:])


def test_a_row_without_any_sample_accepts_nothing_below_it() -> None:
    """A node whose logits were not finite is sampled as -1."""
    assert accepted_path([5, 6, 7], [-1, 0, 1], [6, -1, 3]) == [0, 1]
