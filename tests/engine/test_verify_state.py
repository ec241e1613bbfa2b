"""Verify state: both kinds commit the bits that plain decoding leaves, by slot, whatever shares the step."""

import pytest
import torch
from kernel_cases import normal
from state_cases import StateSegment, random_tree, state_rows

from graftline.engine.models.hybrid_config import LinearShape
from graftline.engine.state_pool import StateGeometry, StatePool
from graftline.engine.verify_mode import VerifyMode
from graftline.engine.verify_state import (
    AcceptedPath,
    StepStates,
    VerifyState,
    build_verify_state,
    node_bytes,
    verify_state_bytes,
)
from graftline.kernels.causal_conv import causal_conv
from graftline.kernels.gated_delta import delta_inputs, gated_delta

SHAPE = LinearShape(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=16, conv_width=4)
LAYERS, NUM_SLOTS, NUM_NODES = (1, 4), 4, 6
modes = pytest.mark.parametrize("mode", VerifyMode, ids=lambda mode: mode.value)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def filled_pool(dtype: torch.dtype) -> StatePool:
    pool = StatePool(StateGeometry(LAYERS, SHAPE, dtype), NUM_SLOTS)
    for layer in LAYERS:
        pool.windows(layer)[:] = normal(*pool.windows(layer).shape, seed=layer)
        pool.states(layer)[:] = normal(*pool.states(layer).shape, seed=layer + 9)
    return pool


class Rows:
    """What a step's rows bring to every layer."""

    def __init__(self, num_rows: int, seed: int = 0) -> None:
        self.x = {layer: normal(num_rows, SHAPE.conv_channels, seed=seed + layer) for layer in LAYERS}
        self.gates = {layer: normal(num_rows, 2 * SHAPE.num_value_heads, seed=seed + layer + 50) for layer in LAYERS}

    def run(self, pool: StatePool, verify: VerifyState | None, segments: list[StateSegment], rows: slice) -> None:
        """What a model's layers do to the states."""
        states = StepStates(pool, verify, state_rows(segments))
        rate, bias = torch.ones(SHAPE.num_value_heads), torch.zeros(SHAPE.num_value_heads)
        for layer in LAYERS:
            x, gates = self.x[layer][rows], self.gates[layer][rows]
            weight = normal(SHAPE.conv_width, SHAPE.conv_channels, seed=3)
            mixed = causal_conv(x, weight, states.windows(layer), states.rows, states.node_windows(layer))
            q, k, decay, beta = delta_inputs(mixed, gates, rate, bias, SHAPE.num_key_heads, SHAPE.key_dim)
            v = mixed[:, 2 * SHAPE.key_size :]
            states.keep_inputs(layer, x, k, v, decay, beta)
            gated_delta(q, k, v, decay, beta, states.states(layer), states.rows, states.node_states(layer))


def path_to(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


@dtypes
@modes
@pytest.mark.parametrize("node", range(NUM_NODES))
def test_a_commit_is_what_decoding_the_path_leaves(mode: VerifyMode, dtype: torch.dtype, node: int) -> None:
    parents = random_tree(NUM_NODES, seed=4)
    rows, pool, plain = Rows(NUM_NODES), filled_pool(dtype), filled_pool(dtype)
    verify = build_verify_state(pool.geometry, mode, NUM_SLOTS, NUM_NODES)
    rows.run(pool, verify, [StateSegment(2, NUM_NODES, parents)], slice(None))
    path = path_to(parents, node)
    for step in path:
        rows.run(plain, None, [StateSegment(2, 1)], slice(step, step + 1))
    verify.commit(pool, [AcceptedPath(2, path)])
    assert torch.equal(pool.data, plain.data)


@modes
def test_nodes_are_found_by_slot_not_by_place_in_the_step(mode: VerifyMode) -> None:
    """Two trees and a chunk in one step; the slots commit in another order, after a step of somebody else."""
    rows, pool, plain = Rows(11), filled_pool(torch.float32), filled_pool(torch.float32)
    verify = build_verify_state(pool.geometry, mode, NUM_SLOTS, NUM_NODES)
    segments = [StateSegment(3, 4, [-1, 0, 1, 1]), StateSegment(0, 2), StateSegment(1, 5, [-1, 0, 0, 2, 3])]
    rows.run(pool, verify, segments, slice(None))
    rows.run(pool, verify, [StateSegment(2, 3, [-1, 0, 1])], slice(0, 3))
    verify.commit(pool, [AcceptedPath(1, [0, 2, 3, 4]), AcceptedPath(3, [0, 1, 3])])
    for slot, steps in ((3, (0, 1, 3)), (0, (4, 5)), (1, (6, 8, 9, 10)), (2, (0,))):
        for step in steps:
            rows.run(plain, None, [StateSegment(slot, 1)], slice(step, step + 1))
    assert torch.equal(pool.data, plain.data)


@modes
def test_bytes_are_allocated_as_counted(mode: VerifyMode) -> None:
    geometry = StateGeometry(LAYERS, SHAPE, torch.bfloat16)
    verify = build_verify_state(geometry, mode, NUM_SLOTS, NUM_NODES)
    assert verify.num_bytes == verify_state_bytes(geometry, mode, NUM_SLOTS, NUM_NODES)
    assert verify.num_bytes == (NUM_SLOTS + 1) * (NUM_NODES - 1) * node_bytes(geometry, mode)
    assert verify_state_bytes(geometry, mode, NUM_SLOTS, 1) == 0, "a lone root needs nothing"


def test_replay_keeps_a_fraction_of_the_published_models_state() -> None:
    """The goal is 1/20."""
    published = LinearShape(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, conv_width=4)
    geometry = StateGeometry(tuple(range(36)), published, torch.bfloat16)
    snapshot, replay = (node_bytes(geometry, mode) for mode in (VerifyMode.SNAPSHOT, VerifyMode.REPLAY))
    assert snapshot == 36 * (3 * 8192 * 2 + 32 * 128 * 128 * 4)
    assert replay == 36 * (8192 * 2 + (2048 + 4096 + 32 + 32) * 4)
    assert replay * 52 < snapshot


def test_a_tree_without_memory_for_it_is_our_fault() -> None:
    with pytest.raises(AssertionError, match="verify"):
        StepStates(filled_pool(torch.float32), None, state_rows([StateSegment(0, 2, [-1, 0])]))
