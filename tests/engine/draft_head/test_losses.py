"""The chunked loss against the plain formula."""

import pytest
import torch

from graftline.engine.draft_head.losses import DistillationLoss, LossOptions, soft_targets


@pytest.mark.parametrize(
    "options", [LossOptions(), LossOptions(hard_share=0.3), LossOptions(target_temperature=0.5, level_decay=0.5)]
)
def test_value_and_gradient_equal_the_plain_formula(options: LossOptions) -> None:
    torch.manual_seed(0)
    outputs = torch.randn(3, 12, 16, dtype=torch.float64).float().requires_grad_()
    hidden, rows = torch.randn(12, 16), torch.randn(40, 16)
    loss = DistillationLoss(options, chunk=4, compiled=False)
    total = loss.total(loss(outputs, hidden, rows))
    (slope,) = torch.autograd.grad(total, outputs)
    wanted, _ = soft_targets(hidden @ rows.T, options.target_temperature, options.hard_share)
    entropies = torch.stack([-(wanted * (level @ rows.T).log_softmax(-1)).sum(-1).mean() for level in outputs])
    weights = options.level_decay ** torch.arange(3)
    plain = (entropies * weights).sum() / weights.sum()
    (plain_slope,) = torch.autograd.grad(plain, outputs)
    torch.testing.assert_close(total, plain)
    torch.testing.assert_close(slope, plain_slope, atol=1e-6, rtol=1e-4)


def test_agreement_counts_rows_with_the_same_likeliest_token() -> None:
    hidden, rows = torch.eye(4), torch.eye(4)
    outputs = torch.stack([torch.eye(4), torch.eye(4)[[0, 1, 3, 2]]])
    scores = DistillationLoss(LossOptions(), chunk=2, compiled=False)(outputs, hidden, rows)
    assert scores.agreement.tolist() == [1.0, 0.5]


def test_soft_targets_are_a_distribution_with_the_hard_share_on_top() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    plain, best = soft_targets(logits, 1.0, 0.0)
    mixed, _ = soft_targets(logits, 1.0, 0.25)
    assert best.tolist() == [1]
    torch.testing.assert_close(plain, logits.softmax(-1))
    torch.testing.assert_close(mixed, 0.75 * plain + 0.25 * torch.tensor([[0.0, 1.0, 0.0]]))
