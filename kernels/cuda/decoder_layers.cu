// A range of dense decoder layers for a few rows in one resident kernel: as many blocks as multiprocessors, each there from
// the first layer to the last.
//
// Reading the weights takes nearly all of the time, so nothing may interrupt it. One warp of a block, the producer, has
// the block's share of all weights and of the committed KV copied into a ring of shared memory, in the order of their use and
// as far ahead as the ring holds; it never waits for activations, since what it reads does not depend on them. Other warps
// compute what lies in the ring. Blocks meet after every phase of a layer, while their rings fill up.
//
// Phases of a layer: q, k and v with norm, rotation and KV write; attention by splits; its combination; output; gate and up
// with norm and activation; down. Sizes come as macros:
//   HIDDEN INTER HEADS KV_HEADS HEAD_DIM PAGE_SIZE
//   ROW_TILES     of 8 rows
//   GROUP_QKV GROUP_OUTPUT GROUP_GATE_UP GROUP_DOWN     tiles of 16 outputs that are computed side by side
//   GROUP_TILES   the largest of them
//   CHUNK_HIDDEN CHUNK_ATTENDED CHUNK_INTER     inputs a ring slot, by product
//   SLOT_BYTES NUM_SLOTS                        of the ring

enum {
    LANES = 32,
    WARPS = 8,
    CONSUMERS = WARPS * LANES,
    PRODUCER = WARPS,  // a warp; the rest of its group of four has nothing to do but to give its registers away
    THREADS = CONSUMERS + 4 * LANES,
    TILE = 16,
    ROWS = 8 * ROW_TILES,
    HALF = HEAD_DIM / 2,
    GROUP = HEADS / KV_HEADS,
    Q_SIZE = HEADS * HEAD_DIM,
    QKV_TILES = (HEADS + 2 * KV_HEADS) * HEAD_DIM / TILE,
    KV_TOKENS = 32,
    KV_BYTES = KV_TOKENS * HEAD_DIM * 2,  // of K, and of V
    KV_BLOCKS = HEAD_DIM / 32,
    KV_LINES = HEAD_DIM / 64,  // of 128 bytes, a token
    BOX_TOKENS = PAGE_SIZE < KV_TOKENS ? PAGE_SIZE : KV_TOKENS,
    MAX_SEQUENCES = 16,
    MAX_FEATURES = 4,
    RED_STRIDE = ROWS + 1,
    // Slots on their way. Two keep memory busy; with more, whatever else is asked of L2 waits longer behind them.
    IN_FLIGHT = 2,
    BATCH = 3,  // tiles whose sums meet at once
    RED_FLOATS = WARPS * TILE * RED_STRIDE,  // of a tile
    ITEMS = (BATCH * 8 * ROWS + CONSUMERS - 1) / CONSUMERS,  // pairs of sums that a thread finishes
};

typedef enum { QKV, OUTPUT, GATE_UP, DOWN } Product;

DEVICE int inputs_of(Product product) { return product == OUTPUT ? Q_SIZE : product == DOWN ? INTER : HIDDEN; }
DEVICE int chunk_of(Product product) {
    return product == OUTPUT ? CHUNK_ATTENDED : product == DOWN ? CHUNK_INTER : CHUNK_HIDDEN;
}
DEVICE int tiles_of(Product product) {
    return product == QKV ? QKV_TILES : product == GATE_UP ? INTER / 8 : HIDDEN / TILE;
}
DEVICE int group_of(Product product) {
    return product == QKV ? GROUP_QKV : product == OUTPUT ? GROUP_OUTPUT : product == GATE_UP ? GROUP_GATE_UP : GROUP_DOWN;
}

// What a layer reads; the table lies in global memory.
// Maps tell the copy engine how to find boxes of a matrix (64 inputs, 8 outputs, 64-input blocks of a chunk) and of pages (64
// columns, blocks of a head, 1 head, tokens of a page, 1 page). A box arrives as lines of 128 bytes whose 16-byte pieces are
// swizzled by the number of the line.
typedef struct {
    TileMap qkv, output, gate_up, down, k, v;
    const bf16 *input_norm, *qkv_bias, *post_norm;
    bf16 *k_pages, *v_pages;
    u64 unused[3];  // maps lie at multiples of 64 bytes
} Layer;

typedef struct {
    const Layer *layers;
    bf16 *hidden;             // [rows, HIDDEN], read and written
    bf16 *q, *attended;       // [rows, Q_SIZE]
    bf16 *act;                // [rows, INTER]
    float *partial, *state;   // [items, pairs, HEAD_DIM], [items, pairs, 2]
    u32 *met;                 // 0 at the start
    const int *positions;     // see TreeBatch
    const i64 *row_slots, *visible;
    const int *starts, *page_tables;
    const float *cos, *sin;   // [positions, HALF]
    bf16 *features[MAX_FEATURES];  // [rows, HIDDEN] each
    i64 page_stride;          // elements
    int feature_after[MAX_FEATURES];  // layers, 0 for none
    int num_layers, rows, sequences, rows_each, num_tail, max_pages, row_tiles_of_pairs;
    float eps, scale;         // scale in powers of two
} Round;

// A share of a sequence's committed slots for one KV head.
typedef struct {
    int sequence, head, first, count;  // ring slots of KV_TOKENS
} Item;

