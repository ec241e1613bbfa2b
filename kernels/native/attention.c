// Attention over paged KV. Every query row is reduced on its own, over blocks of 64 visited positions counted from
// position 0: softmax within a block, then blocks combined in order. So bits depend on neither chunk, tree nor batch.

#include <omp.h>

#include "parts.h"

enum {
    BLOCK = 64,
    MAX_HEAD_DIM = 256,
    MAX_PAIRS = 64,  // a pair is a row and one of the query heads of a KV head
    MAX_KV_HEADS = 64,
    STREAMS = 4  // places that a block is read ahead from in turn
};

// Keys and values of one block as float rows: in the pages themselves, or converted into `scratch`.
typedef struct {
    const float *k[BLOCK], *v[BLOCK];
    idx stride;  // floats between neighbouring keys of every aligned group of 8, or 0 when they lie anyhow
} Block;

typedef struct {
    float max, sum;
} Softmax;

typedef struct {
    float k[BLOCK * MAX_HEAD_DIM], v[BLOCK * MAX_HEAD_DIM];
    float weights[MAX_PAIRS][BLOCK];
    Softmax states[MAX_KV_HEADS * MAX_PAIRS];
} Scratch;

// Reads the next block ahead, a head of a token at a time while a head of a token of this one is loaded: a burst would
// fill the queue of outstanding reads, and what is loaded now would wait behind it.
typedef struct {
    idx rows[BLOCK];  // bytes from the start of the pages to each token's first wanted head
    const char *k, *v;
    idx count, units, unit_bytes;   // tokens; heads of each and their bytes
    idx stream, unit, token;        // next: of token `stream` * BLOCK / STREAMS + `token`
} ReadAhead;

INLINE void read_ahead(ReadAhead *next) {
    const idx token = next->stream * (BLOCK / STREAMS) + next->token;
    if (token < next->count) {
        const idx at = next->rows[token] + next->unit * next->unit_bytes;
        for (idx line = 0; line < next->unit_bytes; line += 64) {
            __builtin_prefetch(next->k + at + line, 0, 2);
            __builtin_prefetch(next->v + at + line, 0, 2);
        }
    }
    if (++next->stream < STREAMS) return;
    next->stream = 0;
    if (++next->unit < next->units) return;
    next->unit = 0;
    if (++next->token == BLOCK / STREAMS) next->count = 0;
}

// What to read ahead: heads [kv_first, kv_last) of slots [begin, begin + count).
static void aim_read_ahead(const Batch *b, const Pages *p, idx segment, idx begin, idx count, idx kv_first, idx kv_last,
                           ReadAhead *next) {
    const idx size = p->type == TYPE_FLOAT32 ? 4 : 2, token = p->kv_heads * p->head_dim;
    const int32_t *table = b->page_tables + segment * b->max_pages;
    next->k = p->k;
    next->v = p->v;
    next->count = count < 0 ? 0 : (count > BLOCK ? BLOCK : count);
    next->units = kv_last - kv_first;
    next->unit_bytes = p->head_dim * size;
    next->stream = next->unit = next->token = 0;
    idx page = begin / b->page_size, offset = begin % b->page_size;
    for (idx at = 0; at < next->count; page++, offset = 0) {
        idx element = table[page] * p->page_stride + offset * token + kv_first * p->head_dim;
        for (; offset < b->page_size && at < next->count; offset++, at++, element += token) next->rows[at] = element * size;
    }
}

INLINE void convert_row(const bf16 *from, idx count, float *to) {
    for (idx i = 0; i < count; i += 8) eight_store(to + i, eight_load_bf16(from + i));
}

