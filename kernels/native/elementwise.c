// Norms, rope, gated activation and KV writes, one row at a time: a row's bits depend on that row alone.

#include <omp.h>

#include "parts.h"

// Eight partial sums over i mod 8, in order, then their fixed tree.
void rms_norm_row(const float *x, const float *weight, float eps, idx dim, float *out) {
    const idx whole = dim / 8 * 8;
    Eight sums = eight_zero();
    for (idx i = 0; i < whole; i += 8) {
        const Eight value = eight_load(x + i);
        sums = eight_fma(value, value, sums);
    }
    if (whole < dim) {
        float tail[8] = {0};
        memcpy(tail, x + whole, (size_t)(dim - whole) * sizeof(float));
        const Eight value = eight_load(tail);
        sums = eight_fma(value, value, sums);
    }
    const float scale = 1.0f / sqrtf(eight_total(sums) / (float)dim + eps);
    for (idx i = 0; i < dim; i++) out[i] = x[i] * scale * weight[i];
}

void add_row(const float *x, const float *residual, idx dim, float *out) {
    for (idx i = 0; i < dim; i++) out[i] = x[i] + residual[i];
}

void rope_row(float *x, idx heads, idx head_dim, const float *cos, const float *sin, idx half) {
    for (idx h = 0; h < heads; h++) {
        float *restrict first = x + h * head_dim, *restrict second = first + half;
        for (idx i = 0; i < half; i++) {
            const float a = first[i], b = second[i];
            first[i] = __builtin_fmaf(-b, sin[i], a * cos[i]);
            second[i] = __builtin_fmaf(a, sin[i], b * cos[i]);
        }
    }
}

void silu_mul_row(const float *gate, const float *up, idx count, float *out) {
    for (idx i = 0; i < count; i++) out[i] = gate[i] / (1.0f + exp_float(-gate[i])) * up[i];
}

static void store_row(void *pages, idx type, idx element, const float *values, idx count) {
    if (type == TYPE_FLOAT32) {
        memcpy((float *)pages + element, values, (size_t)count * sizeof(float));
    } else {
        bf16 *to = (bf16 *)pages + element;
        for (idx i = 0; i < count; i++) to[i] = float_to_bf16(values[i]);
    }
}

void store_kv(const Pages *p, idx element, const float *k, const float *v) {
    const idx count = p->kv_heads * p->head_dim;
    store_row(p->k, p->type, element, k, count);
    store_row(p->v, p->type, element, v, count);
}

void write_kv_row(const Batch *b, const Pages *p, idx row, const float *k, const float *v) {
    const idx segment = b->row_segment[row];
    const idx slot = b->segment_start[segment] + row - b->segment_rows[segment];
    store_kv(p, slot_element(b, p, segment, slot), k, v);
}

// --- entry points --------------------------------------------------------------------------------------------------

static void rms_norm_part(const float *x, idx x_stride, idx rows, idx heads, idx dim, const float *weight, float eps,
                          float *out, int thread, int num_threads) {
    idx first, last;
    share(rows * heads, thread, num_threads, &first, &last);
    for (idx i = first; i < last; i++) {
        rms_norm_row(x + i / heads * x_stride + i % heads * dim, weight, eps, dim, out + i * dim);
    }
}

void gl_rms_norm(const float *x, idx x_stride, idx rows, idx heads, idx dim, const float *weight, float eps, float *out,
                 int wanted) {
    IN_PARALLEL(wanted, rms_norm_part(x, x_stride, rows, heads, dim, weight, eps, out, thread, num_threads));
}

static void add_rms_norm_part(const float *x, const float *residual, idx rows, idx dim, const float *weight, float eps,
                              float *out, float *total, int thread, int num_threads) {
    idx first, last;
    share(rows, thread, num_threads, &first, &last);
    for (idx i = first; i < last; i++) {
        add_row(x + i * dim, residual + i * dim, dim, total + i * dim);
        rms_norm_row(total + i * dim, weight, eps, dim, out + i * dim);
    }
}

void gl_add_rms_norm(const float *x, const float *residual, idx rows, idx dim, const float *weight, float eps, float *out,
                     float *total, int wanted) {
    IN_PARALLEL(wanted, add_rms_norm_part(x, residual, rows, dim, weight, eps, out, total, thread, num_threads));
}

