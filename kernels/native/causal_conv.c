// Causal depthwise convolution over every row's own path: its ancestors within the segment, then the slot's window.
// Lanes run over channels; each sums its taps from the oldest to the newest in one chain of fused multiply-adds.

#include <omp.h>

#include "recurrent.h"

enum { BLOCK = 256, MAX_WIDTH = 8 };

typedef struct {
    const float *x;       // [rows, channels], rounded to the windows' type already
    idx x_stride, channels, width;
    const float *weight;  // [width][channels], the oldest tap first
    void *windows;        // [slots][width - 1][channels], the oldest input first
    idx window_stride;    // elements between slots
    void *nodes;          // [slots][nodes][width - 1][channels], or NULL: windows of nodes 1, 2, ...
    idx node_slot_stride, node_stride;
    idx type;
    float *out;           // [rows, channels], or NULL: only the windows move on
} Conv;

static void load_typed(const void *data, idx type, idx element, idx count, float *to) {
    if (type == TYPE_FLOAT32) {
        memcpy(to, (const float *)data + element, (size_t)count * sizeof(float));
    } else {
        const bf16 *from = (const bf16 *)data + element;
        for (idx i = 0; i < count; i++) to[i] = bf16_to_float(from[i]);
    }
}

static void store_typed(void *data, idx type, idx element, idx count, const float *from) {
    if (type == TYPE_FLOAT32) {
        memcpy((float *)data + element, from, (size_t)count * sizeof(float));
    } else {
        bf16 *to = (bf16 *)data + element;
        for (idx i = 0; i < count; i++) to[i] = float_to_bf16(from[i]);
    }
}

// What a row sees, the oldest first: `taps[width - 1]` is the row's own input.
static void find_taps(const Conv *c, const StateRows *s, const float window[][BLOCK], idx first_row, idx row, idx at,
                      const float **taps) {
    idx local = row, place = c->width - 1;
    while (place >= 0 && local >= 0) {
        taps[place--] = c->x + (first_row + local) * c->x_stride + at;
        local = s->parents[first_row + local];
    }
    for (idx newest = c->width - 2; place >= 0; place--, newest--) taps[place] = window[newest];
}

static void convolve(const Conv *c, const float **taps, idx at, idx count, float *restrict out) {
    for (idx i = 0; i < count; i++) out[i] = 0.0f;
    for (idx tap = 0; tap < c->width; tap++) {
        const float *restrict value = taps[tap], *restrict weight = c->weight + tap * c->channels + at;
        for (idx i = 0; i < count; i++) out[i] = __builtin_fmaf(value[i], weight[i], out[i]);
    }
    for (idx i = 0; i < count; i++) out[i] = out[i] / (1.0f + exp_float(-out[i]));
}

static void store_window(const Conv *c, void *windows, idx element, idx at, idx count, const float **taps) {
    for (idx i = 0; i < c->width - 1; i++) store_typed(windows, c->type, element + i * c->channels + at, count, taps[i + 1]);
}

static void conv_block(const Conv *c, const StateRows *s, idx segment, idx at, idx count) {
    float window[MAX_WIDTH - 1][BLOCK];
    const float *taps[MAX_WIDTH];
    const idx first = s->segment_rows[segment], rows = s->segment_rows[segment + 1] - first, slot = s->slots[segment];
    for (idx i = 0; i < c->width - 1; i++) {
        load_typed(c->windows, c->type, slot * c->window_stride + i * c->channels + at, count, window[i]);
    }
    for (idx row = 0; row < rows; row++) {
        find_taps(c, s, window, first, row, at, taps);
        if (c->out != NULL) convolve(c, taps, at, count, c->out + (first + row) * c->channels + at);
        if (c->nodes != NULL && s->is_tree[segment] && row > 0) {
            store_window(c, c->nodes, slot * c->node_slot_stride + (row - 1) * c->node_stride, at, count, taps);
        }
    }
    find_taps(c, s, window, first, s->is_tree[segment] ? 0 : rows - 1, at, taps);
    store_window(c, c->windows, slot * c->window_stride, at, count, taps);
}

static void conv_part(const Conv *c, const StateRows *s, int thread, int num_threads) {
    const idx blocks = (c->channels + BLOCK - 1) / BLOCK;
    idx first, last;
    share(s->num_segments * blocks, thread, num_threads, &first, &last);
    for (idx i = first; i < last; i++) {
        const idx at = i % blocks * BLOCK, left = c->channels - at;
        conv_block(c, s, i / blocks, at, left < BLOCK ? left : BLOCK);
    }
}

void gl_causal_conv(const StateRows *s, const float *x, idx x_stride, idx channels, idx width, const float *weight,
                    void *windows, idx window_stride, void *nodes, idx node_slot_stride, idx node_stride, idx type,
                    float *out, int wanted) {
    const Conv c = {x, x_stride, channels, width, weight, windows, window_stride, nodes, node_slot_stride, node_stride,
                    type, out};
    IN_PARALLEL(wanted, conv_part(&c, s, thread, num_threads));
}
