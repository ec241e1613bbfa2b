"""The resident kernel: emulated thread by thread on a CPU against the single ops in float32, and on a GPU."""

import ctypes
import random
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from kernel_cases import PagedSequences, normal, random_parents
from torch import Tensor

from graftline.engine.models.dense import LayerWeights
from graftline.kernels.cuda_driver import CudaProgramError
from graftline.kernels.cuda_program import BoxMap, compile_program
from graftline.kernels.decoder_layer import DenseLayers, LayerPages
from graftline.kernels.layer_weights import DecoderLayerShape
from graftline.kernels.linear import LinearWeight
from graftline.kernels.resident_layers import (
    FILES,
    ResidentLayers,
    ResidentSizes,
    fits_kernel,
    layer_table,
    prepare_round,
    program_options,
    reason_against_device,
)
from graftline.kernels.tree_batch import TreeBatch

SOURCES = Path(__file__).resolve().parents[2] / "kernels" / "cuda"
PAGE = 8
SMALL = ResidentSizes(hidden=128, inter=192, heads=4, kv_heads=2, head_dim=64, page_size=PAGE)
WIDE = ResidentSizes(hidden=64, inter=64, heads=2, kv_heads=2, head_dim=128, page_size=4)
# Chunks of 576 = 18 steps, which eight warps do not share evenly.
ODD = ResidentSizes(hidden=576, inter=192, heads=9, kv_heads=3, head_dim=64, page_size=PAGE)

LARGE = ResidentSizes(hidden=4096, inter=14336, heads=32, kv_heads=8, head_dim=128, page_size=16)
TENSORS = [field.name for field in fields(TreeBatch) if field.type in (Tensor, "Tensor")]


def on_device(weights: LayerWeights) -> LayerWeights:
    def matrix(weight: LinearWeight) -> LinearWeight:
        bias = None if weight.bias is None else weight.bias.cuda()
        return LinearWeight(weight.data.cuda(), weight.in_features, weight.out_features, bias)

    return LayerWeights(
        weights.input_norm.cuda(), matrix(weights.qkv), None, None, matrix(weights.output), weights.post_norm.cuda(),
        matrix(weights.gate_up), matrix(weights.down),
    )  # fmt: skip


def weights_of(sizes: ResidentSizes, seed: int, with_bias: bool) -> LayerWeights:
    def matrix(rows: int, columns: int, offset: int, bias: bool = False) -> LinearWeight:
        data = (normal(rows, columns, seed=seed + offset) / columns**0.5).bfloat16()
        return LinearWeight(data, columns, rows, normal(rows, seed=seed + 9).bfloat16() if bias else None)

    def norm(offset: int) -> Tensor:
        return (1 + 0.1 * normal(sizes.hidden, seed=seed + offset)).bfloat16()

    q_size, kv_size = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    return LayerWeights(
        norm(1), matrix(q_size + 2 * kv_size, sizes.hidden, 2, with_bias), None, None,
        matrix(sizes.hidden, q_size, 3), norm(4), matrix(2 * sizes.inter, sizes.hidden, 5),
        matrix(sizes.hidden, sizes.inter, 6),
    )  # fmt: skip


def widened(weights: LayerWeights) -> LayerWeights:
    def matrix(weight: LinearWeight) -> LinearWeight:
        bias = None if weight.bias is None else weight.bias.float()
        return LinearWeight(weight.data.float(), weight.in_features, weight.out_features, bias)

    return LayerWeights(
        weights.input_norm.float(), matrix(weights.qkv), None, None, matrix(weights.output),
        weights.post_norm.float(), matrix(weights.gate_up), matrix(weights.down),
    )  # fmt: skip


@cache
def library(sizes: ResidentSizes, row_tiles: int, blocks: int, folder: Path) -> ctypes.CDLL:
    target = folder / f"{abs(hash(sizes))}-{row_tiles}-{blocks}.so"
    macros = [f"-D{name}={value}" for name, value in sizes.macros(row_tiles, blocks).items()]
    words = ["gcc", "-std=gnu11", "-O1", "-w", "-fPIC", "-shared", *macros]
    subprocess.run([*words, str(SOURCES / "emulated_decoder_layers.c"), "-o", str(target), "-lm"], check=True)
    return ctypes.CDLL(str(target))


