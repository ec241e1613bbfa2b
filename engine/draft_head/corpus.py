"""Dialogs ready for training: the draft vocabulary they call for, and the order of batches."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from graftline.engine.draft_head.data import Dialogs


def draft_vocabulary(dialogs: Dialogs, vocab_size: int, draft_vocab_size: int, always: Sequence[int]) -> Tensor:
    """The target ids a reduced draft vocabulary keeps, sorted [V] int64: the most frequent in answers, then anywhere.

    Args:
        always: ids kept in any case.
    """
    tokens = dialogs.tokens.long()
    counts = torch.bincount(tokens.flatten(), minlength=vocab_size).double() * 0.05
    counts += torch.bincount(tokens[dialogs.answers], minlength=vocab_size)
    counts[list(always)] = float("inf")
    return counts.sort(descending=True, stable=True).indices[:draft_vocab_size].sort().values


def coverage(dialogs: Dialogs, kept: Tensor, vocab_size: int) -> float:
    """Share of answer tokens that are in a draft vocabulary."""
    inside = torch.zeros(vocab_size, dtype=torch.bool, device=kept.device)
    inside[kept] = True
    return float(inside[dialogs.tokens[dialogs.answers].long()].float().mean())


def batches(num_rows: int, batch_rows: int, seed: int, first: int) -> Iterator[Tensor]:
    """Endless batches of row numbers, every row once an epoch in a seeded order, beginning with batch `first`."""
    per_epoch = num_rows // batch_rows
    assert per_epoch > 0, f"{num_rows} rows do not fill a batch of {batch_rows}"
    number = first
    while True:
        epoch, place = divmod(number, per_epoch)
        order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed * 100_003 + epoch))
        for at in range(place, per_epoch):
            yield order[at * batch_rows : (at + 1) * batch_rows]
        number = (epoch + 1) * per_epoch
