"""Philox words and Gumbel noise inside Triton kernels: the bits of `graftline.kernels.philox`.

Every addition that follows a multiplication is written as a fused one or cannot be fused, so that the compiler's
contraction changes no bit.
"""

import triton
import triton.language as tl


@triton.jit
def random_words(seed, position, ids):
    """32 random bits of (seed int64, position int64, ids int64 block) as uint32."""
    key_0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    key_1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    word_0 = (ids >> 2).to(tl.uint32)
    word_1 = (ids * 0 + position).to(tl.uint32)
    word_2 = (ids * 0).to(tl.uint32)
    word_3 = (ids * 0).to(tl.uint32)
    for _ in tl.static_range(10):
        product_0 = word_0.to(tl.uint64) * 0xD2511F53
        product_1 = word_2.to(tl.uint64) * 0xCD9E8D57
        word_0 = (product_1 >> 32).to(tl.uint32) ^ word_1 ^ key_0
        word_2 = (product_0 >> 32).to(tl.uint32) ^ word_3 ^ key_1
        word_1 = (product_1 & 0xFFFFFFFF).to(tl.uint32)
        word_3 = (product_0 & 0xFFFFFFFF).to(tl.uint32)
        key_0 = ((key_0.to(tl.uint64) + 0x9E3779B9) & 0xFFFFFFFF).to(tl.uint32)
        key_1 = ((key_1.to(tl.uint64) + 0xBB67AE85) & 0xFFFFFFFF).to(tl.uint32)
    lane = ids & 3
    return tl.where(lane == 0, word_0, tl.where(lane == 1, word_1, tl.where(lane == 2, word_2, word_3)))


@triton.jit
def _fma(a, b, constant: tl.constexpr):
    return tl.fma(a, b, tl.full(a.shape, constant, tl.float32))


@triton.jit
def _log(x, x_minus_one):
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    f = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    f = tl.where(exponent == 0, x_minus_one, f)
    e = exponent.to(tl.float32)
    square = f * f
    p = _fma(tl.full(f.shape, 7.0376836292e-2, tl.float32), f, -1.1514610310e-1)
    p = _fma(p, f, 1.1676998740e-1)
    p = _fma(p, f, -1.2420140846e-1)
    p = _fma(p, f, 1.4249322787e-1)
    p = _fma(p, f, -1.6668057665e-1)
    p = _fma(p, f, 2.0000714765e-1)
    p = _fma(p, f, -2.4999993993e-1)
    p = _fma(p, f, 3.3333331174e-1)
    r = tl.fma(f * square, p, e * -2.12194440e-4)
    r = tl.fma(square, tl.full(f.shape, -0.5, tl.float32), r)
    return tl.fma(e, tl.full(f.shape, 0.693359375, tl.float32), f + r)


@triton.jit
def gumbel(words):
    """Standard Gumbel noise of a block of uint32 words."""
    w = words.to(tl.float32)
    v = _fma(w, tl.full(w.shape, 2.3283064365386963e-10, tl.float32), 1.1641532182693481e-10)
    v = tl.minimum(v, 0.999999940395355224609375)
    exponential = -_log(1.0 - v, -v)
    return -_log(exponential, exponential - 1.0)
