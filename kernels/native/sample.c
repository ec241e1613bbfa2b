// Token draws, top-k and log-normalisers, one row of logits at a time. The specification is graftline.kernels.sample.

#include <float.h>
#include <omp.h>
#include <stdlib.h>

#include "parts.h"

enum { CHUNK = 64 };  // ids whose maximum is kept

typedef struct {
    const float *logits;
    idx count, num_chunks;
    float *chunk_max;  // [num_chunks]
    float max;
    idx argmax;  // lowest id of the maximum, or -1: a NaN, a +inf, or nothing finite
} Row;

typedef struct {
    float logit;
    int32_t id;
} Candidate;

typedef struct {
    const float *temperature, *top_p, *min_p;
    const int32_t *top_k;
    const int64_t *seed, *position;
} Params;

INLINE float max_float(float a, float b) { return a > b ? a : b; }

static Row scan_row(const float *logits, idx count, float *chunk_max) {
    Row row = {logits, count, (count + CHUNK - 1) / CHUNK, chunk_max, -INFINITY, -1};
    int bad = 0;
    for (idx c = 0; c < row.num_chunks; c++) {
        const float *x = logits + c * CHUNK;
        float lanes[8] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY};
        if (c * CHUNK + CHUNK <= count) {
            int odd[8] = {0};
            for (idx j = 0; j < CHUNK; j += 8) {
                for (idx i = 0; i < 8; i++) lanes[i] = max_float(x[j + i], lanes[i]);
                for (idx i = 0; i < 8; i++) odd[i] |= !(x[j + i] <= FLT_MAX);
            }
            for (idx i = 0; i < 8; i++) bad |= odd[i];
        } else {
            for (idx j = 0; j < count - c * CHUNK; j++) {
                lanes[0] = max_float(x[j], lanes[0]);
                bad |= !(x[j] <= FLT_MAX);
            }
        }
        for (idx i = 1; i < 8; i++) lanes[0] = max_float(lanes[i], lanes[0]);
        chunk_max[c] = lanes[0];
        row.max = max_float(lanes[0], row.max);
    }
    if (bad || !(row.max >= -FLT_MAX)) return row;
    idx c = 0;
    while (chunk_max[c] != row.max) c++;
    for (row.argmax = c * CHUNK; logits[row.argmax] != row.max;) row.argmax++;
    return row;
}

// Sum over ids of e^((logit - max) * inverse_temperature): float within a chunk, double across chunks.
static double sum_weights(const Row *row, float inverse_temperature) {
    double total = 0.0;
    for (idx c = 0; c < row->num_chunks; c++) {
        float weights[CHUNK], lanes[8] = {0};
        const idx n = row->count - c * CHUNK < CHUNK ? row->count - c * CHUNK : CHUNK;
        const float *x = row->logits + c * CHUNK;
        for (idx j = 0; j < n; j++) weights[j] = exp_float((x[j] - row->max) * inverse_temperature);
        for (idx j = n; j < CHUNK; j++) weights[j] = 0.0f;
        for (idx j = 0; j < CHUNK; j += 8) {
            for (idx i = 0; i < 8; i++) lanes[i] += weights[j + i];
        }
        total += (double)(((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7])));
    }
    return total;
}

// By logit descending, then id ascending.
static int compare_candidates(const void *left, const void *right) {
    const Candidate *a = left, *b = right;
    if (a->logit != b->logit) return a->logit > b->logit ? -1 : 1;
    return (a->id > b->id) - (a->id < b->id);
}

static int compare_descending(const void *left, const void *right) {
    const float a = *(const float *)left, b = *(const float *)right;
    return (a < b) - (a > b);
}

