"""`draft-head eval`: how long the accepted runs of a head are on held-out prompts."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graftline.engine.draft_head.answers import Prompt, write_answers
from graftline.engine.draft_head.dialogs import DialogWriter
from graftline.engine.draft_head.measure import (
    CHAIN_STEPS,
    TREE_SHAPES,
    Head,
    KindFigures,
    answer_states,
    measure,
)
from graftline.engine.draft_head.target import Target, TargetRunner
from graftline.engine.draft_head.weights import head_weights, kept_ids, read_draft_head
from graftline.engine.models.checkpoint import open_checkpoint
from graftline.engine.tree_shape import TreeShape
from graftline.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """What to measure.

    Attributes:
        prompts: JSON lines with `kind` and `messages`.
        limit: prompts of each kind, 0 for all.
        temperatures: each gets a set of figures; 0 is greedy, others draw with `seed` as serving does.
        shapes: trees, next to chains of 1 to 5 steps.
    """

    model: Path
    head: Path
    prompts: Path
    kinds: tuple[str, ...] = ()
    limit: int = 0
    max_new_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0, 1.0)
    shapes: tuple[TreeShape, ...] = TREE_SHAPES
    seed: int = 0
    device: str = "cpu"
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class TemperatureFigures:
    """Figures of every kind at one temperature."""

    temperature: float
    by_kind: Mapping[str, KindFigures]

    def to_json(self) -> dict[str, Any]:
        """Plain values: accept length and rounds by kind and shape, acceptance by depth."""
        return {
            "temperature": self.temperature,
            "kinds": {
                kind: {
                    "accept_length": {label: rounds.accept_length for label, rounds in figures.by_shape.items()},
                    "rounds": {label: rounds.num_rounds for label, rounds in figures.by_shape.items()},
                    "depth_acceptance": list(figures.depth_acceptance),
                }
                for kind, figures in self.by_kind.items()
            },
        }


def evaluate(options: EvalOptions, report: Callable[[str], None] = lambda _: None) -> list[TemperatureFigures]:
    """Measure a head; `report` hears in words what is going on.

    Raises:
        InvalidRequestError: a file that cannot be used, or a head made for another kind of target.
    """
    checkpoint = open_checkpoint(options.model)
    config, tensors = read_draft_head(options.head)
    if (config.target_hidden_size, config.vocab_size) != (checkpoint.config.hidden_size, checkpoint.config.vocab_size):
        raise InvalidRequestError(
            "draft_head",
            f"made for hidden size {config.target_hidden_size} and {config.vocab_size} tokens, the model has "
            f"{checkpoint.config.hidden_size} and {checkpoint.config.vocab_size}",
        )
    writer = DialogWriter(checkpoint.card)
    prompts = list(read_prompts(options.prompts, writer, options.kinds, options.limit))
    report(f"{len(prompts)} prompts; reading the model")
    target = Target.load(checkpoint, torch.device(options.device), options.dtype)
    runner = TargetRunner(target, compiled=False)
    kept = kept_ids(config, tensors).to(target.device)
    embed = tensors["embed_tokens.weight"].to(target.embed) if "embed_tokens.weight" in tensors else target.embed
    rows = tensors["lm_head.weight"].to(target.embed) if "lm_head.weight" in tensors else target.lm_head[kept]
    head = Head(config, head_weights(config, tensors, target.embed), embed, rows, kept)
    layers = config.features_of(target.shape.num_layers)
    results = []
    for temperature in options.temperatures:
        report(f"answers at temperature {temperature:g}")
        answers = write_answers(
            runner,
            prompts,
            writer.format.end_ids,
            temperature=temperature,
            seed=options.seed,
            max_new_tokens=options.max_new_tokens,
            batch_rows=64 if target.device.type == "cuda" else 8,
        )
        report(f"drafts at temperature {temperature:g}")
        states = answer_states(runner, answers, layers)
        results.append(TemperatureFigures(temperature, measure(head, states, options.shapes, CHAIN_STEPS)))
    return results


def read_prompts(file: Path, writer: DialogWriter, kinds: Sequence[str], limit: int) -> Iterator[Prompt]:
    """Prompts of a JSON lines file, at most `limit` of each kind (0: all).

    Raises:
        InvalidRequestError: the file cannot be read, a line is malformed, or nothing is left.
    """
    taken: dict[str, int] = {}
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        items = [json.loads(line) for line in lines if line.strip()]
        chosen = [(item["kind"], item["messages"]) for item in items if not kinds or item["kind"] in kinds]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequestError("prompts", f"{file} cannot be used: {error!r}") from error
    if not chosen:
        raise InvalidRequestError("prompts", f"{file} holds no prompts of the kinds {', '.join(kinds)}")
    for kind, messages in chosen:
        taken[kind] = taken.get(kind, 0) + 1
        if not limit or taken[kind] <= limit:
            yield Prompt(tuple(writer.prompt_ids(messages)), kind)