// Keys and values of one KV head in `count` neighbouring slots of a page, the first of them at `element` of the pages.
INLINE void load_run(const Pages *p, idx element, idx count, idx at, Block *block, Scratch *scratch, ReadAhead *next) {
    const idx dim = p->head_dim, token = p->kv_heads * dim;
    if (p->type == TYPE_FLOAT32) {
        for (idx j = 0; j < count; j++) {
            block->k[at + j] = (const float *)p->k + element + j * token;
            block->v[at + j] = (const float *)p->v + element + j * token;
            read_ahead(next);
        }
        return;
    }
    for (idx j = 0; j < count; j++) {
        float *k = scratch->k + (at + j) * dim, *v = scratch->v + (at + j) * dim;
        convert_row((const bf16 *)p->k + element + j * token, dim, k);
        convert_row((const bf16 *)p->v + element + j * token, dim, v);
        block->k[at + j] = k;
        block->v[at + j] = v;
        read_ahead(next);
    }
}

// Slots [begin, begin + count) of a segment become keys 0, 1, ... of the block.
static void load_slots(const Batch *b, const Pages *p, idx segment, idx begin, idx count, idx kv_head, Block *block,
                       Scratch *scratch, ReadAhead *next) {
    const int32_t *table = b->page_tables + segment * b->max_pages;
    idx page = begin / b->page_size, offset = begin % b->page_size;
    for (idx at = 0; at < count; page++, offset = 0) {
        const idx run = b->page_size - offset < count - at ? b->page_size - offset : count - at;
        const idx element = table[page] * p->page_stride + (offset * p->kv_heads + kv_head) * p->head_dim;
        load_run(p, element, run, at, block, scratch, next);
        at += run;
    }
}

// The ancestors of `row` (and itself) whose positions fall into [begin, begin + count), from position `begin` on.
static void load_path(const Batch *b, const Pages *p, idx segment, idx row, idx begin, idx count, idx kv_head, idx at,
                      Block *block, Scratch *scratch) {
    const idx first = b->segment_rows[segment], start = b->segment_start[segment];
    ReadAhead nothing = {.count = 0, .units = 1};
    for (idx local = row - first; local >= 0; local = b->parents[first + local]) {
        const idx position = b->positions[first + local];
        if (position < begin) break;
        if (position >= begin + count) continue;
        const idx element = slot_element(b, p, segment, start + local) + kv_head * p->head_dim;
        load_run(p, element, 1, at + position - begin, block, scratch, &nothing);
    }
}

// sums[i] = q . k[i] for eight keys at k + i * stride: eight partial sums over d mod 8 each, in order.
INLINE void eight_dots(const float *q, const float *k, idx stride, idx dim, Eight sums[8]) {
    const float *far = k + 4 * stride;
    UNROLL for (int i = 0; i < 8; i++) sums[i] = eight_zero();
    for (idx d = 0; d < dim; d += 8) {
        const Eight query = eight_load(q + d);
        UNROLL for (int i = 0; i < 4; i++) sums[i] = eight_fma(query, eight_load(k + i * stride + d), sums[i]);
        UNROLL for (int i = 0; i < 4; i++) sums[4 + i] = eight_fma(query, eight_load(far + i * stride + d), sums[4 + i]);
    }
}

INLINE void eight_scattered_dots(const float *q, const float *const k[8], idx dim, Eight sums[8]) {
    UNROLL for (int i = 0; i < 8; i++) sums[i] = eight_zero();
    for (idx d = 0; d < dim; d += 8) {
        const Eight query = eight_load(q + d);
        UNROLL for (int i = 0; i < 8; i++) sums[i] = eight_fma(query, eight_load(k[i] + d), sums[i]);
    }
}

