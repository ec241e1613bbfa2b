// out = x W^T + b. Output features run along vector lanes; each lane sums k = 0, 1, 2, ... in one chain of fused
// multiply-adds that starts at 0, then adds the bias. Blocking over rows, panels and k only changes which chain runs when.
//
// Packed layouts, for panels of 16 outputs (the last one padded with zeros):
//   float32, int8:  [panel][k][16]
//   bfloat16:       [panel][k / 2][16][2], so that a 32-bit lane holds two consecutive k (k padded to even)

#include <omp.h>
#include <sys/mman.h>

#include "parts.h"

enum {
    VECTORS = PANEL / LANES,
    MAX_ROWS = 6,             // of a tile
    K_BLOCK = 2048,           // more k than this go block by block, through partial sums in `out`
    CHUNK_BYTES = 256 * 1024  // of x that stay in the second-level cache while the panels go by
};

// Keeps the compiler from holding on to what it loaded: the tiles need every register for their sums.
#define RELOAD() __asm__ volatile("" ::: "memory")

// Weights are read at memory speed only when several places are fetched at once. A tile of one or two panels therefore
// prefetches the next group of four panels, a line of each in turn, while it works on this one.
enum { GROUP_PANELS = 4, LINE = 64 };

typedef struct {
    const char *at;
    idx stride;  // bytes between panels
    int period;  // lines of this panel between two fetches
    int due;
} Prefetch;

// Called once a line of the panels at work.
INLINE void prefetch_group(Prefetch *prefetch) {
    if (--prefetch->due > 0) return;
    prefetch->due = prefetch->period;
    UNROLL for (int p = 0; p < GROUP_PANELS; p++) __builtin_prefetch(prefetch->at + p * prefetch->stride, 0, 2);
    prefetch->at += LINE;
}

// sums[r][c] += x[r] * weights[c] for one k. Few rows keep x in registers, more rows keep the weights there.
INLINE void add_products(int R, int P, const float *x, idx x_stride, const Wide *weights, Wide sums[][4 * VECTORS]) {
    UNROLL for (int r = 0; r < R; r++) {
        const Wide value = wide_set(x[r * x_stride]);
        UNROLL for (int c = 0; c < P * VECTORS; c++) sums[r][c] = wide_fma(value, weights[c], sums[r][c]);
    }
}

// R rows x P panels, k in [0, n): sums += x w.
INLINE void tile_float(int R, int P, const float *x, idx x_stride, const float *w, idx panel_stride, idx n,
                       Prefetch prefetch, Wide sums[][4 * VECTORS]) {
    for (idx k = 0; k < n; k++) {
        if (P < GROUP_PANELS) prefetch_group(&prefetch);
        Wide weights[4 * VECTORS];
        UNROLL for (int c = 0; c < P * VECTORS; c++) {
            weights[c] = wide_load(w + c / VECTORS * panel_stride + k * PANEL + c % VECTORS * LANES);
        }
        add_products(R, P, x + k, x_stride, weights, sums);
    }
}

INLINE void tile_int8(int R, int P, const float *x, idx x_stride, const int8_t *w, idx panel_stride, idx n,
                      Prefetch prefetch, Wide sums[][4 * VECTORS]) {
    for (idx k = 0; k < n; k++) {
        if (P < GROUP_PANELS && k % 4 == 0) prefetch_group(&prefetch);
        Wide weights[4 * VECTORS];
        UNROLL for (int c = 0; c < P * VECTORS; c++) {
            weights[c] = wide_load_int8(w + c / VECTORS * panel_stride + k * PANEL + c % VECTORS * LANES);
        }
        add_products(R, P, x + k, x_stride, weights, sums);
    }
}

INLINE void tile_bf16(int R, int P, const float *x, idx x_stride, const bf16 *w, idx panel_stride, idx n,
                      Prefetch prefetch, Wide sums[][4 * VECTORS]) {
    for (idx k = 0; k < n; k += 2) {
        if (P < GROUP_PANELS) prefetch_group(&prefetch);
        Wide weights[4 * VECTORS];
        const bf16 *pairs = w + k * PANEL;
        UNROLL for (int c = 0; c < P * VECTORS; c++) {
            weights[c] = wide_load_bf16_low(pairs + c / VECTORS * panel_stride + c % VECTORS * LANES * 2);
        }
        add_products(R, P, x + k, x_stride, weights, sums);
        RELOAD();
        UNROLL for (int c = 0; c < P * VECTORS; c++) {
            weights[c] = wide_load_bf16_high(pairs + c / VECTORS * panel_stride + c % VECTORS * LANES * 2);
        }
        add_products(R, P, x + k + 1, x_stride, weights, sums);
        RELOAD();
    }
}