// All finite ids with logit >= threshold, sorted. `out` holds row->count candidates.
static idx collect(const Row *row, float threshold, Candidate *out) {
    idx n = 0;
    for (idx c = 0; c < row->num_chunks; c++) {
        if (row->chunk_max[c] < threshold) continue;
        const idx end = (c + 1) * CHUNK < row->count ? (c + 1) * CHUNK : row->count;
        for (idx i = c * CHUNK; i < end; i++) {
            if (row->logits[i] >= threshold && row->logits[i] >= -FLT_MAX) out[n++] = (Candidate){row->logits[i], (int32_t)i};
        }
    }
    qsort(out, (size_t)n, sizeof *out, compare_candidates);
    return n;
}

// The first k ids in candidate order (fewer when fewer are finite). The k-th largest chunk maximum bounds them below.
static idx collect_top_k(const Row *row, idx k, Candidate *out) {
    float threshold = -FLT_MAX;
    if (k <= row->num_chunks) {
        float *maxima = malloc((size_t)row->num_chunks * sizeof(float));
        memcpy(maxima, row->chunk_max, (size_t)row->num_chunks * sizeof(float));
        qsort(maxima, (size_t)row->num_chunks, sizeof(float), compare_descending);
        threshold = maxima[k - 1];
        free(maxima);
    }
    const idx n = collect(row, threshold, out);
    return n < k ? n : k;
}

// --- noise: see graftline.kernels.philox ---------------------------------------------------------------------------

enum { GROUP = 16 };  // Philox counters at a time: 4 * GROUP ids

// words[4 * i + j] belongs to id 4 * (first_counter + i) + j.
static void random_words(uint64_t seed, uint32_t position, uint32_t first_counter, uint32_t words[4 * GROUP]) {
    uint32_t w0[GROUP], w1[GROUP], w2[GROUP], w3[GROUP];
    for (int i = 0; i < GROUP; i++) {
        w0[i] = first_counter + (uint32_t)i;
        w1[i] = position;
        w2[i] = w3[i] = 0;
    }
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        for (int i = 0; i < GROUP; i++) {
            const uint64_t product0 = (uint64_t)w0[i] * 0xD2511F53u, product1 = (uint64_t)w2[i] * 0xCD9E8D57u;
            w0[i] = (uint32_t)(product1 >> 32) ^ w1[i] ^ key0;
            w2[i] = (uint32_t)(product0 >> 32) ^ w3[i] ^ key1;
            w1[i] = (uint32_t)product1;
            w3[i] = (uint32_t)product0;
        }
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    for (int i = 0; i < GROUP; i++) {
        words[4 * i] = w0[i];
        words[4 * i + 1] = w1[i];
        words[4 * i + 2] = w2[i];
        words[4 * i + 3] = w3[i];
    }
}

// `minus_one` replaces x - 1 where x needs no scaling by a power of two.
INLINE float log_float(float x, float minus_one) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    const int32_t exponent = (bits - 0x3F3504F3) >> 23;
    const int32_t mantissa = bits - (int32_t)((uint32_t)exponent << 23);
    float f;
    memcpy(&f, &mantissa, 4);
    f = f - 1.0f;
    f = exponent == 0 ? minus_one : f;
    const float e = (float)exponent, square = f * f;
    float p = 7.0376836292e-2f;
    p = __builtin_fmaf(p, f, -1.1514610310e-1f);
    p = __builtin_fmaf(p, f, 1.1676998740e-1f);
    p = __builtin_fmaf(p, f, -1.2420140846e-1f);
    p = __builtin_fmaf(p, f, 1.4249322787e-1f);
    p = __builtin_fmaf(p, f, -1.6668057665e-1f);
    p = __builtin_fmaf(p, f, 2.0000714765e-1f);
    p = __builtin_fmaf(p, f, -2.4999993993e-1f);
    p = __builtin_fmaf(p, f, 3.3333331174e-1f);
    float r = __builtin_fmaf(f * square, p, e * -2.12194440e-4f);
    r = __builtin_fmaf(square, -0.5f, r);
    return __builtin_fmaf(e, 0.693359375f, f + r);
}

INLINE float gumbel(uint32_t word) {
    float v = __builtin_fmaf((float)word, 0x1p-32f, 0x1p-33f);
    v = v > 1.0f - 0x1p-24f ? 1.0f - 0x1p-24f : v;
    const float exponential = -log_float(1.0f - v, -v);
    return -log_float(exponential, exponential - 1.0f);
}

