"""Recurrent state pools: layout, views, alignment, and what a transfer is told of them."""

import pytest
import torch

from graftline.engine.models.hybrid_config import LinearShape
from graftline.engine.state_pool import StateGeometry, StatePool
from graftline.kv_transfer.copy_plan import CopyPlanner
from graftline.kv_transfer.layout import BufferKey, BufferKind, StageLayout, WorkerLayout
from graftline.worker.transfer import STATE_KINDS, state_buffers

SHAPE = LinearShape(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=16, conv_width=4)
ODD = LinearShape(num_key_heads=1, num_value_heads=3, key_dim=3, value_dim=5, conv_width=2)


def geometry(*layers: int, shape: LinearShape = SHAPE, dtype: torch.dtype = torch.bfloat16) -> StateGeometry:
    return StateGeometry(layers, shape, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [SHAPE, ODD], ids=["even", "odd"])
def test_views_are_disjoint_and_cover_their_slots(shape: LinearShape, dtype: torch.dtype) -> None:
    pool = StatePool(geometry(1, 2, 6, shape=shape, dtype=dtype), num_slots=3)
    assert pool.num_bytes == 4 * pool.geometry.slot_bytes == pool.data.nbytes
    pool.data.fill_(0xFF)
    for layer in (1, 2, 6):
        assert pool.windows(layer).shape == (4, shape.conv_width - 1, shape.conv_channels)
        assert pool.states(layer).shape == (4, shape.num_value_heads, shape.key_dim, shape.value_dim)
        assert (pool.windows(layer).dtype, pool.states(layer).dtype) == (dtype, torch.float32)
        pool.windows(layer)[:] = layer
        pool.states(layer)[:] = -layer
    for layer in (1, 2, 6):
        assert bool((pool.windows(layer) == layer).all())
        assert bool((pool.states(layer) == -layer).all())
    pad = pool.geometry.window_bytes - shape.window_elements * dtype.itemsize
    pad += pool.geometry.state_bytes - shape.state_elements * 4
    written = 3 * (pool.geometry.window_bytes + pool.geometry.state_bytes - pad)
    untouched = int((pool.data == 0xFF).all(0).sum())
    assert pool.geometry.slot_bytes - written == untouched
    assert pad < 32


def test_clearing_leaves_other_slots_alone() -> None:
    pool = StatePool(geometry(0, 1), num_slots=3)
    pool.data.fill_(7)
    pool.clear([2, 0])
    assert [int(pool.data[slot].sum()) == 0 for slot in range(4)] == [True, False, True, False]


def layout(stage: int, session: str, pool: StatePool) -> StageLayout:
    return StageLayout(stage, session, tuple(state_buffers(pool)))


def test_one_slot_is_one_copy_between_equal_stages() -> None:
    ours, theirs = StatePool(geometry(0, 1, 2), 4), StatePool(geometry(0, 1, 2), 9)
    planner = CopyPlanner(layout(0, "here", ours), WorkerLayout((layout(0, "there", theirs),)))
    (copy,) = planner.plans(STATE_KINDS)["there"].copies([(2, 7, 1)])
    assert copy.num_bytes == ours.geometry.slot_bytes
    assert copy.src_address == ours.data[2].data_ptr()
    assert copy.dst_address == theirs.data[7].data_ptr()


def test_layers_find_their_stage_by_key() -> None:
    """CASES P07: three layers of one stage, two stages there that split them unevenly."""
    ours = StatePool(geometry(0, 1, 2), 4)
    theirs = [StatePool(geometry(0), 4), StatePool(geometry(1, 2), 4)]
    peer = WorkerLayout(tuple(layout(stage, f"s{stage}", pool) for stage, pool in enumerate(theirs)))
    planner = CopyPlanner(layout(0, "here", ours), peer)
    copies = {name: plan.copies([(1, 3, 1)]) for name, plan in planner.plans(STATE_KINDS).items()}
    layer_bytes = ours.geometry.window_bytes + ours.geometry.state_bytes
    assert {name: [copy.num_bytes for copy in found] for name, found in copies.items()} == {
        "s0": [layer_bytes],
        "s1": [2 * layer_bytes],
    }
    assert copies["s1"][0].src_address == ours.data[1].data_ptr() + layer_bytes


def test_the_padding_slot_is_not_offered() -> None:
    pool = StatePool(geometry(3), 4)
    buffers = {buffer.key: buffer for buffer in state_buffers(pool)}
    assert set(buffers) == {BufferKey(BufferKind.CONV, 3), BufferKey(BufferKind.SSM, 3)}
    assert all(buffer.num_units == 4 for buffer in buffers.values())
    assert buffers[BufferKey(BufferKind.SSM, 3)].dtype == "float32"
