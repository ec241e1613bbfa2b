"""Counter-based random words and Gumbel noise: a pure function of (seed, position, vocabulary id).

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Every implementation (torch,
native, Triton) draws the same words, and turns them into noise by the same float32 steps; see `gumbel`.
"""

import torch
from torch import Tensor

_ROUNDS = 10
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_MASK = 0xFFFFFFFF

_SQRT_HALF_BITS = 0x3F3504F3
_LN2_HIGH = 0.693359375
_LN2_LOW = -2.12194440e-4
# Minimax polynomial of (log(1 + f) - f + f^2 / 2) / f^3 on [sqrt(1/2) - 1, sqrt(2) - 1] (Cephes, Moshier).
_LOG_POLYNOMIAL = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)


def random_words(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """32 random bits for every (seed, position, id).

    The words come from Philox with key (seed mod 2^32, seed div 2^32) and counter (id div 4, position, 0, 0), of whose
    four words number id mod 4 is taken.

    Args:
        seeds: int64, the 64 bits of the seed; broadcasts with the others.
        positions: int64, absolute position of the token to draw, below 2^32.
        ids: int64 vocabulary ids, below 2^34.

    Returns:
        int64 in [0, 2^32), of the broadcast shape.
    """
    seeds, positions, ids = torch.broadcast_tensors(seeds, positions, ids)  # type: ignore[no-untyped-call]
    key_0, key_1 = seeds & _MASK, (seeds >> 32) & _MASK
    words = (ids >> 2, positions & _MASK, torch.zeros_like(ids), torch.zeros_like(ids))
    for _ in range(_ROUNDS):
        high_0, low_0 = _multiply(words[0], _MULTIPLIER_0)
        high_1, low_1 = _multiply(words[2], _MULTIPLIER_1)
        words = (high_1 ^ words[1] ^ key_0, low_1, high_0 ^ words[3] ^ key_1, low_0)
        key_0, key_1 = (key_0 + _WEYL_0) & _MASK, (key_1 + _WEYL_1) & _MASK
    return torch.stack(words, dim=-1).gather(-1, (ids & 3).unsqueeze(-1)).squeeze(-1)


def gumbel(words: Tensor) -> Tensor:
    """Standard Gumbel noise of random words.

    v = min(fma(float32(word), 2^-32, 2^-33), 1 - 2^-24) is uniform in (0, 1) with steps that shrink toward 0, so that
    the upper tail of the noise is resolved down to probabilities of 2^-33. The noise is -log(-log(1 - v)), both
    logarithms by `_log` (relative error about 1e-7). Values lie in [-2.82, 22.9].

    Args:
        words: int64 in [0, 2^32).

    Returns:
        float32, same shape.
    """
    v = _fma(words.float(), 2.0**-32, 2.0**-33).clamp(max=1.0 - 2.0**-24)
    exponential = -_log(1.0 - v, -v)
    return -_log(exponential, None)


def _multiply(words: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 x 32 bit product, in int64 without overflow."""
    low = (words & 0xFFFF) * multiplier
    high = (words >> 16) * multiplier + (low >> 16)
    return (high >> 16) & _MASK, ((high << 16) | (low & 0xFFFF)) & _MASK


def _log(x: Tensor, x_minus_one: Tensor | None) -> Tensor:
    """Natural logarithm of positive normal float32; `x_minus_one` is taken as it is where x needs no scaling."""
    bits = x.view(torch.int32)
    exponent = (bits - _SQRT_HALF_BITS) >> 23
    f = (bits - (exponent << 23)).view(torch.float32) - 1.0
    if x_minus_one is not None:
        f = torch.where(exponent == 0, x_minus_one, f)
    e = exponent.float()
    square = f * f
    p = torch.full_like(f, _LOG_POLYNOMIAL[0])
    for coefficient in _LOG_POLYNOMIAL[1:]:
        p = _fma(p, f, coefficient)
    r = _fma(f * square, p, e * _LN2_LOW)
    r = _fma(square, -0.5, r)
    return _fma(e, _LN2_HIGH, f + r)


def _fma(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """a * b + c with one rounding (through float64: the product is exact, the sum is rounded twice in rare cases)."""
    factor = b.double() if isinstance(b, Tensor) else float(torch.tensor(b, dtype=torch.float32))
    addend = c.double() if isinstance(c, Tensor) else float(torch.tensor(c, dtype=torch.float32))
    return (a.double() * factor + addend).float()
