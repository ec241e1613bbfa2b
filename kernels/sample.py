"""Draws tokens: a pure function of (logits, sampling parameters, seed, position), equal on every device.

Order of the steps, that of Hugging Face and vLLM: temperature, top-k, top-p, min-p, then the argmax of
(logit - max logit) / temperature + Gumbel noise over what is left. Logit bias and forbidden ids come before, elsewhere.
"""

from collections.abc import Sequence
from ctypes import CDLL
from dataclasses import dataclass

import torch
from torch import Tensor

from graftline.kernels.checks import check_rows
from graftline.kernels.native_library import native_library, num_threads
from graftline.kernels.philox import gumbel, random_words
from graftline.kernels.upload import upload

_LARGEST_INVERSE_TEMPERATURE = 3e38


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters of every row, all on one device.

    Attributes:
        temperature: [rows] float32; 0 is greedy.
        top_k: [rows] int32; 0 is no limit.
        top_p: [rows] float32 in (0, 1]; 1 is no limit.
        min_p: [rows] float32 in [0, 1]; 0 is no limit.
        seed: [rows] int64, the 64 bits of the seed.
        is_greedy: every temperature is 0 (known on the host, saves looking).
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    is_greedy: bool

    def gather(self, index: Tensor) -> "SamplingRows":
        """Rows `index` [n] int64, in that order, repeats allowed: one parameter set for all nodes of a tree."""
        return SamplingRows(
            self.temperature[index],
            self.top_k[index],
            self.top_p[index],
            self.min_p[index],
            self.seed[index],
            self.is_greedy,
        )


def build_sampling_rows(
    temperature: Sequence[float],
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
    seed: Sequence[int],
    device: torch.device | str = "cpu",
) -> SamplingRows:
    """Parameters from lists of one value a row; seeds are taken modulo 2^64. The host waits for no device."""
    signed_seeds = [((value + (1 << 63)) % (1 << 64)) - (1 << 63) for value in seed]
    there = torch.device(device)
    return SamplingRows(
        temperature=upload(temperature, torch.float32, there),
        top_k=upload(top_k, torch.int32, there),
        top_p=upload(top_p, torch.float32, there),
        min_p=upload(min_p, torch.float32, there),
        seed=upload(signed_seeds, torch.int64, there),
        is_greedy=not any(temperature),
    )


def sample(logits: Tensor, params: SamplingRows, positions: Tensor) -> Tensor:
    """Draws one token a row.

    Greedy rows take the lowest id of the largest logit. Top-k keeps the k first ids ordered by (logit descending, id
    ascending); top-p keeps, in the same order and renormalised over what top-k left, every id before which the
    probabilities sum to less than top_p; min-p keeps ids at least min_p times as likely as the likeliest. Given equal
    logits the noise has the same bits everywhere; only the sums behind top-p may round differently between devices.

    Args:
        logits: [rows, vocabulary] float32; -inf marks forbidden ids.
        params: of the same rows.
        positions: [rows] int32 or int64: absolute position of the token being drawn (keys the noise).

    Returns:
        [rows] int64 ids; -1 for a row with a NaN or +inf, or without any finite logit.

    Raises:
        ValueError: shapes that do not fit.
    """
    if logits.dim() != 2 or positions.shape != logits.shape[:1] or params.seed.shape != positions.shape:
        raise ValueError(f"logits {tuple(logits.shape)}, {positions.shape[0]} positions, {params.seed.shape[0]} params")
    if params.is_greedy:
        return argmax(logits)
    if logits.is_cuda:
        from graftline.kernels.sample_triton import sample as kernel

        limits = (params.temperature, params.top_k, params.top_p, params.min_p)
        return kernel(logits, *limits, params.seed, positions.long())
    library = _library_for(logits)
    if library is None:
        return sample_reference(logits, params, positions)
    rows, count = logits.shape
    places = positions.long().contiguous()
    ids = torch.empty(rows, dtype=torch.int64)
    library.gl_sample(
        logits.data_ptr(),
        logits.stride(0),
        rows,
        count,
        params.temperature.data_ptr(),
        params.top_k.data_ptr(),
        params.top_p.data_ptr(),
        params.min_p.data_ptr(),
        params.seed.data_ptr(),
        places.data_ptr(),
        ids.data_ptr(),
        num_threads(rows),
    )
    return ids


def _library_for(logits: Tensor) -> CDLL | None:
    """The C library if these logits are for it."""
    if logits.device.type != "cpu":
        return None
    check_rows("logits", logits)
    return native_library() if logits.numel() else None


def sample_reference(logits: Tensor, params: SamplingRows, positions: Tensor) -> Tensor:
    """The specification."""
    greedy = argmax_reference(logits)
    drawn = [
        _draw(row, float(t), int(k), float(p), float(m), seed, position)
        if valid >= 0 and t > 0
        else torch.tensor(valid, device=logits.device)
        for row, valid, t, k, p, m, seed, position in zip(
            logits,
            greedy.tolist(),
            params.temperature.tolist(),
            params.top_k.tolist(),
            params.top_p.tolist(),
            params.min_p.tolist(),
            params.seed,
            positions.long(),
            strict=True,
        )
    ]
    return torch.stack(drawn) if drawn else greedy


