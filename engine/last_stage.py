"""What only the last stage does with a step: sample, walk the trees, extend the drafter, grow the next trees."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graftline.engine.draft_module import feature_columns
from graftline.engine.drafter import Drafter, GrowthRoot
from graftline.engine.models.target_model import TargetModel
from graftline.engine.plan import (
    SampledToken,
    Segment,
    SegmentOutcome,
    SlotOpening,
    StepPlan,
    StepResult,
    StepTokens,
)
from graftline.engine.prompt_end import CapturedStep, PromptEnd
from graftline.engine.request import DraftTree
from graftline.engine.sampler import SampledRow, Sampler
from graftline.engine.verify import NO_FINITE_LOGIT, accepted_path
from graftline.kernels.attention_batch import SegmentRows, build_attention_batch
from graftline.kernels.draft_inputs import gather_columns
from graftline.kernels.upload import upload


@dataclass(frozen=True, slots=True)
class _Verdict:
    """A segment's sampled rows, judged.

    Attributes:
        first_row: where the segment's rows start in the step.
        final_rows: rows of the step whose target features are final, in order of position.
        next_tokens: the token behind each of them.
    """

    segment: Segment
    outcome: SegmentOutcome
    first_row: int
    final_rows: list[int]
    next_tokens: list[int]


class LastStage:
    """Head, sampler and drafter of a pipeline.

    Args:
        drafter: None turns speculation off.
        launches_early: prompts end as `PromptEnd` ends them, where that is possible.
    """

    def __init__(
        self,
        model: TargetModel,
        drafter: Drafter | None,
        page_size: int,
        device: torch.device,
        launches_early: bool = False,
    ) -> None:
        self._model = model
        self._drafter = drafter
        self._page_size = page_size
        self._device = device
        self._sampler = Sampler(device)
        self._prompt_end: PromptEnd | None = None
        if launches_early and drafter is not None and drafter.grows_unseen:
            self._prompt_end = PromptEnd(model, drafter, self._sampler, page_size, device)

    def open(self, opening: SlotOpening) -> None:
        """A request takes a slot."""
        self._sampler.open(opening)

    def forget(self, slot: int) -> None:
        """Nobody has the slot any more."""
        self._sampler.forget(slot)

    def finish(
        self,
        plan: StepPlan,
        hidden: Tensor,
        features: Sequence[Tensor],
        pages: Mapping[int, Sequence[int]],
        drafted: Callable[[], None],
        emit: Callable[[StepTokens | StepResult], None],
        step: CapturedStep | None = None,
    ) -> None:
        """Ends a step.

        Args:
            hidden: [rows, hidden] residual stream behind the last layer.
            features: [rows, hidden] each: the layers that the drafter wants, ascending, each once.
            pages: page table of every slot.
            drafted: called once all that is written to drafter pages has been launched.
            step: what was captured with it.
        """
        if self._prompt_end is not None and self._prompt_end.takes(plan):
            self._prompt_end.finish(plan, hidden, features, pages, drafted, emit, step)
            return
        verdicts = self._judge(plan.segments, self._sample(plan.segments, hidden))
        if plan.early_tokens and any(verdict.outcome.tokens for verdict in verdicts):
            emit(StepTokens(plan.step, [verdict.outcome for verdict in verdicts if verdict.outcome.tokens]))
        outcomes = [verdict.outcome for verdict in verdicts]
        if self._drafter is not None:
            outcomes = self._draft(self._drafter, verdicts, hidden, features, pages)
        drafted()
        emit(StepResult(plan.step, plan.microbatch, outcomes))

    def _sample(self, segments: Sequence[Segment], hidden: Tensor) -> list[SampledToken]:
        """A token for every sampled row of the step, in row order."""
        rows: list[int] = []
        sampled: list[SampledRow] = []
        first_row = 0
        for segment in segments:
            depths = _depths(segment)
            for row in range(segment.first_sampled, segment.num_rows):
                rows.append(first_row + row)
                sampled.append(SampledRow(segment.slot, segment.start + depths[row] + 1))
            first_row += segment.num_rows
        if not rows:
            return []
        picked = hidden if len(rows) == hidden.shape[0] else hidden[rows]
        return self._sampler.draw(self._model.logits(self._model.final_norm(picked)), sampled)

    def _judge(self, segments: Sequence[Segment], sampled: Sequence[SampledToken]) -> list[_Verdict]:
        verdicts = []
        first_row, first_sample = 0, 0
        for segment in segments:
            count = segment.num_rows - segment.first_sampled
            samples = sampled[first_sample : first_sample + count]
            verdicts.append(_judge_segment(segment, first_row, samples))
            first_row += segment.num_rows
            first_sample += count
        return verdicts

    def _draft(
        self,
        drafter: Drafter,
        verdicts: Sequence[_Verdict],
        hidden: Tensor,
        features: Sequence[Tensor],
        pages: Mapping[int, Sequence[int]],
    ) -> list[SegmentOutcome]:
        good = [verdict for verdict in verdicts if not verdict.outcome.error]
        if not good:
            return [verdict.outcome for verdict in verdicts]
        rows = [row for verdict in good for row in verdict.final_rows]
        next_tokens = [token for verdict in good for token in verdict.next_tokens]
        outputs = drafter.extend(
            self._drafter_input(drafter, hidden, features, rows),
            upload(next_tokens, torch.int64, self._device),
            build_attention_batch(
                [
                    SegmentRows(verdict.segment.start, len(verdict.final_rows), pages[verdict.segment.slot])
                    for verdict in good
                ],
                self._page_size,
                self._device,
            ),
        )
        trees = self._grow(drafter, good, outputs, pages)
        return [
            verdict.outcome.with_tree(trees[verdict.segment.slot]) if verdict.segment.slot in trees else verdict.outcome
            for verdict in verdicts
        ]

    def _drafter_input(
        self, drafter: Drafter, hidden: Tensor, features: Sequence[Tensor], rows: Sequence[int]
    ) -> Tensor:
        columns = feature_columns(drafter.feature_layers, features, lambda: self._model.final_norm(hidden))
        return gather_columns(columns, upload(rows, torch.int64, self._device))

    def _grow(
        self, drafter: Drafter, good: Sequence[_Verdict], outputs: Tensor, pages: Mapping[int, Sequence[int]]
    ) -> dict[int, DraftTree]:
        last_rows: list[int] = []
        roots: list[GrowthRoot] = []
        slots: list[int] = []
        end = 0
        for verdict in good:
            end += len(verdict.final_rows)
            if verdict.segment.grow:
                slot = verdict.segment.slot
                last_rows.append(end - 1)
                slots.append(slot)
                start = verdict.segment.start + len(verdict.final_rows)
                roots.append(GrowthRoot(verdict.next_tokens[-1], start, pages[slot]))
        if not roots:
            return {}
        return dict(zip(slots, drafter.grow(outputs[last_rows], roots), strict=True))


def _judge_segment(segment: Segment, first_row: int, samples: Sequence[SampledToken]) -> _Verdict:
    ids = [sample.token_id for sample in samples]
    if segment.parents is None:
        accepted: list[int] = []
        tokens = list(samples)
        local_rows = list(range(segment.num_rows))
        next_tokens = [*segment.tokens[1:], ids[0] if ids else segment.next_token]
    else:
        accepted = accepted_path(segment.tokens, segment.parents, ids)
        tokens = [samples[node] for node in accepted]
        local_rows = accepted
        next_tokens = [ids[node] for node in accepted]
    error = NO_FINITE_LOGIT if any(token.token_id < 0 for token in tokens) else ""
    outcome = SegmentOutcome(segment.slot, accepted, [] if error else tokens, [], [], error)
    return _Verdict(segment, outcome, first_row, [first_row + row for row in local_rows], next_tokens)


def _depths(segment: Segment) -> Sequence[int]:
    if segment.parents is None:
        return range(segment.num_rows)
    return DraftTree(tuple(segment.tokens), tuple(segment.parents)).depths()