typedef struct {
    u64 full[NUM_SLOTS], empty[NUM_SLOTS];
    int starts[MAX_SEQUENCES], first_item[MAX_SEQUENCES];
    Item items[WARPS];
    int span, most;           // ring slots of an item; of the longest item of this block
    float squares[WARPS][ROWS];
    float red[BATCH * RED_FLOATS];
} Shared;

enum { RING_AT = (sizeof(Shared) + 1023) / 1024 * 1024 };

_Static_assert(RING_AT + NUM_SLOTS * SLOT_BYTES <= SHARED_BYTES, "the ring does not fit");
_Static_assert(sizeof(Layer) % 64 == 0, "maps must lie at multiples of 64 bytes");

DEVICE Shared *shared(void) { return (Shared *)shared_base(); }
DEVICE unsigned char *ring_slot(int slot) { return shared_base() + RING_AT + slot * SLOT_BYTES; }
// Where the 16-byte piece `piece` of a line lies.
DEVICE int swizzled(int line, int piece) { return line * 128 + ((piece ^ (line & 7)) << 4); }
// A permutation of 8 lines: those that a step reads side by side lie in different banks.
DEVICE int line_of(int lane) { return (lane >> 1) + 4 * (lane & 1); }
DEVICE int committed_steps(int start) { return (start + KV_TOKENS - 1) / KV_TOKENS; }
DEVICE float low_half(u32 word) { return as_float(word << 16); }
DEVICE float high_half(u32 word) { return as_float(word & 0xffff0000u); }
DEVICE bf16 to_bf16(float value) { return (bf16)(pack_bf16(value, 0.0f) & 0xffff); }
DEVICE float rounded(float value) { return low_half(pack_bf16(value, 0.0f)); }
DEVICE int smaller(int a, int b) { return a < b ? a : b; }
DEVICE int larger(int a, int b) { return a > b ? a : b; }

// Where a thread is in the ring: uses of slots so far.
typedef struct {
    int slot, parity, count;
} Place;

DEVICE void step(Place *place) {
    place->count++;
    if (++place->slot == NUM_SLOTS) {
        place->slot = 0;
        place->parity ^= 1;
    }
}

// The weight row behind row `i` of a tile. Two rows that are combined afterwards lie 8 apart in one tile: the two halves of a
// rotated pair, gate and up.
DEVICE int weight_row(Product product, int tile, int i) {
    if (product == QKV) {
        int head = tile / (HEAD_DIM / TILE), pair = tile % (HEAD_DIM / TILE) * 8 + (i & 7);
        return head * HEAD_DIM + pair + (i < 8 ? 0 : HALF);
    }
    if (product == GATE_UP) return tile * 8 + (i & 7) + (i < 8 ? 0 : INTER);
    return tile * TILE + i;
}

// First tile of this block when tiles go round from block `turn` on: who has one more changes from product to product.
DEVICE int first_tile(int *turn, Product product) {
    int grid = num_blocks(), first = (block_id() - *turn + grid) % grid;
    *turn = (*turn + tiles_of(product)) % grid;
    return first;
}

// ---- producer ----

// Waits until the next slot is free and few are on their way.
DEVICE void await_slot(const Place *place) {
    signal_wait(&shared()->empty[place->slot], place->parity ^ 1);
    if (place->count < IN_FLIGHT) return;
    int before = place->slot - IN_FLIGHT, is_wrapped = before < 0;
    signal_wait(&shared()->full[is_wrapped ? before + NUM_SLOTS : before], place->parity ^ is_wrapped);
}

DEVICE void produce_product(
    Place *place, Product product, const TileMap *map, int *turn, u64 policy) {
    int inputs = inputs_of(product), chunk = chunk_of(product), group = group_of(product), tiles = tiles_of(product);
    int lane = thread_id() % LANES, grid = num_blocks(), first = first_tile(turn, product);
    for (int begin = first; begin < tiles; begin += group * grid) {
        int count = smaller(group, (tiles - begin + grid - 1) / grid);
        for (int k = 0; k < inputs; k += chunk)
            for (int j = 0; j < count; j++) {
                u64 *full = &shared()->full[place->slot];
                await_slot(place);
                if (lane == 0) {
                    signal_expect(full, TILE * 2 * chunk);
                    for (int half = 0; half < 2; half++) {
                        unsigned char *to = ring_slot(place->slot) + half * 16 * chunk;
                        copy_box_3(to, map, 0, weight_row(product, begin + j * grid, 8 * half), k / 64, full, policy);
                    }
                }
                step(place);
            }
    }
}

DEVICE void produce_kv(Place *place, const Round *round, const Layer *layer, int streams, u64 policy) {
    int lane = thread_id() % LANES, most = shared()->most;
    for (int index = 0; index < most; index++)
        for (int stream = 0; stream < streams; stream++) {
            const Item *item = &shared()->items[stream];
            if (index >= item->count) continue;
            u64 *full = &shared()->full[place->slot];
            // A lane takes a box; past the end it is the last one again.
            int last = (shared()->starts[item->sequence] - 1) / BOX_TOKENS * BOX_TOKENS;
            int slot = smaller((item->first + index) * KV_TOKENS + lane * BOX_TOKENS, last), page = 0;
            if (lane < KV_TOKENS / BOX_TOKENS)
                page = round->page_tables[(i64)item->sequence * round->max_pages + slot / PAGE_SIZE];
            await_slot(place);
            if (lane == 0) signal_expect(full, 2 * KV_BYTES);
            warp_sync();
            if (lane < KV_TOKENS / BOX_TOKENS) {
                unsigned char *to = ring_slot(place->slot) + lane * BOX_TOKENS * HEAD_DIM * 2;
                copy_box_5(to, &layer->k, 0, 0, item->head, slot % PAGE_SIZE, page, full, policy);
                copy_box_5(to + KV_BYTES, &layer->v, 0, 0, item->head, slot % PAGE_SIZE, page, full, policy);
            }
            step(place);
        }
}

