// Every op as a function of (arguments, thread, number of threads), so that a single op and a fused layer run the same
// code: whoever calls it provides the threads and the barriers between dependent parts.
#pragma once

#include "vec.h"

enum { TYPE_FLOAT32 = 0, TYPE_BFLOAT16 = 1, TYPE_INT8 = 2 };
enum { PANEL = 16 };  // output features a panel of a packed weight

// Half-open share of `count` items for one thread.
INLINE void share(idx count, int thread, int num_threads, idx *begin, idx *end) {
    *begin = count * thread / num_threads;
    *end = count * (thread + 1) / num_threads;
}

// Runs CALL, which names `thread` and `num_threads`, on `wanted` threads.
#define IN_PARALLEL(wanted, CALL)                                                                                      \
    do {                                                                                                               \
        if ((wanted) == 1) {                                                                                           \
            const int thread = 0, num_threads = 1;                                                                     \
            CALL;                                                                                                      \
        } else {                                                                                                       \
            _Pragma("omp parallel num_threads(wanted)") {                                                              \
                const int thread = omp_get_thread_num(), num_threads = omp_get_num_threads();                          \
                CALL;                                                                                                  \
            }                                                                                                          \
        }                                                                                                              \
    } while (0)

typedef struct {
    const void *data;    // packed panels, see linear.c
    const float *scale;  // [out] for int8, else NULL
    const float *bias;   // [out] or NULL
    idx in_features, out_features;
    idx type;
} Weight;

// Mirrors graftline.kernels.attention_batch.AttentionBatch.
typedef struct {
    const int32_t *row_segment, *positions, *parents, *segment_rows, *segment_start, *page_tables;
    idx num_rows, num_segments, max_pages, page_size, is_chain;
    idx skipped;  // first rows of every segment whose KV is there already and whose attention nobody wants
} Batch;

// K and V of one layer: [num_pages, page_size, kv_heads, head_dim], any stride between pages.
typedef struct {
    void *k, *v;
    idx page_stride;  // in elements, for both
    idx kv_heads, head_dim;
    idx type;
} Pages;

// Rows of heads: element (row, head, d) at data[row * stride + head * head_dim + d].
typedef struct {
    float *data;
    idx stride;
} Rows;

INLINE idx slot_element(const Batch *b, const Pages *p, idx segment, idx slot) {
    const idx page = b->page_tables[segment * b->max_pages + slot / b->page_size];
    return page * p->page_stride + slot % b->page_size * p->kv_heads * p->head_dim;
}

void linear_panels(const Weight *w, const float *x, idx x_stride, float *out, idx out_stride, idx rows, idx first, idx last);
void linear_part(const Weight *w, const float *x, idx x_stride, float *out, idx out_stride, idx rows, int thread,
                 int num_threads);
void unpack_row(const Weight *w, idx row, float *out);
void rms_norm_row(const float *x, const float *weight, float eps, idx dim, float *out);
void add_row(const float *x, const float *residual, idx dim, float *out);
void rope_row(float *x, idx heads, idx head_dim, const float *cos, const float *sin, idx half);
void silu_mul_row(const float *gate, const float *up, idx count, float *out);
void store_kv(const Pages *p, idx element, const float *k, const float *v);
void write_kv_row(const Batch *b, const Pages *p, idx row, const float *k, const float *v);
void attention_part(const Batch *b, const Pages *p, Rows q, Rows out, idx heads, float scale, int thread, int num_threads);
// Writes the k likeliest ids and their log-probabilities; returns the log-normaliser.
float top_k_row(const float *logits, idx count, idx k, float *values, int64_t *ids, void *scratch);
idx top_k_scratch_bytes(idx count);
