// The gated delta rule, token by token: S <- a S; S <- S + k (beta (v - k S)); o = q S. Lanes run over the columns of S (the
// value dimension), sums over its rows (the key dimension) are chains of fused multiply-adds in order.

#include <omp.h>

#include "recurrent.h"

enum { MAX_DIM = 256 };

typedef struct {
    const float *q, *k;          // [rows, k_heads, key_dim], q may be NULL: no output is wanted
    const float *v;              // [rows, v_heads, value_dim]
    idx v_stride;                // between rows of v
    const float *decay, *beta;   // [rows, v_heads]
    idx k_heads, v_heads, key_dim, value_dim;
    NodeArrays states;           // [slots][v_heads][key_dim][value_dim]; node_stride unused
    NodeArrays nodes;            // [slots][nodes]...: states of nodes 1, 2, ... of a tree; data NULL: they go to scratch
    float *scratch;              // [threads][max nodes][key_dim][value_dim]
    idx scratch_nodes;
    float *out;                  // [rows, v_heads, value_dim]
} Delta;

static void step(const Delta *d, idx row, idx head, const float *from, float *to) {
    const idx n = d->key_dim, m = d->value_dim, k_head = head / (d->v_heads / d->k_heads);
    const float *k = d->k + (row * d->k_heads + k_head) * n, *v = d->v + row * d->v_stride + head * m;
    const float *q = d->q == NULL ? NULL : d->q + (row * d->k_heads + k_head) * n;
    const float decay = d->decay[row * d->v_heads + head], beta = d->beta[row * d->v_heads + head];
    float change[MAX_DIM], sums[MAX_DIM];
    for (idx j = 0; j < m; j++) change[j] = 0.0f, sums[j] = 0.0f;
    for (idx i = 0; i < n; i++) {
        const float *s = from + i * m, key = k[i];
        _Pragma("GCC ivdep") for (idx j = 0; j < m; j++) change[j] = __builtin_fmaf(s[j] * decay, key, change[j]);
    }
    for (idx j = 0; j < m; j++) change[j] = (v[j] - change[j]) * beta;
    for (idx i = 0; i < n; i++) {
        const float *s = from + i * m, key = k[i], query = q == NULL ? 0.0f : q[i];
        float *t = to + i * m;
        _Pragma("GCC ivdep") for (idx j = 0; j < m; j++) {
            const float value = __builtin_fmaf(key, change[j], s[j] * decay);
            t[j] = value;
            sums[j] = __builtin_fmaf(value, query, sums[j]);
        }
    }
    if (q != NULL) memcpy(d->out + (row * d->v_heads + head) * m, sums, (size_t)m * sizeof(float));
}

static void delta_head(const Delta *d, const StateRows *s, idx segment, idx head, float *scratch) {
    const idx size = d->key_dim * d->value_dim, slot = s->slots[segment];
    const idx first = s->segment_rows[segment], rows = s->segment_rows[segment + 1] - first;
    float *state = d->states.data + slot * d->states.slot_stride + head * size;
    if (!s->is_tree[segment]) {
        for (idx row = 0; row < rows; row++) step(d, first + row, head, state, state);
        return;
    }
    float *nodes = scratch;
    idx stride = size;
    if (d->nodes.data != NULL) {
        nodes = d->nodes.data + slot * d->nodes.slot_stride + head * size;
        stride = d->nodes.node_stride;
    }
    step(d, first, head, state, state);
    for (idx row = 1; row < rows; row++) {
        const idx parent = s->parents[first + row];
        step(d, first + row, head, parent == 0 ? state : nodes + (parent - 1) * stride, nodes + (row - 1) * stride);
    }
}

static void delta_part(const Delta *d, const StateRows *s, int thread, int num_threads) {
    idx first, last;
    share(s->num_segments * d->v_heads, thread, num_threads, &first, &last);
    float *scratch = d->scratch + thread * d->scratch_nodes * d->key_dim * d->value_dim;
    for (idx i = first; i < last; i++) delta_head(d, s, i / d->v_heads, i % d->v_heads, scratch);
}

