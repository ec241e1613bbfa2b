"""Triton kernels of `graftline.kernels.sample`: parts of rows first, by as many programs as there are, then rows.

Filters work on thresholds instead of a sort: the k-th largest logit and the lowest logit of the nucleus are found by
bisection over the float's bits, and ties at a threshold are let in by id, so that the sets are those of the sort. A row
with such filters is thinned out first: only logits above a level that keeps enough of them take part. Where more than
`_MAX_CANDIDATES` would remain, the whole row does, slowly.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from graftline.kernels.philox_triton import gumbel, random_words

_LARGEST_INVERSE_TEMPERATURE = 3e38
_BLOCK = 4096  # logits a part
_SEARCH_BLOCK = 1024
_MAX_CANDIDATES = 8192
_LEVELS = 32  # the last one keeps everything
_MARGIN = 1.0001  # times what top-p wants: no sum may round below
# What differs from round to round compiles nothing anew.
_BY_ROUND = ("parts", "k")


@triton.jit
def _ordered_key(x):
    """int32 that orders like the float; -0.0 counts as 0.0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _packed(x, ids):
    """int64 that orders like (x descending, id ascending) does: the larger, the earlier."""
    return (_ordered_key(x).to(tl.int64) << 32) + (2147483647 - ids).to(tl.int64)


@triton.jit
def _id_of(packed):
    return 2147483647 - (packed & 0xFFFFFFFF)


@triton.jit
def _value_of(packed):
    key = (packed >> 32).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=_BY_ROUND)
