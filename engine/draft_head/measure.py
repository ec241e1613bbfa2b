"""Accept length of a head on held-out prompts: chains, trees, per depth, per kind."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from graftline.engine.draft_head.acceptance import Answer, Rounds, accepted_by_root, chain_hits, walk
from graftline.engine.draft_head.config import DraftHeadConfig
from graftline.engine.draft_head.module import HeadWeights, Unroller
from graftline.engine.draft_head.target import TargetRunner, varying_lengths
from graftline.engine.draft_head.trees import TreeSimulator
from graftline.engine.tree_shape import TreeShape

CHAIN_STEPS = (1, 2, 3, 4, 5)
TREE_SHAPES = (TreeShape(4, 2, 8), TreeShape(5, 4, 16), TreeShape(6, 8, 32))


@dataclass(frozen=True, slots=True)
class AnswerState:
    """An answer with what the head reads of it: features [T, n * target_h]."""

    answer: Answer
    features: Tensor


@dataclass(frozen=True, slots=True)
class Head:
    """A head ready to be measured, in the target's type and on its device."""

    config: DraftHeadConfig
    weights: HeadWeights
    embed: Tensor  # [vocab, h]
    vocab_rows: Tensor  # [V, h]
    kept_ids: Tensor  # [V]


@dataclass(frozen=True, slots=True)
class KindFigures:
    """Figures of one kind of prompt.

    Attributes:
        by_shape: "S3" for a chain of three steps, "S5 K4 V16" for a tree.
        depth_acceptance: share of chain drafts accepted at depth 1, 2, ... given those before, at real roots.
    """

    by_shape: Mapping[str, Rounds]
    depth_acceptance: tuple[float, ...]


def answer_states(runner: TargetRunner, answers: Iterable[Answer], feature_layers: Sequence[int]) -> list[AnswerState]:
    """Run the target over every answer once."""
    device = runner.target.device
    states = []
    for answer in answers:
        tokens = answer.tokens.to(device)
        with varying_lengths():
            features = runner.features(tokens[None], feature_layers).features[0]
        states.append(AnswerState(Answer(tokens, answer.num_prompt_tokens, answer.kind), features))
    return states


def measure(
    head: Head, states: Sequence[AnswerState], shapes: Sequence[TreeShape], chain_steps: Sequence[int] = CHAIN_STEPS
) -> dict[str, KindFigures]:
    """Figures for each kind among the states; a chain of S steps is the tree of S steps, K = 1, V = S + 1."""
    simulator = TreeSimulator(head.config, head.weights, head.embed, head.vocab_rows, head.kept_ids)
    unroller = Unroller(head.config)
    rounds: dict[str, dict[str, Rounds]] = {}
    depths: dict[str, Tensor] = {}
    for state in states:
        answer, length = state.answer, len(state.answer.tokens)
        if length - answer.num_prompt_tokens < 2:
            continue
        with varying_lengths():
            hits = _answer_hits(head, unroller, state, max(chain_steps))
        of_kind = rounds.setdefault(answer.kind, {})
        for steps in chain_steps:
            accepted = accepted_by_root(hits, steps)[0].tolist()
            label = f"S{steps}"
            of_kind[label] = of_kind.get(label, Rounds(0, 0)) + walk(accepted, answer.num_prompt_tokens, length)
        counts = _depth_counts(hits, answer.num_prompt_tokens)
        depths[answer.kind] = depths.get(answer.kind, torch.zeros_like(counts)) + counts
        for shape in shapes:
            first = answer.num_prompt_tokens - 1
            accepted = [0] * first + simulator.accepted(answer.tokens, state.features, first, shape).tolist()
            of_kind[shape_label(shape)] = of_kind.get(shape_label(shape), Rounds(0, 0)) + walk(
                accepted, answer.num_prompt_tokens, length
            )
    return {
        kind: KindFigures(of_kind, tuple((depths[kind][1] / depths[kind][0].clamp_min(1)).tolist()))
        for kind, of_kind in rounds.items()
    }


def shape_label(shape: TreeShape) -> str:
    """Such as "S5 K4 V16"."""
    return f"S{shape.depth} K{shape.branching} V{shape.nodes}"


def mean_accept_length(figures: Mapping[str, KindFigures], kinds: Sequence[str], label: str) -> float:
    """Mean over kinds of the accept length of one shape."""
    return sum(figures[kind].by_shape[label].accept_length for kind in kinds) / len(kinds)


def _answer_hits(head: Head, unroller: Unroller, state: AnswerState, depth: int) -> Tensor:
    """`chain_hits` of one answer for rows 0 .. T-3."""
    tokens = state.answer.tokens
    return chain_hits(
        head.config,
        head.weights,
        unroller,
        functional.embedding(tokens[1:-1], head.embed)[None],
        state.features[None, :-2],
        tokens[None, 2:],
        head.vocab_rows,
        head.kept_ids,
        depth,
    )


def _depth_counts(hits: Tensor, num_prompt_tokens: int) -> Tensor:
    """Over all roots inside the answer: drafts reached and drafts accepted at each depth, [2, depth]."""
    depth, _, num_rows = hits.shape
    counts = torch.zeros(2, depth, dtype=torch.float64)
    alive = torch.ones(num_rows, dtype=torch.bool, device=hits.device)
    for level in range(depth):
        roots = torch.arange(num_prompt_tokens - 1, num_rows - level, device=hits.device)
        reached = alive[roots]
        right = hits[level, 0, roots + level]
        counts[0, level] = float(reached.sum())
        counts[1, level] = float((reached & right).sum())
        alive[roots] = reached & right
    return counts
