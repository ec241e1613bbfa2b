"""A stage's layers over chunks of prompts, captured: a step of few rows waits for some nine launches a layer otherwise.

On the last stage what follows is captured too: the head of prompts' last rows, and the drafter's rows behind the tokens
that are drawn between. A step is padded to one of a few sizes. Padding rows belong to no prompt: they are computed for
nothing and written nowhere. Attention is Triton's here, whose kernels read all they need to know on the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from graftline.engine.drafter import Drafter
from graftline.engine.graph_capture import FixedWork, GraphPool, sizes_up_to
from graftline.engine.kv_pool import KvPool
from graftline.engine.models.config import ModelConfig
from graftline.engine.models.target_model import TargetModel
from graftline.engine.pages import num_pages_for
from graftline.kernels.attention_batch import AttentionBatch, SegmentRows
from graftline.kernels.sample import argmax
from graftline.kernels.upload import int_starts, pad_rows, upload, upload_into

_LEAST_ROWS, _MOST_ROWS = 16, 2048
# What an H200 computes while a host launches a layer's kernels, 0.42 ms (`python -m graftline.bench.gpu --sections
# roofline`: prompts of up to 512 tokens through 32 layers took 13.6 ms, whatever their length).
_OPERATIONS_A_LAUNCH = 2.2e11
_PROMPTS = 16  # at most; each size is captured for one prompt too, whose attention is cut differently


def most_rows(model: ModelConfig) -> int:
    """Rows up to which a step is worth a graph: with more, the device is busy for longer than the host is, and padding
    would cost time.
    """
    matrices = model.hidden_size * (2 * model.q_size + 2 * model.kv_size + 3 * model.intermediate_size)
    rows = _LEAST_ROWS
    while rows < _MOST_ROWS and 2 * matrices * rows < _OPERATIONS_A_LAUNCH:
        rows *= 2
    return rows


def prompt_sizes(most: int, max_running: int) -> list[tuple[int, int]]:
    """(rows, prompts) of the steps that are captured: powers of two, and `most`, the largest there can be."""
    rows = sizes_up_to(most, _LEAST_ROWS)
    return [(count, prompts) for count in rows for prompts in sorted({1, min(_PROMPTS, max_running)})]


class PromptGraphs:
    """Captured steps of one stage; calls come from one thread and one stream.

    Args:
        capture: features that the stage must take; see `Stage`.
        hidden_size: columns of the residual stream.
        dtype: of the residual stream.
        max_pages: of a prompt.
        drafter: whose rows follow behind the head, one that can be captured; None where none do.
    """

    def __init__(
        self,
        model: TargetModel,
        pool: KvPool,
        capture: Sequence[int],
        hidden_size: int,
        dtype: torch.dtype,
        max_pages: int,
        device: torch.device,
        *,
        drafter: Drafter | None = None,
        captures: bool = True,
    ) -> None:
        self._model = model
        self._pool = pool
        self._capture = tuple(capture)
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._max_pages = max_pages
        self._device = device
        self._drafter = drafter
        self._graph_pool = GraphPool(device, captures=captures)
        self._sizes: list[_Size] = []
        self._ran: _Size | None = None
        self._verdicts: tuple[Tensor, Tensor] | None = None  # logits and the largest's ids, for all sizes

    def capture(self, sizes: Sequence[tuple[int, int]]) -> int:
        """Warms steps of these (rows, prompts) up and, on CUDA, captures them. Only padding is computed.

        Returns:
            Bytes of device memory that the graphs took.
        """
        num_bytes = 0
        for rows, prompts in sorted(sizes, reverse=True):  # the largest first: the others' memory fits into its pool
            size = _Size(rows, prompts, *self._inputs(rows, prompts))
            size.layers = self._graph_pool.fix(partial(self._run, size))
            if self._drafter is not None:
                size.head = self._head(size)
                size.drafts = self._drafts(self._drafter, size)
            num_bytes += size.num_bytes
            self._sizes.insert(0, size)
        return num_bytes

    def takes(self, segments: Sequence[SegmentRows]) -> bool:
        """Whether there is a size for a step: prompts alone, no trees."""
        return self._size_of(segments) is not None and all(segment.parents is None for segment in segments)

    def run(self, hidden: Tensor, segments: Sequence[SegmentRows]) -> tuple[Tensor, dict[int, Tensor]]:
        """As `TargetModel.run_layers`, for a step that `takes` says yes to; the next one overwrites what it gives."""
        size = self._size_of(segments)
        assert size is not None, "a step that is not captured"
        rows = hidden.shape[0]
        numbers, tables = pad_prompts(segments, size.rows, size.prompts, self._pool.geometry.page_size)
        upload_into(size.numbers, numbers)
        upload_into(size.tables[: len(tables), : len(tables[0])], tables)
        size.hidden[:rows] = hidden
        self._ran = size
        size.layers.launch()
        return size.outputs[0][:rows], {
            layer: output[:rows] for layer, output in zip(self._capture, size.outputs[1:], strict=True)
        }

    @property
    def is_followed(self) -> bool:
        """Whether `judge` and `extend` can follow a step."""
        return self._drafter is not None

    def judge(self, ends: Tensor) -> tuple[Tensor, Tensor]:
        """What the head says of rows of the last step.

        Args:
            ends: [ends] int64 rows, one a prompt at most.

        Returns:
            ([ends, vocab] float32 logits, [ends] int64 the largest's ids, -1 where no logit is finite); the next step
            overwrites them.
        """
        assert self._ran is not None
        assert self._ran.head is not None
        head, count = self._ran.head, ends.shape[0]
        head.ends[:count] = ends
        head.work.launch()
        assert self._verdicts is not None
        logits, ids = self._verdicts
        return logits[:count], ids[:count]

    def extend(self, columns: Sequence[Tensor], next_tokens: Sequence[int], ends: Tensor, ids: Tensor) -> Tensor:
        """Makes the drafter's rows of the last step final.

        Args:
            columns: [rows, hidden] each, what the drafter wants of the step, side by side.
            next_tokens: behind every row; anything where `ids` has it.
            ends: [ends] int64 rows whose next tokens were drawn.
            ids: [ends] int64 these tokens.

        Returns:
            [rows, hidden] outputs; the next step overwrites them.
        """
        assert self._ran is not None
        assert self._ran.drafts is not None
        drafts, rows = self._ran.drafts, len(next_tokens)
        torch.cat(list(columns), dim=-1, out=drafts.features[:rows])
        upload_into(drafts.next_tokens[:rows], next_tokens)
        drafts.next_tokens.index_copy_(0, ends, ids)
        return drafts.work.launch()[:rows]

    def _head(self, size: "_Size") -> "_Head":
        ends = torch.zeros(size.prompts, dtype=torch.int64, device=self._device)
        return _Head(ends, self._graph_pool.fix(partial(self._run_head, size, ends)))

    def _run_head(self, size: "_Size", ends: Tensor) -> Tensor:
        logits = self._model.logits(self._model.final_norm(size.outputs[0][ends]))
        if self._verdicts is None:
            most = max(size.prompts, _PROMPTS)
            ids = torch.empty(most, dtype=torch.int64, device=self._device)
            self._verdicts = torch.empty(most, logits.shape[1], dtype=logits.dtype, device=self._device), ids
        verdicts, ids = self._verdicts
        verdicts[: size.prompts] = logits
        ids[: size.prompts] = argmax(logits)
        return ids

    def _drafts(self, drafter: Drafter, size: "_Size") -> "_Drafts":
        columns = len(drafter.feature_layers) * self._hidden_size
        features = torch.zeros(size.rows, columns, dtype=self._dtype, device=self._device)
        next_tokens = torch.zeros(size.rows, dtype=torch.int64, device=self._device)
        run = partial(drafter.extend, features, next_tokens, size.batch(self._pool))
        return _Drafts(features, next_tokens, self._graph_pool.fix(run))

    def _size_of(self, segments: Sequence[SegmentRows]) -> "_Size | None":
        rows = sum(segment.num_rows for segment in segments)
        return next((size for size in self._sizes if size.rows >= rows and size.prompts >= len(segments)), None)

    def _inputs(self, rows: int, prompts: int) -> tuple[Tensor, Tensor, Tensor]:
        numbers, _ = pad_prompts([], rows, prompts, self._pool.geometry.page_size)
        return (
            torch.zeros(rows, self._hidden_size, dtype=self._dtype, device=self._device),
            upload(numbers, torch.int32, self._device),
            torch.zeros(prompts, self._max_pages, dtype=torch.int32, device=self._device),
        )

    def _run(self, size: "_Size") -> Tensor:
        hidden, captured = self._model.run_layers(size.hidden, size.batch(self._pool), self._pool, self._capture)
        size.outputs = (hidden, *(captured[layer] for layer in self._capture))
        return hidden


@dataclass(frozen=True, slots=True, eq=False)
class _Head:
    """The head of a size's last rows, and which they are."""

    ends: Tensor
    work: FixedWork


@dataclass(frozen=True, slots=True, eq=False)
class _Drafts:
    """The drafter's rows of a size, and where their inputs lie.

    Attributes:
        features: [rows, columns].
        next_tokens: [rows] int64.
        work: gives [rows, hidden].
    """

    features: Tensor
    next_tokens: Tensor
    work: FixedWork


@dataclass(slots=True, eq=False)
class _Size:
    """Steps of one size: where their inputs and outputs lie, and what captured them.

    Attributes:
        numbers: int32, what `pad_prompts` gives.
        tables: [prompts, max_pages] int32 page ids.
        outputs: residual stream behind the layers, then features.
        graph: None where it is not captured.
    """

    rows: int
    prompts: int
    hidden: Tensor
    numbers: Tensor
    tables: Tensor
    outputs: tuple[Tensor, ...] = ()
    layers: FixedWork = field(init=False)
    head: _Head | None = None
    drafts: _Drafts | None = None

    @property
    def num_bytes(self) -> int:
        """Device memory that the graphs took."""
        behind = [part.work for part in (self.head, self.drafts) if part is not None]
        return sum(work.num_bytes for work in (self.layers, *behind))

    def batch(self, pool: KvPool) -> AttentionBatch:
        """The step's rows; its segments are known on the device alone."""
        lengths = _lengths(self.rows, self.prompts)
        row_segment, positions, segment_rows, starts = (
            self.numbers[start : start + length]
            for start, length in zip(int_starts(lengths), lengths, strict=False)  # the last start is the end
        )
        return AttentionBatch(
            row_segment=row_segment,
            positions=positions,
            parents=positions,  # of a chain nobody asks
            segment_rows=segment_rows,
            segment_start=starts,
            page_tables=self.tables,
            page_size=pool.geometry.page_size,
            is_chain=True,
        )


def pad_prompts(
    segments: Sequence[SegmentRows], rows: int, prompts: int, page_size: int
) -> tuple[list[int], list[list[int]]]:
    """A step as numbers for its size.

    Returns:
        (segment of every row, -1 for padding; position of every row; first row of every segment, and the end of the
        last one, `prompts` + 1 in all; committed length of every segment), one after the other, each where `int_starts`
        says: kernels are compiled for alignments, and steps that are not captured meet the same ones; page ids of the
        real segments, as many as their rows reach, padded to one length.
    """
    row_segment: list[int] = []
    positions: list[int] = []
    first_rows = [0]
    for index, segment in enumerate(segments):
        row_segment += [index] * segment.num_rows
        positions += range(segment.start, segment.start + segment.num_rows)
        first_rows.append(len(positions))
    padding = rows - len(positions)
    starts = [segment.start for segment in segments]
    missing = prompts - len(segments)
    vectors = (
        [*row_segment, *[-1] * padding],
        [*positions, *[0] * padding],
        [*first_rows, *[first_rows[-1]] * missing],
        [*starts, *[0] * missing],
    )
    numbers: list[int] = []
    for vector, end in zip(vectors, int_starts(_lengths(rows, prompts))[1:], strict=True):
        numbers += vector
        numbers += [0] * (end - len(numbers))
    counts = [num_pages_for(segment.start + segment.num_rows, page_size) for segment in segments]
    return numbers, pad_rows([segment.page_ids[:count] for segment, count in zip(segments, counts, strict=True)])


def _lengths(rows: int, prompts: int) -> tuple[int, int, int, int]:
    return rows, rows, prompts + 1, prompts
