"""The gated delta rule: values, states of chunks and trees, bits that depend on the path alone."""

import pytest
import torch
from kernel_cases import normal, poisoned_allocations, threads
from state_cases import StateSegment, mixed_segments, random_tree, state_rows, strided_slots
from torch import Tensor

from graftline.kernels.gated_delta import (
    delta_inputs,
    delta_inputs_reference,
    gated_delta,
    gated_delta_reference,
    gated_rms_norm,
    gated_rms_norm_reference,
)

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 8, 24


class Inputs:
    """Random rows of the recurrence."""

    def __init__(self, num_rows: int, seed: int = 0) -> None:
        mixed = normal(num_rows, 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM, seed=seed)
        rate, bias = normal(VALUE_HEADS, seed=seed + 2).exp(), normal(VALUE_HEADS, seed=seed + 3)
        gates = normal(num_rows, 2 * VALUE_HEADS, seed=seed + 1)
        self.q, self.k, self.decay, self.beta = delta_inputs(mixed, gates, rate, bias, KEY_HEADS, KEY_DIM)
        self.v = mixed[:, 2 * KEY_HEADS * KEY_DIM :]

    def rows(self, wanted: slice) -> tuple[Tensor, ...]:
        return tuple(part[wanted] for part in (self.q, self.k, self.v, self.decay, self.beta))


def node_room(num_slots: int, nodes: int) -> Tensor:
    return strided_slots(num_slots, nodes, VALUE_HEADS, KEY_DIM, VALUE_DIM, seed=9)


@pytest.mark.parametrize("key_dim", [4, 16, 20])
def test_inputs_match(key_dim: int) -> None:
    wide = normal(9, 2 * KEY_HEADS * key_dim + 50, seed=1)
    mixed, gates = wide[:, : 2 * KEY_HEADS * key_dim + 10], 30 * normal(9, 2 * VALUE_HEADS, seed=2)
    rate, bias = normal(VALUE_HEADS, seed=3).exp(), normal(VALUE_HEADS, seed=4)
    with poisoned_allocations():
        found = delta_inputs(mixed, gates, rate, bias, KEY_HEADS, key_dim)
    for ours, reference in zip(
        found, delta_inputs_reference(mixed, gates, rate, bias, KEY_HEADS, key_dim), strict=True
    ):
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", [0, 1])
def test_recurrence_matches(seed: int) -> None:
    rows = state_rows(mixed_segments(seed))
    inputs = Inputs(rows.num_rows, seed)
    states, nodes = strided_slots(8, VALUE_HEADS, KEY_DIM, VALUE_DIM, seed=seed), node_room(8, 8)
    wanted, wanted_nodes = states.clone(), nodes.clone()
    reference = gated_delta_reference(*inputs.rows(slice(None)), wanted, rows, wanted_nodes)
    with poisoned_allocations():
        out = gated_delta(*inputs.rows(slice(None)), states, rows, nodes)
    torch.testing.assert_close(out, reference)
    torch.testing.assert_close(states, wanted)
    torch.testing.assert_close(nodes, wanted_nodes)


def test_states_of_nodes_are_those_of_their_paths() -> None:
    """A node's state and output are, bit for bit, those of its path decoded token by token."""
    parents = random_tree(9, seed=5)
    rows, inputs = state_rows([StateSegment(3, 9, parents)]), Inputs(9)
    before = strided_slots(4, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    kept, dropped, nodes = before.clone(), before.clone(), node_room(4, 8)
    out = gated_delta(*inputs.rows(slice(None)), kept, rows, nodes)
    again = gated_delta(*inputs.rows(slice(None)), dropped, rows, None)
    assert torch.equal(out, again)
    assert torch.equal(kept, dropped)
    for node in range(9):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        alone = before.clone()
        for step in path:
            one = gated_delta(*inputs.rows(slice(step, step + 1)), alone, state_rows([StateSegment(3, 1)]), None)
        assert torch.equal(one[0], out[node])
        assert torch.equal(alone[3], kept[3] if node == 0 else nodes[3, node - 1])


def test_bits_do_not_depend_on_chunks_or_threads() -> None:
    """Contract 1."""
    inputs, before = Inputs(13), strided_slots(2, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    whole = before.clone()
    out = gated_delta(*inputs.rows(slice(None)), whole, state_rows([StateSegment(1, 13)]), None)
    assert torch.equal(whole[0], before[0]), "another slot's state moved"
    for count in (1, 2, 3, 4, 5):
        for num_threads in (1, 2):
            states, parts = before.clone(), []
            with threads(num_threads):
                for first in range(0, 13, count):
                    rows = state_rows([StateSegment(1, min(count, 13 - first))])
                    parts.append(gated_delta(*inputs.rows(slice(first, first + count)), states, rows, None))
            assert torch.equal(torch.cat(parts), out)
            assert torch.equal(states, whole)


def test_without_queries_only_states_move() -> None:
    inputs, states = Inputs(5), strided_slots(2, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    silent, rows = states.clone(), state_rows([StateSegment(0, 5)])
    assert gated_delta(None, *inputs.rows(slice(None))[1:], silent, rows, None) is None
    gated_delta(*inputs.rows(slice(None)), states, rows, None)
    assert torch.equal(silent, states)


def test_gated_norm_matches_and_keeps_rows_apart() -> None:
    x, gate, weight = normal(17, 3, 12, seed=1), normal(17, 50, seed=2)[:, 7:43], normal(12, seed=3)
    with poisoned_allocations():
        out = gated_rms_norm(x, gate, weight, 1e-6)
    torch.testing.assert_close(out, gated_rms_norm_reference(x, gate, weight, 1e-6))
    for row in range(17):
        assert torch.equal(gated_rms_norm(x[row : row + 1], gate[row : row + 1], weight, 1e-6)[0], out[row])


def test_misfits_are_named() -> None:
    inputs, rows = Inputs(3), state_rows([StateSegment(0, 3, [-1, 0, 1])])
    states = strided_slots(2, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    with pytest.raises(ValueError, match="node_states"):
        gated_delta(*inputs.rows(slice(None)), states, rows, node_room(2, 1))
    with pytest.raises(ValueError, match="states"):
        gated_delta(*inputs.rows(slice(None)), states.double(), rows, None)
    with pytest.raises(ValueError, match="v "):
        gated_delta(inputs.q, inputs.k, inputs.v[:, 1:], inputs.decay, inputs.beta, states, rows, None)
    with pytest.raises(ValueError, match="gate"):
        gated_rms_norm(normal(2, 3, 4), normal(2, 11), normal(4), 1e-6)
    with pytest.raises(ValueError, match="more than one root"):
        state_rows([StateSegment(0, 2, [-1, -1])])
    with pytest.raises(ValueError, match="twice"):
        state_rows([StateSegment(0, 2), StateSegment(0, 1)])