// ---- products ----

typedef struct {
    uint4 values[ROW_TILES], norm;
} Inputs;

// Eight inputs of this thread's rows, and of the norm's weight.
DEVICE void load_inputs(Inputs *to, const bf16 *x, int inputs, const bf16 *norm, int k, int rows) {
    const uint4 none = {0, 0, 0, 0};
    int row = thread_id() % LANES / 4;
    UNROLL
    for (int tile = 0; tile < ROW_TILES; tile++) {
        to->values[tile] = none;
        if (8 * tile + row < rows) to->values[tile] = load_fresh_16(x + (i64)(8 * tile + row) * inputs + k);
    }
    if (norm) to->norm = load_constant_16(norm + k);
}

DEVICE u32 scale_pair(u32 pair, u32 norm, float *squares) {
    float low = low_half(pair), high = high_half(pair);
    *squares += low * low + high * high;
    return pack_bf16(low * low_half(norm), high * high_half(norm));
}

// The norm's weight goes onto the inputs; its other factor, one number a row, onto the sums.
DEVICE void scale_inputs(Inputs *inputs, float *squares) {
    UNROLL
    for (int tile = 0; tile < ROW_TILES; tile++) {
        uint4 *values = &inputs->values[tile];
        values->x = scale_pair(values->x, inputs->norm.x, &squares[tile]);
        values->y = scale_pair(values->y, inputs->norm.y, &squares[tile]);
        values->z = scale_pair(values->z, inputs->norm.z, &squares[tile]);
        values->w = scale_pair(values->w, inputs->norm.w, &squares[tile]);
    }
}

// What finishing two sums needs besides them, read while the product is computed.
typedef struct {
    float a, b;  // cosine and sine of a rotated pair, or what the residual stream holds
    i64 slot;    // where a row's KV goes
} Early;

DEVICE void prepare(Early *early, const Round *round, Product product, int tile, int i, int row) {
    if (product == QKV) {
        i64 at = (i64)round->positions[row] * HALF + tile % (HEAD_DIM / TILE) * 8 + i;
        early->a = round->cos[at];
        early->b = round->sin[at];
        early->slot = round->row_slots[row];
    } else if (product != GATE_UP) {
        i64 at = (i64)row * HIDDEN + tile * TILE + i;
        early->a = low_half(load_fresh_bf16(round->hidden + at));
        early->b = low_half(load_fresh_bf16(round->hidden + at + 8));
    }
}

// What becomes of two sums of one row: outputs `weight_row(product, tile, i)` and `…(i + 8)`.
DEVICE void finish(
    const Early *early, const Round *round, const Layer *layer, int index, Product product, int tile, int i, int row,
    float a, float b) {
    if (product == QKV) {
        int head = tile / (HEAD_DIM / TILE), column = tile % (HEAD_DIM / TILE) * 8 + i;
        if (layer->qkv_bias) {
            a += low_half(layer->qkv_bias[head * HEAD_DIM + column]);
            b += low_half(layer->qkv_bias[head * HEAD_DIM + column + HALF]);
        }
        a = rounded(a);
        b = rounded(b);
        if (head < HEADS + KV_HEADS) {
            float turned = a * early->a - b * early->b;
            b = b * early->a + a * early->b;
            a = turned;
        }
        if (head < HEADS) {
            bf16 *to = round->q + (i64)row * Q_SIZE + head * HEAD_DIM + column;
            to[0] = to_bf16(a);
            to[HALF] = to_bf16(b);
            return;
        }
        if (early->slot < 0) return;
        int is_value = head >= HEADS + KV_HEADS, kv_head = head - HEADS - (is_value ? KV_HEADS : 0);
        bf16 *to = (is_value ? layer->v_pages : layer->k_pages) + early->slot / PAGE_SIZE * round->page_stride +
                   (early->slot % PAGE_SIZE * KV_HEADS + kv_head) * HEAD_DIM + column;
        to[0] = to_bf16(a);
        to[HALF] = to_bf16(b);
    } else if (product == GATE_UP) {
        float gated = a / (1.0f + exp2_of(-1.4426950408889634f * a)) * b;
        round->act[(i64)row * INTER + tile * 8 + i] = to_bf16(gated);
    } else {
        i64 at = (i64)row * HIDDEN + tile * TILE + i;
        bf16 first = to_bf16(rounded(a) + early->a), second = to_bf16(rounded(b) + early->b);
        round->hidden[at] = first;
        round->hidden[at + 8] = second;
        if (product == DOWN) {
            UNROLL
            for (int feature = 0; feature < MAX_FEATURES; feature++)
                if (round->feature_after[feature] == index + 1) {
                    round->features[feature][at] = first;
                    round->features[feature][at + 8] = second;
                }
        }
    }
}

