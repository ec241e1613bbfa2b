"""Triton kernels of recurrent state against the references: on the GPU where there is one, else interpreted."""

from dataclasses import fields, replace

import pytest
import torch
from kernel_cases import normal, poisoned_allocations
from state_cases import StateSegment, mixed_segments, state_rows, strided_slots
from torch import Tensor

from graftline.engine.models.hybrid_config import LinearShape
from graftline.engine.state_pool import StateGeometry, StatePool
from graftline.engine.verify_state import _packed
from graftline.kernels.causal_conv import causal_conv_reference
from graftline.kernels.gated_delta import delta_inputs_reference, gated_delta_reference, gated_rms_norm_reference
from graftline.kernels.gating import sigmoid_mul_reference
from graftline.kernels.state_commit import replay_nodes_reference
from graftline.kernels.state_rows import StateRows

pytest.importorskip("triton")

from graftline.kernels import causal_conv_triton, gated_delta_triton, gating_triton, state_commit_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = LinearShape(num_key_heads=1, num_value_heads=2, key_dim=12, value_dim=20, conv_width=4)
TYPES = [torch.float32, torch.bfloat16]
BRANCHY = [-1, 0, 0, 1, 3, 2]


def there(x: Tensor) -> Tensor:
    return x.to(DEVICE)


def rows_there(rows: StateRows) -> StateRows:
    return replace(rows, **{f.name: there(getattr(rows, f.name)) for f in fields(rows) if f.name != "segments"})


