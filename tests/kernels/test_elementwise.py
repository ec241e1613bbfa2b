"""Norms, rope, gated activation: values against the references, bits that depend on the row alone."""

import pytest
import torch
from kernel_cases import normal, poisoned_allocations, threads

from graftline.kernels.activation import silu_mul, silu_mul_reference
from graftline.kernels.norm import add_rms_norm, rms_norm, rms_norm_reference
from graftline.kernels.rope import rope_, rope_reference_

DIMS = [1, 7, 8, 64, 100, 577]


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("rows", [1, 3, 50])
def test_rms_norm_matches(dim: int, rows: int) -> None:
    x, weight = 3 * normal(rows, dim, seed=1), normal(dim, seed=2)
    with poisoned_allocations():
        out = rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(out, rms_norm_reference(x, weight, 1e-5))


def test_rms_norm_of_heads_reads_strided_rows() -> None:
    qkv, weight = normal(5, 4 * 24, seed=1), normal(24, seed=2)
    heads = qkv[:, 24:72].view(5, 2, 24)
    torch.testing.assert_close(rms_norm(heads, weight, 1e-6), rms_norm_reference(heads, weight, 1e-6))


@pytest.mark.parametrize("dim", DIMS)
def test_add_rms_norm_is_the_sum_and_its_norm(dim: int) -> None:
    x, residual, weight = normal(4, dim, seed=1), normal(4, dim, seed=2), normal(dim, seed=3)
    with poisoned_allocations():
        normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("dim", [64, 577])
def test_norm_bits_depend_on_the_row_alone(dim: int) -> None:
    """Contract 1."""
    x, weight = normal(300, dim, seed=1), normal(dim, seed=2)
    alone = torch.cat([rms_norm(x[row : row + 1], weight, 1e-5) for row in range(300)])
    for num_threads in (1, 2):
        with threads(num_threads):
            for rows in (3, 4, 8, 33, 300):
                assert torch.equal(rms_norm(x[:rows], weight, 1e-5), alone[:rows])
                added, _ = add_rms_norm(x[:rows], torch.zeros(rows, dim), weight, 1e-5)
                assert torch.equal(added, alone[:rows])


def test_norm_misfits_are_named() -> None:
    with pytest.raises(ValueError, match="weight"):
        rms_norm(normal(2, 8), normal(7), 1e-5)
    with pytest.raises(ValueError, match="residual"):
        add_rms_norm(normal(2, 8), normal(3, 8), normal(8), 1e-5)
    with pytest.raises(ValueError, match="bfloat16"):
        rms_norm(normal(2, 8).bfloat16(), normal(8).bfloat16(), 1e-5)


@pytest.mark.parametrize(("head_dim", "rotated"), [(16, 16), (64, 64), (80, 20), (64, 2)])
def test_rope_matches_and_leaves_the_rest_alone(head_dim: int, rotated: int) -> None:
    angles = normal(50, rotated // 2, seed=1)
    cos, sin = angles.cos(), angles.sin()
    positions = torch.tensor([0, 49, 7, 7, 30], dtype=torch.int32)
    qkv = normal(5, 6 * head_dim, seed=2)
    expected = qkv.clone()
    q, k = qkv[:, : 3 * head_dim].view(5, 3, head_dim), qkv[:, 3 * head_dim : 5 * head_dim].view(5, 2, head_dim)
    rope_reference_(expected[:, : 5 * head_dim].view(5, 5, head_dim), positions, cos, sin)
    rope_(q, k, positions, cos, sin)
    torch.testing.assert_close(qkv, expected)
    assert torch.equal(qkv[:, 5 * head_dim :], expected[:, 5 * head_dim :])


def test_rope_bits_depend_on_the_row_alone() -> None:
    angles = normal(700, 32, seed=1)
    positions = torch.arange(600, dtype=torch.int32)
    x = normal(600, 3, 64, seed=2)
    together, k = x.clone(), x.clone()
    with threads(2):
        rope_(together, k, positions, angles.cos(), angles.sin())
    for row in (0, 1, 299, 599):
        alone = x[row : row + 1].clone()
        rope_(alone, alone.clone(), positions[row : row + 1], angles.cos(), angles.sin())
        assert torch.equal(alone[0], together[row])


def test_rope_misfits_are_named() -> None:
    x, positions, cos = normal(2, 1, 16), torch.zeros(2, dtype=torch.int32), normal(4, 8)
    with pytest.raises(ValueError, match="positions"):
        rope_(x, x.clone(), positions[:1], cos, cos)
    with pytest.raises(ValueError, match="cos"):
        rope_(x, x.clone(), positions, normal(4, 9), normal(4, 9))
    with pytest.raises(ValueError, match="int32"):
        rope_(x, x.clone(), positions.long(), cos, cos)


@pytest.mark.parametrize("inter", [1, 8, 255, 256, 300, 1536])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_silu_mul_matches(inter: int, rows: int) -> None:
    gate_up = 4 * normal(rows, 2 * inter, seed=1)
    gate_up[0, 0], gate_up[-1, inter - 1] = 100.0, -100.0
    with poisoned_allocations():
        out = silu_mul(gate_up)
    torch.testing.assert_close(out, silu_mul_reference(gate_up), rtol=2e-6, atol=1e-6)


def test_silu_mul_bits_depend_on_the_row_alone() -> None:
    """Contract 1, odd widths included (vector tails must round like vector bodies)."""
    gate_up = 3 * normal(90, 2 * 777, seed=1)
    with threads(2):
        together = silu_mul(gate_up)
    for row in range(0, 90, 7):
        assert torch.equal(silu_mul(gate_up[row : row + 1])[0], together[row])
    shifted = torch.cat([gate_up[:, 1:777], gate_up[:, 778:]], dim=1)
    assert torch.equal(silu_mul(shifted), together[:, 1:])


def test_silu_mul_carries_nan() -> None:
    gate_up = torch.ones(1, 32)
    gate_up[0, 3] = torch.nan
    assert silu_mul(gate_up)[0].isnan().tolist() == [column == 3 for column in range(16)]
