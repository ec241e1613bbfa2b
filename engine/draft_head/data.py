"""Self-generation: the target finishes user turns that were only begun, and answers them, again and again.

All rows of a batch stand at the same position, so one decode step needs neither padding nor masks; a row that
ends an answer goes on with the next user turn until its length is used up.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from graftline.engine.draft_head.dialogs import DialogFormat
from graftline.engine.draft_head.step_graphs import StepGraphs
from graftline.engine.draft_head.target import TargetRunner, fixed_shape_compiler

_USER, _ANSWER, _TO_ANSWER, _TO_USER = range(4)
_FILL_ROWS = 256


@dataclass(frozen=True, slots=True)
class WritingOptions:
    """How the target writes.

    Attributes:
        user_temperature: of user turns.
        min_p: tokens less likely than this share of the likeliest are never drawn (where the temperature is not 0).
        max_user_len, max_answer_len: tokens after which a turn is ended by force.
    """

    user_temperature: float = 1.0
    min_p: float = 0.02
    max_user_len: int = 96
    max_answer_len: int = 320


@dataclass(frozen=True, slots=True)
class Dialogs:
    """Rows of dialogs: token ids [B, T] int32, and which tokens the target wrote as answers [B, T] bool."""

    tokens: Tensor
    answers: Tensor


@dataclass(frozen=True, slots=True)
class _Turns:
    """Where each row stands: [B] int64 each. `place` counts tokens within the turn or the forced sequence."""

    mode: Tensor
    place: Tensor


class DialogGenerator:
    """Writes dialogs with one target. Equal seeds on equal hardware give equal dialogs."""

    def __init__(
        self, runner: TargetRunner, dialog_format: DialogFormat, options: WritingOptions, *, compiled: bool
    ) -> None:
        self._runner = runner
        self._options = options
        self._compiled = compiled
        self._steps: StepGraphs | None = None
        device = runner.target.device
        self._end_ids = torch.tensor(dialog_format.end_ids, device=device)
        self._num_to_answer = len(dialog_format.user_to_answer)
        self._num_to_user = len(dialog_format.answer_to_user)
        width = max(self._num_to_answer, self._num_to_user)
        forced = torch.zeros(4, width, dtype=torch.int64)
        forced[_TO_ANSWER, : self._num_to_answer] = torch.tensor(dialog_format.user_to_answer)
        forced[_TO_USER, : self._num_to_user] = torch.tensor(dialog_format.answer_to_user)
        self._forced = forced.to(device)
        wrap = fixed_shape_compiler(compiled)
        self._draw = wrap(draw)
        self._advance_turns = wrap(self._advance)

    def write(
        self, prefixes: Sequence[Sequence[int]], length: int, answer_temperatures: Tensor, *, answering: bool = False
    ) -> Dialogs:
        """Write one row of `length` tokens after each prefix, drawing from torch's global generator.

        Args:
            prefixes: token ids, each shorter than `length` and ending inside a user turn (or, when `answering`,
                where an answer begins).
            answer_temperatures: [B] float; 0 is greedy.
        """
        target = self._runner.target
        device, batch = target.device, len(prefixes)
        lengths = torch.tensor([len(prefix) for prefix in prefixes])
        shared, longest = int(lengths.min()), int(lengths.max())
        assert 0 < shared <= longest < length, f"prefixes of {shared}..{longest} tokens for rows of {length}"
        tokens = torch.zeros(batch, length, dtype=torch.int64)
        for row, prefix in enumerate(prefixes):
            tokens[row, : len(prefix)] = torch.tensor(prefix)
        tokens, lengths = tokens.to(device), lengths.to(device)
        answers = torch.zeros(batch, length, dtype=torch.bool, device=device)
        temperatures = answer_temperatures.to(device=device, dtype=torch.float32)
        steps = self._steps_for(batch, length)
        hidden = torch.cat(
            [
                steps.fill(tokens[start : start + _FILL_ROWS, :shared], slice(start, start + _FILL_ROWS))
                for start in range(0, batch, _FILL_ROWS)
            ]
        )
        start_mode = torch.full((batch,), _ANSWER if answering else _USER, device=device)
        turns = _Turns(start_mode, torch.zeros_like(start_mode))
        for position in range(shared, length):
            temperature = torch.where(turns.mode == _ANSWER, temperatures, self._options.user_temperature)
            drawn = self._draw(functional.linear(hidden, target.lm_head), temperature, self._options.min_p)
            token, mode, place, answered = self._advance_turns(drawn, turns.mode, turns.place)
            given = position < lengths
            token = torch.where(given, tokens[:, position], token)
            turns = _Turns(torch.where(given, turns.mode, mode), torch.where(given, turns.place, place))
            tokens[:, position] = token
            answers[:, position] = answered & ~given
            if position + 1 < length:
                hidden = steps.step(token, position)
        return Dialogs(tokens.to(torch.int32), answers)

    def _steps_for(self, num_rows: int, length: int) -> StepGraphs:
        """The steps of the last batch, if it had that size; its captured graphs are what later batches live on."""
        if self._steps is None or (self._steps.num_rows, self._steps.length) != (num_rows, length):
            self._steps = None
            self._steps = StepGraphs(self._runner, num_rows, length, captured=self._compiled)
        return self._steps

    def _advance(self, drawn: Tensor, mode: Tensor, place: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The token each row gets, its next mode and place, and whether the token belongs to an answer."""
        options = self._options
        free = mode <= _ANSWER
        answering = mode == _ANSWER
        too_long = torch.where(answering, place >= options.max_answer_len, place >= options.max_user_len)
        ended = (drawn[:, None] == self._end_ids).any(1) | (drawn == self._forced[_TO_ANSWER, 0]) & ~answering
        ending = free & (ended | too_long)
        next_forced = torch.where(answering, _TO_USER, _TO_ANSWER)
        mode_now = torch.where(ending, next_forced, mode)
        place_now = torch.where(ending, 0, place)
        forced = self._forced[mode_now, place_now.clamp(max=self._forced.shape[1] - 1)]
        # An answer may end by another id than the template's; what the model drew stands.
        keep = free & ~(ending & (too_long | ~answering))
        token = torch.where(keep, drawn, forced)
        place_next = place_now + 1
        done_to_answer = (mode_now == _TO_ANSWER) & (place_next >= self._num_to_answer)
        done_to_user = (mode_now == _TO_USER) & (place_next >= self._num_to_user)
        mode_next = torch.where(done_to_answer, _ANSWER, torch.where(done_to_user, _USER, mode_now))
        place_next = torch.where(done_to_answer | done_to_user, 0, place_next)
        return token, mode_next, place_next, answering & ~(ending & too_long & ~ended)


def draw(logits: Tensor, temperature: Tensor, min_p: float) -> Tensor:
    """Draw one token a row; rows of temperature 0 take the likeliest.

    Args:
        logits: [B, vocab].
        temperature: [B] float32.

    Returns:
        [B] int64.
    """
    greedy = (temperature <= 0)[:, None]
    scaled = logits.float() / torch.where(greedy, 1.0, temperature[:, None])
    floor = scaled.amax(-1, keepdim=True) + math.log(min_p)
    uniform = torch.rand_like(scaled).clamp_min(1e-20)
    noise = -torch.log(-torch.log(uniform))
    noisy = torch.where(scaled >= floor, scaled + noise, float("-inf"))
    return torch.where(greedy, scaled, noisy).argmax(-1)