def _draw(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, seed: Tensor, position: Tensor
) -> Tensor:
    inverse = (1.0 / torch.tensor(temperature, dtype=torch.float32)).clamp(max=_LARGEST_INVERSE_TEMPERATURE)
    ordered, ids = torch.sort(logits, descending=True, stable=True)
    num_finite = int((ordered > -torch.inf).sum())
    num_kept = min(top_k, num_finite) if top_k > 0 else num_finite
    difference = ordered[:num_kept] - ordered[0]
    weights = (difference * inverse).double().exp()
    if top_p < 1:
        before = weights.cumsum(0) - weights
        num_kept = max(1, int((before < top_p * weights.sum()).sum()))
    num_kept = max(1, int((weights[:num_kept] >= min_p).sum()))
    kept_ids = ids[:num_kept]
    noise = gumbel(random_words(seed, position, kept_ids))
    scores = (difference[:num_kept].double() * inverse.double() + noise.double()).float()
    return kept_ids[scores == scores.max()].min()


def argmax(logits: Tensor) -> Tensor:
    """Lowest id of the largest logit of every row.

    Args:
        logits: [rows, n] float32.

    Returns:
        [rows] int64; -1 for a row with a NaN or +inf, or without any finite logit.
    """
    if logits.is_cuda:
        from graftline.kernels.sample_triton import argmax as kernel

        return kernel(logits)
    library = _library_for(logits)
    if library is None:
        return argmax_reference(logits)
    rows, count = logits.shape
    ids = torch.empty(rows, dtype=torch.int64)
    library.gl_argmax(logits.data_ptr(), logits.stride(0), rows, count, ids.data_ptr(), num_threads(rows))
    return ids


def argmax_reference(logits: Tensor) -> Tensor:
    """The specification."""
    largest, _ = logits.max(dim=-1)  # NaN if there is one
    ids = torch.arange(logits.shape[1], device=logits.device)
    lowest = torch.where(logits == largest.unsqueeze(-1), ids, logits.shape[1]).min(dim=-1).values
    return torch.where(torch.isfinite(largest), lowest, -1)


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k likeliest ids of every row and their log-probabilities.

    Args:
        logits: [rows, n] float32 without NaN.
        k: 1 <= k <= n.

    Returns:
        ([rows, k] float32 log-softmax values, [rows, k] int64 ids), ordered by (logit descending, id ascending). When
        fewer than k logits are finite, the rest has value -inf and no meaningful id.

    Raises:
        ValueError: k out of range.
    """
    if not 1 <= k <= logits.shape[-1]:
        raise ValueError(f"k: {k} of {logits.shape[-1]} logits")
    if logits.is_cuda:
        from graftline.kernels.sample_triton import top_k as kernel

        values, ids, _ = kernel(logits, k)
        return values, ids
    library = _library_for(logits)
    if library is None:
        return top_k_reference(logits, k)
    values, ids, _ = _native_top_k(library, logits, k)
    return values, ids


def _native_top_k(library: CDLL, logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values and ids of `top_k`, and the log-normaliser [rows]."""
    rows, count = logits.shape
    values, ids, norms = torch.empty((rows, k)), torch.empty((rows, k), dtype=torch.int64), torch.empty(rows)
    library.gl_top_k(
        logits.data_ptr(),
        logits.stride(0),
        rows,
        count,
        k,
        values.data_ptr(),
        ids.data_ptr(),
        norms.data_ptr(),
        num_threads(rows),
    )
    return values, ids, norms


def top_k_reference(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The specification."""
    ordered, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    return ordered[:, :k] - logits.double().logsumexp(-1, keepdim=True).float(), ids[:, :k].contiguous()


def token_logprobs(logits: Tensor, ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of chosen tokens under the plain softmax, and the likeliest alternatives.

    Args:
        logits: [rows, vocabulary] float32.
        ids: [rows] int64.
        num_top: alternatives wanted, 0 for none.

    Returns:
        ([rows] log-probabilities, [rows, num_top] log-probabilities, [rows, num_top] int64 ids).
    """
    num_top = min(num_top, logits.shape[1])
    if logits.is_cuda:
        from graftline.kernels.sample_triton import top_k as kernel

        values, top_ids, norms = kernel(logits, num_top)
        return logits.gather(1, ids.unsqueeze(1)).squeeze(1) - norms, values, top_ids
    library = _library_for(logits)
    if library is not None:
        values, top_ids, norms = _native_top_k(library, logits, num_top)
        return logits.gather(1, ids.unsqueeze(1)).squeeze(1) - norms, values, top_ids
    if num_top > 0:
        values, top_ids = top_k(logits, num_top)
        norm = logits.gather(1, top_ids[:, :1]) - values[:, :1]
    else:
        values = logits.new_empty((logits.shape[0], 0))
        top_ids = ids.new_empty((logits.shape[0], 0))
        norm = logits.double().logsumexp(-1, keepdim=True).float()
    return (logits.gather(1, ids.unsqueeze(1)) - norm).squeeze(1), values, top_ids
