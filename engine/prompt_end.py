"""The end of a prefill's step on a GPU: sampling, drafter rows and trees are all launched before anything is read.

The token that is sampled stays on the device on its way into the drafter, so that the host has launched the growth by
the time the GPU has computed the prompt; first tokens are told as soon as they arrive (before the growth is launched,
if they have by then), trees behind them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from graftline.engine.device_event import has_passed, send_to_host
from graftline.engine.draft_module import feature_columns
from graftline.engine.drafter import Drafter, tree_of
from graftline.engine.models.target_model import TargetModel
from graftline.engine.plan import SampledToken, Segment, SegmentOutcome, StepPlan, StepResult, StepTokens
from graftline.engine.sampler import SampledRow, Sampler
from graftline.engine.verify import NO_FINITE_LOGIT
from graftline.kernels.attention_batch import SegmentRows, build_attention_batch
from graftline.kernels.draft_inputs import gather_columns
from graftline.kernels.upload import upload

Emit = Callable[[StepTokens | StepResult], None]


class CapturedStep(Protocol):
    """A step whose end was captured too; see `PromptGraphs`."""

    def judge(self, ends: Tensor) -> tuple[Tensor, Tensor]:
        """What the head says of rows."""

    def extend(self, columns: Sequence[Tensor], next_tokens: Sequence[int], ends: Tensor, ids: Tensor) -> Tensor:
        """Makes the drafter's rows final."""


class PromptEnd:
    """See the module.

    Args:
        drafter: one that `grows_unseen`.
    """

    def __init__(
        self, model: TargetModel, drafter: Drafter, sampler: Sampler, page_size: int, device: torch.device
    ) -> None:
        assert drafter.grows_unseen, "this drafter asks the host"
        self._model = model
        self._drafter = drafter
        self._sampler = sampler
        self._page_size = page_size
        self._device = device

    def takes(self, plan: StepPlan) -> bool:
        """Whether a step is one of prompts whose tokens need no look at the logits."""
        if not plan.early_tokens or any(
            segment.parents is not None or segment.num_rows - segment.first_sampled > 1 for segment in plan.segments
        ):
            return False
        return all(self._sampler.is_plain(end.sampled) for end in _ends(plan.segments))

    def finish(
        self,
        plan: StepPlan,
        hidden: Tensor,
        features: Sequence[Tensor],
        pages: Mapping[int, Sequence[int]],
        drafted: Callable[[], None],
        emit: Emit,
        step: CapturedStep | None = None,
    ) -> None:
        """Ends a step; see `LastStage.finish`."""
        ends = _ends(plan.segments)
        rows = upload([end.row for end in ends], torch.int64, self._device)
        ids = self._sample(ends, rows, hidden, step) if ends else None
        told = None if ids is None else _Landing.of(ids)
        columns = feature_columns(self._drafter.feature_layers, features, lambda: self._model.final_norm(hidden))
        drawn = rows if ids is None else ids.clamp(min=0)
        extend = partial(self._extend, plan.segments, pages) if step is None else step.extend
        outputs = extend(columns, _next(plan.segments), rows, drawn)
        drafted()
        outcomes = {segment.slot: SegmentOutcome(segment.slot, [], [], [], [], "") for segment in plan.segments}

        def tell(told: _Landing) -> None:
            for end, (token_id,) in zip(ends, told.rows(), strict=True):
                tokens = [SampledToken(token_id)] if token_id >= 0 else []
                error = "" if tokens else NO_FINITE_LOGIT
                outcomes[end.segment.slot] = SegmentOutcome(end.segment.slot, [], tokens, [], [], error)
            known = [outcome for outcome in outcomes.values() if outcome.tokens]
            if known:
                emit(StepTokens(plan.step, known))

        # Short prompts of small models are computed before their drafts are launched.
        if told is not None and told.has_arrived:
            tell(told)
            told = None
        grown = None
        growing = [index for index, end in enumerate(ends) if end.segment.grow]
        if growing and ids is not None:
            if len(growing) < len(ends):
                picked = upload(growing, torch.int64, self._device)
                rows, drawn = rows[picked], drawn[picked]
            last = gather_columns([outputs], rows)
            grown = _Landing.of(self._grow([ends[index] for index in growing], drawn, last, pages))
        if told is not None:
            tell(told)
        if grown is not None:
            for index, row in zip(growing, grown.rows(), strict=True):
                slot = ends[index].segment.slot
                if not outcomes[slot].error:
                    outcomes[slot] = outcomes[slot].with_tree(tree_of(row))
        emit(StepResult(plan.step, plan.microbatch, list(outcomes.values())))

    def _sample(self, ends: Sequence["_End"], rows: Tensor, hidden: Tensor, step: CapturedStep | None) -> Tensor:
        sampled = [end.sampled for end in ends]
        if step is None:
            return self._sampler.draw_ids(self._model.logits(self._model.final_norm(hidden[rows])), sampled)
        logits, most_likely = step.judge(rows)
        return self._sampler.draw_ids(logits, sampled, most_likely)

    def _extend(
        self,
        segments: Sequence[Segment],
        pages: Mapping[int, Sequence[int]],
        columns: Sequence[Tensor],
        next_tokens: Sequence[int],
        ends: Tensor,
        ids: Tensor,
    ) -> Tensor:
        """As `PromptGraphs.extend`, op by op."""
        behind = upload(next_tokens, torch.int64, self._device)
        behind.index_copy_(0, ends, ids)
        batch = build_attention_batch(
            [SegmentRows(segment.start, segment.num_rows, pages[segment.slot]) for segment in segments],
            self._page_size,
            self._device,
        )
        return self._drafter.extend(torch.cat(list(columns), dim=-1) if len(columns) > 1 else columns[0], behind, batch)

    def _grow(
        self, ends: Sequence["_End"], bonus: Tensor, outputs: Tensor, pages: Mapping[int, Sequence[int]]
    ) -> Tensor:
        """[trees, 1 + 2 V] int64; see `Drafter.grow_unseen`."""
        return self._drafter.grow_unseen(
            outputs, bonus, [end.length for end in ends], [pages[end.segment.slot] for end in ends]
        )