// The block's tiles of one product, up to `group` side by side. Every warp takes its own inputs of every chunk; sums meet in
// shared memory.
DEVICE void compute_product(
    Place *place, const Round *round, const Layer *layer, int index, Product product, const bf16 *x, const bf16 *norm,
    int *turn) {
    enum {
        MAX_STEPS = 3,  // of 32 inputs, a warp and chunk
        AHEAD = 2,  // chunks whose inputs are on their way: L2 answers later than the ring, and later still if asked for more
    };
    int inputs = inputs_of(product), chunk = chunk_of(product), group = group_of(product), tiles = tiles_of(product);
    int thread = thread_id(), warp = thread / LANES, lane = thread % LANES, grid = num_blocks();
    int first = first_tile(turn, product);
    int steps = chunk / 32, most_steps = (steps + WARPS - 1) / WARPS, line = line_of(lane / 4);
    int from = warp / 2 * 1024 + swizzled(line, warp % 2 * 4 + lane % 4);  // two steps share a line
    for (int begin = first; begin < tiles; begin += group * grid) {
        int count = smaller(group, (tiles - begin + grid - 1) / grid);
        float acc[GROUP_TILES][ROW_TILES][4], squares[ROW_TILES];
        Inputs ahead[AHEAD][MAX_STEPS];
        Early early[ITEMS];
        UNROLL
        for (int d = 0; d < AHEAD; d++)
            UNROLL
            for (int s = 0; s < MAX_STEPS; s++)
                if (d * chunk < inputs && s < most_steps && warp + WARPS * s < steps) {
                    int column = d * chunk + (warp + WARPS * s) * 32 + lane % 4 * 8;
                    load_inputs(&ahead[d][s], x, inputs, norm, column, round->rows);
                }
        UNROLL
        for (int item = 0; item < ITEMS; item++) {
            int at = thread + CONSUMERS * item, j = at / (8 * ROWS), row = at / 8 % ROWS;
            if (j < smaller(count, BATCH) && row < round->rows)
                prepare(&early[item], round, product, begin + j * grid, at % 8, row);
        }
        UNROLL
        for (int tile = 0; tile < ROW_TILES; tile++) squares[tile] = 0;
        UNROLL
        for (int j = 0; j < GROUP_TILES; j++)
            UNROLL
            for (int tile = 0; tile < ROW_TILES; tile++)
                UNROLL
                for (int c = 0; c < 4; c++) acc[j][tile][c] = 0;
        for (int base = 0; base < inputs; base += AHEAD * chunk)
            UNROLL
            for (int d = 0; d < AHEAD; d++) {
                int k = base + d * chunk;
                if (k >= inputs) break;
                if (norm) {
                    UNROLL
                    for (int s = 0; s < MAX_STEPS; s++)
                        if (s < most_steps && warp + WARPS * s < steps) scale_inputs(&ahead[d][s], squares);
                }
                UNROLL
                for (int j = 0; j < GROUP_TILES; j++)
                    if (j < group && j < count) {
                        const unsigned char *slot = ring_slot(place->slot) + from;
                        signal_wait(&shared()->full[place->slot], place->parity);
                        UNROLL
                        for (int s = 0; s < MAX_STEPS; s++)
                            if (s < most_steps && warp + WARPS * s < steps) {
                                uint4 upper = load_shared_16(slot + WARPS * s * 512);
                                uint4 lower = load_shared_16(slot + WARPS * s * 512 + 16 * chunk);
                                UNROLL
                                for (int tile = 0; tile < ROW_TILES; tile++) {
                                    uint4 value = ahead[d][s].values[tile];
                                    multiply_add(acc[j][tile], upper.x, lower.x, upper.y, lower.y, value.x, value.y);
                                    multiply_add(acc[j][tile], upper.z, lower.z, upper.w, lower.w, value.z, value.w);
                                }
                            }
                        warp_sync();
                        if (lane == 0) signal_arrive(&shared()->empty[place->slot]);
                        step(place);
                    }
                UNROLL
                for (int s = 0; s < MAX_STEPS; s++)
                    if (k + AHEAD * chunk < inputs && s < most_steps && warp + WARPS * s < steps) {
                        int column = k + AHEAD * chunk + (warp + WARPS * s) * 32 + lane % 4 * 8;
                        load_inputs(&ahead[d][s], x, inputs, norm, column, round->rows);
                    }
            }
        if (norm) {
            UNROLL
            for (int tile = 0; tile < ROW_TILES; tile++) {
                float sum = squares[tile];
                sum += as_float(exchange_xor(as_bits(sum), 1));
                sum += as_float(exchange_xor(as_bits(sum), 2));
                if (lane % 4 == 0) shared()->squares[warp][8 * tile + lane / 4] = sum;
            }
        }
        UNROLL
        for (int done = 0; done < GROUP_TILES; done += BATCH)
            if (done < count) {
                UNROLL
                for (int j = done; j < done + BATCH && j < GROUP_TILES; j++)
                    if (j < group && j < count) {
                        float *to = shared()->red + (j - done) * RED_FLOATS + (warp * TILE + line) * RED_STRIDE + lane % 4 * 2;
                        UNROLL
                        for (int tile = 0; tile < ROW_TILES; tile++) {
                            to[8 * tile] = acc[j][tile][0];
                            to[8 * tile + 1] = acc[j][tile][1];
                            to[8 * RED_STRIDE + 8 * tile] = acc[j][tile][2];
                            to[8 * RED_STRIDE + 8 * tile + 1] = acc[j][tile][3];
                        }
                    }
                part_sync(CONSUMERS);
                UNROLL
                for (int item = 0; item < ITEMS; item++) {
                    int at = thread + CONSUMERS * item, j = at / (8 * ROWS), row = at / 8 % ROWS, i = at % 8;
                    if (j < smaller(count - done, BATCH) && row < round->rows) {
                        const float *from = shared()->red + j * RED_FLOATS + i * RED_STRIDE + row;
                        int tile = begin + (done + j) * grid;
                        float a = 0, b = 0;
                        if (done > 0) prepare(&early[item], round, product, tile, i, row);
                        UNROLL
                        for (int w = 0; w < WARPS; w++) {
                            a += from[w * TILE * RED_STRIDE];
                            b += from[(w * TILE + 8) * RED_STRIDE];
                        }
                        if (norm) {
                            float sum = 0;
                            UNROLL
                            for (int w = 0; w < WARPS; w++) sum += shared()->squares[w][row];
                            float factor = rsqrt_of(sum / HIDDEN + round->eps);
                            a *= factor;
                            b *= factor;
                        }
                        finish(&early[item], round, layer, index, product, tile, i, row, a, b);
                    }
                }
                part_sync(CONSUMERS);  // `red` is free again
            }
    }
}