def close(actual: Tensor, expected: Tensor, loose: bool = False) -> None:
    torch.testing.assert_close(actual.cpu(), expected, rtol=2e-2 if loose else 1e-4, atol=2e-2 if loose else 2e-5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("keep", [False, True])
def test_convolution_and_windows(dtype: torch.dtype, keep: bool) -> None:
    rows = state_rows(mixed_segments(1)[1:4])
    x, weight = normal(rows.num_rows, 47, seed=1, dtype=dtype)[:, 5:42], normal(4, 37, seed=2, dtype=dtype)
    windows = strided_slots(8, 3, 37, dtype=dtype, seed=3)
    nodes = strided_slots(8, 8, 3, 37, dtype=dtype, seed=4) if keep else None
    moved, kept = there(windows.clone()), None if nodes is None else there(nodes.clone())
    with poisoned_allocations():
        out = causal_conv_triton.causal_conv(there(x), there(weight), moved, rows_there(rows), kept)
    close(out, causal_conv_reference(x, weight, windows, rows, nodes), dtype == torch.bfloat16)
    assert torch.equal(moved.cpu(), windows)
    if kept is not None and nodes is not None:
        assert torch.equal(kept.cpu(), nodes)


@pytest.mark.parametrize("dtype", TYPES)
def test_inputs_and_outputs_of_the_recurrence(dtype: torch.dtype) -> None:
    mixed, gates = normal(3, 2 * 2 * 12 + 9, seed=1, dtype=dtype), 20 * normal(3, 8, seed=2, dtype=dtype)
    rate, bias = normal(4, seed=3).exp(), normal(4, seed=4)
    with poisoned_allocations():
        found = gated_delta_triton.delta_inputs(there(mixed), there(gates), there(rate), there(bias), 2, 12)
    for ours, wanted in zip(found, delta_inputs_reference(mixed, gates, rate, bias, 2, 12), strict=True):
        close(ours, wanted)
    x, gate, weight = (
        normal(3, 2, 20, dtype=dtype),
        normal(3, 44, seed=1, dtype=dtype)[:, 2:42],
        normal(20, dtype=dtype),
    )
    with poisoned_allocations():
        out = gated_delta_triton.gated_rms_norm(there(x), there(gate), there(weight), 1e-6)
    close(out, gated_rms_norm_reference(x, gate, weight, 1e-6), dtype == torch.bfloat16)


class Recurrence:
    """Random inputs of some rows."""

    def __init__(self, rows: StateRows) -> None:
        count, shape = rows.num_rows, SHAPE
        self.rows = rows
        mixed = normal(count, shape.conv_channels, seed=5)
        gates = normal(count, 2 * shape.num_value_heads, seed=6)
        ones, zeros = torch.ones(shape.num_value_heads), torch.zeros(shape.num_value_heads)
        q, k, decay, beta = delta_inputs_reference(mixed, gates, ones, zeros, shape.num_key_heads, shape.key_dim)
        self.inputs = (q, k, mixed[:, 2 * shape.key_size :], decay, beta)

    def there(self) -> list[Tensor]:
        return [there(part) for part in self.inputs]


def state_slots(*lead: int) -> Tensor:
    shape = SHAPE
    return strided_slots(*lead, shape.num_value_heads, shape.key_dim, shape.value_dim, seed=7)


@pytest.mark.parametrize("keep", [False, True], ids=["replay", "snapshot"])
def test_recurrence_over_trees_and_chunks(keep: bool) -> None:
    case = Recurrence(state_rows([StateSegment(2, 6, BRANCHY), StateSegment(0, 3), StateSegment(1, 2, [-1, 0])]))
    states, nodes = state_slots(3), state_slots(3, 5) if keep else None
    moved, kept = there(states.clone()), None if nodes is None else there(nodes.clone())
    with poisoned_allocations():
        out = gated_delta_triton.gated_delta(*case.there(), moved, rows_there(case.rows), kept)
    wanted = gated_delta_reference(*case.inputs, states, case.rows, nodes)
    assert out is not None
    assert wanted is not None
    close(out, wanted)
    close(moved, states)
    if kept is not None and nodes is not None:
        close(kept, nodes)


@pytest.mark.parametrize("one_gate", [False, True])
def test_sigmoid_gates(one_gate: bool) -> None:
    x, gate = normal(3, 50, seed=1)[:, 3:40], normal(3, 1 if one_gate else 37, seed=2)
    close(gating_triton.sigmoid_mul(there(x), there(gate)), sigmoid_mul_reference(x, gate))


@pytest.mark.parametrize("dtype", TYPES)
def test_commits(dtype: torch.dtype) -> None:
    """What is stored of nodes, a replay of two paths in two layers, and copies of nodes."""
    geometry = StateGeometry((0, 3), SHAPE, dtype)
    layout, pool = _packed(geometry), StatePool(geometry, 3)
    inputs = torch.zeros(4, 5, 2 * layout.node_layer_bytes, dtype=torch.uint8)
    stored = there(inputs.clone())
    places = (torch.tensor([1, 2, 4, 5]), torch.tensor([0, 0, 2, 2]), torch.tensor([0, 4, 1, 2]))
    for layer in range(2):
        case = Recurrence(state_rows([StateSegment(0, 6)]))
        x = normal(6, SHAPE.conv_channels + 3, seed=layer, dtype=dtype)[:, 1:-2]
        parts = (x, *case.inputs[1:])
        for view, part in zip(layout.inputs(inputs, layer), parts, strict=True):
            view[places[1], places[2]] = part[places[0]].to(view.dtype)
        on_device = tuple(map(there, places)), tuple(map(there, parts))
        state_commit_triton.store_inputs(stored, layout, layer, *on_device)
        pool.windows(geometry.layers[layer])[:] = normal(*pool.windows(0).shape, seed=20 + layer)
        pool.states(geometry.layers[layer])[:] = normal(*pool.states(0).shape, seed=30 + layer)
    assert torch.equal(stored.cpu(), inputs)
    replayed, slots, paths = there(pool.data.clone()), [2, 0], [[1, 2], [0, 4]]
    state_commit_triton.replay_nodes(replayed, stored, layout, slots, paths)
    wanted = pool.data.clone()
    replay_nodes_reference(wanted, inputs, layout, slots, paths)
    for layer in range(2):
        assert torch.equal(layout.windows(replayed, layer).cpu(), layout.windows(wanted, layer))
        close(layout.states(replayed, layer), layout.states(wanted, layer))
    snapshots = torch.randint(0, 255, (4, 2, geometry.slot_bytes), dtype=torch.uint8)
    copied = there(pool.data.clone())
    state_commit_triton.copy_nodes(copied, there(snapshots), [1, 3], [1, 0])
    wanted = pool.data.clone()
    wanted[1], wanted[3] = snapshots[1, 1], snapshots[3, 0]
    assert torch.equal(copied.cpu(), wanted)
