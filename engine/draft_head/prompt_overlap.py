"""Whether a training run has seen held-out prompts: what its dialogs share with what users ask in them."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from graftline.engine.draft_head.dialogs import DialogWriter
from graftline.engine.draft_head.overlap import shared_ngrams
from graftline.engine.models.checkpoint import open_checkpoint
from graftline.errors import InvalidRequestError


def prompt_overlap(work: Path, model: Path, prompts: Path, n: int) -> dict[str, list[float]]:
    """By kind, each prompt's share of n-grams of its last message that occur in the run's dialogs.

    The template's own words are left out: they are in every dialog. A message shorter than n tokens has a share of 0.

    Raises:
        InvalidRequestError: the folder holds no dialogs, or the prompts cannot be read.
    """
    files = sorted(work.glob("dialogs-*.safetensors"))
    if not files:
        raise InvalidRequestError("work", f"{work} holds no dialogs")
    writer = DialogWriter(open_checkpoint(model).card)
    try:
        items = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
        asked = [(str(item["kind"]), writer.encode(item["messages"][-1]["content"])) for item in items]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise InvalidRequestError("prompts", f"{prompts} cannot be used: {error!r}") from error
    tokens = torch.cat([load_file(file)["tokens"] for file in files])
    by_kind: dict[str, list[float]] = {}
    for (kind, _), share in zip(asked, shared_ngrams(tokens, [ids for _, ids in asked], n), strict=True):
        by_kind.setdefault(kind, []).append(share)
    return by_kind