// ---- attention ----

// Running softmax of 16 (row, head) pairs, in the register layout of products: rows lane / 4 and that + 8.
typedef struct {
    uint4 q[2][KV_BLOCKS];
    float acc[HEAD_DIM / 8][4], most[2], total[2];
} Softmax;

// Token of a block of 8 in column c of its scores: so that two rows that a step reads side by side lie in different banks.
DEVICE int token_of(int c) { return HEAD_DIM == 64 ? line_of(c) : (c & 4) | (c & 1) << 1 | (c >> 1 & 1); }

DEVICE void begin_softmax(Softmax *softmax, const Round *round, int sequence, int head, int pair_tile) {
    const uint4 none = {0, 0, 0, 0};
    int lane = thread_id() % LANES, pairs = round->rows_each * GROUP;
    UNROLL
    for (int half = 0; half < 2; half++) {
        int pair = pair_tile * 16 + lane / 4 + 8 * half;
        softmax->most[half] = NOTHING;
        softmax->total[half] = 0;
        const bf16 *from = round->q + (i64)(sequence * round->rows_each + pair / GROUP) * Q_SIZE +
                           (head * GROUP + pair % GROUP) * HEAD_DIM + lane % 4 * 8;
        UNROLL
        for (int b = 0; b < KV_BLOCKS; b++) {
            softmax->q[half][b] = none;
            if (pair < pairs) softmax->q[half][b] = load_fresh_16(from + 32 * b);
        }
    }
    UNROLL
    for (int column = 0; column < HEAD_DIM / 8; column++)
        UNROLL
        for (int c = 0; c < 4; c++) softmax->acc[column][c] = 0;
}

DEVICE void add_scores(const Softmax *softmax, float *scores, int b, uint4 k) {
    multiply_add(scores, softmax->q[0][b].x, softmax->q[1][b].x, softmax->q[0][b].y, softmax->q[1][b].y, k.x, k.y);
    multiply_add(scores, softmax->q[0][b].z, softmax->q[1][b].z, softmax->q[0][b].w, softmax->q[1][b].w, k.z, k.w);
}

// Scores of `blocks` of 8 tokens, scaled and -inf where not seen, become weights; sums so far are scaled to them.
DEVICE void weigh(Softmax *softmax, float (*scores)[4], int blocks) {
    UNROLL
    for (int half = 0; half < 2; half++) {
        float most = softmax->most[half], total = 0;
        UNROLL
        for (int b = 0; b < blocks; b++) most = fmaxf(most, fmaxf(scores[b][2 * half], scores[b][2 * half + 1]));
        most = fmaxf(most, as_float(exchange_xor(as_bits(most), 1)));
        most = fmaxf(most, as_float(exchange_xor(as_bits(most), 2)));
        float finite = most == NOTHING ? 0.0f : most, keep = exp2_of(softmax->most[half] - finite);
        UNROLL
        for (int b = 0; b < blocks; b++)
            UNROLL
            for (int c = 2 * half; c < 2 * half + 2; c++) {
                scores[b][c] = exp2_of(scores[b][c] - finite);
                total += scores[b][c];
            }
        softmax->most[half] = most;
        softmax->total[half] = softmax->total[half] * keep + total;
        UNROLL
        for (int column = 0; column < HEAD_DIM / 8; column++) {
            softmax->acc[column][2 * half] *= keep;
            softmax->acc[column][2 * half + 1] *= keep;
        }
    }
}