def _survey_kernel(
    logits_ptr, stats_ptr, firsts_ptr, stride, count, parts, k, NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of one part of a row: largest logit, sum of exponentials, whether one is NaN or +inf; its k first ids."""
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    ids = part * BLOCK + tl.arange(0, BLOCK)
    inside = ids < count
    x = tl.load(logits_ptr + row * stride + ids, mask=inside, other=float("-inf"))
    num_bad = tl.sum(((x != x) | (x == float("inf"))).to(tl.int32))
    x = tl.where(x != x, float("-inf"), x)
    largest = tl.max(x)
    stats = stats_ptr + (row * parts + part) * 3
    tl.store(stats, largest)
    if NORM:
        tl.store(stats + 1, tl.sum(tl.exp(x - tl.where(largest == float("-inf"), 0.0, largest))))
    tl.store(stats + 2, num_bad.to(tl.float32))
    lowest: tl.constexpr = -9223372036854775808
    packed = tl.where(inside, _packed(x, ids), lowest)
    for place in range(k):
        first = tl.max(packed)
        tl.store(firsts_ptr + (row * parts + part) * k + place, first)
        packed = tl.where(packed == first, lowest, packed)


@triton.jit
def _largest(stats_ptr, row, parts, BLOCK_PARTS: tl.constexpr):
    """(largest logit of a row, whether it has a distribution)."""
    part = tl.arange(0, BLOCK_PARTS)
    stats = stats_ptr + (row * parts + part) * 3
    largest = tl.max(tl.load(stats, mask=part < parts, other=float("-inf")))
    num_bad = tl.sum(tl.load(stats + 2, mask=part < parts, other=0.0))
    return largest, (num_bad == 0.0) & (largest > float("-inf")) & (largest < float("inf"))


@triton.jit
def _first(firsts_ptr, row, parts, BLOCK_PARTS: tl.constexpr):
    """The first of the parts' first ones, packed."""
    part = tl.arange(0, BLOCK_PARTS)
    return tl.max(tl.load(firsts_ptr + row * parts + part, mask=part < parts, other=-9223372036854775808))


@triton.jit
def _argmax_kernel(stats_ptr, firsts_ptr, ids_ptr, parts, BLOCK_PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    _, valid = _largest(stats_ptr, row, parts, BLOCK_PARTS)
    tl.store(ids_ptr + row, tl.where(valid, _id_of(_first(firsts_ptr, row, parts, BLOCK_PARTS)), -1))


@triton.jit(do_not_specialize=_BY_ROUND)
def _top_k_kernel(
    stats_ptr, firsts_ptr, values_ptr, ids_ptr, norms_ptr, parts, k, BLOCK_PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    largest, valid = _largest(stats_ptr, row, parts, BLOCK_PARTS)
    part = tl.arange(0, BLOCK_PARTS)
    stats = stats_ptr + (row * parts + part) * 3
    part_largest = tl.load(stats, mask=part < parts, other=float("-inf"))
    sums = tl.load(stats + 1, mask=part < parts, other=0.0)
    total = tl.sum(sums * tl.exp(part_largest - tl.where(valid, largest, 0.0)))
    norm = tl.where(valid, largest + tl.log(total), float("nan"))
    tl.store(norms_ptr + row, norm)
    lanes = tl.arange(0, BLOCK)
    lowest = tl.full((), -9223372036854775808, tl.int64)
    last = tl.full((), 9223372036854775807, tl.int64)
    for place in range(k):
        best = lowest
        for first in range(0, parts * k, BLOCK):
            at = first + lanes
            packed = tl.load(firsts_ptr + row * parts * k + at, mask=at < parts * k, other=-9223372036854775808)
            best = tl.maximum(best, tl.max(tl.where(packed < last, packed, lowest)))
        last = best
        exists = best > lowest
        tl.store(values_ptr + row * k + place, tl.where(exists, _value_of(best), float("-inf")) - norm)
        tl.store(ids_ptr + row * k + place, tl.where(exists & valid, _id_of(best), 0))


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
def _level(level, temperature, largest, LEVELS: tl.constexpr):
    """The logit that a level keeps and all above; the last level keeps all."""
    step = tl.maximum(0.75 * temperature, 0.5)
    return tl.where(level == LEVELS - 1, float("-inf"), largest - (level + 1).to(tl.float32) * step)


@triton.jit
def _spread_kernel(
    logits_ptr, stats_ptr, inverse_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr,
    firsts_ptr, counts_ptr, weights_ptr, stride, count, parts,
    BLOCK: tl.constexpr, STEP: tl.constexpr, LEVELS: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """Of one part of a drawn row: without top-k and top-p its best score, else what every level keeps of it."""
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    largest, valid = _largest(stats_ptr, row, parts, BLOCK_PARTS)
    temperature = tl.load(temperature_ptr + row)
    row_ptr = logits_ptr + row * stride
    inverse = tl.load(inverse_ptr + row)
    if (temperature > 0.0) & valid:
        if (tl.load(top_k_ptr + row) > 0) | (tl.load(top_p_ptr + row) < 1.0):
            level = tl.arange(0, LEVELS)
            threshold = _level(level, temperature, largest, LEVELS)
            counts = tl.zeros((STEP, LEVELS), tl.int32)
            weights = tl.zeros((STEP, LEVELS), tl.float32)
            for first in range(part * BLOCK, tl.minimum(part * BLOCK + BLOCK, count), STEP):
                ids = first + tl.arange(0, STEP)
                x = tl.load(row_ptr + ids, mask=ids < count, other=float("-inf"))
                kept = (x[:, None] >= threshold[None, :]) & (x[:, None] > float("-inf"))
                counts += kept.to(tl.int32)
                weights += tl.where(kept, tl.exp((x - largest) * inverse)[:, None], 0.0)
            at = (row * parts + part) * LEVELS + level
            tl.store(counts_ptr + at, tl.sum(counts, 0))
            tl.store(weights_ptr + at, tl.sum(weights, 0))
        else:
            ids = part * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(row_ptr + ids, mask=ids < count, other=float("-inf"))
            score = _scores(
                x, ids, x > float("-inf"), largest, inverse, tl.load(min_p_ptr + row), tl.load(seed_ptr + row),
                tl.load(position_ptr + row),
            )  # fmt: skip
            tl.store(firsts_ptr + row * parts + part, tl.max(_packed(score, ids)))


@triton.jit
def _scores(x, ids, allowed, largest, inverse, min_p, seed, position):
    """Scaled logits with noise, -inf where not allowed."""
    difference = x - largest
    allowed = allowed & (tl.exp(difference * inverse) >= min_p)
    noise = gumbel(random_words(seed, position, ids.to(tl.int64)))
    score = tl.fma(tl.where(allowed, difference, 0.0), tl.zeros(x.shape, tl.float32) + inverse, noise)
    return tl.where(allowed, score, float("-inf"))


@triton.jit
def _choose_level(
    counts_ptr, weights_ptr, row, parts, top_k, top_p, margin, LEVELS: tl.constexpr, BLOCK_PARTS: tl.constexpr
):
    """(level that keeps enough, how many logits it keeps, weight of all logits)."""
    part = tl.arange(0, BLOCK_PARTS)[:, None]
    level = tl.arange(0, LEVELS)
    at = (row * parts + part) * LEVELS + level[None, :]
    kept = tl.sum(tl.load(counts_ptr + at, mask=part < parts, other=0), 0)
    weight = tl.sum(tl.load(weights_ptr + at, mask=part < parts, other=0.0), 0)
    is_last = level == LEVELS - 1
    total = tl.sum(tl.where(is_last, weight, 0.0))
    suffices = tl.where(top_k > 0, kept >= top_k, weight >= top_p * margin * total)
    chosen = tl.min(tl.where(suffices | is_last, level, LEVELS))
    return chosen, tl.sum(tl.where(level == chosen, kept, 0)), total


@triton.jit
def _collect_kernel(
    logits_ptr, stats_ptr, temperature_ptr, top_k_ptr, top_p_ptr, counts_ptr, weights_ptr, kept_ptr, kept_ids_ptr,
    stride, count, parts, max_candidates, margin,
    BLOCK: tl.constexpr, LEVELS: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """Of one part of a row with top-k or top-p: what its level keeps, in order of ids."""
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    largest, valid = _largest(stats_ptr, row, parts, BLOCK_PARTS)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    if (temperature > 0.0) & valid & ((top_k > 0) | (top_p < 1.0)):
        level, num_kept, _ = _choose_level(
            counts_ptr, weights_ptr, row, parts, top_k, top_p, margin, LEVELS, BLOCK_PARTS
        )
        if num_kept <= max_candidates:
            earlier = tl.arange(0, BLOCK_PARTS)
            counts = tl.load(counts_ptr + (row * parts + earlier) * LEVELS + level, mask=earlier < part, other=0)
            ids = part * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(logits_ptr + row * stride + ids, mask=ids < count, other=float("-inf"))
            kept = (x >= _level(level, temperature, largest, LEVELS)) & (x > float("-inf"))
            at = row * max_candidates + tl.sum(counts) + tl.cumsum(kept.to(tl.int32), 0) - 1
            tl.store(kept_ptr + at, x, mask=kept)
            tl.store(kept_ids_ptr + at, ids, mask=kept)


@triton.jit
def _sample_kernel(
    logits_ptr, stats_ptr, inverse_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr,
    firsts_ptr, counts_ptr, weights_ptr, kept_ptr, kept_ids_ptr, ids_ptr, stride, count, parts, max_candidates, margin,
    BLOCK: tl.constexpr, LEVELS: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """The first of a row's parts, or, with top-k or top-p, the draw among what was kept of it."""
    row = tl.program_id(0).to(tl.int64)
    largest, valid = _largest(stats_ptr, row, parts, BLOCK_PARTS)
    chosen = tl.where(valid, _id_of(_first(firsts_ptr, row, parts, BLOCK_PARTS)), -1)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    if (tl.load(temperature_ptr + row) > 0.0) & valid & ((top_k > 0) | (top_p < 1.0)):
        _, num_kept, total = _choose_level(
            counts_ptr, weights_ptr, row, parts, top_k, top_p, margin, LEVELS, BLOCK_PARTS
        )
        is_thinned = num_kept <= max_candidates
        row_ptr = tl.where(is_thinned, kept_ptr + row * max_candidates, logits_ptr + row * stride)
        num_left = tl.where(is_thinned, num_kept, count)
        inverse = tl.load(inverse_ptr + row)
        min_p = tl.load(min_p_ptr + row)
        largest_key = _ordered_key(largest).to(tl.int64)
        lowest_key = tl.full((), -2147483648, tl.int64)
        num_ties = tl.full((), 2147483647, tl.int32)  # ids allowed at the lowest key, lowest ids first
        if top_k > 0:
            top_k = tl.minimum(top_k, _count_at_least(row_ptr, num_left, -2147483648, BLOCK))
            high = largest_key
            while lowest_key < high:  # at most 32 turns
                middle = lowest_key + (high - lowest_key + 1) // 2
                enough = _count_at_least(row_ptr, num_left, middle.to(tl.int32), BLOCK) >= top_k
                lowest_key = tl.where(enough, middle, lowest_key)
                high = tl.where(enough, high, middle - 1)
            above = _count_at_least(row_ptr, num_left, tl.minimum(lowest_key + 1, 2147483647).to(tl.int32), BLOCK)
            num_ties = top_k - above
        if top_p < 1.0:
            lowest = lowest_key.to(tl.int32)
            if top_k > 0:
                above_weight = _weight_at_least(
                    row_ptr, num_left, tl.minimum(lowest_key + 1, 2147483647).to(tl.int32), largest, inverse, BLOCK
                )
                ties = _count_at_least(row_ptr, num_left, lowest, BLOCK) - _count_at_least(
                    row_ptr, num_left, tl.minimum(lowest_key + 1, 2147483647).to(tl.int32), BLOCK
                )
                kept_ties = tl.minimum(ties, num_ties).to(tl.float32)
                total = above_weight + kept_ties * _key_weight(lowest, largest, inverse)
            wanted = top_p * total
            low = lowest_key
            high = largest_key
            while low < high:  # at most 32 turns
                middle = low + (high - low + 1) // 2
                enough = _weight_at_least(row_ptr, num_left, middle.to(tl.int32), largest, inverse, BLOCK) >= wanted
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle - 1)
            before = _weight_at_least(
                row_ptr, num_left, tl.minimum(low + 1, 2147483647).to(tl.int32), largest, inverse, BLOCK
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
        for first in range(0, num_left, BLOCK):
            places = first + columns
            inside = places < num_left
            x = tl.load(row_ptr + places, mask=inside, other=float("-inf"))
            ids = tl.load(kept_ids_ptr + row * max_candidates + places, mask=inside & is_thinned, other=0)
            ids = tl.where(is_thinned, ids, places)
            key = _ordered_key(x)
            tie = (key == lowest) & (x > float("-inf"))
            tie_index = ties_so_far + tl.cumsum(tie.to(tl.int32), 0) - 1
            ties_so_far += tl.sum(tie.to(tl.int32))
            allowed = ((key > lowest) | (tie & (tie_index < num_ties))) & (x > float("-inf"))
            score = _scores(x, ids, allowed, largest, inverse, min_p, seed, position)
            block_best = tl.max(score)
            block_id = tl.min(tl.where(score == block_best, ids, 2147483647)).to(tl.int64)
            better = block_best > best_score
            chosen = tl.where(better, block_id, chosen)
            best_score = tl.where(better, block_best, best_score)
    tl.store(ids_ptr + row, chosen)


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
    device = logits.device
    ids = torch.empty(rows, dtype=torch.int64, device=device)
    if not rows:
        return ids
    inverse = (1.0 / temperature).clamp(max=_LARGEST_INVERSE_TEMPERATURE)
    stats, firsts, parts = _survey(logits, 1, has_norm=False)
    counts = torch.empty((rows, parts, _LEVELS), dtype=torch.int32, device=device)
    weights = torch.empty((rows, parts, _LEVELS), dtype=torch.float32, device=device)
    max_candidates = min(_MAX_CANDIDATES, count)
    kept = torch.empty((rows, max_candidates), dtype=torch.float32, device=device)
    kept_ids = torch.empty((rows, max_candidates), dtype=torch.int32, device=device)
    block, warps = _launch_shape(count)
    block_parts = triton.next_power_of_2(parts)
    _spread_kernel[(parts, rows)](
        logits, stats, inverse, temperature, top_k, top_p, min_p, seed, positions, firsts, counts, weights,
        logits.stride(0), count, parts, BLOCK=block, STEP=min(256, block), LEVELS=_LEVELS, BLOCK_PARTS=block_parts,
        num_warps=warps,
    )  # fmt: skip
    _collect_kernel[(parts, rows)](
        logits, stats, temperature, top_k, top_p, counts, weights, kept, kept_ids, logits.stride(0), count, parts,
        max_candidates, _MARGIN, BLOCK=block, LEVELS=_LEVELS, BLOCK_PARTS=block_parts, num_warps=warps,
    )  # fmt: skip
    _sample_kernel[(rows,)](
        logits, stats, inverse, temperature, top_k, top_p, min_p, seed, positions, firsts, counts, weights, kept,
        kept_ids, ids, logits.stride(0), count, parts, max_candidates, _MARGIN,
        BLOCK=min(_SEARCH_BLOCK, triton.next_power_of_2(count)), LEVELS=_LEVELS, BLOCK_PARTS=block_parts,
    )  # fmt: skip
    return ids


def argmax(logits: Tensor) -> Tensor:
    """See `graftline.kernels.sample.argmax`."""
    rows = logits.shape[0]
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        stats, firsts, parts = _survey(logits, 1, has_norm=False)
        _argmax_kernel[(rows,)](stats, firsts, ids, parts, BLOCK_PARTS=triton.next_power_of_2(parts), num_warps=1)
    return ids


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values and ids of `graftline.kernels.sample.top_k`, and the log-normaliser [rows]; k may be 0."""
    rows = logits.shape[0]
    values = torch.empty((rows, k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, k), dtype=torch.int64, device=logits.device)
    norms = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        stats, firsts, parts = _survey(logits, k, has_norm=True)
        _top_k_kernel[(rows,)](
            stats, firsts, values, ids, norms, parts, k, BLOCK_PARTS=triton.next_power_of_2(parts),
            BLOCK=max(16, min(_SEARCH_BLOCK, triton.next_power_of_2(parts * k))), num_warps=2,
        )  # fmt: skip
    return values, ids, norms


def _survey(logits: Tensor, k: int, has_norm: bool) -> tuple[Tensor, Tensor, int]:
    """What `_survey_kernel` finds: [rows, parts, 3] statistics and [rows, parts, k] packed ids; how many parts."""
    rows, count = logits.shape
    block, warps = _launch_shape(count)
    parts = triton.cdiv(count, block)
    stats = torch.empty((rows, parts, 3), dtype=torch.float32, device=logits.device)
    firsts = torch.empty((rows, parts, k), dtype=torch.int64, device=logits.device)
    _survey_kernel[(parts, rows)](
        logits, stats, firsts, logits.stride(0), count, parts, k, NORM=has_norm, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return stats, firsts, parts


def _launch_shape(count: int) -> tuple[int, int]:
    block = min(_BLOCK, triton.next_power_of_2(count))
    return block, min(8, max(1, block // 256))