INLINE idx packed_k(idx type, idx in_features) { return type == TYPE_BFLOAT16 ? (in_features + 1) / 2 * 2 : in_features; }

INLINE idx element_bytes(idx type) { return type == TYPE_FLOAT32 ? 4 : (type == TYPE_BFLOAT16 ? 2 : 1); }

// One tile over k in [k_begin, k_end): continues the chains in `out`, or starts them at 0.
INLINE void run_tile(int R, int P, const Weight *w, const float *x, idx x_stride, float *out, idx out_stride, idx panel,
                     idx k_begin, idx k_end, Prefetch prefetch) {
    const idx num_outputs = w->out_features - panel * PANEL;
    const idx panel_stride = packed_k(w->type, w->in_features) * PANEL;
    const int full = num_outputs >= P * PANEL;
    float edge[6][4 * PANEL];
    Wide acc[6][4 * VECTORS];
    if (k_begin == 0) {
        UNROLL for (int r = 0; r < R; r++) { UNROLL for (int c = 0; c < P * VECTORS; c++) acc[r][c] = wide_zero(); }
    } else {
        UNROLL for (int r = 0; r < R; r++) {
            const float *from = out + r * out_stride + panel * PANEL;
            if (!full) {
                memset(edge[r], 0, sizeof edge[r]);
                memcpy(edge[r], from, (size_t)num_outputs * sizeof(float));
                from = edge[r];
            }
            UNROLL for (int c = 0; c < P * VECTORS; c++) acc[r][c] = wide_load(from + c * LANES);
        }
    }
    const idx offset = panel * panel_stride + k_begin * PANEL;
    const float *x_block = x + k_begin;
    if (w->type == TYPE_FLOAT32) {
        tile_float(R, P, x_block, x_stride, (const float *)w->data + offset, panel_stride, k_end - k_begin, prefetch, acc);
    } else if (w->type == TYPE_BFLOAT16) {
        const idx even = (k_end - k_begin) / 2 * 2;
        const bf16 *data = (const bf16 *)w->data + offset;
        tile_bf16(R, P, x_block, x_stride, data, panel_stride, even, prefetch, acc);
        if (even < k_end - k_begin) {  // the last of an odd number of inputs
            UNROLL for (int p = 0; p < P; p++) {
                UNROLL for (int v = 0; v < VECTORS; v++) {
                    const Wide last = wide_load_bf16_low(data + p * panel_stride + even * PANEL + v * LANES * 2);
                    UNROLL for (int r = 0; r < R; r++) {
                        Wide *sum = &acc[r][p * VECTORS + v];
                        *sum = wide_fma(wide_set(x_block[r * x_stride + even]), last, *sum);
                    }
                }
            }
        }
    } else {
        tile_int8(R, P, x_block, x_stride, (const int8_t *)w->data + offset, panel_stride, k_end - k_begin, prefetch, acc);
    }
    UNROLL for (int r = 0; r < R; r++) {
        float *to = out + r * out_stride + panel * PANEL;
        float *target = full ? to : edge[r];
        UNROLL for (int c = 0; c < P * VECTORS; c++) wide_store(target + c * LANES, acc[r][c]);
        if (!full) memcpy(to, edge[r], (size_t)num_outputs * sizeof(float));
    }
}

#define TILE_CASE(R, P)                                                                                                \
    __attribute__((noinline)) static void tile_##R##x##P(const Weight *w, const float *x, idx x_stride, float *out,   \
                                                         idx out_stride, idx panel, idx k_begin, idx k_end,            \
                                                         Prefetch prefetch) {                                          \
        run_tile(R, P, w, x, x_stride, out, out_stride, panel, k_begin, k_end, prefetch);                              \
    }