void gl_noise(const int64_t *seeds, const int64_t *positions, const int64_t *ids, idx count, int64_t *words, float *noise) {
    for (idx i = 0; i < count; i++) {
        uint32_t group[4 * GROUP];
        random_words((uint64_t)seeds[i], (uint32_t)positions[i], (uint32_t)(ids[i] >> 2), group);
        words[i] = group[ids[i] & 3];
        noise[i] = gumbel(group[ids[i] & 3]);
    }
}

// --- draws ----------------------------------------------------------------------------------------------------------

typedef struct {
    float score;
    idx id;
} Best;

INLINE void consider(Best *best, float score, idx id) {
    if (score > best->score || (score == best->score && id < best->id)) *best = (Best){score, id};
}

// Over every finite id at least min_p times as likely as the likeliest.
static idx draw_from_all(const Row *row, float inverse_temperature, float min_p, uint64_t seed, uint32_t position) {
    Best best = {-INFINITY, row->count};
    for (idx c = 0; c < row->num_chunks; c++) {
        if (row->chunk_max[c] < -FLT_MAX) continue;
        if (min_p > 0.0f && exp_float((row->chunk_max[c] - row->max) * inverse_temperature) < min_p) continue;
        uint32_t words[CHUNK];
        float scores[CHUNK];
        const idx n = row->count - c * CHUNK < CHUNK ? row->count - c * CHUNK : CHUNK;
        const float *x = row->logits + c * CHUNK;
        random_words(seed, position, (uint32_t)(c * CHUNK / 4), words);
        for (idx j = 0; j < CHUNK; j++) scores[j] = gumbel(words[j]);
        for (idx j = 0; j < n; j++) scores[j] = __builtin_fmaf(x[j] - row->max, inverse_temperature, scores[j]);
        for (idx j = 0; j < n; j++) {
            if (scores[j] < best.score || !(x[j] >= -FLT_MAX)) continue;
            if (min_p > 0.0f && exp_float((x[j] - row->max) * inverse_temperature) < min_p) continue;
            consider(&best, scores[j], c * CHUNK + j);
        }
    }
    return best.id < row->count ? best.id : row->argmax;
}

static double candidate_weight(const Row *row, const Candidate *candidate, float inverse_temperature) {
    return (double)exp_float((candidate->logit - row->max) * inverse_temperature);
}

// Sorted candidates that top-k leaves, or, without top-k, enough of the likeliest to hold the nucleus; `total` is the
// weight that top-p refers to.
static idx collect_nucleus(const Row *row, idx top_k, float top_p, float inverse_temperature, Candidate *out, double *total) {
    if (top_k > 0) {
        const idx n = collect_top_k(row, top_k, out);
        *total = 0.0;
        for (idx i = 0; i < n; i++) *total += candidate_weight(row, &out[i], inverse_temperature);
        return n;
    }
    *total = sum_weights(row, inverse_temperature);
    for (double share = 1e-3; share > 1e-12; share /= 32.0) {
        const float threshold = row->max + (float)log(share * *total) / inverse_temperature;
        const idx n = collect(row, threshold, out);
        double sum = 0.0;
        for (idx i = 0; i < n; i++) sum += candidate_weight(row, &out[i], inverse_temperature);
        if (n > 0 && sum >= (double)top_p * *total) return n;
    }
    return collect(row, -FLT_MAX, out);
}

