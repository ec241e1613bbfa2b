"""Draws the tokens of a step's rows on the last stage, each with its own request's parameters."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graftline.engine.plan import SampledToken, SlotOpening
from graftline.kernels.sample import SamplingRows, argmax, build_sampling_rows, sample, token_logprobs
from graftline.kernels.upload import upload


@dataclass(frozen=True, slots=True)
class SampledRow:
    """Where a row stands: whose it is, and the absolute position of the token drawn there."""

    slot: int
    position: int


class Sampler:
    """Knows the sampling parameters of every slot; a pure function of them, the logits and the position."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._openings: dict[int, SlotOpening] = {}

    def open(self, opening: SlotOpening) -> None:
        """A request takes a slot; whoever had it before is gone."""
        self._openings[opening.slot] = opening

    def forget(self, slot: int) -> None:
        """Nobody has the slot any more."""
        self._openings.pop(slot, None)

    def is_plain(self, row: SampledRow) -> bool:
        """Whether a row's token follows from its logits and the sampling parameters, and nothing else is wanted."""
        opening = self._openings[row.slot]
        is_free = row.position >= opening.min_ending_position or not opening.ending_ids
        return opening.logprobs < 0 and not opening.logit_bias and is_free

    def draw_ids(self, logits: Tensor, rows: Sequence[SampledRow], most_likely: Tensor | None = None) -> Tensor:
        """Tokens of plain rows, without a wait for the device: [rows] int64, -1 where no logit was finite.

        Args:
            most_likely: [rows] ids of the largest logits, if they are known.
        """
        openings = [self._openings[row.slot] for row in rows]
        if all(opening.temperature == 0 for opening in openings):
            return argmax(logits) if most_likely is None else most_likely
        positions = upload([row.position for row in rows], torch.int64, self._device)
        return sample(logits, _sampling_rows(openings, self._device), positions)

    def draw(self, logits: Tensor, rows: Sequence[SampledRow]) -> list[SampledToken]:
        """One token per row.

        Args:
            logits: [rows, vocab] float32, changed in place.
            rows: whose rows they are.

        Returns:
            Tokens in row order; token id -1 where no logit was finite.
        """
        openings = [self._openings[row.slot] for row in rows]
        wanted = [index for index, opening in enumerate(openings) if opening.logprobs >= 0]
        raw = logits[wanted] if wanted else None
        for index, (row, opening) in enumerate(zip(rows, openings, strict=True)):
            _constrain(logits[index], row.position, opening)
        positions = torch.tensor([row.position for row in rows], dtype=torch.int64, device=self._device)
        ids: list[int] = sample(logits, _sampling_rows(openings, self._device), positions).tolist()
        tokens = [SampledToken(token_id) for token_id in ids]
        if raw is not None:
            for index, token in zip(wanted, _with_logprobs(raw, wanted, ids, openings), strict=True):
                tokens[index] = token
        return tokens


def _constrain(logits: Tensor, position: int, opening: SlotOpening) -> None:
    for token_id, bias in opening.logit_bias.items():
        logits[token_id] += bias
    if position < opening.min_ending_position and opening.ending_ids:
        logits[opening.ending_ids] = -torch.inf


def _sampling_rows(openings: Sequence[SlotOpening], device: torch.device) -> SamplingRows:
    return build_sampling_rows(
        [opening.temperature for opening in openings],
        [opening.top_k for opening in openings],
        [opening.top_p for opening in openings],
        [opening.min_p for opening in openings],
        [opening.seed for opening in openings],
        device,
    )


def _with_logprobs(
    raw: Tensor, wanted: Sequence[int], ids: Sequence[int], openings: Sequence[SlotOpening]
) -> list[SampledToken]:
    most = max(openings[index].logprobs for index in wanted)
    chosen = torch.tensor([max(ids[index], 0) for index in wanted], dtype=torch.int64, device=raw.device)
    logprobs, top_values, top_ids = token_logprobs(raw, chosen, most)
    tokens = []
    for row, index in enumerate(wanted):
        count = openings[index].logprobs
        best = list(zip(top_ids[row, :count].tolist(), top_values[row, :count].tolist(), strict=True))
        tokens.append(SampledToken(ids[index], float(logprobs[row]), best))
    return tokens
