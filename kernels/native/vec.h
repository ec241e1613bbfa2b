// Vectors of floats with fused multiply-add, one name for AVX-512, AVX2 and plain C.
//
// Bits never depend on the width: lanes are independent, and every reduction across lanes goes through a fixed tree over
// 8 partial sums (see `Eight`). Contraction is off; every fused operation is written as one.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef int64_t idx;
typedef uint16_t bf16;

INLINE float bf16_to_float(bf16 x) {
    const uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// Round to nearest even; NaN stays NaN.
INLINE bf16 float_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (bf16)((bits >> 16) | 0x40u);
    return (bf16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// --- the widest vector: lanes run over independent outputs -------------------------------------------------------

#if defined(__AVX512F__)

#define LANES 16
typedef __m512 Wide;
INLINE Wide wide_zero(void) { return _mm512_setzero_ps(); }
INLINE Wide wide_set(float x) { return _mm512_set1_ps(x); }
INLINE Wide wide_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void wide_store(float *p, Wide v) { _mm512_storeu_ps(p, v); }
INLINE Wide wide_fma(Wide a, Wide b, Wide c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Wide wide_add(Wide a, Wide b) { return _mm512_add_ps(a, b); }
INLINE Wide wide_mul(Wide a, Wide b) { return _mm512_mul_ps(a, b); }
// Of LANES pairs of bfloat16: the first of every pair, the second of every pair.
INLINE Wide wide_load_bf16_low(const bf16 *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512((const void *)p), 16));
}
INLINE Wide wide_load_bf16_high(const bf16 *p) {
    const __m512i mask = _mm512_set1_epi32((int)0xffff0000u);
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512((const void *)p), mask));
}
INLINE Wide wide_load_int8(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

#elif defined(__AVX2__) && defined(__FMA__)

#define LANES 8
typedef __m256 Wide;
INLINE Wide wide_zero(void) { return _mm256_setzero_ps(); }
INLINE Wide wide_set(float x) { return _mm256_set1_ps(x); }
INLINE Wide wide_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void wide_store(float *p, Wide v) { _mm256_storeu_ps(p, v); }
INLINE Wide wide_fma(Wide a, Wide b, Wide c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Wide wide_add(Wide a, Wide b) { return _mm256_add_ps(a, b); }
INLINE Wide wide_mul(Wide a, Wide b) { return _mm256_mul_ps(a, b); }
INLINE Wide wide_load_bf16_low(const bf16 *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i *)p), 16));
}
INLINE Wide wide_load_bf16_high(const bf16 *p) {
    const __m256i mask = _mm256_set1_epi32((int)0xffff0000u);
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256((const __m256i *)p), mask));
}
INLINE Wide wide_load_int8(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}

#else

#define LANES 8
typedef struct { float x[LANES]; } Wide;
INLINE Wide wide_set(float x) { Wide r; for (int i = 0; i < LANES; i++) r.x[i] = x; return r; }
INLINE Wide wide_zero(void) { return wide_set(0.0f); }
INLINE Wide wide_load(const float *p) { Wide r; memcpy(&r, p, sizeof r); return r; }
INLINE void wide_store(float *p, Wide v) { memcpy(p, &v, sizeof v); }
INLINE Wide wide_fma(Wide a, Wide b, Wide c) {
    for (int i = 0; i < LANES; i++) c.x[i] = __builtin_fmaf(a.x[i], b.x[i], c.x[i]);
    return c;
}
INLINE Wide wide_add(Wide a, Wide b) { for (int i = 0; i < LANES; i++) a.x[i] += b.x[i]; return a; }
INLINE Wide wide_mul(Wide a, Wide b) { for (int i = 0; i < LANES; i++) a.x[i] *= b.x[i]; return a; }
INLINE Wide wide_load_bf16_low(const bf16 *p) {
    Wide r;
    for (int i = 0; i < LANES; i++) r.x[i] = bf16_to_float(p[2 * i]);
    return r;
}
INLINE Wide wide_load_bf16_high(const bf16 *p) { return wide_load_bf16_low(p + 1); }
INLINE Wide wide_load_int8(const int8_t *p) {
    Wide r;
    for (int i = 0; i < LANES; i++) r.x[i] = (float)p[i];
    return r;
}

