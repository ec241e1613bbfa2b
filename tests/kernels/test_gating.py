"""Sigmoid gates and expert routing."""

import pytest
import torch
from kernel_cases import normal, poisoned_allocations

from graftline.kernels.gating import route, route_reference, sigmoid_mul, sigmoid_mul_reference


@pytest.mark.parametrize("columns", [1, 7, 64])
@pytest.mark.parametrize("one_gate", [False, True])
def test_sigmoid_gates_match_and_keep_rows_apart(columns: int, one_gate: bool) -> None:
    x, gate = normal(9, columns + 5, seed=1)[:, 2 : 2 + columns], 5 * normal(9, 1 if one_gate else columns, seed=2)
    with poisoned_allocations():
        out = sigmoid_mul(x, gate)
    torch.testing.assert_close(out, sigmoid_mul_reference(x, gate))
    for row in range(9):
        assert torch.equal(sigmoid_mul(x[row : row + 1], gate[row : row + 1])[0], out[row])


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(("experts", "chosen"), [(1, 1), (4, 2), (7, 7), (64, 10)])
def test_routing_matches(experts: int, chosen: int, normalise: bool) -> None:
    logits = 3 * normal(20, experts, seed=experts)
    with poisoned_allocations():
        weights, ids = route(logits, chosen, normalise)
    wanted, wanted_ids = route_reference(logits, chosen, normalise)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted)


def test_routing_ties_go_to_the_lower_id() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0]])
    for choose in (route, route_reference):
        assert choose(logits, 3, True)[1].tolist() == [[1, 2, 0]]


def test_misfits_are_named() -> None:
    with pytest.raises(ValueError, match="num_chosen"):
        route(normal(2, 4), 5, True)
    with pytest.raises(ValueError, match="gate"):
        sigmoid_mul(normal(2, 4), normal(2, 3))
