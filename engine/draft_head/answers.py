"""Answers of the target to given prompts, drawn exactly as serving draws them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from graftline.engine.draft_head.acceptance import Answer
from graftline.engine.draft_head.step_graphs import StepGraphs
from graftline.engine.draft_head.target import TargetRunner
from graftline.kernels.sample import build_sampling_rows, sample


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids up to where an answer begins."""

    token_ids: tuple[int, ...]
    kind: str


def write_answers(
    runner: TargetRunner,
    prompts: Sequence[Prompt],
    end_ids: Sequence[int],
    *,
    temperature: float,
    seed: int,
    max_new_tokens: int,
    batch_rows: int,
) -> list[Answer]:
    """One answer a prompt, in their order, up to an id of `end_ids` or by length; prompt i draws with `seed + i`."""
    answers: dict[int, Answer] = {}
    by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index].token_ids))
    for start in range(0, len(by_length), batch_rows):
        numbers = by_length[start : start + batch_rows]
        rows = _write_batch(
            runner, [prompts[n] for n in numbers], [seed + n for n in numbers], end_ids, temperature, max_new_tokens
        )
        answers.update(zip(numbers, rows, strict=True))
    return [answers[index] for index in range(len(prompts))]


def _write_batch(
    runner: TargetRunner,
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
    end_ids: Sequence[int],
    temperature: float,
    max_new_tokens: int,
) -> list[Answer]:
    target, count = runner.target, len(prompts)
    lengths = torch.tensor([len(prompt.token_ids) for prompt in prompts])
    shared, longest = int(lengths.min()), int(lengths.max())
    length = min(longest + max_new_tokens, target.shape.context_length)
    tokens = torch.zeros(count, length, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt.token_ids)] = torch.tensor(prompt.token_ids)
    tokens, lengths = tokens.to(target.device), lengths.to(target.device)
    ends = torch.tensor(list(end_ids), device=target.device)
    params = build_sampling_rows([temperature] * count, [0] * count, [1.0] * count, [0.0] * count, seeds, target.device)
    steps = StepGraphs(runner, count, length, captured=False)
    hidden = steps.fill(tokens[:, :shared], slice(0, count))
    stops = torch.clamp(lengths + max_new_tokens, max=length)
    for position in range(shared, length):
        positions = torch.full((count,), position, device=target.device)
        drawn = sample(functional.linear(hidden, target.lm_head).float(), params, positions)
        given = position < lengths
        tokens[:, position] = torch.where(given, tokens[:, position], drawn)
        ended = ~given & (tokens[:, position, None] == ends).any(1)
        stops = torch.where(ended, torch.clamp(stops, max=position + 1), stops)
        if position + 1 >= length or bool((stops <= position + 1).all()):
            break
        hidden = steps.step(tokens[:, position], position)
    return [_answer(tokens[row], int(lengths[row]), int(stops[row]), prompt.kind) for row, prompt in enumerate(prompts)]


def _answer(tokens: Tensor, num_prompt_tokens: int, stop: int, kind: str) -> Answer:
    return Answer(tokens[:stop].clone(), num_prompt_tokens, kind)