#endif

// --- eight lanes: partial sums of a reduction ----------------------------------------------------------------------

#if defined(__AVX2__) && defined(__FMA__)

typedef __m256 Eight;
INLINE Eight eight_zero(void) { return _mm256_setzero_ps(); }
INLINE Eight eight_set(float x) { return _mm256_set1_ps(x); }
INLINE Eight eight_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void eight_store(float *p, Eight v) { _mm256_storeu_ps(p, v); }
INLINE Eight eight_fma(Eight a, Eight b, Eight c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Eight eight_mul(Eight a, Eight b) { return _mm256_mul_ps(a, b); }
INLINE Eight eight_load_bf16(const bf16 *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
// Lane j of the result is the sum of the lanes of v[j]: ((0+1)+(2+3)) + ((4+5)+(6+7)).
INLINE Eight eight_sums(const Eight v[8]) {
    const __m256 s01 = _mm256_hadd_ps(v[0], v[1]), s23 = _mm256_hadd_ps(v[2], v[3]);
    const __m256 s45 = _mm256_hadd_ps(v[4], v[5]), s67 = _mm256_hadd_ps(v[6], v[7]);
    const __m256 s0123 = _mm256_hadd_ps(s01, s23), s4567 = _mm256_hadd_ps(s45, s67);
    return _mm256_add_ps(_mm256_permute2f128_ps(s0123, s4567, 0x20), _mm256_permute2f128_ps(s0123, s4567, 0x31));
}

#else

typedef struct { float x[8]; } Eight;
INLINE Eight eight_set(float x) { Eight r; for (int i = 0; i < 8; i++) r.x[i] = x; return r; }
INLINE Eight eight_zero(void) { return eight_set(0.0f); }
INLINE Eight eight_load(const float *p) { Eight r; memcpy(&r, p, sizeof r); return r; }
INLINE void eight_store(float *p, Eight v) { memcpy(p, &v, sizeof v); }
INLINE Eight eight_fma(Eight a, Eight b, Eight c) {
    for (int i = 0; i < 8; i++) c.x[i] = __builtin_fmaf(a.x[i], b.x[i], c.x[i]);
    return c;
}
INLINE Eight eight_mul(Eight a, Eight b) { for (int i = 0; i < 8; i++) a.x[i] *= b.x[i]; return a; }
INLINE Eight eight_load_bf16(const bf16 *p) {
    Eight r;
    for (int i = 0; i < 8; i++) r.x[i] = bf16_to_float(p[i]);
    return r;
}
INLINE Eight eight_sums(const Eight v[8]) {
    Eight r;
    for (int i = 0; i < 8; i++) {
        const float *x = v[i].x;
        r.x[i] = ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
    }
    return r;
}

#endif

// Sum of eight partial sums in the order of `eight_sums`.
INLINE float eight_total(Eight v) {
    float x[8];
    eight_store(x, v);
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

// --- elementary functions: elementwise, so that vectorising them changes no bit -------------------------------------

// e^x; 0 below -87.3, saturating above 88.3. Range reduction by powers of two, polynomial of Cephes expf (Moshier).
INLINE float exp_float(float x) {
    const float low = -87.33654f, high = 88.3762626647949f;
    const float clamped = x < low ? low : (x > high ? high : x);
    const float n = __builtin_rintf(clamped * 1.44269504088896341f);
    float r = __builtin_fmaf(n, -0.693359375f, clamped);
    r = __builtin_fmaf(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = __builtin_fmaf(p, r, 1.3981999507e-3f);
    p = __builtin_fmaf(p, r, 8.3334519073e-3f);
    p = __builtin_fmaf(p, r, 4.1665795894e-2f);
    p = __builtin_fmaf(p, r, 1.6666665459e-1f);
    p = __builtin_fmaf(p, r, 5.0000001201e-1f);
    p = __builtin_fmaf(p, r * r, r) + 1.0f;
    const int32_t bits = ((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    const float value = p * scale;
    return x < low ? 0.0f : (x != x ? x : value);
}
