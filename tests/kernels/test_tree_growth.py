"""Tree growth: against a plain search over all candidates."""

import random

import pytest
import torch

from graftline.kernels.tree_growth import select_children, select_tree


def grown_candidates(seed: int, depth: int, width: int) -> tuple[list[float], list[int]]:
    """Cumulative scores and parents of a beam search as the drafter runs it; scores are coarse so that ties occur."""
    draw = random.Random(seed)
    scores = [-(draw.randint(0, 4) / 2) for _ in range(width)]
    parents = [-1] * width
    beam = list(range(width))
    for _ in range(depth - 1):
        first = len(scores)
        children = []
        for node in beam:
            for _ in range(width):
                children.append((scores[node] - draw.randint(0, 4) / 2, len(scores)))
                scores.append(children[-1][0])
                parents.append(node)
        beam = [index for _, index in sorted(children, key=lambda child: (-child[0], child[1]))[:width]]
        assert min(beam) >= first
    return scores, parents


@pytest.mark.parametrize("seed", range(30))
def test_the_best_nodes_form_a_tree(seed: int) -> None:
    draw = random.Random(seed)
    depth, width = draw.randint(1, 5), draw.randint(1, 4)
    scores, parents = grown_candidates(seed, depth, width)
    num_drafts = draw.randint(1, len(scores))
    selected, tree_parents = select_tree(torch.tensor([scores]), torch.tensor([parents]), num_drafts)
    best = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:num_drafts]
    assert selected[0].tolist() == best
    node = {candidate: index + 1 for index, candidate in enumerate(best)}
    node[-1] = 0
    assert tree_parents[0].tolist() == [node[parents[candidate]] for candidate in best]
    assert all(parent < index for index, parent in enumerate(tree_parents[0].tolist(), start=1))


def test_the_first_nodes_are_the_best_smaller_tree() -> None:
    scores, parents = (torch.tensor([values]) for values in grown_candidates(7, 4, 3))
    nodes, links = select_tree(scores, parents, 20)
    for fewer in range(1, 20):
        assert torch.equal(select_tree(scores, parents, fewer)[0], nodes[:, :fewer])
        assert torch.equal(select_tree(scores, parents, fewer)[1], links[:, :fewer])


def test_nan_counts_as_least() -> None:
    nodes, links = select_tree(torch.tensor([[torch.nan, -1.0, torch.nan, -2.0]]), torch.tensor([[-1, -1, 0, 1]]), 4)
    assert nodes.tolist() == [[1, 3, 0, 2]]
    assert links.tolist() == [[0, 1, 0, 3]]


def test_requests_are_independent() -> None:
    cases = [grown_candidates(seed, 3, 2) for seed in range(5)]
    scores = torch.tensor([case[0] for case in cases])
    parents = torch.tensor([case[1] for case in cases])
    together = select_tree(scores, parents, 4)
    for index in range(5):
        alone = select_tree(scores[index : index + 1], parents[index : index + 1], 4)
        assert torch.equal(alone[0][0], together[0][index])
        assert torch.equal(alone[1][0], together[1][index])


def test_children_are_ranked_by_cumulative_score_then_order() -> None:
    cum = torch.tensor([[-1.0, -0.5], [0.0, -9.0]])
    child = torch.tensor([[[-0.5, -2.0], [-1.0, -1.5]], [[-1.0, -2.0], [-0.1, -0.2]]])
    ids = torch.tensor([[[10, 11], [20, 21]], [[30, 31], [40, 41]]])
    children, tokens, best, scores = select_children(cum, child, ids)
    assert children.tolist() == [[0, 2], [0, 1]]  # -1.5 twice: the earlier parent first
    assert tokens.tolist() == [[10, 20], [30, 31]]
    assert best.tolist() == [[-1.5, -1.5], [-1.0, -2.0]]
    torch.testing.assert_close(scores, torch.tensor([[-1.5, -3.0, -1.5, -2.0], [-1.0, -2.0, -9.1, -9.2]]))


def test_too_many_wanted_is_an_error() -> None:
    with pytest.raises(ValueError, match="num_drafts: 3"):
        select_tree(torch.zeros(1, 2), torch.tensor([[-1, 0]]), 3)
    with pytest.raises(ValueError, match="num_drafts: 0"):
        select_tree(torch.zeros(1, 2), torch.tensor([[-1, 0]]), 0)