DEVICE void attend_step(Softmax *softmax, const Round *round, const unsigned char *slot, int left) {
    int lane = thread_id() % LANES;
    float scores[KV_TOKENS / 8][4];
    UNROLL
    for (int block = 0; block < KV_TOKENS / 8; block++) {
        UNROLL
        for (int c = 0; c < 4; c++) scores[block][c] = 0;
        UNROLL
        for (int b = 0; b < KV_BLOCKS; b++) {
            int line = (8 * block + token_of(lane / 4)) * KV_LINES + b / 2;
            add_scores(softmax, scores[block], b, load_shared_16(slot + swizzled(line, b % 2 * 4 + lane % 4)));
        }
        UNROLL
        for (int c = 0; c < 4; c++) {
            int token = 8 * block + token_of(lane % 4 * 2 + c % 2);
            scores[block][c] = token < left ? scores[block][c] * round->scale : NOTHING;
        }
    }
    weigh(softmax, scores, KV_TOKENS / 8);
    UNROLL
    for (int pair = 0; pair < KV_TOKENS / 16; pair++) {
        float(*here)[4] = &scores[2 * pair];
        u32 a0 = pack_bf16(here[0][0], here[0][1]), a1 = pack_bf16(here[0][2], here[0][3]);
        u32 a2 = pack_bf16(here[1][0], here[1][1]), a3 = pack_bf16(here[1][2], here[1][3]);
        // Behind the end there may be anything, also NaN.
        u32 keep[2];
        UNROLL
        for (int block = 0; block < 2; block++) {
            int low = 16 * pair + 8 * block + token_of(lane % 4 * 2), high = 16 * pair + 8 * block + token_of(lane % 4 * 2 + 1);
            keep[block] = (low < left ? 0x0000ffffu : 0) | (high < left ? 0xffff0000u : 0);
        }
        UNROLL
        for (int column = 0; column < HEAD_DIM / 8; column += 2) {
            int piece = column + lane / 16;
            int line = (16 * pair + lane / 8 % 2 * 8 + token_of(lane % 8)) * KV_LINES + piece / 8;
            uint4 v = load_matrices_transposed(slot + KV_BYTES + swizzled(line, piece % 8));
            multiply_add(softmax->acc[column], a0, a1, a2, a3, v.x & keep[0], v.y & keep[1]);
            multiply_add(softmax->acc[column + 1], a0, a1, a2, a3, v.z & keep[0], v.w & keep[1]);
        }
    }
}

DEVICE void end_softmax(const Softmax *softmax, const Round *round, int item, int pair_tile) {
    int lane = thread_id() % LANES, pairs = round->row_tiles_of_pairs * 16;
    UNROLL
    for (int half = 0; half < 2; half++) {
        float total = softmax->total[half];
        total += as_float(exchange_xor(as_bits(total), 1));
        total += as_float(exchange_xor(as_bits(total), 2));
        i64 at = (i64)item * pairs + pair_tile * 16 + lane / 4 + 8 * half;
        float *to = round->partial + at * HEAD_DIM + lane % 4 * 2;
        UNROLL
        for (int column = 0; column < HEAD_DIM / 8; column++) {
            to[8 * column] = softmax->acc[column][2 * half];
            to[8 * column + 1] = softmax->acc[column][2 * half + 1];
        }
        if (lane % 4 == 0) {
            round->state[2 * at] = softmax->most[half];
            round->state[2 * at + 1] = total;
        }
    }
}

DEVICE void attend(Place *place, const Round *round) {
    int warp = thread_id() / LANES, lane = thread_id() % LANES, tiles = round->row_tiles_of_pairs;
    int streams = WARPS / tiles, stream = warp / tiles, tile = warp % tiles;
    Item mine = shared()->items[stream];
    Softmax softmax;
    if (mine.count > 0) begin_softmax(&softmax, round, mine.sequence, mine.head, tile);
    for (int index = 0; index < shared()->most; index++)
        for (int other = 0; other < streams; other++) {
            if (index >= shared()->items[other].count) continue;
            // All warps wait for and leave every slot: one that is more than a ring away from a signal would misread it.
            signal_wait(&shared()->full[place->slot], place->parity);
            if (other == stream) {
                int left = shared()->starts[mine.sequence] - (mine.first + index) * KV_TOKENS;
                attend_step(&softmax, round, ring_slot(place->slot), left);
                warp_sync();
            }
            if (lane == 0) signal_arrive(&shared()->empty[place->slot]);
            step(place);
        }
    if (mine.count > 0) end_softmax(&softmax, round, block_id() + num_blocks() * stream, tile);
}

// A softmax of one (row, head) pair, spread over the lanes of a warp: columns lane, lane + 32, …
enum { EACH = HEAD_DIM / LANES };

typedef struct {
    float acc[EACH], most, total;
} Spread;

DEVICE float warp_sum(float value) {
    for (int mask = 16; mask; mask /= 2) value += as_float(exchange_xor(as_bits(value), mask));
    return value;
}

DEVICE float warp_max(float value) {
    for (int mask = 16; mask; mask /= 2) value = fmaxf(value, as_float(exchange_xor(as_bits(value), mask)));
    return value;
}

// Sums so far are scaled to a new maximum; returns what scores are to be taken relative to.
DEVICE float raise(Spread *spread, float most) {
    most = fmaxf(most, spread->most);
    float finite = most == NOTHING ? 0.0f : most, keep = exp2_of(spread->most - finite);
    spread->most = most;
    spread->total *= keep;
    UNROLL
    for (int e = 0; e < EACH; e++) spread->acc[e] *= keep;
    return finite;
}

