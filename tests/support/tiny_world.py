"""Tiny models and draft heads on disk, and what the plain one-process model answers, each made once."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from random import Random

import torch

from graftline.engine.draft_head.config import DraftHeadKind
from graftline.engine.draft_head.random import Drafts, silence_layers, write_tiny_head
from graftline.engine.models.checkpoint import open_checkpoint
from graftline.engine.models.load import load_model
from graftline.engine.models.random import write_tiny_model
from graftline.engine.models.reference import generate
from graftline.engine.models.target_model import TargetModel
from graftline.engine.request import Sampling

VOCAB_SIZE = 259
EOS = VOCAB_SIZE - 1


@dataclass
class PlainModel:
    """A model run the plain way; the specification of everything else.

    Attributes:
        path: its directory.
    """

    path: Path
    dtype: torch.dtype = torch.float32
    _known: dict[tuple[object, ...], list[int]] = field(default_factory=dict)

    @cached_property
    def model(self) -> TargetModel:
        checkpoint = open_checkpoint(self.path)
        return load_model(checkpoint, range(checkpoint.config.num_layers), self.dtype)

    def answer(
        self, token_ids: Sequence[int], max_tokens: int, sampling: Sampling | None = None, eos_ids: Sequence[int] = ()
    ) -> list[int]:
        """Output ids; cut behind the first of `eos_ids`."""
        key = (tuple(token_ids), max_tokens, repr(sampling))
        if key not in self._known:
            self._known[key] = self._generate(token_ids, max_tokens, sampling or Sampling())
        ids = self._known[key]
        ends = [index for index, token_id in enumerate(ids) if token_id in eos_ids]
        return ids[: ends[0] + 1] if ends else ids

    def _generate(self, token_ids: Sequence[int], max_tokens: int, sampling: Sampling) -> list[int]:
        with torch.inference_mode():
            return generate(
                self.model,
                token_ids,
                max_tokens,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                seed=sampling.seed,
            )


class TinyWorld:
    """What tests share. Everything is written on first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def plain(self) -> PlainModel:
        """Four layers whose output depends on the whole context."""
        return PlainModel(write_tiny_model(self._folder / "plain"))

    @cached_property
    def plain_bf16(self) -> PlainModel:
        """The same weights in bfloat16."""
        return PlainModel(self.plain.path, torch.bfloat16)

    @cached_property
    def markov(self) -> PlainModel:
        """Four layers that add nothing: the next token depends on the last one alone."""
        path = write_tiny_model(self._folder / "markov")
        silence_layers(path)
        return PlainModel(path)

    @cached_property
    def short(self) -> PlainModel:
        """A context of 64 tokens."""
        return PlainModel(write_tiny_model(self._folder / "short", context=64))

    @cached_property
    def eagle(self) -> Path:
        return write_tiny_head(self._folder / "eagle", self.plain.path)

    @cached_property
    def eagle3(self) -> Path:
        """Three features, and a reduced vocabulary of 64."""
        return write_tiny_head(self._folder / "eagle3", self.plain.path, kind=DraftHeadKind.EAGLE3, draft_vocab=64)

    @cached_property
    def agrees(self) -> Path:
        """Drafts what `markov` says."""
        return write_tiny_head(self._folder / "agrees", self.markov.path, drafts=Drafts.AGREE)

    @cached_property
    def disagrees(self) -> Path:
        """Never drafts what `markov` says."""
        return write_tiny_head(self._folder / "disagrees", self.markov.path, drafts=Drafts.DISAGREE)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random bytes as token ids."""
    draw = Random(f"{length}/{seed}")
    return [draw.randrange(256) for _ in range(length)]
