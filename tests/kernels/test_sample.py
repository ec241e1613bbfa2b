"""Draws: the filters' exact sets, the distribution, purity, and rows that cannot be drawn from."""

import math

import pytest
import torch
from kernel_cases import normal, threads

from graftline.kernels.sample import (
    SamplingRows,
    argmax,
    argmax_reference,
    build_sampling_rows,
    sample,
    sample_reference,
    token_logprobs,
    top_k,
    top_k_reference,
)


def params(
    rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 0
) -> SamplingRows:
    """One setting for all rows, seeds counting up."""
    return build_sampling_rows(
        [temperature] * rows, [top_k] * rows, [top_p] * rows, [min_p] * rows, list(range(seed, seed + rows))
    )


@pytest.mark.parametrize("vocabulary", [1, 2, 63, 64, 65, 1000, 5003])
@pytest.mark.parametrize(
    ("temperature", "k", "p", "m"),
    [
        (0.0, 0, 1.0, 0.0),
        (1.0, 0, 1.0, 0.0),
        (0.7, 1, 1.0, 0.0),
        (1.3, 20, 1.0, 0.0),
        (0.8, 0, 0.95, 0.0),
        (2.0, 0, 0.3, 0.0),
        (1.0, 0, 1.0, 0.2),
        (1.5, 100, 0.9, 0.05),
        (1.0, 3000, 0.999, 0.0),
        (1e-30, 0, 1.0, 0.0),
        (100.0, 0, 0.5, 0.0),
    ],
)
def test_draws_equal_the_reference(vocabulary: int, temperature: float, k: int, p: float, m: float) -> None:
    logits = 3 * normal(12, vocabulary, seed=vocabulary)
    logits[::3, : vocabulary // 2] = -torch.inf
    rows = params(12, temperature, k, p, m, seed=5)
    positions = torch.arange(100, 112, dtype=torch.int32)
    for num_threads in (1, 2):
        with threads(num_threads):
            assert torch.equal(sample(logits, rows, positions), sample_reference(logits, rows, positions))


def test_a_draw_depends_on_its_own_row_only() -> None:
    """CASES S09: the same seed gives the same token alone, in any batch and in any order; resumes rely on it."""
    logits = 2 * normal(9, 3000, seed=1)
    rows, positions = params(9, 0.9, 50, 0.95), torch.arange(9)
    together = sample(logits, rows, positions)
    order = torch.tensor([8, 0, 3, 3, 1])
    assert torch.equal(sample(logits[order], rows.gather(order), positions[order]), together[order])
    for row in range(9):
        one = torch.tensor([row])
        assert sample(logits[one], rows.gather(one), positions[one]).tolist() == [int(together[row])]


def test_seeds_and_positions_change_the_draw() -> None:
    """CASES S11: other seeds, other tokens."""
    logits = torch.zeros(200, 1000)
    by_seed = sample(logits, params(200), torch.zeros(200, dtype=torch.int32))
    same_seed = build_sampling_rows([1.0] * 200, [0] * 200, [1.0] * 200, [0.0] * 200, [3] * 200)
    by_position = sample(logits, same_seed, torch.arange(200))
    assert len(set(by_seed.tolist())) > 150
    assert len(set(by_position.tolist())) > 150
    assert len(set(sample(logits, same_seed, torch.zeros(200, dtype=torch.int32)).tolist())) == 1


@pytest.mark.parametrize(
    ("temperature", "k", "p", "m"),
    [(1.0, 0, 1.0, 0.0), (0.5, 0, 1.0, 0.0), (2.0, 5, 1.0, 0.0), (1.0, 0, 0.8, 0.0), (1.0, 6, 0.9, 0.1)],
)
def test_frequencies_match_the_filtered_distribution(temperature: float, k: int, p: float, m: float) -> None:
    """Vocabulary of 8, 10^5 draws; every frequency within 5.5 standard errors (false alarm below 1e-6 a test)."""
    draws = 100_000
    logits = torch.tensor([0.1, 2.0, -1.0, 0.7, 1.9, -3.0, 0.0, 1.0])
    weights = (logits.double() / temperature).exp()
    order = weights.argsort(descending=True)
    kept = order[: k or 8]
    if p < 1:
        share = weights[kept] / weights[kept].sum()
        kept = kept[: int((share.cumsum(0) - share < p).sum())]
    kept = kept[weights[kept] >= m * weights[kept].max()]
    expected = torch.zeros(8, dtype=torch.float64)
    expected[kept] = weights[kept] / weights[kept].sum()
    rows = build_sampling_rows([temperature] * draws, [k] * draws, [p] * draws, [m] * draws, [11] * draws)
    ids = sample(logits.expand(draws, 8).contiguous(), rows, torch.arange(draws))
    counts = torch.bincount(ids, minlength=8).double() / draws
    assert (counts[expected == 0] == 0).all()
    bound = 5.5 * (expected * (1 - expected) / draws).sqrt()
    assert ((counts - expected).abs() <= bound).all(), (counts, expected)


def test_rare_tokens_are_as_rare_as_they_should_be() -> None:
    """The noise resolves tails: 2000 ids of probability 1e-5 each must win 2 % of 10^5 draws."""
    draws, rare = 20_000, 2000
    logits = torch.full((1, rare + 1), math.log(1e-5))
    logits[0, 0] = math.log(1 - rare * 1e-5)
    rows = build_sampling_rows([1.0] * draws, [0] * draws, [1.0] * draws, [0.0] * draws, [3] * draws)
    ids = sample(logits.expand(draws, -1), rows, torch.arange(draws))
    share = float((ids > 0).double().mean())
    assert abs(share - rare * 1e-5) < 5.5 * math.sqrt(rare * 1e-5 / draws)


def test_ties_go_to_the_lowest_id() -> None:
    """CASES S36."""
    logits = torch.zeros(3, 200)
    logits[1, 130] = logits[1, 70] = 1.0
    logits[2] = -torch.inf
    logits[2, 199] = -5.0
    assert sample(logits, params(3, temperature=0.0), torch.arange(3)).tolist() == [0, 70, 199]
    assert argmax(logits).tolist() == argmax_reference(logits).tolist() == [0, 70, 199]
    assert sample(logits, params(3, top_k=1), torch.arange(3)).tolist() == [0, 70, 199]
    _, ids = top_k(logits[:2], 3)
    assert ids.tolist() == [[0, 1, 2], [70, 130, 0]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("k", "p"), [(0, 1.0), (5, 1.0), (0, 0.9)])
def test_a_bad_row_is_marked_and_the_others_drawn(temperature: float, k: int, p: float) -> None:
    """CASES I12: only the request with NaN logits fails."""
    logits = normal(5, 300, seed=1)
    clean = sample(logits, params(5, temperature, k, p), torch.arange(5))
    logits[1, 299] = torch.nan
    logits[2] = -torch.inf
    logits[3, 0] = torch.inf
    ids = sample(logits, params(5, temperature, k, p), torch.arange(5))
    assert ids[1:4].tolist() == [-1, -1, -1]
    assert torch.equal(ids[[0, 4]], clean[[0, 4]])
    assert sample_reference(logits, params(5, temperature, k, p), torch.arange(5)).tolist() == ids.tolist()


def test_mixed_greedy_and_sampled_rows() -> None:
    logits = normal(4, 100, seed=1)
    rows = build_sampling_rows([0.0, 1.0, 0.0, 2.0], [0] * 4, [1.0] * 4, [0.0] * 4, [1, 2, 3, 2**64 - 1])
    assert not rows.is_greedy
    ids = sample(logits, rows, torch.arange(4))
    assert ids[[0, 2]].tolist() == logits.argmax(-1)[[0, 2]].tolist()
    assert torch.equal(ids, sample_reference(logits, rows, torch.arange(4)))


@pytest.mark.parametrize("vocabulary", [1, 9, 64, 1000, 32768])
@pytest.mark.parametrize("k", [1, 4, 9])
def test_top_k_matches(vocabulary: int, k: int) -> None:
    logits = normal(5, max(vocabulary, k) + 4, seed=2)[:, :-4]
    logits[1] = (logits[1] * 2).round() / 2  # ties
    values, ids = top_k(logits, k)
    expected_values, expected_ids = top_k_reference(logits, k)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(values, expected_values, rtol=1e-5, atol=1e-5)


def test_logprobs_match_log_softmax() -> None:
    """CASES S07."""
    logits = 4 * normal(6, 5000, seed=3)
    ids = torch.tensor([0, 1, 17, 4999, 64, 63])
    expected = logits.double().log_softmax(-1)
    for num_top in (0, 1, 5):
        chosen, values, top_ids = token_logprobs(logits, ids, num_top)
        torch.testing.assert_close(chosen.double(), expected.gather(1, ids[:, None])[:, 0], rtol=1e-5, atol=1e-5)
        best = expected.topk(num_top, dim=-1) if num_top else None
        assert values.shape == top_ids.shape == (6, num_top)
        if best is not None:
            torch.testing.assert_close(values.double(), best.values, rtol=1e-5, atol=1e-5)
            assert torch.equal(top_ids, best.indices)


def test_misfits_are_named() -> None:
    with pytest.raises(ValueError, match="2 positions"):
        sample(normal(3, 8), params(3), torch.arange(2))
    with pytest.raises(ValueError, match="k: 9"):
        top_k(normal(3, 8), 9)
    with pytest.raises(ValueError, match="k: 0"):
        top_k(normal(3, 8), 0)
    with pytest.raises(ValueError, match="float64"):
        argmax(normal(3, 8).double())
