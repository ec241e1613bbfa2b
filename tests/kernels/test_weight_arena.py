"""The arena of packed weights: tensors side by side, none over another, alive as long as they are used."""

import gc

import torch
from kernel_cases import normal

from graftline.kernels import weight_arena
from graftline.kernels.linear import linear, pack_linear
from graftline.kernels.weight_arena import WeightArena


def test_tensors_do_not_overlap_and_are_aligned(monkeypatch) -> None:
    monkeypatch.setattr(weight_arena, "_CHUNK_BYTES", 4096)
    arena = WeightArena()
    shapes = [((3, 5), torch.float32), ((1,), torch.int8), ((40, 30), torch.bfloat16), ((2000,), torch.float32)] * 3
    tensors = [arena.empty(shape, dtype) for shape, dtype in shapes]
    for number, (tensor, (shape, dtype)) in enumerate(zip(tensors, shapes, strict=True)):
        assert tensor.shape == shape
        assert tensor.dtype == dtype
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(number)
    assert all((tensor == number).all() for number, tensor in enumerate(tensors))


def test_a_chunk_starts_at_a_huge_page() -> None:
    first = WeightArena().empty((16,), torch.float32)
    assert first.data_ptr() % (2 << 20) == 0


def test_packed_weights_outlive_their_arena() -> None:
    weight, x = normal(40, 33, seed=1), normal(5, 33, seed=2)
    arena = WeightArena()
    packed = [pack_linear(weight, storage=dtype, arena=arena) for dtype in (torch.float32, torch.bfloat16, torch.int8)]
    del arena
    gc.collect()
    for w, dtype in zip(packed, (torch.float32, torch.bfloat16, torch.int8), strict=True):
        assert torch.equal(linear(x, w), linear(x, pack_linear(weight, storage=dtype)))
