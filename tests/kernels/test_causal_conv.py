"""The causal convolution: values, windows, and bits that depend on the path alone."""

import pytest
import torch
from kernel_cases import normal, poisoned_allocations, threads
from state_cases import StateSegment, mixed_segments, random_tree, state_rows, strided_slots

from graftline.kernels.causal_conv import causal_conv, causal_conv_reference, move_windows
from graftline.kernels.state_rows import chain_rows

CHANNELS = 300  # more than one block


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_values_and_windows_match(width: int, dtype: torch.dtype) -> None:
    rows = state_rows(mixed_segments(width))
    x, weight = normal(rows.num_rows, CHANNELS + 9, seed=1)[:, 5:-4], normal(width, CHANNELS, seed=2)
    windows = strided_slots(8, width - 1, CHANNELS, dtype=dtype, seed=3)
    nodes = strided_slots(8, 8, width - 1, CHANNELS, dtype=dtype, seed=4)
    wanted, wanted_nodes = windows.clone(), nodes.clone()
    reference = causal_conv_reference(x, weight, wanted, rows, wanted_nodes)
    with poisoned_allocations():
        out = causal_conv(x, weight, windows, rows, nodes)
    torch.testing.assert_close(out, reference, rtol=1e-5, atol=1e-5)
    assert torch.equal(windows, wanted)
    assert torch.equal(nodes, wanted_nodes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_chunks_or_threads(dtype: torch.dtype) -> None:
    """Contract 1: chunks shorter than, as long as and longer than the window."""
    x, weight, before = normal(11, CHANNELS), normal(4, CHANNELS, seed=1), strided_slots(2, 3, CHANNELS, dtype=dtype)
    whole = before.clone()
    out = causal_conv(x, weight, whole, state_rows([StateSegment(1, 11)]), None)
    for count in (1, 2, 3, 4, 5):
        for num_threads in (1, 2):
            windows, parts = before.clone(), []
            with threads(num_threads):
                for first in range(0, 11, count):
                    part = x[first : first + count]
                    rows = state_rows([StateSegment(1, part.shape[0])])
                    parts.append(causal_conv(part, weight, windows, rows, None))
            assert torch.equal(torch.cat(parts), out)
            assert torch.equal(windows, whole)


def test_nodes_see_their_own_path() -> None:
    parents = random_tree(9, seed=2)
    x, weight, before = normal(9, CHANNELS), normal(4, CHANNELS, seed=1), strided_slots(3, 3, CHANNELS)
    windows, nodes = before.clone(), strided_slots(3, 8, 3, CHANNELS)
    out = causal_conv(x, weight, windows, state_rows([StateSegment(2, 9, parents)]), nodes)
    for node in range(9):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        alone = before.clone()
        one = causal_conv(x[path], weight, alone, state_rows([StateSegment(2, len(path))]), None)
        assert torch.equal(one[-1], out[node])
        assert torch.equal(alone[2], windows[2] if node == 0 else nodes[2, node - 1])


def test_windows_move_without_computing() -> None:
    x, before = normal(7, CHANNELS), strided_slots(3, 3, CHANNELS, dtype=torch.bfloat16)
    windows, moved = before.clone(), before.clone()
    rows = chain_rows([2, 0], [5, 2])
    causal_conv(x, normal(4, CHANNELS, seed=1), windows, rows, None)
    move_windows(x, moved, rows)
    assert torch.equal(moved, windows)
    assert not torch.equal(moved[2], before[2])


def test_misfits_are_named() -> None:
    rows, windows = state_rows([StateSegment(0, 3, [-1, 0, 0])]), strided_slots(1, 3, 8)
    with pytest.raises(ValueError, match="weight"):
        causal_conv(normal(3, 8), normal(9, 8), strided_slots(1, 8, 8), rows, None)
    with pytest.raises(ValueError, match="windows"):
        causal_conv(normal(3, 8), normal(3, 8), windows, rows, None)
    with pytest.raises(ValueError, match="node_windows"):
        causal_conv(normal(3, 8), normal(4, 8), windows, rows, strided_slots(1, 1, 3, 8))