// scores[j] = scale * q . k[j]: the partial sums, then their fixed tree.
static void block_scores(const float *q, const Block *block, idx count, idx dim, float scale, float *scores) {
    for (idx j = 0; j < count; j += 8) {
        Eight sums[8];
        if (j + 8 <= count && block->stride) {
            eight_dots(q, block->k[j], block->stride, dim, sums);
        } else {
            const float *k[8];
            for (int i = 0; i < 8; i++) k[i] = block->k[j + i < count ? j + i : count - 1];
            eight_scattered_dots(q, k, dim, sums);
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

// Softmax within a block: scores become e^(score - max); returns the block's max and sum.
static Softmax block_softmax(float *weights, idx count) {
    for (idx j = count; j < BLOCK; j++) weights[j] = -INFINITY;
    const float max = largest_of_block(weights);
    for (idx j = 0; j < BLOCK; j++) weights[j] = exp_float(weights[j] - max);
    Eight sums = eight_load(weights);
    for (idx j = 8; j < BLOCK; j += 8) sums = eight_fma(eight_load(weights + j), eight_set(1.0f), sums);
    return (Softmax){max, eight_total(sums)};
}

// Joins a block's weighted values to those of the blocks before it.
static void join_block(const float *weights, const Block *block, idx count, idx dim, Softmax part, int is_first,
                       Softmax *state, float *out) {
    if (is_first) {
        block_values(weights, block, count, dim, out);
        *state = part;
        return;
    }
    float values[MAX_HEAD_DIM];
    block_values(weights, block, count, dim, values);
    const float both = state->max > part.max ? state->max : part.max;
    const float keep = exp_float(state->max - both), take = exp_float(part.max - both);
    for (idx d = 0; d < dim; d++) out[d] = __builtin_fmaf(out[d], keep, values[d] * take);
    *state = (Softmax){both, __builtin_fmaf(state->sum, keep, part.sum * take)};
}

// What a task works on: rows [row, row + num_rows) of one segment, KV heads [kv_first, kv_last) with `group` query heads each.
typedef struct {
    idx segment, row, num_rows, kv_first, kv_last, group;
} Tile;

// Keys of a block that a row sees.
INLINE idx visible(const Batch *b, idx row, idx begin) {
    const idx count = b->positions[row] + 1 - begin;
    return count < 0 ? 0 : (count > BLOCK ? BLOCK : count);
}

// Scores of rows and heads first, values second: keys and values need the nearest cache one after the other.
static void attend_rows(const Batch *b, const Tile *t, const Block *block, Rows q, Rows out, idx first, idx num_rows,
                        idx kv_head, idx dim, float scale, idx begin, Softmax *states, Scratch *scratch) {
    Softmax parts[MAX_PAIRS];
    for (idx r = first; r < first + num_rows; r++) {
        const idx count = visible(b, t->row + r, begin);
        for (idx h = 0; h < t->group && count; h++) {
            const idx pair = r * t->group + h;
            const float *query = q.data + (t->row + r) * q.stride + (kv_head * t->group + h) * dim;
            block_scores(query, block, count, dim, scale, scratch->weights[pair]);
            parts[pair] = block_softmax(scratch->weights[pair], count);
        }
    }
    for (idx r = first; r < first + num_rows; r++) {
        const idx count = visible(b, t->row + r, begin);
        for (idx h = 0; h < t->group && count; h++) {
            const idx pair = r * t->group + h;
            join_block(scratch->weights[pair], block, count, dim, parts[pair], begin == 0, &states[pair],
                       out.data + (t->row + r) * out.stride + (kv_head * t->group + h) * dim);
        }
    }
}

// One block for one KV head. The first `num_shared` keys are the same for all rows of the tile.
static void attend_block(const Batch *b, const Pages *p, const Tile *t, Rows q, Rows out, idx kv_head, float scale, idx begin,
                         idx num_shared, Softmax *states, Scratch *scratch, ReadAhead *next) {
    const idx dim = p->head_dim;
    Block block;
    // Page runs and scratch are regular; a tree's own rows in float32 pages are not.
    block.stride = p->type != TYPE_FLOAT32 ? dim : (num_shared == BLOCK && b->page_size % 8 == 0 ? p->kv_heads * dim : 0);
    load_slots(b, p, t->segment, begin, num_shared, kv_head, &block, scratch, next);
    if (b->is_chain || num_shared == BLOCK) {
        attend_rows(b, t, &block, q, out, 0, t->num_rows, kv_head, dim, scale, begin, states, scratch);
        return;
    }
    for (idx r = 0; r < t->num_rows; r++) {  // every row has a path of its own
        const idx count = visible(b, t->row + r, begin);
        if (count > num_shared) {
            load_path(b, p, t->segment, t->row + r, begin + num_shared, count - num_shared, kv_head, num_shared, &block, scratch);
        }
        attend_rows(b, t, &block, q, out, r, 1, kv_head, dim, scale, begin, states, scratch);
    }
}

static void attend_tile(const Batch *b, const Pages *p, const Tile *t, Rows q, Rows out, float scale, Scratch *scratch) {
    const idx dim = p->head_dim, pairs = t->num_rows * t->group;
    idx last_position = 0;
    for (idx r = t->row; r < t->row + t->num_rows; r++) {
        last_position = b->positions[r] > last_position ? b->positions[r] : last_position;
    }
    // Positions whose slot is the same for all rows of the tile: there, slot = position.
    const idx shared = b->is_chain ? last_position + 1 : b->segment_start[t->segment];
    for (idx begin = 0; begin <= last_position; begin += BLOCK) {
        idx num_shared = shared - begin;
        num_shared = num_shared < 0 ? 0 : (num_shared > BLOCK ? BLOCK : num_shared);
        ReadAhead next;
        aim_read_ahead(b, p, t->segment, begin + BLOCK, shared - begin - BLOCK, t->kv_first, t->kv_last, &next);
        for (idx kv_head = t->kv_first; kv_head < t->kv_last; kv_head++) {
            attend_block(b, p, t, q, out, kv_head, scale, begin, num_shared, scratch->states + (kv_head - t->kv_first) * pairs,
                         scratch, &next);
        }
    }
    for (idx i = 0; i < pairs * (t->kv_last - t->kv_first); i++) {
        const idx kv_head = t->kv_first + i / pairs, row = t->row + i % pairs / t->group;
        float *values = out.data + row * out.stride + (kv_head * t->group + i % pairs % t->group) * dim;
        const float inverse = 1.0f / scratch->states[i].sum;
        for (idx d = 0; d < dim; d++) values[d] = values[d] * inverse;
    }
}

void attention_part(const Batch *b, const Pages *p, Rows q, Rows out, idx heads, float scale, int thread, int num_threads) {
    const idx group = heads / p->kv_heads, rows = b->num_rows - b->num_segments * b->skipped;
    const idx largest = MAX_PAIRS / group, even = (rows + num_threads - 1) / num_threads;
    const idx tile_rows = even < largest ? even : largest;
    idx num_tiles = (rows + tile_rows - 1) / tile_rows;
    num_tiles = num_tiles > b->num_segments ? num_tiles : b->num_segments;
    // A tile's heads stay together, as they lie in memory, unless that leaves threads idle.
    const idx parts = num_tiles % num_threads == 0 || num_tiles >= 4 * num_threads ? 1 : p->kv_heads;
    Scratch scratch;
    idx task = 0;
    for (idx segment = 0; segment < b->num_segments; segment++) {
        const idx end = b->segment_rows[segment + 1];
        for (idx row = b->segment_rows[segment] + b->skipped; row < end; row += tile_rows) {
            for (idx part = 0; part < parts; part++, task++) {
                if (task % num_threads != thread) continue;
                const idx num_rows = end - row < tile_rows ? end - row : tile_rows;
                const Tile tile = {segment, row, num_rows, p->kv_heads * part / parts, p->kv_heads * (part + 1) / parts, group};
                attend_tile(b, p, &tile, q, out, scale, &scratch);
            }
        }
    }
}

void gl_paged_attention(const Batch *b, const Pages *p, float *q, idx q_stride, float *out, idx out_stride, idx heads,
                        float scale, int wanted) {
    const Rows q_rows = {q, q_stride}, out_rows = {out, out_stride};
    IN_PARALLEL(wanted, attention_part(b, p, q_rows, out_rows, heads, scale, thread, num_threads));
}