static idx draw(const Row *row, const Params *params, idx at) {
    const float inverse = 1.0f / params->temperature[at];
    const float inverse_temperature = inverse < 3e38f ? inverse : 3e38f;
    const float top_p = params->top_p[at], min_p = params->min_p[at];
    const idx top_k = params->top_k[at];
    const uint64_t seed = (uint64_t)params->seed[at];
    const uint32_t position = (uint32_t)params->position[at];
    if (top_k <= 0 && !(top_p < 1.0f)) return draw_from_all(row, inverse_temperature, min_p, seed, position);
    Candidate *candidates = malloc((size_t)row->count * sizeof(Candidate));
    double total, before = 0.0;
    const idx n = collect_nucleus(row, top_k, top_p, inverse_temperature, candidates, &total);
    Best best = {-INFINITY, row->count};
    for (idx i = 0; i < n; i++) {
        const double weight = candidate_weight(row, &candidates[i], inverse_temperature);
        if (i > 0 && ((top_p < 1.0f && !(before < (double)top_p * total)) || weight < (double)min_p)) break;
        before += weight;
        uint32_t words[4 * GROUP];
        random_words(seed, position, (uint32_t)candidates[i].id >> 2, words);
        const float noise = gumbel(words[candidates[i].id & 3]);
        consider(&best, __builtin_fmaf(candidates[i].logit - row->max, inverse_temperature, noise), candidates[i].id);
    }
    free(candidates);
    return best.id < row->count ? best.id : row->argmax;
}

// --- entry points --------------------------------------------------------------------------------------------------

static void sample_part(const float *logits, idx stride, idx rows, idx count, const Params *params, int64_t *ids, int thread,
                        int num_threads) {
    float *chunk_max = malloc((size_t)(count / CHUNK + 1) * sizeof(float));
    for (idx r = thread; r < rows; r += num_threads) {
        const Row row = scan_row(logits + r * stride, count, chunk_max);
        ids[r] = row.argmax < 0 || !params || !(params->temperature[r] > 0.0f) ? row.argmax : draw(&row, params, r);
    }
    free(chunk_max);
}

void gl_sample(const float *logits, idx stride, idx rows, idx count, const float *temperature, const int32_t *top_k,
               const float *top_p, const float *min_p, const int64_t *seed, const int64_t *position, int64_t *ids, int wanted) {
    const Params params = {temperature, top_p, min_p, top_k, seed, position};
    IN_PARALLEL(wanted, sample_part(logits, stride, rows, count, &params, ids, thread, num_threads));
}

void gl_argmax(const float *logits, idx stride, idx rows, idx count, int64_t *ids, int wanted) {
    IN_PARALLEL(wanted, sample_part(logits, stride, rows, count, NULL, ids, thread, num_threads));
}

idx top_k_scratch_bytes(idx count) { return (count / CHUNK + 2) * (idx)sizeof(float) + count * (idx)sizeof(Candidate); }

float top_k_row(const float *logits, idx count, idx k, float *values, int64_t *ids, void *scratch) {
    Candidate *candidates = scratch;
    const Row row = scan_row(logits, count, (float *)(candidates + count));
    const float norm = row.argmax < 0 ? NAN : (float)((double)row.max + log(sum_weights(&row, 1.0f)));
    const idx n = k == 0 || row.argmax < 0 ? 0 : collect_top_k(&row, k, candidates);
    for (idx i = 0; i < n; i++) {
        values[i] = candidates[i].logit - norm;
        ids[i] = candidates[i].id;
    }
    for (idx i = n; i < k; i++) {  // forbidden ids, or a row without a distribution
        values[i] = row.argmax < 0 ? NAN : -INFINITY;
        ids[i] = 0;
    }
    return norm;
}

static void top_k_part(const float *logits, idx stride, idx rows, idx count, idx k, float *values, int64_t *ids, float *norms,
                       int thread, int num_threads) {
    void *scratch = malloc((size_t)top_k_scratch_bytes(count));
    for (idx r = thread; r < rows; r += num_threads) {
        norms[r] = top_k_row(logits + r * stride, count, k, values + r * k, ids + r * k, scratch);
    }
    free(scratch);
}

void gl_top_k(const float *logits, idx stride, idx rows, idx count, idx k, float *values, int64_t *ids, float *norms,
              int wanted) {
    IN_PARALLEL(wanted, top_k_part(logits, stride, rows, count, k, values, ids, norms, thread, num_threads));
}