void gl_gated_delta(const StateRows *s, const float *q, const float *k, const float *v, idx v_stride, const float *decay,
                    const float *beta, idx k_heads, idx v_heads, idx key_dim, idx value_dim, float *states,
                    idx slot_stride, float *nodes, idx node_slot_stride, idx node_stride, float *scratch,
                    idx scratch_nodes, float *out, int wanted) {
    const Delta d = {q, k, v, v_stride, decay, beta, k_heads, v_heads, key_dim, value_dim, {states, slot_stride, 0},
                     {nodes, node_slot_stride, node_stride}, scratch, scratch_nodes, out};
    IN_PARALLEL(wanted, delta_part(&d, s, thread, num_threads));
}

// --- what goes in: normalised keys and queries, decay and beta --------------------------------------------------------

static void unit_head(const float *x, idx dim, float factor, float *out) {
    Eight sums = eight_set(0.0f);
    idx i = 0;
    for (; i + 8 <= dim; i += 8) {
        const Eight value = eight_load(x + i);
        sums = eight_fma(value, value, sums);
    }
    float total = eight_total(sums);
    for (; i < dim; i++) total = __builtin_fmaf(x[i], x[i], total);
    const float scale = factor / sqrtf(total + 1e-6f);
    for (i = 0; i < dim; i++) out[i] = x[i] * scale;
}

static void inputs_part(const float *mixed, idx stride, const float *ba, idx ba_stride, idx rows, idx k_heads,
                        idx v_heads, idx key_dim, const float *rate, const float *bias, float *q, float *k, float *decay,
                        float *beta, int thread, int num_threads) {
    const float shrink = 1.0f / sqrtf((float)key_dim);
    idx first, last;
    share(rows, thread, num_threads, &first, &last);
    for (idx row = first; row < last; row++) {
        for (idx h = 0; h < k_heads; h++) {
            const float *query = mixed + row * stride + h * key_dim;
            unit_head(query, key_dim, shrink, q + (row * k_heads + h) * key_dim);
            unit_head(query + k_heads * key_dim, key_dim, 1.0f, k + (row * k_heads + h) * key_dim);
        }
        const float *b = ba + row * ba_stride, *a = b + v_heads;
        for (idx h = 0; h < v_heads; h++) {
            const float x = a[h] + bias[h], soft = x > 20.0f ? x : log1pf(exp_float(x));
            decay[row * v_heads + h] = exp_float(-rate[h] * soft);
            beta[row * v_heads + h] = 1.0f / (1.0f + exp_float(-b[h]));
        }
    }
}

void gl_delta_inputs(const float *mixed, idx stride, const float *ba, idx ba_stride, idx rows, idx k_heads, idx v_heads,
                     idx key_dim, const float *rate, const float *bias, float *q, float *k, float *decay, float *beta,
                     int wanted) {
    IN_PARALLEL(wanted, inputs_part(mixed, stride, ba, ba_stride, rows, k_heads, v_heads, key_dim, rate, bias, q, k, decay,
                                    beta, thread, num_threads));
}

// --- what comes out: norm, then gate ----------------------------------------------------------------------------------

static void gated_norm_part(const float *x, const float *gate, idx gate_stride, idx rows, idx heads, idx dim,
                            const float *weight, float eps, float *out, int thread, int num_threads) {
    idx first, last;
    share(rows * heads, thread, num_threads, &first, &last);
    for (idx i = first; i < last; i++) {
        const float *g = gate + i / heads * gate_stride + i % heads * dim;
        float *to = out + i * dim;
        rms_norm_row(x + i * dim, weight, eps, dim, to);
        for (idx j = 0; j < dim; j++) to[j] *= g[j] / (1.0f + exp_float(-g[j]));
    }
}

void gl_gated_rms_norm(const float *x, const float *gate, idx gate_stride, idx rows, idx heads, idx dim,
                       const float *weight, float eps, float *out, int wanted) {
    IN_PARALLEL(wanted, gated_norm_part(x, gate, gate_stride, rows, heads, dim, weight, eps, out, thread, num_threads));
}
