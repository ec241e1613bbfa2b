// A range of dense decoder layers in one parallel region. Made of the same parts as the single ops, so that the bits are
// those of their composition.

#include <omp.h>

#include "barrier.h"
#include "parts.h"

typedef struct {
    const float *input_norm, *q_norm, *k_norm, *post_norm;  // q_norm and k_norm: both or neither
    const Weight *qkv, *output, *gate_up, *down;
} Layer;

typedef struct {
    const Layer *layers;
    const float *cos, *sin;  // [positions, half]
    idx num_layers, hidden, heads, kv_heads, head_dim, inter, half;
    float eps, scale;
} Layers;

typedef struct {
    float *hidden;           // [rows, hidden] residual stream, in and out
    float *normed;           // [rows, hidden]
    float *qkv;              // [rows, (heads + 2 * kv_heads) * head_dim]
    float *attended;         // [rows, heads * head_dim]
    float *added;            // [rows, hidden]
    float *gate_up;          // [rows, 2 * inter]
    float *gated;            // [rows, inter]
    float *const *captures;  // [num_layers]: where the residual stream after a layer goes, or NULL
    Barrier *barrier;
} Buffers;

typedef struct {
    idx first, last;
} Share;

static Buffers slice_scratch(const Layers *m, idx rows, float *hidden, float *scratch, float *const *captures) {
    Buffers b = {.hidden = hidden, .captures = captures};
    b.normed = scratch;
    b.qkv = b.normed + rows * m->hidden;
    b.attended = b.qkv + rows * (m->heads + 2 * m->kv_heads) * m->head_dim;
    b.added = b.attended + rows * m->heads * m->head_dim;
    b.gate_up = b.added + rows * m->hidden;
    b.gated = b.gate_up + rows * 2 * m->inter;
    return b;
}

static void add_to_stream(const Layers *m, const Buffers *b, Share own, float *capture) {
    for (idx r = own.first; r < own.last; r++) {
        float *stream = b->hidden + r * m->hidden;
        add_row(b->added + r * m->hidden, stream, m->hidden, stream);
        if (capture) memcpy(capture + r * m->hidden, stream, (size_t)m->hidden * sizeof(float));
    }
}

static void norm_stream(const Layers *m, const Buffers *b, Share own, const float *weight) {
    for (idx r = own.first; r < own.last; r++) {
        rms_norm_row(b->hidden + r * m->hidden, weight, m->eps, m->hidden, b->normed + r * m->hidden);
    }
}

static void place_rows(const Layers *m, const Layer *layer, const Batch *batch, const Pages *pages, const Buffers *b,
                       Share own) {
    const idx dim = m->head_dim, width = (m->heads + 2 * m->kv_heads) * dim;
    for (idx r = own.first; r < own.last; r++) {
        float *q = b->qkv + r * width, *k = q + m->heads * dim, *v = k + m->kv_heads * dim;
        if (layer->q_norm) {
            for (idx h = 0; h < m->heads; h++) rms_norm_row(q + h * dim, layer->q_norm, m->eps, dim, q + h * dim);
            for (idx h = 0; h < m->kv_heads; h++) rms_norm_row(k + h * dim, layer->k_norm, m->eps, dim, k + h * dim);
        }
        const idx at = batch->positions[r] * m->half;
        rope_row(q, m->heads + m->kv_heads, dim, m->cos + at, m->sin + at, m->half);
        write_kv_row(batch, pages, r, k, v);
    }
}

// Gate, up and their product. A thread computes the same columns of both, so that no barrier is needed in between.
static void gated_part(const Layers *m, const Layer *layer, const Buffers *b, idx rows, int thread, int num_threads) {
    const idx inter = m->inter, panels = inter / PANEL;
    Share columns;
    if (inter % PANEL == 0) {
        share(panels, thread, num_threads, &columns.first, &columns.last);
        linear_panels(layer->gate_up, b->normed, m->hidden, b->gate_up, 2 * inter, rows, columns.first, columns.last);
        linear_panels(layer->gate_up, b->normed, m->hidden, b->gate_up, 2 * inter, rows, panels + columns.first,
                      panels + columns.last);
        columns.first *= PANEL;
        columns.last *= PANEL;
    } else {
        linear_part(layer->gate_up, b->normed, m->hidden, b->gate_up, 2 * inter, rows, thread, num_threads);
        barrier_wait(b->barrier, num_threads);
        share(inter, thread, num_threads, &columns.first, &columns.last);
    }
    for (idx r = 0; r < rows; r++) {
        const float *gate = b->gate_up + r * 2 * inter + columns.first;
        silu_mul_row(gate, gate + inter, columns.last - columns.first, b->gated + r * inter + columns.first);
    }
}

static void decoder_layers_part(const Layers *m, const Pages *pages, const Batch *batch, const Buffers *b, int thread,
                                int num_threads) {
    const idx rows = batch->num_rows, q_size = m->heads * m->head_dim;
    const Rows q = {b->qkv, q_size + 2 * m->kv_heads * m->head_dim}, attended = {b->attended, q_size};
    Share own;
    share(rows, thread, num_threads, &own.first, &own.last);
    for (idx l = 0; l < m->num_layers; l++) {
        const Layer *layer = &m->layers[l];
        norm_stream(m, b, own, layer->input_norm);
        barrier_wait(b->barrier, num_threads);
        linear_part(layer->qkv, b->normed, m->hidden, b->qkv, q.stride, rows, thread, num_threads);
        barrier_wait(b->barrier, num_threads);
        place_rows(m, layer, batch, &pages[l], b, own);
        barrier_wait(b->barrier, num_threads);
        attention_part(batch, &pages[l], q, attended, m->heads, m->scale, thread, num_threads);
        barrier_wait(b->barrier, num_threads);
        linear_part(layer->output, b->attended, q_size, b->added, m->hidden, rows, thread, num_threads);
        barrier_wait(b->barrier, num_threads);
        add_to_stream(m, b, own, NULL);
        norm_stream(m, b, own, layer->post_norm);
        barrier_wait(b->barrier, num_threads);
        gated_part(m, layer, b, rows, thread, num_threads);
        barrier_wait(b->barrier, num_threads);
        linear_part(layer->down, b->gated, m->inter, b->added, m->hidden, rows, thread, num_threads);
        barrier_wait(b->barrier, num_threads);
        add_to_stream(m, b, own, b->captures[l]);
    }
}

void gl_decoder_layers(const Layers *m, const Pages *pages, const Batch *batch, float *hidden, float *scratch,
                       float *const *captures, int wanted) {
    Barrier barrier = {0};
    Buffers buffers = slice_scratch(m, batch->num_rows, hidden, scratch, captures);
    buffers.barrier = &barrier;
    IN_PARALLEL(wanted, decoder_layers_part(m, pages, batch, &buffers, thread, num_threads));
}
