"""Steps of prompts, padded to sizes that were captured."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from graftline.engine.config import EngineConfig, Role
from graftline.engine.kv_pool import KvGeometry, KvPool
from graftline.engine.memory_plan import state_geometry
from graftline.engine.models.checkpoint import read_model_config
from graftline.engine.models.qwen3_next_random import write_tiny_qwen3_next
from graftline.engine.models.target_model import KvViews, StateViews
from graftline.engine.prompt_graphs import PromptGraphs, most_rows, pad_prompts, prompt_sizes
from graftline.engine.stage_builder import captures_prompts
from graftline.engine.tree_shape import NO_SPECULATION
from graftline.kernels.attention_batch import AttentionBatch, SegmentRows, build_attention_batch
from graftline.kernels.attention_kind import AttentionBackend
from graftline.kernels.tree_batch import RowBatch

CPU = torch.device("cpu")
PAGE = 4
SEGMENTS = [SegmentRows(6, 3, [5, 2, 9, 7]), SegmentRows(0, 5, [1, 3])]


class Layers:
    """Stands for a model: remembers its batches, and answers with what tells rows apart."""

    def __init__(self) -> None:
        self.batches: list[RowBatch] = []

    def run_layers(
        self,
        hidden: Tensor,
        batch: RowBatch,
        kv: KvViews,
        capture: tuple[int, ...] = (),
        states: StateViews | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        self.batches.append(batch)
        return hidden + 1, {layer: hidden * layer for layer in capture}

    def final_norm(self, hidden: Tensor) -> Tensor:
        return hidden * 2

    def logits(self, normed: Tensor) -> Tensor:
        return torch.cat((normed, -normed), dim=1)


def graphs(layers: Layers, capture: tuple[int, ...] = ()) -> PromptGraphs:
    pool = KvPool(KvGeometry(1, PAGE, 1, 8, torch.float32), 10, layers=(0,))
    return PromptGraphs(layers, pool, capture, 2, torch.float32, 6, CPU)  # type: ignore[arg-type]


def test_a_step_is_padded() -> None:
    numbers, tables = pad_prompts(SEGMENTS, 16, 4, PAGE)
    whole = build_attention_batch(SEGMENTS, PAGE)
    row_segment, positions, first_rows, _, starts = torch.tensor(numbers).split([16, 16, 5, 3, 4])
    assert row_segment.tolist() == whole.row_segment.tolist() + [-1] * 8
    assert positions.tolist() == whole.positions.tolist() + [0] * 8
    assert first_rows.tolist() == [*whole.segment_rows.tolist(), 8, 8]
    assert starts.tolist() == [6, 0, 0, 0]
    assert tables == [[5, 2, 9], [1, 3, 0]]


def test_padding_alone_is_a_step() -> None:
    numbers, tables = pad_prompts([], 2, 1, PAGE)
    assert numbers == [-1, -1, 0, 0] + [0] * 12
    assert tables == []


@pytest.mark.parametrize(
    ("most", "running", "expected"),
    [
        (512, 1, [(16, 1), (32, 1), (64, 1), (128, 1), (256, 1), (512, 1)]),
        (40, 3, [(16, 1), (16, 3), (32, 1), (32, 3), (40, 1), (40, 3)]),
        (1, 64, [(16, 1), (16, 16)]),
    ],
)
def test_sizes(most: int, running: int, expected: list[tuple[int, int]]) -> None:
    assert prompt_sizes(most, running) == expected


def test_large_models_keep_a_device_busy_with_fewer_rows() -> None:
    def rows(hidden: int, inter: int, q_size: int, kv_size: int) -> int:
        sizes: Any = SimpleNamespace(hidden_size=hidden, intermediate_size=inter, q_size=q_size, kv_size=kv_size)
        return most_rows(sizes)

    assert rows(576, 1536, 576, 192) == 2048
    assert rows(4096, 14336, 4096, 1024) == 512
    assert rows(8192, 28672, 8192, 1024) == 256


@pytest.mark.parametrize(("rows", "prompts"), [(16, 1), (50, 3)])
def test_kernels_meet_the_alignments_of_other_steps(rows: int, prompts: int) -> None:
    """They are compiled for them: what captured steps have compiled is then there for those that do not fit."""
    layers = Layers()
    graphs(layers).capture([(rows, prompts)])
    batch = layers.batches[-1]
    assert isinstance(batch, AttentionBatch)
    vectors = (batch.row_segment, batch.positions, batch.segment_rows, batch.segment_start, batch.page_tables)
    assert [vector.shape[0] for vector in vectors] == [rows, rows, prompts + 1, prompts, prompts]
    assert [vector.data_ptr() % 16 for vector in vectors] == [0] * 5


def test_takes_prompts_that_fit() -> None:
    steps = graphs(Layers())
    assert not steps.takes(SEGMENTS)
    assert steps.capture([(16, 1), (16, 2)]) == 0
    assert steps.takes(SEGMENTS)
    assert steps.takes(SEGMENTS[:1])
    assert not steps.takes([*SEGMENTS, SEGMENTS[0]])
    assert not steps.takes([SegmentRows(0, 17, [0, 1, 2, 3, 4])])
    assert not steps.takes([SegmentRows(0, 2, [0], [-1, -1])])


def test_rows_come_back_without_padding() -> None:
    layers = Layers()
    steps = graphs(layers, capture=(3, 5))
    steps.capture([(16, 2), (32, 2), (16, 1)])
    seen = len(layers.batches)
    hidden = torch.arange(16, dtype=torch.float32).view(8, 2)
    out, features = steps.run(hidden, SEGMENTS)
    assert out.equal(hidden + 1)
    assert features[3].equal(hidden * 3)
    assert features[5].equal(hidden * 5)
    (batch,) = layers.batches[seen:]
    assert (batch.num_rows, batch.page_tables.shape) == (16, (2, 6))
    assert batch.page_tables[:, :3].tolist() == [[5, 2, 9], [1, 3, 0]]
    short, _ = steps.run(hidden[:2], [SegmentRows(4, 2, [4, 8])])
    assert short.equal(hidden[:2] + 1)
    alone = layers.batches[-1]
    assert (alone.num_rows, alone.page_tables.shape) == (16, (1, 6))


def test_steps_are_captured_of_dense_models_on_a_gpu(tmp_path: Path) -> None:
    """A hybrid model's stage without recurrent state is none of a dense one: it would write padding's KV."""
    path = write_tiny_qwen3_next(tmp_path / "hybrid")
    hybrid = read_model_config(path)
    config = EngineConfig(
        model=str(path), role=Role.PREFILL, devices=("cuda:0",), layer_split=(3, 1), tree=NO_SPECULATION
    )
    assert state_geometry(config, hybrid, 1) is None
    dense = replace(hybrid, hybrid=None)
    assert captures_prompts(config, dense, AttentionBackend.TRITON)
    assert captures_prompts(config, dense, AttentionBackend.FLASHINFER)
    assert not captures_prompts(config, hybrid, AttentionBackend.TRITON)
    assert not captures_prompts(config, dense, AttentionBackend.TORCH)
    for change in ({"role": Role.DECODE}, {"cuda_graphs": False}, {"devices": ("cpu",)}):
        assert not captures_prompts(msgspec.structs.replace(config, **change), dense, AttentionBackend.TRITON)


class Rows:
    """Stands for a drafter: answers with what tells its rows' features and next tokens apart."""

    feature_layers = (3, 5)

    def __init__(self) -> None:
        self.batches: list[RowBatch] = []

    def extend(self, features: Tensor, next_tokens: Tensor, batch: RowBatch) -> Tensor:
        self.batches.append(batch)
        return torch.cat((features, next_tokens.unsqueeze(1).float()), dim=1)


