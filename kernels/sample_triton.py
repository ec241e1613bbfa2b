"""Triton kernels of `graftline.kernels.sample`: one program a row, which passes over the logits as often as it must.

Filters work on thresholds instead of a sort: the k-th largest logit and the lowest logit of the nucleus are found by
bisection over the float's bits, and ties at a threshold are let in by id, so that the sets are those of the sort.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from graftline.kernels.philox_triton import gumbel, random_words

_LARGEST_INVERSE_TEMPERATURE = 3e38
_BLOCK = 4096


@triton.jit
def _ordered_key(x):
    """int32 that orders like the float; -0.0 counts as 0.0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _scan(row_ptr, count, BLOCK: tl.constexpr):
    """(largest logit, its lowest id or -1 for a row without a distribution)."""
    columns = tl.arange(0, BLOCK)
    largest = tl.full((), float("-inf"), tl.float32)
    best = tl.full((), 0, tl.int64)
    num_bad = tl.full((), 0, tl.int32)
    for first in range(0, count, BLOCK):
        ids = first + columns
        x = tl.load(row_ptr + ids, mask=ids < count, other=float("-inf"))
        num_bad += tl.sum(((x != x) | (x == float("inf"))).to(tl.int32))
        block_max = tl.max(tl.where(x != x, float("-inf"), x))
        block_id = tl.min(tl.where(x == block_max, ids, count)).to(tl.int64)
        better = block_max > largest
        best = tl.where(better, block_id, best)
        largest = tl.where(better, block_max, largest)
    return largest, tl.where((num_bad > 0) | (largest == float("-inf")), -1, best)


@triton.jit
def _count_at_least(row_ptr, count, key, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, count, BLOCK):
        ids = first + columns
        x = tl.load(row_ptr + ids, mask=ids < count, other=float("-inf"))
        total += ((_ordered_key(x) >= key) & (x > float("-inf"))).to(tl.int32)
    return tl.sum(total)


@triton.jit
def _weight_at_least(row_ptr, count, key, largest, inverse, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, count, BLOCK):
        ids = first + columns
        x = tl.load(row_ptr + ids, mask=ids < count, other=float("-inf"))
        total += tl.where(_ordered_key(x) >= key, tl.exp((x - largest) * inverse), 0.0)
    return tl.sum(total)


@triton.jit
def _key_weight(key, largest, inverse):
    """Weight of the logit that has this key."""
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return tl.exp((bits.to(tl.float32, bitcast=True) - largest) * inverse)


@triton.jit
def _sample_kernel(
    logits_ptr, inverse_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr, ids_ptr,
    stride, count, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    largest, chosen = _scan(row_ptr, count, BLOCK)
    if (tl.load(temperature_ptr + row) > 0.0) & (chosen >= 0):
        inverse = tl.load(inverse_ptr + row)
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        min_p = tl.load(min_p_ptr + row)
        largest_key = _ordered_key(largest).to(tl.int64)
        lowest_key = tl.full((), -2147483648, tl.int64)
        num_ties = tl.full((), 2147483647, tl.int32)  # ids allowed at the lowest key, lowest ids first
        if top_k > 0:
            top_k = tl.minimum(top_k, _count_at_least(row_ptr, count, -2147483648, BLOCK))
            high = largest_key
            while lowest_key < high:  # at most 32 turns
                middle = lowest_key + (high - lowest_key + 1) // 2
                enough = _count_at_least(row_ptr, count, middle.to(tl.int32), BLOCK) >= top_k
                lowest_key = tl.where(enough, middle, lowest_key)
                high = tl.where(enough, high, middle - 1)
            above = _count_at_least(row_ptr, count, tl.minimum(lowest_key + 1, 2147483647).to(tl.int32), BLOCK)
            num_ties = top_k - above
        if top_p < 1.0:
            lowest = lowest_key.to(tl.int32)
            total = _weight_at_least(row_ptr, count, lowest, largest, inverse, BLOCK)
            if top_k > 0:
                above_weight = _weight_at_least(
                    row_ptr, count, tl.minimum(lowest_key + 1, 2147483647).to(tl.int32), largest, inverse, BLOCK
                )
                ties = _count_at_least(row_ptr, count, lowest, BLOCK) - _count_at_least(
                    row_ptr, count, tl.minimum(lowest_key + 1, 2147483647).to(tl.int32), BLOCK
                )
                kept_ties = tl.minimum(ties, num_ties).to(tl.float32)
                total = above_weight + kept_ties * _key_weight(lowest, largest, inverse)
            wanted = top_p * total
            low = lowest_key
            high = largest_key
            while low < high:  # at most 32 turns
                middle = low + (high - low + 1) // 2
                enough = _weight_at_least(row_ptr, count, middle.to(tl.int32), largest, inverse, BLOCK) >= wanted
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle - 1)
            before = _weight_at_least(
                row_ptr, count, tl.minimum(low + 1, 2147483647).to(tl.int32), largest, inverse, BLOCK
            )
            # The j-th tie is kept while before + j * weight < wanted.
            weight = _key_weight(low.to(tl.int32), largest, inverse)
            fitting = tl.minimum(tl.ceil((wanted - before) / weight), 1e9).to(tl.int32)
            fitting = tl.maximum(fitting, 1)
            num_ties = tl.where(low == lowest_key, tl.minimum(num_ties, fitting), fitting)
            lowest_key = low
        lowest = lowest_key.to(tl.int32)
        seed = tl.load(seed_ptr + row)
        position = tl.load(position_ptr + row)
        columns = tl.arange(0, BLOCK)
        ties_so_far = tl.full((), 0, tl.int32)
        best_score = tl.full((), float("-inf"), tl.float32)
        for first in range(0, count, BLOCK):
            ids = first + columns
            x = tl.load(row_ptr + ids, mask=ids < count, other=float("-inf"))
            key = _ordered_key(x)
            tie = (key == lowest) & (x > float("-inf"))
            tie_index = ties_so_far + tl.cumsum(tie.to(tl.int32), 0) - 1
            ties_so_far += tl.sum(tie.to(tl.int32))
            allowed = ((key > lowest) | (tie & (tie_index < num_ties))) & (x > float("-inf"))
            difference = x - largest
            allowed = allowed & (tl.exp(difference * inverse) >= min_p)
            noise = gumbel(random_words(seed, position, ids.to(tl.int64)))
            score = tl.fma(tl.where(allowed, difference, 0.0), tl.zeros((BLOCK,), tl.float32) + inverse, noise)
            score = tl.where(allowed, score, float("-inf"))
            block_best = tl.max(score)
            block_id = tl.min(tl.where(score == block_best, ids, count)).to(tl.int64)
            better = block_best > best_score
            chosen = tl.where(better, block_id, chosen)
            best_score = tl.where(better, block_best, best_score)
    tl.store(ids_ptr + row, chosen)


