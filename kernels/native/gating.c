// Sigmoid gates, and the choice of experts.

#include <omp.h>

#include "parts.h"

// out = x * sigmoid(gate); one gate a column, or one a row.
static void sigmoid_mul_part(const float *x, idx x_stride, const float *gate, idx gate_stride, idx gate_columns, idx rows,
                             idx columns, float *out, int thread, int num_threads) {
    idx first, last;
    share(rows, thread, num_threads, &first, &last);
    for (idx r = first; r < last; r++) {
        const float *from = x + r * x_stride, *g = gate + r * gate_stride;
        float *to = out + r * columns;
        if (gate_columns == 1) {
            const float factor = 1.0f / (1.0f + exp_float(-g[0]));
            for (idx i = 0; i < columns; i++) to[i] = from[i] * factor;
        } else {
            for (idx i = 0; i < columns; i++) to[i] = from[i] / (1.0f + exp_float(-g[i]));
        }
    }
}

void gl_sigmoid_mul(const float *x, idx x_stride, const float *gate, idx gate_stride, idx gate_columns, idx rows,
                    idx columns, float *out, int wanted) {
    IN_PARALLEL(wanted, sigmoid_mul_part(x, x_stride, gate, gate_stride, gate_columns, rows, columns, out, thread,
                                         num_threads));
}

// The `k` likeliest experts of a row, ties to the lower id, and their share of the softmax over all (or over the chosen).
static void route_row(const float *logits, idx experts, idx k, int normalise, float *weights, int64_t *ids) {
    float largest = logits[0], total = 0.0f, chosen = 0.0f;
    for (idx e = 1; e < experts; e++) largest = logits[e] > largest ? logits[e] : largest;
    for (idx e = 0; e < experts; e++) total += exp_float(logits[e] - largest);
    for (idx j = 0; j < k; j++) {
        idx best = -1;
        for (idx e = 0; e < experts; e++) {
            int taken = 0;
            for (idx i = 0; i < j; i++) taken |= ids[i] == e;
            if (!taken && (best < 0 || logits[e] > logits[best])) best = e;
        }
        ids[j] = best;
        weights[j] = exp_float(logits[best] - largest) / total;
        chosen += weights[j];
    }
    if (normalise) {
        for (idx j = 0; j < k; j++) weights[j] /= chosen;
    }
}

static void route_part(const float *logits, idx rows, idx experts, idx k, int normalise, float *weights, int64_t *ids,
                       int thread, int num_threads) {
    idx first, last;
    share(rows, thread, num_threads, &first, &last);
    for (idx r = first; r < last; r++) route_row(logits + r * experts, experts, k, normalise, weights + r * k, ids + r * k);
}

void gl_route(const float *logits, idx rows, idx experts, idx k, idx normalise, float *weights, int64_t *ids, int wanted) {
    IN_PARALLEL(wanted, route_part(logits, rows, experts, k, (int)normalise, weights, ids, thread, num_threads));
}