def emulated_map(box: BoxMap) -> bytes:
    """`TileMap` of emulated.h."""
    strides, sizes = [*box.strides, 0, 0, 0], [*box.box, 1, 1, 1]
    return struct.pack("16Q", box.address, *strides[:4], *sizes[:5], *[0] * 6)


class Case:
    """Layers, pages and a batch; every slot that may not be read is NaN."""

    def __init__(
        self,
        sizes: ResidentSizes,
        trees: Sequence[tuple[int, Sequence[int]] | None],
        rows_each: int,
        num_layers: int = 2,
        with_bias: bool = False,
        num_tail: int | None = None,
    ) -> None:
        self.sizes = sizes
        lengths = [0 if tree is None else tree[0] for tree in trees]
        sequences = PagedSequences(lengths, sizes.page_size, sizes.kv_heads, sizes.head_dim, torch.bfloat16)
        self.batch: TreeBatch = sequences.tree_batch(trees, rows_each, num_tail)
        shape = (sequences.pool.shape[0], 2 * num_layers + 1, sizes.page_size, sizes.kv_heads, sizes.head_dim)
        self.pool = torch.full(shape, torch.nan, dtype=torch.bfloat16)
        for index, length in enumerate(lengths):
            for slot in range(length):
                page = sequences.page_ids[index][slot // sizes.page_size]
                values = normal(*shape[1:2], *shape[3:], seed=1000 * index + slot)
                self.pool[page, :, slot % sizes.page_size] = values.bfloat16()
        self.weights = [weights_of(sizes, 100 * index, with_bias) for index in range(num_layers)]
        self.hidden = normal(self.batch.num_rows, sizes.hidden, seed=77).bfloat16()
        angles = normal(4000, sizes.head_dim // 2, seed=9)
        self.shape = DecoderLayerShape(
            sizes.heads, sizes.kv_heads, sizes.head_dim, 1e-5, sizes.head_dim**-0.5, angles.cos(), angles.sin()
        )

    def shape_on(self, device: torch.device) -> DecoderLayerShape:
        return replace(self.shape, cos=self.shape.cos.to(device), sin=self.shape.sin.to(device))

    def pages(self, pool: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [(pool[:, 2 * layer], pool[:, 2 * layer + 1]) for layer in range(len(self.weights))]

    def expected(self, capture: Sequence[int]) -> tuple[Tensor, dict[int, Tensor], Tensor]:
        pool = self.pool.float()
        layers = DenseLayers([widened(weights) for weights in self.weights], self.shape)
        hidden, features = layers.run_composed(self.hidden.float(), self.batch, LayerPages(self.pages(pool)), capture)
        return hidden, features, pool

    def emulated(self, folder: Path, blocks: int, capture: Sequence[int]) -> tuple[Tensor, dict[int, Tensor], Tensor]:
        pool = self.pool.clone()
        table = layer_table(self.weights, self.pages(pool), self.sizes, torch.device("cpu"), emulated_map)
        prepared = prepare_round(
            table, self.hidden, self.batch, pool.stride(0), self.sizes, self.shape, capture, blocks
        )
        row_tiles = -(-self.batch.num_rows // 8)
        library(self.sizes, row_tiles, blocks, folder).emulate_decoder_layers(ctypes.byref(prepared.arguments), blocks)
        return prepared.hidden, prepared.features, pool


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


def chain(rows: int) -> list[int]:
    return [-1, *range(rows - 1)]


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize(
    ("sizes", "trees", "rows_each"),
    [
        (SMALL, [(37, chain(1))], 1),
        (SMALL, [(0, chain(1)), (150, chain(1)), None, (33, chain(1))], 1),
        (SMALL, [(70, random_parents(5, 1)), (31, random_parents(3, 2))], 5),
        (SMALL, [(200, random_parents(16, 3))], 16),
        (ODD, [(100, chain(1)), (64, chain(1))], 1),
        (WIDE, [(100, chain(2)), (64, chain(1))], 2),
    ],
)
def test_equals_the_single_ops(
    sizes: ResidentSizes, trees: list[tuple[int, list[int]] | None], rows_each: int, blocks: int, folder: Path
) -> None:
    case = Case(sizes, trees, rows_each)
    hidden, features, pool = case.emulated(folder, blocks, [1])
    expected, expected_features, expected_pool = case.expected([1])
    real = torch.tensor([slot >= 0 for slot in case.batch.row_slots.tolist()])
    torch.testing.assert_close(hidden.float()[real], expected[real], atol=0.06, rtol=0.03)
    torch.testing.assert_close(features[1].float()[real], expected_features[1][real], atol=0.05, rtol=0.03)
    torch.testing.assert_close(pool.float(), expected_pool, atol=0.06, rtol=0.03, equal_nan=True)
    assert hidden.isfinite().all()


@pytest.mark.parametrize(
    ("sizes", "trees", "rows_each"),
    [
        (SMALL, [(70, chain(1)), (0, chain(1)), None, (100, chain(1))], 1),
        (SMALL, [(300, random_parents(2, 1)), (290, random_parents(2, 2)), (270, [-1]), (310, chain(2))], 2),
        (WIDE, [(100, chain(3)), (64, chain(2)), (90, random_parents(3, 4))], 3),
    ],
)
def test_blocks_attend_whole_heads(
    sizes: ResidentSizes, trees: list[tuple[int, list[int]] | None], rows_each: int, folder: Path
) -> None:
    """A block for every head of every sequence, which are about as long as each other."""
    case = Case(sizes, trees, rows_each)
    hidden, _, pool = case.emulated(folder, 8, [])
    expected, _, expected_pool = case.expected([])
    real = torch.tensor([slot >= 0 for slot in case.batch.row_slots.tolist()])
    torch.testing.assert_close(hidden.float()[real], expected[real], atol=0.06, rtol=0.03)
    torch.testing.assert_close(pool.float(), expected_pool, atol=0.06, rtol=0.03, equal_nan=True)


@pytest.mark.parametrize("seed", range(12))
def test_equals_the_single_ops_whatever_the_batch(seed: int, folder: Path) -> None:
    draw = random.Random(seed)
    sizes = draw.choice(
        [SMALL, WIDE, ODD, replace(SMALL, heads=8, kv_heads=1, inter=320), replace(WIDE, heads=1, kv_heads=1)]
    )
    blocks, rows_each, num_layers = draw.choice([1, 2, 5, 8]), draw.choice([1, 1, 2, 4]), draw.choice([1, 3])
    base, is_alike = draw.randint(0, 300), draw.random() < 0.5
    trees: list[tuple[int, list[int]] | None] = [(33, chain(1))]
    for _ in range(draw.randint(0, 16 // rows_each - 1)):
        length = max(0, base + draw.randint(-40, 40)) if is_alike else draw.choice([0, 1, 32, draw.randint(0, 400)])
        rows = draw.randint(1, rows_each)
        tree = random_parents(rows, seed) if draw.random() < 0.5 else chain(rows)
        trees.append(None if draw.random() < 0.1 else (length, tree))
    case = Case(sizes, trees, rows_each, num_layers, with_bias=draw.random() < 0.5)
    if not fits_kernel(case.batch, sizes, 8 * blocks):
        case, blocks = Case(sizes, trees[:1], rows_each, num_layers), 2
    wanted = sorted(draw.sample(range(1, num_layers + 1), draw.randint(0, num_layers)))
    hidden, features, pool = case.emulated(folder, blocks, wanted)
    expected, expected_features, expected_pool = case.expected(wanted)
    real = torch.tensor([slot >= 0 for slot in case.batch.row_slots.tolist()])
    torch.testing.assert_close(hidden.float()[real], expected[real], atol=0.08, rtol=0.04)
    for layer in wanted:
        torch.testing.assert_close(features[layer].float()[real], expected_features[layer][real], atol=0.08, rtol=0.04)
    torch.testing.assert_close(pool.float(), expected_pool, atol=0.08, rtol=0.04, equal_nan=True)


def test_reads_no_layer_that_it_cannot(folder: Path) -> None:
    assert ODD.reason_against() is None
    assert SMALL.macros(1, 132)["NUM_SLOTS"] >= 4
    for change, words in [
        ({"head_dim": 96}, "head_dim 96"),
        ({"heads": 5}, "5 heads of 2"),
        ({"hidden": 100}, "hidden 100"),
        ({"inter": 100}, "inter 100"),
        ({"page_size": 24}, "pages of 24"),
        ({"page_size": 1}, "pages of 1"),
    ]:
        assert words in (replace(SMALL, **change).reason_against() or "")


def test_refuses_what_it_would_misread() -> None:
    """Kernels get addresses: a wrong type must end here."""
    case = Case(SMALL, [(5, chain(2))], 2)
    table = torch.zeros(104, dtype=torch.int64)
    stride = case.pool.stride(0)
    prepare_round(table, case.hidden, case.batch, stride, SMALL, case.shape, (), 4)
    for name, wrong in [("row_slots", torch.int32), ("positions", torch.int64), ("visible", torch.int32)]:
        batch = replace(case.batch, **{name: getattr(case.batch, name).to(wrong)})
        with pytest.raises(ValueError, match=name):
            prepare_round(table, case.hidden, batch, stride, SMALL, case.shape, (), 4)
    for hidden in (case.hidden.float(), case.hidden[:1]):
        with pytest.raises(ValueError, match="hidden"):
            prepare_round(table, hidden, case.batch, stride, SMALL, case.shape, (), 4)


def test_says_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(SMALL, [(5, chain(1))], 1)
    assert "cpu" in (DenseLayers(case.weights, case.shape).reason_against_resident or "")
    alone = DenseLayers(case.weights, case.shape, may_reside=False)
    assert "wait for other devices" in (alone.reason_against_resident or "")
    assert "cpu" in (reason_against_device(torch.device("cpu"), torch.bfloat16) or "")
    assert "float32" in (reason_against_device(torch.device("cuda"), torch.float32) or "")
    monkeypatch.setenv("GRAFTLINE_RESIDENT_LAYERS", "off")
    assert "off" in (reason_against_device(torch.device("cuda"), torch.bfloat16) or "")


class RefusedLayers(ResidentLayers):
    """A driver that refuses launches."""

    tries = 0

    def takes(self, batch: TreeBatch, num_features: int) -> bool:
        return True

    def run(self, *arguments: object, **options: object) -> NoReturn:
        self.tries += 1
        raise CudaProgramError("CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE")


def test_single_ops_run_what_the_driver_refuses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case(SMALL, [(37, chain(1))], 1)
    layers = DenseLayers([widened(weights) for weights in case.weights], case.shape)
    refused = RefusedLayers.__new__(RefusedLayers)
    refused.sizes = SMALL
    monkeypatch.setattr(DenseLayers, "reason_against_resident", None)
    monkeypatch.setattr(layers, "_residents", {PAGE: refused})
    monkeypatch.setattr("graftline.kernels.decoder_layer.layer_table", lambda *_: torch.zeros(1))
    pool = case.pool.float()
    hidden, _ = layers.run(case.hidden.float(), case.batch, LayerPages(case.pages(pool)))
    assert hidden.equal(case.expected([])[0])
    assert "TOO_LARGE" in caplog.text
    layers.run(case.hidden.float(), case.batch, LayerPages(case.pages(pool)))
    assert refused.tries == 1


def test_takes_few_rows() -> None:
    def batch(trees: int, rows_each: int) -> TreeBatch:
        sequences = PagedSequences([5] * trees, PAGE, 2, 64, torch.bfloat16)
        return sequences.tree_batch([(5, chain(rows_each))] * trees, rows_each)

    assert fits_kernel(batch(4, 4), SMALL, 132 * 8)
    assert not fits_kernel(batch(17, 1), SMALL, 132 * 8)
    assert not fits_kernel(batch(2, 9), SMALL, 132 * 8)
    assert not fits_kernel(batch(4, 1), SMALL, 7)  # a stream of KV for every sequence and KV head


@pytest.mark.parametrize(("sizes", "row_tiles"), [(replace(ODD, page_size=16), 2), (LARGE, 1), (LARGE, 2)])
def test_compiles_without_a_gpu(
    sizes: ResidentSizes, row_tiles: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = compile_program(FILES, program_options(sizes, row_tiles, 132))
    assert code.startswith(b"\x7fELF")
    assert b"decoder_layers" in code
    assert [path.read_bytes() for path in tmp_path.rglob("*.cubin")] == [code]
    assert compile_program(FILES, program_options(sizes, row_tiles, 132)) == code
    with pytest.raises(CudaProgramError, match="does not compile"):
        compile_program(FILES, ["--gpu-architecture=sm_90a"])


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("sizes", "trees", "rows_each"),
    [
        (SMALL, [(37, chain(1))], 1),
        (SMALL, [(0, chain(1)), (150, chain(1)), None, (33, chain(1))], 1),
        (SMALL, [(70, random_parents(5, 1)), (31, random_parents(3, 2))], 5),
        (replace(ODD, page_size=16), [(700, random_parents(16, 3))], 16),
        (replace(SMALL, head_dim=128, page_size=64), [(3000, chain(2)), (64, chain(1))], 2),
    ],
)
def test_on_a_gpu(sizes: ResidentSizes, trees: list[tuple[int, list[int]] | None], rows_each: int) -> None:
    case = Case(sizes, trees, rows_each)
    device = torch.device("cuda")
    layers = DenseLayers([on_device(weights) for weights in case.weights], case.shape_on(device))
    if reason := layers.reason_against_resident:
        pytest.skip(reason)
    pool = case.pool.to(device)
    batch = replace(case.batch, **{name: getattr(case.batch, name).to(device) for name in TENSORS})
    hidden, features = layers.run(case.hidden.to(device), batch, LayerPages(case.pages(pool)), [1])
    expected, expected_features, expected_pool = case.expected([1])
    real = case.batch.row_slots >= 0
    torch.testing.assert_close(hidden.cpu().float()[real], expected[real], atol=0.06, rtol=0.03)
    torch.testing.assert_close(features[1].cpu().float()[real], expected_features[1][real], atol=0.05, rtol=0.03)
    torch.testing.assert_close(pool.cpu().float(), expected_pool, atol=0.06, rtol=0.03, equal_nan=True)
    again, _ = layers.run(case.hidden.to(device), batch, LayerPages(case.pages(pool)))
    assert again.equal(hidden)


@pytest.mark.cuda
@pytest.mark.parametrize(("lengths", "rows_each"), [([1024] * 16, 1), ([700, 5000], 8), ([1024], 16), ([333] * 5, 1)])
def test_gives_the_same_bits_each_time(lengths: list[int], rows_each: int) -> None:
    """Weights stream in while blocks are at different places: whoever reads too late or too early shows here."""
    layer = weights_of(LARGE, 0, False)
    device = torch.device("cuda")
    angles = normal(8192, LARGE.head_dim // 2, seed=9)
    shape = DecoderLayerShape(
        LARGE.heads,
        LARGE.kv_heads,
        LARGE.head_dim,
        1e-5,
        LARGE.head_dim**-0.5,
        angles.cos().cuda(),
        angles.sin().cuda(),
    )
    layers = DenseLayers([on_device(layer)] * 2, shape)
    if reason := layers.reason_against_resident:
        pytest.skip(reason)
    sequences = PagedSequences(lengths, LARGE.page_size, LARGE.kv_heads, LARGE.head_dim, torch.bfloat16)
    batch = sequences.tree_batch([(length, chain(rows_each)) for length in lengths], rows_each)
    batch = replace(batch, **{name: getattr(batch, name).to(device) for name in TENSORS})
    generator = torch.Generator(device).manual_seed(3)
    size = (sequences.pool.shape[0], 4, LARGE.page_size, LARGE.kv_heads, LARGE.head_dim)
    pool = torch.randn(size, generator=generator, device=device).bfloat16()
    pages = LayerPages([(pool[:, 0], pool[:, 1]), (pool[:, 2], pool[:, 3])])
    hidden = torch.randn(batch.num_rows, LARGE.hidden, generator=generator, device=device).bfloat16()
    first, _ = layers.run_resident(hidden, batch, pages)
    expected, _ = layers.run_composed(hidden, batch, pages)
    torch.testing.assert_close(first.float(), expected.float(), atol=0.15, rtol=0.05)
    for _ in range(300):
        assert layers.run_resident(hidden, batch, pages)[0].equal(first)
