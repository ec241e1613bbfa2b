// Attention over paged KV. Every query row is reduced on its own, over blocks of 64 visited positions counted from
// position 0: softmax within a block, then blocks combined in order. So bits depend on neither chunk, tree nor batch.

#include <omp.h>

#include "parts.h"

enum { BLOCK = 64, TILE_ROWS = 16, MAX_HEAD_DIM = 256, MAX_GROUP = 64 };

// Keys and values of one block as float rows: in the pages themselves, or converted into `scratch`.
typedef struct {
    const float *k[BLOCK], *v[BLOCK];
} Block;

typedef struct {
    float k[BLOCK * MAX_HEAD_DIM], v[BLOCK * MAX_HEAD_DIM];
} Scratch;

typedef struct {
    float max, sum;
} Softmax;

static void convert_row(const bf16 *from, idx count, float *to) {
    for (idx i = 0; i < count; i++) to[i] = bf16_to_float(from[i]);
}

static void load_slot(const Batch *b, const Pages *p, idx segment, idx slot, idx kv_head, idx at, Block *block,
                      Scratch *scratch) {
    const idx dim = p->head_dim, element = slot_element(b, p, segment, slot) + kv_head * dim;
    if (p->type == TYPE_FLOAT32) {
        block->k[at] = (const float *)p->k + element;
        block->v[at] = (const float *)p->v + element;
    } else {
        float *k = scratch->k + at * dim, *v = scratch->v + at * dim;
        convert_row((const bf16 *)p->k + element, dim, k);
        convert_row((const bf16 *)p->v + element, dim, v);
        block->k[at] = k;
        block->v[at] = v;
    }
}

// The ancestors of `row` (and itself) whose positions fall into [begin, begin + count), from position `begin` on.
static void load_path(const Batch *b, const Pages *p, idx segment, idx row, idx begin, idx count, idx kv_head, idx at,
                      Block *block, Scratch *scratch) {
    const idx first = b->segment_rows[segment], start = b->segment_start[segment];
    for (idx local = row - first; local >= 0; local = b->parents[first + local]) {
        const idx position = b->positions[first + local];
        if (position < begin) break;
        if (position < begin + count) {
            load_slot(b, p, segment, start + local, kv_head, at + position - begin, block, scratch);
        }
    }
}

// scores[j] = scale * q . k[j]: eight partial sums over d mod 8, in order, then their fixed tree.
static void block_scores(const float *q, const Block *block, idx count, idx dim, float scale, float *scores) {
    for (idx j = 0; j < count; j += 8) {
        const float *k[8];
        Eight sums[8];
        UNROLL for (int i = 0; i < 8; i++) {
            k[i] = block->k[j + i < count ? j + i : count - 1];
            sums[i] = eight_zero();
        }
        for (idx d = 0; d < dim; d += 8) {
            const Eight query = eight_load(q + d);
            UNROLL for (int i = 0; i < 8; i++) sums[i] = eight_fma(query, eight_load(k[i] + d), sums[i]);
        }
        eight_store(scores + j, eight_mul(eight_sums(sums), eight_set(scale)));
    }
}

// out[d] = sum over keys, in order, of weights[j] * v[j][d], for N * 8 dimensions.
INLINE void weighted_sum(int N, const float *weights, const Block *block, idx count, idx d, float *out) {
    Eight sums[8];
    UNROLL for (int i = 0; i < N; i++) sums[i] = eight_zero();
    for (idx j = 0; j < count; j++) {
        const Eight weight = eight_set(weights[j]);
        const float *v = block->v[j] + d;
        UNROLL for (int i = 0; i < N; i++) sums[i] = eight_fma(weight, eight_load(v + 8 * i), sums[i]);
    }
    UNROLL for (int i = 0; i < N; i++) eight_store(out + d + 8 * i, sums[i]);
}

static void block_values(const float *weights, const Block *block, idx count, idx dim, float *out) {
    idx d = 0;
    for (; d + 64 <= dim; d += 64) weighted_sum(8, weights, block, count, d, out);
    for (; d + 16 <= dim; d += 16) weighted_sum(2, weights, block, count, d, out);
    for (; d < dim; d += 8) weighted_sum(1, weights, block, count, d, out);
}

static float largest_of_block(const float *x) {
    float lanes[8];
    memcpy(lanes, x, sizeof lanes);
    for (idx j = 8; j < BLOCK; j += 8) {
        for (idx i = 0; i < 8; i++) lanes[i] = x[j + i] > lanes[i] ? x[j + i] : lanes[i];
    }
    float max = lanes[0];
    for (idx i = 1; i < 8; i++) max = lanes[i] > max ? lanes[i] : max;
    return max;
}