@triton.jit
def _argmax_kernel(logits_ptr, ids_ptr, stride, count, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    _, chosen = _scan(logits_ptr + row * stride, count, BLOCK)
    tl.store(ids_ptr + row, chosen)


@triton.jit
def _top_k_kernel(logits_ptr, values_ptr, ids_ptr, norms_ptr, stride, count, k, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    columns = tl.arange(0, BLOCK)
    largest, valid = _scan(row_ptr, count, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, count, BLOCK):
        ids = first + columns
        x = tl.load(row_ptr + ids, mask=ids < count, other=float("-inf"))
        sums += tl.exp(x - largest)
    norm = largest + tl.log(tl.sum(sums))
    norm = tl.where(valid < 0, float("nan"), norm)
    tl.store(norms_ptr + row, norm)
    last_value = tl.full((), float("inf"), tl.float32)
    last_id = tl.full((), -1, tl.int64)
    for place in range(k):
        value = tl.full((), float("-inf"), tl.float32)
        chosen = tl.full((), 0, tl.int64)
        for first in range(0, count, BLOCK):
            ids = (first + columns).to(tl.int64)
            x = tl.load(row_ptr + ids, mask=ids < count, other=float("-inf"))
            later = (x < last_value) | ((x == last_value) & (ids > last_id))
            x = tl.where(later, x, float("-inf"))
            block_max = tl.max(x)
            block_id = tl.min(tl.where(x == block_max, ids, count))
            better = block_max > value
            chosen = tl.where(better, block_id, chosen)
            value = tl.where(better, block_max, value)
        tl.store(values_ptr + row * k + place, value - norm)
        tl.store(ids_ptr + row * k + place, tl.where(valid < 0, 0, chosen))
        last_value = value
        last_id = chosen


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    positions: Tensor,
) -> Tensor:
    """See `graftline.kernels.sample.sample`; positions are int64."""
    rows, count = logits.shape
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        inverse = (1.0 / temperature).clamp(max=_LARGEST_INVERSE_TEMPERATURE)
        block, warps = _launch_shape(count)
        _sample_kernel[(rows,)](
            logits, inverse, temperature, top_k, top_p, min_p, seed, positions, ids, logits.stride(0), count,
            BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return ids


def argmax(logits: Tensor) -> Tensor:
    """See `graftline.kernels.sample.argmax`."""
    rows, count = logits.shape
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        block, warps = _launch_shape(count)
        _argmax_kernel[(rows,)](logits, ids, logits.stride(0), count, BLOCK=block, num_warps=warps)
    return ids


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values and ids of `graftline.kernels.sample.top_k`, and the log-normaliser [rows]; k may be 0."""
    rows, count = logits.shape
    values = torch.empty((rows, k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, k), dtype=torch.int64, device=logits.device)
    norms = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        block, warps = _launch_shape(count)
        _top_k_kernel[(rows,)](logits, values, ids, norms, logits.stride(0), count, k, BLOCK=block, num_warps=warps)
    return values, ids, norms


def _launch_shape(count: int) -> tuple[int, int]:
    block = min(_BLOCK, triton.next_power_of_2(count))
    return block, min(16, max(1, block // 256))
