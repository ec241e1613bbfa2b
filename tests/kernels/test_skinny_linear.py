"""Matrix products of few rows: plain, split, with a bias, with the gated activation at the end."""

import pytest
import torch
from kernel_cases import normal, poisoned_allocations
from torch import Tensor

from graftline.kernels.linear import linear, linear_wide, pack_linear
from graftline.kernels.skinny_linear import (
    LinearBackend,
    skinny_gate_up,
    skinny_gate_up_reference,
    skinny_linear,
    skinny_linear_reference,
)

pytest.importorskip("triton")

from graftline.kernels import skinny_linear_triton
from graftline.kernels.skinny_linear_triton import Streaming, choose_streaming, is_ahead

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TYPES = [torch.float32, torch.bfloat16]


def there(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.to(DEVICE)


def close(actual: Tensor, expected: Tensor) -> None:
    loose = expected.dtype == torch.bfloat16
    torch.testing.assert_close(actual.cpu(), expected, rtol=2e-2 if loose else 1e-4, atol=2e-2 if loose else 2e-5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "streaming"),
    [
        (1, 1, 1, Streaming(16, 16, 4, 2, 1)),
        (3, 64, 40, Streaming(16, 32, 4, 3, 1)),
        (17, 70, 33, Streaming(32, 16, 4, 2, 2)),
        (5, 100, 16, Streaming(16, 32, 4, 2, 4)),
        (2, 48, 20, Streaming(16, 32, 4, 2, 16)),
    ],
)
def test_products(
    dtype: torch.dtype, has_bias: bool, rows: int, inputs: int, outputs: int, streaming: Streaming
) -> None:
    x, weight = normal(rows, inputs, seed=1, dtype=dtype), normal(outputs, inputs, seed=2, dtype=dtype) / 8
    bias = normal(outputs, seed=3, dtype=dtype) if has_bias else None
    with poisoned_allocations():
        out = skinny_linear_triton.skinny_linear(there(x), there(weight), there(bias), streaming)
    close(out, skinny_linear_reference(x, weight, bias))


def test_wide_results_are_not_rounded() -> None:
    x, weight = normal(3, 64, seed=1, dtype=torch.bfloat16), normal(40, 64, seed=2, dtype=torch.bfloat16)
    with poisoned_allocations():
        out = skinny_linear_triton.skinny_linear(
            there(x), there(weight), None, Streaming(16, 32, 4, 2, 1), out_dtype=torch.float32
        )
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.cpu(), x.float() @ weight.float().T, rtol=1e-4, atol=1e-4)


def test_linear_wide_is_linear_on_cpu() -> None:
    x, weight = normal(3, 10), pack_linear(normal(8, 10, seed=2), normal(8, seed=3))
    assert torch.equal(linear_wide(x, weight), linear(x, weight))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "inputs", "inter"), [(1, 1, 1), (3, 64, 40), (18, 70, 33)])
def test_gated_products(dtype: torch.dtype, rows: int, inputs: int, inter: int) -> None:
    x, weight = normal(rows, inputs, seed=1, dtype=dtype), normal(2 * inter, inputs, seed=2, dtype=dtype) / 8
    with poisoned_allocations():
        out = skinny_linear_triton.skinny_gate_up(there(x), there(weight), Streaming(16, 32, 4, 2, 1))
    close(out, skinny_gate_up_reference(x, weight))


def test_cpu_takes_torch() -> None:
    x, weight = normal(3, 10), normal(8, 10, seed=2)
    for backend in LinearBackend:
        close(skinny_linear(x, weight, weight[:, 0].contiguous(), backend), x @ weight.T + weight[:, 0])
        close(skinny_gate_up(x, weight, backend), skinny_gate_up_reference(x, weight))


@pytest.mark.parametrize("rows", [1, 16, 17, 64])
@pytest.mark.parametrize("outputs", [576, 4096, 28672, 128256])
def test_choices_fit_the_device(rows: int, outputs: int) -> None:
    for inputs in (576, 4096, 14336):
        for is_gated in (False, True):
            streaming = choose_streaming(rows, inputs, outputs, is_gated, 132)
            block_m = max(16, 1 << (rows - 1).bit_length())
            stage = (block_m + streaming.block_n * (1 + is_gated)) * streaming.block_k * 2
            assert stage * (streaming.num_stages - 1) <= 200 * 1024, "shared memory"
            assert streaming.num_splits == 1 or not is_gated
            assert inputs // streaming.num_splits >= min(inputs, 512)


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "is_gated", "streaming"),
    [
        (1, 4096, 6144, False, Streaming(64, 128, 4, 6, 1)),
        (16, 4096, 4096, False, Streaming(32, 128, 4, 8, 1)),
        (4, 14336, 4096, False, Streaming(32, 128, 4, 8, 1)),
        (4, 4096, 14336, True, Streaming(64, 128, 4, 6, 1)),
        (64, 4096, 14336, True, Streaming(64, 64, 4, 6, 1)),
        (64, 4096, 128256, False, Streaming(128, 64, 8, 5, 1)),
        (64, 14336, 4096, False, Streaming(64, 128, 4, 4, 2)),
        (64, 4096, 4096, False, None),
        (1, 576, 49152, False, None),
        (1, 576, 960, False, Streaming(16, 64, 4, 8, 1)),
        (16, 576, 1536, True, Streaming(32, 128, 4, 8, 1)),
        (65, 4096, 4096, False, None),
    ],
)
def test_choices_are_the_fastest_measured(
    rows: int, inputs: int, outputs: int, is_gated: bool, streaming: Streaming | None
) -> None:
    assert is_ahead(rows, inputs, outputs, is_gated) == (streaming is not None)
    if streaming is not None:
        assert choose_streaming(rows, inputs, outputs, is_gated, 132) == streaming


def test_misfits_are_named() -> None:
    x, weight = normal(3, 10), normal(8, 10)
    for call, message in (
        (lambda: skinny_linear(x[:, :9].contiguous(), weight), "3, 9"),
        (lambda: skinny_linear(x, weight.bfloat16()), "bfloat16"),
        (lambda: skinny_linear(x.T.contiguous().T, weight), "strides"),
        (lambda: skinny_linear(x, weight, normal(7)), "bias"),
        (lambda: skinny_gate_up(x, weight[:7]), "7 outputs"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