TILE_CASE(1, 4) TILE_CASE(1, 1) TILE_CASE(2, 2) TILE_CASE(2, 1) TILE_CASE(3, 1) TILE_CASE(4, 1) TILE_CASE(5, 1) TILE_CASE(6, 1)

typedef void (*Tile)(const Weight *, const float *, idx, float *, idx, idx, idx, idx, Prefetch);
typedef struct { Tile wide, narrow; int width; } TileShapes;  // `wide` covers `width` panels
static const TileShapes TILES[MAX_ROWS + 1] = {
    {0, 0, 1}, {tile_1x4, tile_1x1, 4}, {tile_2x2, tile_2x1, 2}, {tile_3x1, tile_3x1, 1},
    {tile_4x1, tile_4x1, 1}, {tile_5x1, tile_5x1, 1}, {tile_6x1, tile_6x1, 1}};

static void finish_rows(const Weight *w, float *out, idx out_stride, idx rows, idx first, idx last) {
    for (idx r = 0; r < rows; r++) {
        float *row = out + r * out_stride;
        if (w->scale) for (idx i = first; i < last; i++) row[i] = row[i] * w->scale[i];
        if (w->bias) for (idx i = first; i < last; i++) row[i] = row[i] + w->bias[i];
    }
}

// Rows [0, rows) of a group of neighbouring panels, k in [k_begin, k_end). Row tiles differ by at most one row.
static void multiply_tiles(const Weight *w, const float *x, idx x_stride, float *out, idx out_stride, idx rows, idx panel,
                           idx num_panels, idx k_begin, idx k_end, Prefetch prefetch) {
    const idx num_tiles = (rows + MAX_ROWS - 1) / MAX_ROWS;
    const idx lines = (k_end - k_begin) * PANEL * element_bytes(w->type) / LINE * num_panels / GROUP_PANELS;
    const char *group = prefetch.at;
    prefetch.period = prefetch.due = (int)(GROUP_PANELS / num_panels * num_tiles);
    idx row = 0;
    for (idx t = 0; t < num_tiles; t++) {
        const idx next = rows * (t + 1) / num_tiles;
        prefetch.at = group + lines * t / num_tiles * LINE;
        const TileShapes *shapes = &TILES[next - row];
        for (idx p = 0; p < num_panels;) {
            const int is_wide = num_panels - p >= shapes->width;
            (is_wide ? shapes->wide : shapes->narrow)(w, x + row * x_stride, x_stride, out + row * out_stride, out_stride,
                                                      panel + p, k_begin, k_end, prefetch);
            p += is_wide ? shapes->width : 1;
        }
        row = next;
    }
}

// Rows [0, rows) of a chunk, panels [first, last), k in [k_begin, k_end): panel by panel, so that the weight is read in
// the order it lies in memory, in blocks of k that stay in the nearest caches for all rows of the chunk.
static void multiply_chunk(const Weight *w, const float *x, idx x_stride, float *out, idx out_stride, idx rows, idx first,
                           idx last, idx k_begin, idx k_end) {
    const idx panel_bytes = packed_k(w->type, w->in_features) * PANEL * element_bytes(w->type);
    const idx width = rows <= 3 ? TILES[rows].width : 1;
    const idx block = rows <= MAX_ROWS ? k_end - k_begin : (w->type == TYPE_FLOAT32 ? 768 : 1024);
    for (idx panel = first; panel < last; panel += width) {
        const idx num_panels = last - panel < width ? last - panel : width;
        const idx place = (panel - first) % GROUP_PANELS, next_group = panel - place + GROUP_PANELS;
        for (idx k = k_begin; k < k_end; k += block) {
            const idx lines_before = (place * panel_bytes + k * PANEL * element_bytes(w->type)) / GROUP_PANELS / LINE;
            const Prefetch prefetch = {(const char *)w->data + next_group * panel_bytes + lines_before * LINE, panel_bytes, 0, 0};
            multiply_tiles(w, x, x_stride, out, out_stride, rows, panel, num_panels, k,
                           k + block < k_end ? k + block : k_end, prefetch);
        }
    }
}

