"""Linear: values against the reference, and bits that depend on nothing but the row."""

import pytest
import torch
from kernel_cases import normal, poisoned_allocations, threads

from graftline.kernels.linear import linear, linear_reference, pack_linear, unpack_rows

TYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 1), (16, 8), (17, 33), (40, 576), (200, 301), (64, 2500)]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_match_the_float64_product(dtype: torch.dtype, shape: tuple[int, int], with_bias: bool) -> None:
    weight = normal(*shape, seed=1, dtype=dtype)
    bias = normal(shape[0], seed=2) if with_bias else None
    x = normal(13, shape[1], seed=3)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    packed = pack_linear(weight, bias)
    with poisoned_allocations():
        out = linear(x, packed)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5 * shape[1] ** 0.5)
    torch.testing.assert_close(linear_reference(x, packed).double(), expected, rtol=1e-5, atol=1e-5 * shape[1] ** 0.5)


@pytest.mark.parametrize("dtype", [*TYPES, torch.int8])
@pytest.mark.parametrize("shape", [(40, 576), (200, 301), (72, 2501)])
def test_a_row_has_the_same_bits_in_every_company(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Contract 1: alone, in 1 to 20 rows, 33, 97 or 500 of them, anywhere among them, on one or two threads."""
    packed = pack_linear(normal(*shape, seed=1), normal(shape[0], seed=2), storage=dtype)
    x = normal(500, shape[1], seed=3)
    alone = torch.cat([linear(x[row : row + 1], packed) for row in range(500)])
    for num_threads in (1, 2):
        with threads(num_threads):
            for rows in (*range(1, 21), 33, 97, 500):
                for first in {0, 1, (500 - rows) // 2, 500 - rows}:
                    chunk = slice(first, first + rows)
                    if first + rows <= 500:
                        assert torch.equal(linear(x[chunk], packed), alone[chunk]), (rows, first, num_threads)


@pytest.mark.parametrize("dtype", TYPES)
def test_an_output_is_one_chain_of_fused_multiply_adds(dtype: torch.dtype) -> None:
    """Every machine and build must sum in this order: bits of prefill and decode hosts agree."""
    weight = normal(3, 70, seed=1, dtype=dtype)
    x = normal(1, 70, seed=2)
    expected = torch.zeros(3, dtype=torch.float64)
    for k in range(70):
        # The product is exact in float64; the sum there is rounded once more, which matters in ~1 of 2^29 cases.
        expected = (expected + x[0, k].double() * weight[:, k].double()).float().double()
    assert torch.equal(linear(x, pack_linear(weight))[0], expected.float())


def test_rows_may_be_strided() -> None:
    packed = pack_linear(normal(24, 40, seed=1))
    wide = normal(9, 100, seed=2)
    assert torch.equal(linear(wide[:, 30:70], packed), linear(wide[:, 30:70].contiguous(), packed))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(5, 7), (33, 64), (49, 31)])
def test_rows_come_back_out_of_the_packed_form(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight = normal(*shape, dtype=dtype)
    ids = torch.tensor([0, shape[0] - 1, 3, 3])
    assert torch.equal(unpack_rows(pack_linear(weight), ids), weight[ids].float())


def test_int8_storage_stays_within_half_a_step() -> None:
    weight = normal(37, 90, seed=1)
    packed = pack_linear(weight, storage=torch.int8)
    step = weight.abs().amax(dim=1, keepdim=True) / 127
    back = unpack_rows(packed, torch.arange(37))
    assert ((back - weight).abs() <= 0.5001 * step).all()
    x = normal(4, 90, seed=2)
    torch.testing.assert_close(linear(x, packed), x @ back.T, rtol=1e-4, atol=1e-4)


def test_no_rows_are_fine() -> None:
    assert linear(torch.empty(0, 8), pack_linear(normal(4, 8))).shape == (0, 4)


def test_misfits_are_named() -> None:
    packed = pack_linear(normal(4, 8))
    with pytest.raises(ValueError, match="8 inputs"):
        linear(normal(2, 9), packed)
    with pytest.raises(ValueError, match="float64"):
        linear(normal(2, 8).double(), packed)
    with pytest.raises(ValueError, match="strides"):
        linear(normal(8, 2).T, packed)
    with pytest.raises(ValueError, match="outside"):
        unpack_rows(packed, torch.tensor([4]))
    with pytest.raises(ValueError, match="outside"):
        unpack_rows(packed, torch.tensor([-1]))
    with pytest.raises(ValueError, match="bias"):
        pack_linear(normal(4, 8), normal(5))
    with pytest.raises(ValueError, match="float16"):
        pack_linear(normal(4, 8).half())
    with pytest.raises(ValueError, match="storage"):
        pack_linear(normal(4, 8), storage=torch.float16)
