"""How much of the held-out prompts was in the training data: shared n-grams of token ids."""

from collections.abc import Sequence

import torch
from torch import Tensor

_BASE = 1_000_003


def ngram_hashes(tokens: Tensor, n: int) -> Tensor:
    """A 64-bit hash of every n-gram within each row: [B, T] -> [B, T - n + 1] (empty when T < n)."""
    count = tokens.shape[1] - n + 1
    if count < 1:
        return torch.empty(tokens.shape[0], 0, dtype=torch.int64, device=tokens.device)
    hashes = torch.zeros(tokens.shape[0], count, dtype=torch.int64, device=tokens.device)
    for place in range(n):
        hashes = hashes * _BASE + tokens[:, place : place + count] + 1
    return hashes


def shared_ngrams(train: Tensor, prompts: Sequence[Sequence[int]], n: int) -> list[float]:
    """For each prompt the share of its distinct n-grams that occur anywhere in the training rows [B, T]."""
    known = torch.unique(torch.cat([torch.unique(ngram_hashes(rows.long(), n)) for rows in torch.split(train, 1024)]))
    shares = []
    for prompt in prompts:
        wanted = torch.unique(ngram_hashes(torch.tensor([list(prompt)], device=train.device), n))
        shares.append(float(torch.isin(wanted, known).float().mean()) if len(wanted) else 0.0)
    return shares