// Every `apart`th split of a pair, from `part` on.
DEVICE void join_splits(Spread *spread, const Round *round, int first, int splits, int pair, int part, int apart) {
    int lane = thread_id() % LANES, pairs = round->row_tiles_of_pairs * 16;
    for (int base = part; base < splits; base += LANES * apart) {
        int mine = base + lane * apart, count = smaller(LANES, (splits - base + apart - 1) / apart);
        float most = NOTHING, total = 0;
        if (mine < splits) {
            const float *state = round->state + 2 * ((i64)(first + mine * KV_HEADS) * pairs + pair);
            most = load_fresh_float(state);
            total = load_fresh_float(state + 1);
        }
        float factor = exp2_of(most - raise(spread, warp_max(most)));
        spread->total += warp_sum(factor * total);
        UNROLL_8
        for (int one = 0; one < count; one++) {
            const float *from =
                round->partial + ((i64)(first + (base + one * apart) * KV_HEADS) * pairs + pair) * HEAD_DIM + lane;
            float share = as_float(exchange_from(as_bits(factor), one));
            UNROLL
            for (int e = 0; e < EACH; e++) spread->acc[e] += share * load_fresh_float(from + LANES * e);
        }
    }
}

// The slots behind the committed ones, which this round wrote: every `apart`th, where the row sees it.
DEVICE void attend_tail(
    Spread *spread, const Round *round, const Layer *layer, int row, int head, int part, int apart) {
    enum { AT_ONCE = 4 };
    int lane = thread_id() % LANES, sequence = row / round->rows_each, start = shared()->starts[sequence];
    const int *table = round->page_tables + (i64)sequence * round->max_pages;
    u64 visible = (u64)round->visible[row];
    float q[EACH];
    UNROLL
    for (int e = 0; e < EACH; e++)
        q[e] = low_half(load_fresh_bf16(round->q + (i64)row * Q_SIZE + head * HEAD_DIM + lane + LANES * e));
    for (int base = part; base < round->num_tail; base += AT_ONCE * apart) {
        u32 k[AT_ONCE][EACH], v[AT_ONCE][EACH];
        float scores[AT_ONCE], most = NOTHING;
        UNROLL
        for (int one = 0; one < AT_ONCE; one++) {
            int token = base + one * apart, is_seen = token < round->num_tail && (visible >> token & 1);
            int slot = is_seen ? start + token : 0;
            i64 at = lane + (i64)(slot % PAGE_SIZE * KV_HEADS + head / GROUP) * HEAD_DIM;
            if (is_seen) at += table[slot / PAGE_SIZE] * round->page_stride;
            UNROLL
            for (int e = 0; e < EACH; e++) {
                k[one][e] = is_seen ? load_fresh_bf16(layer->k_pages + at + LANES * e) : 0;
                v[one][e] = is_seen ? load_fresh_bf16(layer->v_pages + at + LANES * e) : 0;
            }
            scores[one] = is_seen ? 0.0f : NOTHING;
        }
        UNROLL
        for (int one = 0; one < AT_ONCE; one++) {
            float score = 0;
            UNROLL
            for (int e = 0; e < EACH; e++) score += q[e] * low_half(k[one][e]);
            scores[one] += warp_sum(score) * round->scale;
            most = fmaxf(most, scores[one]);
        }
        float finite = raise(spread, most);
        UNROLL
        for (int one = 0; one < AT_ONCE; one++) {
            float weight = exp2_of(scores[one] - finite);
            spread->total += weight;
            UNROLL
            for (int e = 0; e < EACH; e++) spread->acc[e] += weight * low_half(v[one][e]);
        }
    }
}

// How (row, head) pairs are shared out among warps: as many warps a pair as there are to spare.
typedef struct {
    int tasks, apart, part;
} Shares;

DEVICE Shares share_pairs(const Round *round) {
    Shares shares = {round->rows * HEADS, WARPS, 0};
    while (shares.apart > 1 && num_blocks() * (WARPS / shares.apart) < shares.tasks) shares.apart /= 2;
    shares.part = thread_id() / LANES % shares.apart;
    return shares;
}

DEVICE int task_of(const Shares *shares, int turn) {
    int each = WARPS / shares->apart;
    return (turn * each + thread_id() / LANES / shares->apart) * num_blocks() + block_id();
}

DEVICE void begin_pair(Spread *spread, const Round *round, const Layer *layer, const Shares *shares, int task) {
    spread->most = NOTHING;
    spread->total = 0;
    UNROLL
    for (int e = 0; e < EACH; e++) spread->acc[e] = 0;
    if (task < shares->tasks)
        attend_tail(spread, round, layer, task / HEADS, task % HEADS, shares->part, shares->apart);
}

// Attention of every (row, head) pair from its tail, which `first` already has of the first ones, and its splits.
DEVICE void combine(const Round *round, const Layer *layer, const Shares *shares, const Spread *first) {
    int warp = thread_id() / LANES, lane = thread_id() % LANES, apart = shares->apart, part = shares->part;
    float *sums = shared()->red, *rest = shared()->red + WARPS * HEAD_DIM;
    for (int turn = 0; turn * num_blocks() * (WARPS / apart) < shares->tasks; turn++) {
        int task = task_of(shares, turn);
        Spread spread = *first;
        if (turn > 0) begin_pair(&spread, round, layer, shares, task);
        if (task < shares->tasks) {
            int row = task / HEADS, head = task % HEADS, sequence = row / round->rows_each;
            int splits = (committed_steps(shared()->starts[sequence]) + shared()->span - 1) / shared()->span;
            int pair = row % round->rows_each * GROUP + head % GROUP;
            join_splits(
                &spread, round, shared()->first_item[sequence] + head / GROUP, splits, pair, part, apart);
        }
        if (apart > 1) {
            UNROLL
            for (int e = 0; e < EACH; e++) sums[warp * HEAD_DIM + lane + LANES * e] = spread.acc[e];
            if (lane == 0) {
                rest[2 * warp] = spread.most;
                rest[2 * warp + 1] = spread.total;
            }
            part_sync(CONSUMERS);
            if (part == 0)
                for (int other = warp + 1; other < warp + apart; other++) {
                    float share = exp2_of(rest[2 * other] - raise(&spread, rest[2 * other]));
                    spread.total += share * rest[2 * other + 1];
                    UNROLL
                    for (int e = 0; e < EACH; e++) spread.acc[e] += share * sums[other * HEAD_DIM + lane + LANES * e];
                }
            part_sync(CONSUMERS);
        }
        if (part == 0 && task < shares->tasks) {
            float factor = spread.total == 0 ? 1.0f : 1.0f / spread.total;
            UNROLL
            for (int e = 0; e < EACH; e++)
                round->attended[(i64)task * HEAD_DIM + lane + LANES * e] = to_bf16(spread.acc[e] * factor);
        }
    }
}