def test_head_and_drafter_follow() -> None:
    pool = KvPool(KvGeometry(1, PAGE, 1, 8, torch.float32), 10, layers=(0,))
    rows = Rows()
    steps = PromptGraphs(Layers(), pool, (3, 5), 2, torch.float32, 6, CPU, drafter=rows)  # type: ignore[arg-type]
    steps.capture([(16, 2), (32, 2)])
    assert steps.is_followed
    hidden = torch.arange(16, dtype=torch.float32).view(8, 2)
    for _ in range(2):  # nothing is left of the first
        rows.batches.clear()
        _, features = steps.run(hidden, SEGMENTS)
        logits, ids = steps.judge(torch.tensor([2, 7]))
        assert logits.equal(torch.cat((2 * (hidden[[2, 7]] + 1), -2 * (hidden[[2, 7]] + 1)), dim=1))
        assert ids.tolist() == [1, 1]
        assert steps.judge(torch.tensor([5]))[0].tolist() == [[*(2 * (hidden[5] + 1)), *(-2 * (hidden[5] + 1))]]
        columns = [features[5], features[3]]
        outputs = steps.extend(columns, [9] * 8, torch.tensor([2, 7]), torch.tensor([40, 41]))
        assert outputs[:, :4].equal(torch.cat(columns, dim=1))
        assert outputs[:, 4].tolist() == [9, 9, 40, 9, 9, 9, 9, 41]
        (batch,) = rows.batches
        assert batch.num_rows == 16
        hidden = hidden + 1
    assert not graphs(Layers()).is_followed