void linear_panels(const Weight *w, const float *x, idx x_stride, float *out, idx out_stride, idx rows, idx first,
                   idx last) {
    if (first == last) return;
    const idx end_output = last * PANEL < w->out_features ? last * PANEL : w->out_features;
    const idx block = rows <= MAX_ROWS || w->in_features < K_BLOCK ? w->in_features : K_BLOCK;
    const idx chunk_rows = CHUNK_BYTES / (idx)sizeof(float) / block / MAX_ROWS * MAX_ROWS + MAX_ROWS;
    for (idx chunk = 0; chunk < rows; chunk += chunk_rows) {
        const idx height = rows - chunk < chunk_rows ? rows - chunk : chunk_rows;
        float *chunk_out = out + chunk * out_stride;
        for (idx k = 0; k < w->in_features; k += block) {
            const idx k_end = k + block < w->in_features ? k + block : w->in_features;
            multiply_chunk(w, x + chunk * x_stride, x_stride, chunk_out, out_stride, height, first, last, k, k_end);
        }
        if (w->scale || w->bias) finish_rows(w, chunk_out, out_stride, height, first * PANEL, end_output);
    }
}

void linear_part(const Weight *w, const float *x, idx x_stride, float *out, idx out_stride, idx rows, int thread,
                 int num_threads) {
    idx first, last;
    share((w->out_features + PANEL - 1) / PANEL, thread, num_threads, &first, &last);
    linear_panels(w, x, x_stride, out, out_stride, rows, first, last);
}

void unpack_row(const Weight *w, idx row, float *out) {
    const idx panel = row / PANEL, lane = row % PANEL, depth = packed_k(w->type, w->in_features);
    const idx base = panel * depth * PANEL;
    for (idx k = 0; k < w->in_features; k++) {
        if (w->type == TYPE_FLOAT32) {
            out[k] = ((const float *)w->data)[base + k * PANEL + lane];
        } else if (w->type == TYPE_BFLOAT16) {
            out[k] = bf16_to_float(((const bf16 *)w->data)[base + k / 2 * 2 * PANEL + lane * 2 + k % 2]);
        } else {
            out[k] = (float)((const int8_t *)w->data)[base + k * PANEL + lane] * w->scale[row];
        }
    }
}

// --- entry points --------------------------------------------------------------------------------------------------

void gl_linear(const Weight *w, const float *x, idx x_stride, float *out, idx out_stride, idx rows, int wanted) {
    IN_PARALLEL(wanted, linear_part(w, x, x_stride, out, out_stride, rows, thread, num_threads));
}

// Returns how many of the ids lie outside the matrix; their rows are zeroed.
idx gl_unpack_rows(const Weight *w, const int64_t *row_ids, idx count, float *out) {
    idx num_bad = 0;
    for (idx i = 0; i < count; i++) {
        if (row_ids[i] < 0 || row_ids[i] >= w->out_features) {
            memset(out + i * w->in_features, 0, (size_t)w->in_features * sizeof(float));
            num_bad++;
        } else {
            unpack_row(w, row_ids[i], out + i * w->in_features);
        }
    }
    return num_bad;
}

// Packs `from` [out, in] (float32 or bfloat16 bits) panel by panel; see the layouts above. `to` is zeroed by the caller.
void gl_pack_panels(const void *from, idx out_features, idx in_features, idx type, void *to) {
    const idx depth = packed_k(type, in_features);
    for (idx row = 0; row < out_features; row++) {
        const idx base = row / PANEL * depth * PANEL, lane = row % PANEL;
        for (idx k = 0; k < in_features; k++) {
            const idx source = row * in_features + k;
            if (type == TYPE_FLOAT32) {
                ((float *)to)[base + k * PANEL + lane] = ((const float *)from)[source];
            } else if (type == TYPE_BFLOAT16) {
                ((bf16 *)to)[base + k / 2 * 2 * PANEL + lane * 2 + k % 2] = ((const bf16 *)from)[source];
            } else {
                ((int8_t *)to)[base + k * PANEL + lane] = ((const int8_t *)from)[source];
            }
        }
    }
}

// Asks the kernel for huge pages under [data, data + num_bytes); harmless where it cannot.
void gl_advise_huge_pages(void *data, idx num_bytes) {
    const uintptr_t huge = 2 << 20;
    const uintptr_t begin = ((uintptr_t)data + huge - 1) / huge * huge, end = ((uintptr_t)data + (uintptr_t)num_bytes) / huge * huge;
    if (end > begin) madvise((void *)begin, end - begin, MADV_HUGEPAGE);
}