static void attend_block(const float *q, const Block *block, idx count, idx dim, float scale, int is_first, Softmax *state,
                         float *out) {
    float weights[BLOCK], values[MAX_HEAD_DIM];
    block_scores(q, block, count, dim, scale, weights);
    for (idx j = count; j < BLOCK; j++) weights[j] = -INFINITY;
    const float max = largest_of_block(weights);
    for (idx j = 0; j < BLOCK; j++) weights[j] = exp_float(weights[j] - max);
    Eight sums = eight_load(weights);
    for (idx j = 8; j < BLOCK; j += 8) sums = eight_fma(eight_load(weights + j), eight_set(1.0f), sums);
    const float sum = eight_total(sums);
    if (is_first) {
        block_values(weights, block, count, dim, out);
        *state = (Softmax){max, sum};
        return;
    }
    block_values(weights, block, count, dim, values);
    const float both = state->max > max ? state->max : max;
    const float keep = exp_float(state->max - both), take = exp_float(max - both);
    for (idx d = 0; d < dim; d++) out[d] = __builtin_fmaf(out[d], keep, values[d] * take);
    *state = (Softmax){both, __builtin_fmaf(state->sum, keep, sum * take)};
}

// Query heads [head, head + num_heads), all of one KV head, of rows [row, row + num_rows), all of one segment.
static void attend_tile(const Batch *b, const Pages *p, Rows q, Rows out, idx row, idx num_rows, idx kv_head, idx head,
                        idx num_heads, float scale, Scratch *scratch) {
    const idx segment = b->row_segment[row], dim = p->head_dim;
    idx last_position = 0;
    for (idx r = row; r < row + num_rows; r++) last_position = b->positions[r] > last_position ? b->positions[r] : last_position;
    // Positions whose slot is the same for all rows of the tile: there, slot = position.
    const idx shared = b->is_chain ? last_position + 1 : b->segment_start[segment];
    Softmax states[TILE_ROWS * MAX_GROUP];
    Block block;
    for (idx begin = 0; begin <= last_position; begin += BLOCK) {
        idx num_shared = shared - begin;
        num_shared = num_shared < 0 ? 0 : (num_shared > BLOCK ? BLOCK : num_shared);
        for (idx j = 0; j < num_shared; j++) load_slot(b, p, segment, begin + j, kv_head, j, &block, scratch);
        for (idx r = 0; r < num_rows; r++) {
            idx count = b->positions[row + r] + 1 - begin;
            if (count <= 0) continue;
            if (count > BLOCK) count = BLOCK;
            if (count > num_shared) {
                load_path(b, p, segment, row + r, begin + num_shared, count - num_shared, kv_head, num_shared, &block, scratch);
            }
            for (idx h = 0; h < num_heads; h++) {
                const idx at = (head + h) * dim;
                attend_block(q.data + (row + r) * q.stride + at, &block, count, dim, scale, begin == 0,
                             &states[r * num_heads + h], out.data + (row + r) * out.stride + at);
            }
        }
    }
    for (idx r = 0; r < num_rows; r++) {
        for (idx h = 0; h < num_heads; h++) {
            float *values = out.data + (row + r) * out.stride + (head + h) * dim;
            const float inverse = 1.0f / states[r * num_heads + h].sum;
            for (idx d = 0; d < dim; d++) values[d] = values[d] * inverse;
        }
    }
}

void attention_part(const Batch *b, const Pages *p, Rows q, Rows out, idx heads, float scale, int thread, int num_threads) {
    const idx group = heads / p->kv_heads;
    // Few rows: one query head a task, so that the threads share the work evenly.
    const idx heads_a_task = b->num_rows * p->kv_heads < 4 * num_threads ? 1 : group;
    const idx tile_rows = b->num_rows < TILE_ROWS * num_threads ? (b->num_rows + num_threads - 1) / num_threads : TILE_ROWS;
    Scratch scratch;
    idx task = 0;
    for (idx segment = 0; segment < b->num_segments; segment++) {
        const idx end = b->segment_rows[segment + 1];
        for (idx row = b->segment_rows[segment]; row < end; row += tile_rows) {
            const idx num_rows = end - row < tile_rows ? end - row : tile_rows;
            for (idx head = 0; head < heads; head += heads_a_task, task++) {
                if (task % num_threads != thread) continue;
                attend_tile(b, p, q, out, row, num_rows, head / group, head, heads_a_task, scale, &scratch);
            }
        }
    }
}

void gl_paged_attention(const Batch *b, const Pages *p, float *q, idx q_stride, float *out, idx out_stride, idx heads,
                        float scale, int wanted) {
    const Rows q_rows = {q, q_stride}, out_rows = {out, out_stride};
    IN_PARALLEL(wanted, attention_part(b, p, q_rows, out_rows, heads, scale, thread, num_threads));
}