// ---- the whole ----

// How committed slots are shared out, the same for every layer. One item a stream of KV, of which a block has several.
DEVICE void plan_items(const Round *round) {
    int thread = thread_id(), tiles = round->row_tiles_of_pairs, streams = WARPS / tiles;
    if (thread < round->sequences) shared()->starts[thread] = round->starts[thread];
    block_sync();
    if (thread == 0) {
        int places = num_blocks() * streams, all = 0, span, items, wide;
        for (int sequence = 0; sequence < round->sequences; sequence++)
            all += KV_HEADS * committed_steps(shared()->starts[sequence]);
        // Two slots an item where each block has some: half as many splits to combine.
        wide = smaller(2, (all + num_blocks() - 1) / num_blocks());
        for (span = larger(larger(tiles, wide), (all + places - 1) / places);; span++) {
            items = 0;
            for (int sequence = 0; sequence < round->sequences; sequence++) {
                shared()->first_item[sequence] = items;
                items += KV_HEADS * ((committed_steps(shared()->starts[sequence]) + span - 1) / span);
            }
            if (items <= places) break;
        }
        shared()->span = span;
        shared()->most = 0;
        for (int stream = 0; stream < streams; stream++) {
            int at = block_id() + num_blocks() * stream, sequence = round->sequences - 1;
            Item *item = &shared()->items[stream];
            item->count = 0;
            if (at >= items) continue;
            while (shared()->first_item[sequence] > at) sequence--;
            at -= shared()->first_item[sequence];
            item->sequence = sequence;
            item->head = at % KV_HEADS;
            item->first = at / KV_HEADS * span;
            item->count = smaller(span, committed_steps(shared()->starts[sequence]) - item->first);
            shared()->most = larger(shared()->most, item->count);
        }
    }
    block_sync();
}

DEVICE void consumers_meet(const Round *round, u32 *goal) {
    *goal += num_blocks();
    part_sync(CONSUMERS);
    if (thread_id() == 0) meet(round->met, *goal);
    part_sync(CONSUMERS);
}

DEVICE void produce(const Round *round) {
    Place place = {0, 0, 0};
    int turn = 0;
    u64 policy = policy_read_once();
    for (int index = 0; index < round->num_layers; index++) {
        const Layer *layer = &round->layers[index];
        produce_product(&place, QKV, &layer->qkv, &turn, policy);
        produce_kv(&place, round, layer, WARPS / round->row_tiles_of_pairs, policy);
        produce_product(&place, OUTPUT, &layer->output, &turn, policy);
        produce_product(&place, GATE_UP, &layer->gate_up, &turn, policy);
        produce_product(&place, DOWN, &layer->down, &turn, policy);
    }
}

DEVICE void consume(const Round *round) {
    Place place = {0, 0, 0};
    int turn = 0;
    u32 goal = 0;
    Shares shares = share_pairs(round);
    for (int index = 0; index < round->num_layers; index++) {
        const Layer *layer = &round->layers[index];
        compute_product(&place, round, layer, index, QKV, round->hidden, layer->input_norm, &turn);
        consumers_meet(round, &goal);
        Spread spread;
        begin_pair(&spread, round, layer, &shares, task_of(&shares, 0));
        attend(&place, round);
        consumers_meet(round, &goal);
        combine(round, layer, &shares, &spread);
        consumers_meet(round, &goal);
        compute_product(&place, round, layer, index, OUTPUT, round->attended, 0, &turn);
        consumers_meet(round, &goal);
        compute_product(&place, round, layer, index, GATE_UP, round->hidden, layer->post_norm, &turn);
        consumers_meet(round, &goal);
        compute_product(&place, round, layer, index, DOWN, round->act, 0, &turn);
        if (index + 1 < round->num_layers) consumers_meet(round, &goal);
    }
}

KERNEL(THREADS) decoder_layers(const BY_VALUE Round round) {
    if (thread_id() == 0) {
        for (int slot = 0; slot < NUM_SLOTS; slot++) {
            signal_init(&shared()->full[slot], 1);
            signal_init(&shared()->empty[slot], WARPS);
        }
        signals_ready();
    }
    plan_items(&round);
    if (thread_id() < CONSUMERS) {
        TAKE_REGISTERS(232);
        consume(&round);
    } else {
        GIVE_REGISTERS(40);
        if (thread_id() / LANES == PRODUCER) produce(&round);
    }
}