@dataclass(frozen=True, slots=True)
class _End:
    """The last row of a prompt.

    Attributes:
        row: of the step.
        length: of the prompt, which is the position of the token drawn there.
    """

    segment: Segment
    row: int
    length: int

    @property
    def sampled(self) -> SampledRow:
        """As the sampler names it."""
        return SampledRow(self.segment.slot, self.length)


def _ends(segments: Sequence[Segment]) -> list[_End]:
    ends, rows = [], 0
    for segment in segments:
        rows += segment.num_rows
        if segment.first_sampled < segment.num_rows:
            ends.append(_End(segment, rows - 1, segment.start + segment.num_rows))
    return ends


def _next(segments: Sequence[Segment]) -> list[int]:
    """The token behind every row, as far as the host knows them."""
    return [token for segment in segments for token in (*segment.tokens[1:], max(0, segment.next_token))]


@dataclass(frozen=True, slots=True)
class _Landing:
    """Values on their way to the host."""

    values: Tensor
    arrived: torch.cuda.Event | None

    @classmethod
    def of(cls, values: Tensor) -> "_Landing":
        """Sends [n] or [n, columns] values on their way, behind what the stream has been given."""
        if not values.is_cuda:
            return cls(values, None)
        return cls(*send_to_host(values, sleeps=True))

    @property
    def has_arrived(self) -> bool:
        """Reading them would wait for nothing."""
        return self.arrived is None or has_passed(self.arrived)

    def rows(self) -> list[list[int]]:
        """The values, once they have arrived."""
        if self.arrived is not None:
            self.arrived.synchronize()
        listed: list[list[int]] = self.values.view(self.values.shape[0], -1).tolist()
        return listed