static void rope_part(Rows x, idx rows, idx heads, idx head_dim, const int32_t *positions, const float *cos,
                      const float *sin, idx half, int thread, int num_threads) {
    idx first, last;
    share(rows, thread, num_threads, &first, &last);
    for (idx i = first; i < last; i++) {
        const idx at = positions[i] * half;
        rope_row(x.data + i * x.stride, heads, head_dim, cos + at, sin + at, half);
    }
}

void gl_rope(float *q, idx q_stride, idx q_heads, float *k, idx k_stride, idx k_heads, idx rows, idx head_dim,
             const int32_t *positions, const float *cos, const float *sin, idx half, int wanted) {
    const Rows q_rows = {q, q_stride}, k_rows = {k, k_stride};
    IN_PARALLEL(wanted, (rope_part(q_rows, rows, q_heads, head_dim, positions, cos, sin, half, thread, num_threads),
                         rope_part(k_rows, rows, k_heads, head_dim, positions, cos, sin, half, thread, num_threads)));
}

static void silu_mul_part(const float *gate_up, idx rows, idx count, float *out, int thread, int num_threads) {
    // Pieces of rows, so that one row also keeps every thread busy.
    const idx piece = 256, pieces = (count + piece - 1) / piece;
    idx first, last;
    share(rows * pieces, thread, num_threads, &first, &last);
    for (idx i = first; i < last; i++) {
        const idx row = i / pieces, at = i % pieces * piece;
        const float *gate = gate_up + row * 2 * count + at;
        silu_mul_row(gate, gate + count, count - at < piece ? count - at : piece, out + row * count + at);
    }
}

void gl_silu_mul(const float *gate_up, idx rows, idx count, float *out, int wanted) {
    IN_PARALLEL(wanted, silu_mul_part(gate_up, rows, count, out, thread, num_threads));
}

static void write_kv_part(const Batch *b, const Pages *p, Rows k, Rows v, int thread, int num_threads) {
    idx first, last;
    share(b->num_rows, thread, num_threads, &first, &last);
    for (idx i = first; i < last; i++) write_kv_row(b, p, i, k.data + i * k.stride, v.data + i * v.stride);
}

void gl_write_kv(const Batch *b, const Pages *p, float *k, idx k_stride, float *v, idx v_stride, int wanted) {
    const Rows k_rows = {k, k_stride}, v_rows = {v, v_stride};
    IN_PARALLEL(wanted, write_kv_part(b, p, k_rows, v_rows, thread, num_threads));
}

// Planes [first, last) of every sequence: tokens move one after the other, each to a slot at or before its own.
static void compact_part(char *pool, idx planes, idx page_size, idx token_bytes, const int32_t *tables, idx max_pages,
                         const int32_t *starts, const int32_t *accepted, idx sequences, idx max_accepted, int thread,
                         int num_threads) {
    idx first, last;
    share(planes, thread, num_threads, &first, &last);
    for (idx s = 0; s < sequences; s++) {
        const int32_t *table = tables + s * max_pages;
        for (idx j = 0; j < max_accepted; j++) {
            const idx node = accepted[s * max_accepted + j];
            if (node < 0) break;
            if (node == j) continue;
            const idx source = starts[s] + node, target = starts[s] + j;
            const idx from = table[source / page_size] * planes * page_size + source % page_size;
            const idx to = table[target / page_size] * planes * page_size + target % page_size;
            for (idx plane = first; plane < last; plane++) {
                memcpy(pool + (to + plane * page_size) * token_bytes, pool + (from + plane * page_size) * token_bytes,
                       (size_t)token_bytes);
            }
        }
    }
}

void gl_compact_kv(char *pool, idx planes, idx page_size, idx token_bytes, const int32_t *tables, idx max_pages,
                   const int32_t *starts, const int32_t *accepted, idx sequences, idx max_accepted, int wanted) {
    IN_PARALLEL(wanted, compact_part(pool, planes, page_size, token_bytes, tables, max_pages, starts, accepted, sequences,
                                     max_accepted, thread, num_threads));
}
