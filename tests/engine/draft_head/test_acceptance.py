"""Rounds, chains and trees against naive walks."""

import itertools
import random

import pytest
import torch
from torch import Tensor

from graftline.engine.draft_head.acceptance import Answer, Rounds, accepted_by_root, walk
from graftline.engine.draft_head.config import DraftHeadConfig
from graftline.engine.draft_head.measure import AnswerState, Head, measure, shape_label
from graftline.engine.draft_head.module import HeadWeights, to_logit_space
from graftline.engine.draft_head.trees import TreeSimulator
from graftline.engine.tree_shape import TreeShape
from tests.engine.draft_head.builders import EAGLE, EAGLE3, naive_path, weights_of


def test_walk_counts_rounds_and_only_the_answers_tokens() -> None:
    """CASES S38: what lies behind the end of the answer is not counted."""
    # Prompt of 3, answer of 6 (tokens 3..8); token 3 comes from the prefill, tokens 4..8 from rounds.
    assert walk([9] * 9, 3, 9) == Rounds(1, 5)
    assert walk([0] * 9, 3, 9) == Rounds(5, 5)
    assert walk([0, 0, 1, 0, 2, 0, 0, 0, 0], 3, 9) == Rounds(2, 5)
    assert walk([3] * 4, 3, 4) == Rounds(0, 0)


def test_rounds_add_and_divide() -> None:
    assert (Rounds(2, 5) + Rounds(3, 5)).accept_length == 2.0
    assert Rounds(0, 0).accept_length == 0.0


def test_accepted_by_root_is_the_run_of_hits_along_the_diagonal() -> None:
    hits = torch.rand(5, 2, 9, generator=torch.Generator().manual_seed(3)) < 0.6
    for steps in (1, 3, 5):
        accepted = accepted_by_root(hits, steps)
        for batch, root in itertools.product(range(2), range(9)):
            run = 0
            while run < steps and root + run < 9 and hits[run, batch, root + run]:
                run += 1
            assert accepted[batch, root] == run


def naive_tree(
    config: DraftHeadConfig,
    weights: HeadWeights,
    embed: Tensor,
    tokens: Tensor,
    features: Tensor,
    root: int,
    shape: TreeShape,
) -> int:
    """Accepted drafts of one tree, grown path by path in plain Python."""
    embeddings = embed[tokens[1:]]

    def children(path: tuple[int, ...]) -> list[tuple[float, int]]:
        drafted = embed[torch.tensor(path, dtype=torch.int64)]
        output = naive_path(config, weights, embeddings, features[:-1], root, drafted)
        best = (to_logit_space(config, weights, output) @ embed.T).log_softmax(-1).topk(shape.branching)
        return list(zip(best.values.tolist(), best.indices.tolist(), strict=True))

    beam: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    candidates: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(shape.depth):
        level = [(score + gain, (*path, token)) for score, path in beam for gain, token in children(path)]
        candidates += level
        beam = sorted(level, reverse=True)[: shape.branching]
    kept = {path for _, path in sorted(candidates, reverse=True)[: shape.nodes - 1]}
    answer = tuple(tokens[root + 2 : root + 2 + shape.depth].tolist())
    return max(length for length in range(len(answer) + 1) if length == 0 or answer[:length] in kept)


@pytest.mark.parametrize("config", [EAGLE3, EAGLE], ids=["eagle3", "eagle"])
@pytest.mark.parametrize("shape", [TreeShape(3, 2, 7), TreeShape(2, 4, 9), TreeShape(3, 1, 4)], ids=shape_label)
@torch.no_grad()
def test_trees_accept_what_naive_trees_accept(config: DraftHeadConfig, shape: TreeShape) -> None:
    torch.manual_seed(random.Random(shape_label(shape)).randrange(1000))
    weights, embed = weights_of(config), torch.randn(24, 32)
    tokens, features = torch.randint(0, 24, (14,)), torch.randn(14, 32 * len(config.feature_layers))
    # Make some drafts right: the naive drafter's own likeliest tokens.
    for place in range(6, 13):
        output = naive_path(config, weights, embed[tokens[1:]], features[:-1], place - 2, embed[:0])
        if place % 3:
            tokens[place] = (to_logit_space(config, weights, output) @ embed.T).argmax()
    simulator = TreeSimulator(config, weights, embed, embed, torch.arange(24))
    accepted = simulator.accepted(tokens, features, 3, shape)
    naive = [naive_tree(config, weights, embed, tokens, features, root, shape) for root in range(3, 12)]
    assert accepted.tolist() == naive
    assert max(naive) > 0


@torch.no_grad()
def test_a_chain_is_a_tree_with_one_child_and_a_full_tree_is_never_wrong() -> None:
    torch.manual_seed(2)
    embed = torch.randn(24, 32)
    kept = torch.arange(0, 24, 4)
    tokens = kept[torch.randint(0, 6, (30,))]
    head = Head(EAGLE3, weights_of(EAGLE3), embed, embed[kept], kept)
    states = [AnswerState(Answer(tokens, 8, "x"), torch.randn(30, 96))]
    chains = [TreeShape(steps, 1, steps + 1) for steps in (1, 3, 5)]
    figures = measure(head, states, [*chains, TreeShape(2, 6, 43)])["x"].by_shape
    for chain in chains:
        assert figures[shape_label(chain)] == figures[f"S{chain.depth}"]
    assert figures["S2 K6 V43"] == Rounds(7, 21)
    assert figures["S1"].num_emitted == 21
