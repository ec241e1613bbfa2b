"""Lossless sampling: what a verify emits is distributed as the target's own tokens, whatever was drafted."""

import math
from collections.abc import Callable
from random import Random

import pytest
import torch
from torch import Tensor

from graftline.engine.plan import SampledToken, SlotOpening
from graftline.engine.sampler import SampledRow, Sampler
from graftline.engine.verify import accepted_path

VOCAB = 8
DRAWS = 100_000
CPU = torch.device("cpu")


def opening(slot: int, **changes: object) -> SlotOpening:
    fields: dict[str, object] = {
        "slot": slot,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": slot,
        "logit_bias": {},
        "ending_ids": [],
        "min_ending_position": 0,
        "logprobs": -1,
    }
    return SlotOpening(**(fields | changes))  # type: ignore[arg-type]


def target_logits(context: int) -> Tensor:
    """A target whose logits depend on the last token alone; row `VOCAB` is the prompt's."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(VOCAB + 1, VOCAB, generator=generator)[context] * 1.5


def tolerance(num_draws: int, num_cells: int) -> float:
    """Hoeffding with a union bound: a frequency of any cell is off by more with a chance below 1e-9."""
    return math.sqrt(math.log(2 * num_cells / 1e-9) / (2 * num_draws))


# The root stands for the prompt's last token; drafts are likely ones and unlikely ones, twice the same on one path.
TOKENS, DEPTHS = [VOCAB, 3, 5, 5], [0, 1, 1, 2]
# Nodes of every verify among these, and their parents there.
VERIFIES = {"chain": ([0, 1, 3], [-1, 0, 1]), "tree": ([0, 1, 2, 3], [-1, 0, 0, 1])}


class Counts:
    """What one kind of verify emitted: first tokens, and pairs of first and second ones."""

    def __init__(self) -> None:
        self.first = torch.zeros(VOCAB)
        self.pairs = torch.zeros(VOCAB, VOCAB)

    def add(self, emitted: list[int]) -> None:
        self.first[emitted[0]] += 1
        if len(emitted) > 1:
            self.pairs[emitted[0], emitted[1]] += 1

    def check(self, drafted: set[int]) -> None:
        exact = target_logits(VOCAB).softmax(-1)
        assert (self.first / DRAWS - exact).abs().max() < tolerance(DRAWS, VOCAB)
        for token in range(VOCAB):
            if token not in drafted:
                assert self.pairs[token].sum() == 0, "a second token only behind a draft that held"
                continue
            assert self.pairs[token].sum() == self.first[token] > 0, "the draft holds exactly when it is sampled"
            following = target_logits(token).softmax(-1)
            bound = tolerance(int(self.first[token]), VOCAB)
            assert (self.pairs[token] / self.first[token] - following).abs().max() < bound


def test_verify_emits_the_targets_own_distribution() -> None:
    """CASES S12, S13: 1e5 verifies of a chain and a tree, a seed each; emitted tokens against exact chances."""
    rows = torch.stack([target_logits(token) for token in TOKENS])
    counts = {name: Counts() for name in VERIFIES}
    rounds = 1000
    for start in range(0, DRAWS, rounds):
        sampler, seeds = Sampler(CPU), range(start, start + rounds)
        for seed in seeds:
            sampler.open(opening(seed))
        wanted = [SampledRow(seed, 10 + depth) for seed in seeds for depth in DEPTHS]
        ids = [token.token_id for token in sampler.draw(rows.repeat(rounds, 1), wanted)]
        for first in range(0, len(ids), len(TOKENS)):
            for name, (nodes, parents) in VERIFIES.items():
                sampled = [ids[first + node] for node in nodes]
                path = accepted_path([TOKENS[node] for node in nodes], parents, sampled)
                counts[name].add([sampled[node] for node in path])
    counts["chain"].check({3})
    counts["tree"].check({3, 5})


def nucleus(probabilities: Tensor) -> Tensor:
    ordered = probabilities.sort(descending=True)
    return ordered.indices[: int((ordered.values.cumsum(0) < 0.7).sum()) + 1]


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"top_k": 3}, lambda p: p.argsort(descending=True)[:3]),
        (
            {"top_p": 0.7},
            lambda p: p.argsort(descending=True)[: int((p.sort(descending=True).values.cumsum(0) < 0.7).sum()) + 1],
        ),
        ({"min_p": 0.3}, lambda p: (p >= 0.3 * p.max()).nonzero().flatten()),
        ({"logit_bias": {2: 4.0, 5: -9.0}}, lambda p: torch.arange(VOCAB)),
        ({"temperature": 1.5}, lambda p: torch.arange(VOCAB)),
    ],
    ids=["top_k", "top_p", "min_p", "bias", "temperature"],
)
def test_every_parameter_is_honoured(changes: dict[str, object], kept: Callable[[Tensor], Tensor]) -> None:
    """CASES S12: temperature and limits apply on CPU as anywhere."""
    sampler, count = Sampler(CPU), 20_000
    logits = target_logits(1)
    for token, bias in dict(changes.get("logit_bias", {})).items():  # type: ignore[call-overload]
        logits[token] += bias
    exact = (logits / float(changes.get("temperature", 1.0))).softmax(-1)  # type: ignore[arg-type]
    allowed = kept(exact)
    limited = torch.zeros(VOCAB)
    limited[allowed] = exact[allowed]
    for seed in range(count):
        sampler.open(opening(seed, **changes))
    drawn = sampler.draw(target_logits(1).repeat(count, 1), [SampledRow(seed, 3) for seed in range(count)])
    counts = torch.bincount(torch.tensor([token.token_id for token in drawn]), minlength=VOCAB)
    assert (counts / count - limited / limited.sum()).abs().max() < tolerance(count, VOCAB)
    assert counts[limited == 0].sum() == 0


def test_a_row_knows_only_itself() -> None:
    """CASES S09: any order, any company: the same token for the same (logits, parameters, seed, position)."""
    draw, sampler = Random(3), Sampler(CPU)
    for slot in range(12):
        sampler.open(opening(slot, temperature=(0.0, 0.7, 2.0)[slot % 3], top_k=slot % 4, seed=slot * 977))
    rows = [SampledRow(draw.randrange(12), draw.randrange(50)) for _ in range(60)]
    logits = torch.randn(60, VOCAB)
    together = sampler.draw(logits.clone(), rows)
    order = draw.sample(range(60), 60)
    shuffled = sampler.draw(logits[order], [rows[index] for index in order])
    alone = [sampler.draw(logits[index : index + 1].clone(), [row])[0] for index, row in enumerate(rows)]
    assert together == alone
    assert shuffled == [together[index] for index in order]


def test_positions_and_seeds_both_count() -> None:
    """CASES S11: one request draws anew at every position, two requests draw apart."""
    sampler = Sampler(CPU)
    sampler.open(opening(0, seed=5))
    sampler.open(opening(1, seed=6))
    drawn = sampler.draw(torch.zeros(200, VOCAB), [SampledRow(slot, pos) for slot in (0, 1) for pos in range(100)])
    ids = [token.token_id for token in drawn]
    assert len(set(ids[:100])) == VOCAB
    assert sum(a == b for a, b in zip(ids[:100], ids[100:], strict=True)) < 40


def test_ends_are_held_back_until_their_position() -> None:
    """CASES S04: rows of one tree stand at different positions."""
    sampler = Sampler(CPU)
    sampler.open(opening(0, temperature=0.0, ending_ids=[2, 4], min_ending_position=12))
    logits = torch.tensor([[0.0, 1, 9, 2, 8, 0, 0, 0]]).repeat(3, 1)
    drawn = sampler.draw(logits, [SampledRow(0, position) for position in (10, 11, 12)])
    assert [token.token_id for token in drawn] == [3, 3, 2]


def test_logprobs_are_of_the_plain_distribution() -> None:
    """CASES S07: neither temperature, bias nor limits show in them; rows that want none get none."""
    sampler = Sampler(CPU)
    sampler.open(opening(0, logprobs=2, temperature=0.3, top_k=1, logit_bias={6: 50.0}))
    sampler.open(opening(1))
    sampler.open(opening(2, logprobs=0))
    sampler.open(opening(3, logprobs=20))
    logits = torch.stack([target_logits(row) for row in range(4)])
    expected = logits.log_softmax(-1)
    drawn = sampler.draw(logits.clone(), [SampledRow(slot, 1) for slot in range(4)])
    best = expected[0].topk(2)
    assert drawn[0].token_id == 6
    assert drawn[0].logprob == pytest.approx(float(expected[0, 6]), abs=1e-5)
    assert drawn[0].top is not None
    assert [token_id for token_id, _ in drawn[0].top] == best.indices.tolist()
    assert [value for _, value in drawn[0].top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert (drawn[1].logprob, drawn[1].top) == (None, None)
    assert drawn[2].top == []
    assert drawn[3].top is not None
    assert len(drawn[3].top) == VOCAB, "no more alternatives than there are tokens"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_finite_logit_spoils_no_other(temperature: float) -> None:
    """CASES I12."""
    sampler = Sampler(CPU)
    for slot in range(4):
        sampler.open(opening(slot, temperature=temperature, logprobs=1))
    logits = torch.stack([target_logits(row) for row in range(4)])
    good = sampler.draw(logits.clone(), [SampledRow(slot, 1) for slot in range(4)])
    logits[1, 3] = torch.nan
    logits[2] = -torch.inf
    drawn = sampler.draw(logits.clone(), [SampledRow(slot, 1) for slot in range(4)])
    assert [drawn[row] for row in (0, 3)] == [good[row] for row in (0, 3)]
    assert [drawn[row].token_id for row in (1, 2)] == [-1, -1]
    assert isinstance(drawn[0], SampledToken)
