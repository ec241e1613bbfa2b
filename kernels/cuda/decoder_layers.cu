// A range of dense decoder layers for a few rows in one resident kernel: as many blocks as multiprocessors, each there from
// the first layer to the last.
//
// Reading the weights takes nearly all of the time, so nothing may interrupt it. A block's last warps, the producers, copy
// the block's share of all weights and of the committed KV into a ring of shared memory, in the order of their use and as
// far ahead as the ring holds; they never wait for activations, since what they read does not depend on them. The other
// warps compute what lies in the ring. Blocks meet after every phase of a layer, while their rings fill up.
//
// Phases of a layer: q, k and v with norm, rotation and KV write; attention by splits; its combination; output; gate and up
// with norm and activation; down. Sizes come as macros:
//   HIDDEN INTER HEADS KV_HEADS HEAD_DIM PAGE_SIZE
//   ROW_TILES     of 8 rows
//   GROUP_TILES   tiles of 16 outputs that are computed side by side
//   CHUNK_HIDDEN CHUNK_ATTENDED CHUNK_INTER     inputs a ring slot, by product
//   SLOT_BYTES NUM_SLOTS                        of the ring

enum {
    LANES = 32,
    WARPS = 8,
    CONSUMERS = WARPS * LANES,
    PRODUCERS = 4,  // warps; they divide the number of the ring's slots
    THREADS = CONSUMERS + PRODUCERS * LANES,
    TILE = 16,
    ROWS = 8 * ROW_TILES,
    HALF = HEAD_DIM / 2,
    GROUP = HEADS / KV_HEADS,
    Q_SIZE = HEADS * HEAD_DIM,
    QKV_TILES = (HEADS + 2 * KV_HEADS) * HEAD_DIM / TILE,
    KV_TOKENS = 32,
    KV_STRIDE = 2 * HEAD_DIM + 16,  // bytes: rows of a step lie in different banks
    KV_BLOCKS = HEAD_DIM / 32,
    MAX_SEQUENCES = 16,
    MAX_FEATURES = 4,
    RED_STRIDE = ROWS + 1,
    RED_FLOATS = WARPS * TILE * RED_STRIDE,
};

typedef enum { QKV, OUTPUT, GATE_UP, DOWN } Product;

// What a layer reads; the table lies in global memory.
typedef struct {
    const bf16 *input_norm, *qkv, *qkv_bias, *output, *post_norm, *gate_up, *down;
    bf16 *k_pages, *v_pages;
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
    float red[2][RED_FLOATS];
} Shared;

enum { RING_AT = (sizeof(Shared) + 127) / 128 * 128 };

DEVICE Shared *shared(void) { return (Shared *)shared_base(); }
DEVICE unsigned char *ring_slot(int slot) { return shared_base() + RING_AT + slot * SLOT_BYTES; }
DEVICE int stride_of(int chunk) { return (2 * chunk + 127) / 128 * 128 + 64; }
DEVICE int committed_steps(int start) { return (start + KV_TOKENS - 1) / KV_TOKENS; }
DEVICE float low_half(u32 word) { return as_float(word << 16); }
DEVICE float high_half(u32 word) { return as_float(word & 0xffff0000u); }
DEVICE bf16 to_bf16(float value) { return (bf16)(pack_bf16(value, 0.0f) & 0xffff); }
DEVICE float rounded(float value) { return low_half(pack_bf16(value, 0.0f)); }
DEVICE int smaller(int a, int b) { return a < b ? a : b; }
DEVICE int larger(int a, int b) { return a > b ? a : b; }

// Where a thread is in the ring: uses of slots so far.
typedef struct {
    int slot, parity;
} Place;

DEVICE void step(Place *place) {
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

// ---- producer ----

// Producers take the ring's slots in turns.
DEVICE int is_mine(const Place *place) { return place->slot % PRODUCERS == thread_id() / LANES - WARPS; }

DEVICE void produce_product(
    Place *place, Product product, const bf16 *weight, int inputs, int chunk, int tiles, int first, u64 policy) {
    int lane = thread_id() % LANES, grid = num_blocks(), stride = stride_of(chunk), pieces = chunk / 8;
    for (int begin = first; begin < tiles; begin += GROUP_TILES * grid) {
        int count = smaller(GROUP_TILES, (tiles - begin + grid - 1) / grid);
        for (int k = 0; k < inputs; k += chunk)
            for (int j = 0; j < count; j++) {
                if (is_mine(place)) {
                    const bf16 *upper = weight + (i64)weight_row(product, begin + j * grid, 0) * inputs + k;
                    const bf16 *lower = weight + (i64)weight_row(product, begin + j * grid, 8) * inputs + k;
                    signal_wait(&shared()->empty[place->slot], place->parity ^ 1);
                    UNROLL_8
                    for (int piece = lane; piece < TILE * pieces; piece += LANES) {
                        int row = piece / pieces, column = piece % pieces;
                        const bf16 *from = (row < 8 ? upper : lower) + (row & 7) * inputs + column * 8;
                        copy_16(ring_slot(place->slot) + row * stride + column * 16, from, policy);
                    }
                    signal_copies(&shared()->full[place->slot]);
                }
                step(place);
            }
    }
}

DEVICE void produce_kv(Place *place, const Round *round, const Layer *layer, int streams, u64 policy) {
    enum { PIECES = HEAD_DIM / 8 };  // of a token
    int lane = thread_id() % LANES, most = shared()->most;
    for (int index = 0; index < most; index++)
        for (int stream = 0; stream < streams; stream++) {
            const Item *item = &shared()->items[stream];
            if (index >= item->count) continue;
            if (is_mine(place)) {
                // Where this lane's token lies; past the end the last one again, so that all that is read is finite.
                int slot = smaller((item->first + index) * KV_TOKENS + lane, shared()->starts[item->sequence] - 1);
                i64 page = round->page_tables[(i64)item->sequence * round->max_pages + slot / PAGE_SIZE];
                u32 vector = (u32)(page * (round->page_stride / HEAD_DIM)) + slot % PAGE_SIZE * KV_HEADS + item->head;
                unsigned char *to = ring_slot(place->slot);
                signal_wait(&shared()->empty[place->slot], place->parity ^ 1);
                UNROLL_8
                for (int piece = lane; piece < KV_TOKENS * PIECES; piece += LANES) {
                    int token = piece / PIECES, column = piece % PIECES;
                    i64 at = (i64)exchange_from(vector, token) * HEAD_DIM + column * 8;
                    copy_16(to + token * KV_STRIDE + column * 16, layer->k_pages + at, policy);
                    copy_16(to + (KV_TOKENS + token) * KV_STRIDE + column * 16, layer->v_pages + at, policy);
                }
                signal_copies(&shared()->full[place->slot]);
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

// What becomes of two sums of one row: outputs `weight_row(product, tile, i)` and `…(i + 8)`.
DEVICE void finish(const Round *round, const Layer *layer, int index, Product product, int tile, int i, int row, float a, float b) {
    if (product == QKV) {
        int head = tile / (HEAD_DIM / TILE), column = tile % (HEAD_DIM / TILE) * 8 + i;
        if (layer->qkv_bias) {
            a += low_half(layer->qkv_bias[head * HEAD_DIM + column]);
            b += low_half(layer->qkv_bias[head * HEAD_DIM + column + HALF]);
        }
        a = rounded(a);
        b = rounded(b);
        if (head < HEADS + KV_HEADS) {
            i64 at = (i64)round->positions[row] * HALF + column;
            float cos = round->cos[at], sin = round->sin[at], turned = a * cos - b * sin;
            b = b * cos + a * sin;
            a = turned;
        }
        if (head < HEADS) {
            bf16 *to = round->q + (i64)row * Q_SIZE + head * HEAD_DIM + column;
            to[0] = to_bf16(a);
            to[HALF] = to_bf16(b);
            return;
        }
        i64 slot = round->row_slots[row];
        if (slot < 0) return;
        int is_value = head >= HEADS + KV_HEADS, kv_head = head - HEADS - (is_value ? KV_HEADS : 0);
        bf16 *to = (is_value ? layer->v_pages : layer->k_pages) + slot / PAGE_SIZE * round->page_stride +
                   (slot % PAGE_SIZE * KV_HEADS + kv_head) * HEAD_DIM + column;
        to[0] = to_bf16(a);
        to[HALF] = to_bf16(b);
    } else if (product == GATE_UP) {
        float gated = a / (1.0f + exp2_of(-1.4426950408889634f * a)) * b;
        round->act[(i64)row * INTER + tile * 8 + i] = to_bf16(gated);
    } else {
        i64 at = (i64)row * HIDDEN + tile * TILE + i;
        bf16 first = to_bf16(rounded(a) + low_half((u32)load_fresh_bf16(round->hidden + at)));
        bf16 second = to_bf16(rounded(b) + low_half((u32)load_fresh_bf16(round->hidden + at + 8)));
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

// The block's tiles of one product. Every warp takes its own inputs of every chunk; sums meet in shared memory.
DEVICE void compute_product(
    Place *place, const Round *round, const Layer *layer, int index, Product product, const bf16 *x, const bf16 *norm,
    int inputs, int chunk, int tiles, int first) {
    enum { MAX_STEPS = 3 };  // of 32 inputs, a warp and chunk
    int thread = thread_id(), warp = thread / LANES, lane = thread % LANES, grid = num_blocks();
    int stride = stride_of(chunk), steps = chunk / 32, most_steps = (steps + WARPS - 1) / WARPS;
    int from = (lane / 4) * stride + lane % 4 * 16;  // bytes within a step of 32 inputs
    for (int begin = first; begin < tiles; begin += GROUP_TILES * grid) {
        int count = smaller(GROUP_TILES, (tiles - begin + grid - 1) / grid);
        float acc[GROUP_TILES][ROW_TILES][4], squares[ROW_TILES];
        UNROLL
        for (int tile = 0; tile < ROW_TILES; tile++) squares[tile] = 0;
        UNROLL
        for (int j = 0; j < GROUP_TILES; j++)
            UNROLL
            for (int tile = 0; tile < ROW_TILES; tile++)
                UNROLL
                for (int c = 0; c < 4; c++) acc[j][tile][c] = 0;
        Inputs ahead[MAX_STEPS];
        UNROLL
        for (int s = 0; s < MAX_STEPS; s++)
            if (s < most_steps && warp + WARPS * s < steps)
                load_inputs(&ahead[s], x, inputs, norm, (warp + WARPS * s) * 32 + lane % 4 * 8, round->rows);
        for (int k = 0; k < inputs; k += chunk) {
            Inputs now[MAX_STEPS];
            UNROLL
            for (int s = 0; s < MAX_STEPS; s++)
                if (s < most_steps && warp + WARPS * s < steps) {
                    now[s] = ahead[s];
                    if (norm) scale_inputs(&now[s], squares);
                    int next = k + chunk + (warp + WARPS * s) * 32 + lane % 4 * 8;
                    if (k + chunk < inputs) load_inputs(&ahead[s], x, inputs, norm, next, round->rows);
                }
            UNROLL
            for (int j = 0; j < GROUP_TILES; j++)
                if (j < count) {
                    const unsigned char *slot = ring_slot(place->slot) + from;
                    signal_wait(&shared()->full[place->slot], place->parity);
                    UNROLL
                    for (int s = 0; s < MAX_STEPS; s++)
                        if (s < most_steps && warp + WARPS * s < steps) {
                            uint4 upper = load_shared_16(slot + (warp + WARPS * s) * 64);
                            uint4 lower = load_shared_16(slot + (warp + WARPS * s) * 64 + 8 * stride);
                            UNROLL
                            for (int tile = 0; tile < ROW_TILES; tile++) {
                                uint4 value = now[s].values[tile];
                                multiply_add(acc[j][tile], upper.x, lower.x, upper.y, lower.y, value.x, value.y);
                                multiply_add(acc[j][tile], upper.z, lower.z, upper.w, lower.w, value.z, value.w);
                            }
                        }
                    warp_sync();
                    if (lane == 0) signal_arrive(&shared()->empty[place->slot]);
                    step(place);
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
        for (int j = 0; j < GROUP_TILES; j++)
            if (j < count) {
                float *red = shared()->red[j & 1];
                UNROLL
                for (int tile = 0; tile < ROW_TILES; tile++) {
                    float *to = red + (warp * TILE + lane / 4) * RED_STRIDE + 8 * tile + lane % 4 * 2;
                    to[0] = acc[j][tile][0];
                    to[1] = acc[j][tile][1];
                    to[8 * RED_STRIDE] = acc[j][tile][2];
                    to[8 * RED_STRIDE + 1] = acc[j][tile][3];
                }
                part_sync(CONSUMERS);
                int i = thread % 8, row = thread / 8;
                if (row < round->rows) {
                    float a = 0, b = 0;
                    UNROLL
                    for (int w = 0; w < WARPS; w++) {
                        a += red[(w * TILE + i) * RED_STRIDE + row];
                        b += red[(w * TILE + i + 8) * RED_STRIDE + row];
                    }
                    if (norm) {
                        float sum = 0;
                        UNROLL
                        for (int w = 0; w < WARPS; w++) sum += shared()->squares[w][row];
                        float factor = rsqrt_of(sum / HIDDEN + round->eps);
                        a *= factor;
                        b *= factor;
                    }
                    finish(round, layer, index, product, begin + j * grid, i, row, a, b);
                }
            }
        part_sync(CONSUMERS);  // `red` is free again
    }
}

// ---- attention ----

// Running softmax of 16 (row, head) pairs, in the register layout of products: rows lane / 4 and that + 8.
typedef struct {
    uint4 q[2][KV_BLOCKS];
    float acc[HEAD_DIM / 8][4], most[2], total[2];
} Softmax;

// Token of a block of 8 in column c of its scores: so that two rows that a step reads side by side lie in different banks.
DEVICE int token_of(int c) { return (c >> 1) + 4 * (c & 1); }

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
    const unsigned char *k_at = slot + token_of(lane / 4) * KV_STRIDE + lane % 4 * 16;
    UNROLL
    for (int block = 0; block < KV_TOKENS / 8; block++) {
        UNROLL
        for (int c = 0; c < 4; c++) scores[block][c] = 0;
        UNROLL
        for (int b = 0; b < KV_BLOCKS; b++)
            add_scores(softmax, scores[block], b, load_shared_16(k_at + 8 * block * KV_STRIDE + 64 * b));
        UNROLL
        for (int c = 0; c < 4; c++) {
            int token = 8 * block + token_of(lane % 4 * 2 + c % 2);
            scores[block][c] = token < left ? scores[block][c] * round->scale : NOTHING;
        }
    }
    weigh(softmax, scores, KV_TOKENS / 8);
    const unsigned char *v_at =
        slot + (KV_TOKENS + lane / 8 % 2 * 8 + token_of(lane % 8)) * KV_STRIDE + lane / 16 * 16;
    UNROLL
    for (int pair = 0; pair < KV_TOKENS / 16; pair++) {
        float(*here)[4] = &scores[2 * pair];
        u32 a0 = pack_bf16(here[0][0], here[0][1]), a1 = pack_bf16(here[0][2], here[0][3]);
        u32 a2 = pack_bf16(here[1][0], here[1][1]), a3 = pack_bf16(here[1][2], here[1][3]);
        UNROLL
        for (int column = 0; column < HEAD_DIM / 8; column += 2) {
            uint4 v = load_matrices_transposed(v_at + 16 * pair * KV_STRIDE + 16 * column);
            multiply_add(softmax->acc[column], a0, a1, a2, a3, v.x, v.y);
            multiply_add(softmax->acc[column + 1], a0, a1, a2, a3, v.z, v.w);
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

// The slots behind the committed ones: written in this round, seen by masks, read past the ring.
DEVICE void attend_tail(Softmax *softmax, const Round *round, const Layer *layer, int sequence, int head, int pair_tile) {
    int lane = thread_id() % LANES, rows = round->rows_each, start = shared()->starts[sequence];
    u64 seen = 0, mine[2];
    for (int row = 0; row < rows; row++) seen |= (u64)round->visible[sequence * rows + row];
    UNROLL
    for (int half = 0; half < 2; half++) {
        int row = (pair_tile * 16 + lane / 4 + 8 * half) / GROUP;
        mine[half] = row < rows ? (u64)round->visible[sequence * rows + row] : 0;
    }
    for (int first = 0; first < round->num_tail; first += 16) {
        float scores[2][4];
        const bf16 *values[4];
        UNROLL
        for (int block = 0; block < 2; block++) {
            int token = first + 8 * block + lane / 4;
            int is_seen = token < round->num_tail && (seen >> token & 1), slot = is_seen ? start + token : 0;
            int page = is_seen ? round->page_tables[(i64)sequence * round->max_pages + slot / PAGE_SIZE] : 0;
            const bf16 *k = layer->k_pages + page * round->page_stride +
                            (i64)(slot % PAGE_SIZE * KV_HEADS + head) * HEAD_DIM + lane % 4 * 8;
            UNROLL
            for (int c = 0; c < 4; c++) scores[block][c] = 0;
            UNROLL
            for (int b = 0; b < KV_BLOCKS; b++) {
                uint4 value = {0, 0, 0, 0};
                if (is_seen) value = load_fresh_16(k + 32 * b);
                add_scores(softmax, scores[block], b, value);
            }
            UNROLL
            for (int c = 0; c < 4; c++) {
                int column = first + 8 * block + lane % 4 * 2 + c % 2;
                int is_visible = column < round->num_tail && (mine[c / 2] >> column & 1);
                scores[block][c] = is_visible ? scores[block][c] * round->scale : NOTHING;
            }
            UNROLL
            for (int late = 0; late < 2; late++) {
                int column = first + 8 * block + lane % 4 * 2 + late;
                values[2 * block + late] = 0;
                if (column < round->num_tail && (seen >> column & 1)) {
                    int at = start + column;
                    i64 from = round->page_tables[(i64)sequence * round->max_pages + at / PAGE_SIZE];
                    values[2 * block + late] = layer->v_pages + from * round->page_stride +
                                               (i64)(at % PAGE_SIZE * KV_HEADS + head) * HEAD_DIM + lane / 4;
                }
            }
        }
        weigh(softmax, scores, 2);
        u32 a0 = pack_bf16(scores[0][0], scores[0][1]), a1 = pack_bf16(scores[0][2], scores[0][3]);
        u32 a2 = pack_bf16(scores[1][0], scores[1][1]), a3 = pack_bf16(scores[1][2], scores[1][3]);
        UNROLL
        for (int column = 0; column < HEAD_DIM / 8; column++) {
            u32 v[4];
            UNROLL
            for (int one = 0; one < 4; one++) v[one] = values[one] ? load_fresh_bf16(values[one] + 8 * column) : 0;
            multiply_add(softmax->acc[column], a0, a1, a2, a3, v[0] | v[1] << 16, v[2] | v[3] << 16);
        }
    }
}

DEVICE void attend(Place *place, const Round *round, const Layer *layer) {
    int warp = thread_id() / LANES, lane = thread_id() % LANES, tiles = round->row_tiles_of_pairs;
    int streams = WARPS / tiles, stream = warp / tiles, tile = warp % tiles;
    int places = num_blocks() * streams;
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
    int tails = round->sequences * KV_HEADS * tiles;
    for (int tail = (WARPS - 1 - warp) * num_blocks() + block_id(); tail < tails; tail += num_blocks() * WARPS) {
        int at = tail / tiles, sequence = at / KV_HEADS, head = at % KV_HEADS;
        begin_softmax(&softmax, round, sequence, head, tail % tiles);
        attend_tail(&softmax, round, layer, sequence, head, tail % tiles);
        end_softmax(&softmax, round, places + at, tail % tiles);
    }
}

// Joins the splits of (row, head) pairs; as many warps a pair as there are to spare.
DEVICE void combine(const Round *round) {
    enum { EACH = HEAD_DIM / LANES };
    int warp = thread_id() / LANES, lane = thread_id() % LANES, grid = num_blocks();
    int pairs = round->row_tiles_of_pairs * 16, places = grid * (WARPS / round->row_tiles_of_pairs);
    int tasks = round->rows * HEADS, warps_each = WARPS;
    while (warps_each > 1 && grid * (WARPS / warps_each) < tasks) warps_each /= 2;
    int tasks_at_once = grid * (WARPS / warps_each), part = warp % warps_each;
    float *sums = shared()->red[0], *totals = shared()->red[1];
    for (int begin = 0; begin < tasks; begin += tasks_at_once) {
        int task = begin + (warp / warps_each) * grid + block_id();
        float acc[EACH], total = 0;
        UNROLL
        for (int e = 0; e < EACH; e++) acc[e] = 0;
        if (task < tasks) {
            int row = task / HEADS, head = task % HEADS, sequence = row / round->rows_each, kv_head = head / GROUP;
            int pair = row % round->rows_each * GROUP + head % GROUP;
            int first = shared()->first_item[sequence] + kv_head;
            int splits = (committed_steps(shared()->starts[sequence]) + shared()->span - 1) / shared()->span;
            float most = NOTHING;
            for (int split = lane; split <= splits; split += LANES) {
                int item = split < splits ? first + split * KV_HEADS : places + sequence * KV_HEADS + kv_head;
                most = fmaxf(most, load_fresh_float(round->state + 2 * ((i64)item * pairs + pair)));
            }
            for (int mask = 16; mask; mask /= 2) most = fmaxf(most, as_float(exchange_xor(as_bits(most), mask)));
            float finite = most == NOTHING ? 0.0f : most;
            UNROLL_4
            for (int split = part; split <= splits; split += warps_each) {
                int item = split < splits ? first + split * KV_HEADS : places + sequence * KV_HEADS + kv_head;
                i64 at = (i64)item * pairs + pair;
                float factor = exp2_of(load_fresh_float(round->state + 2 * at) - finite);
                total += factor * load_fresh_float(round->state + 2 * at + 1);
                UNROLL
                for (int e = 0; e < EACH; e++)
                    acc[e] += factor * load_fresh_float(round->partial + at * HEAD_DIM + lane + LANES * e);
            }
        }
        if (warps_each > 1) {
            UNROLL
            for (int e = 0; e < EACH; e++) sums[warp * HEAD_DIM + lane + LANES * e] = acc[e];
            if (lane == 0) totals[warp] = total;
            part_sync(CONSUMERS);
            if (part == 0)
                for (int other = 1; other < warps_each; other++) {
                    total += totals[warp + other];
                    UNROLL
                    for (int e = 0; e < EACH; e++) acc[e] += sums[(warp + other) * HEAD_DIM + lane + LANES * e];
                }
            part_sync(CONSUMERS);
        }
        if (part == 0 && task < tasks) {
            float factor = total == 0 ? 1.0f : 1.0f / total;
            UNROLL
            for (int e = 0; e < EACH; e++)
                round->attended[(i64)task * HEAD_DIM + lane + LANES * e] = to_bf16(acc[e] * factor);
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
        int places = num_blocks() * streams, all = 0, span, items;
        for (int sequence = 0; sequence < round->sequences; sequence++)
            all += KV_HEADS * committed_steps(shared()->starts[sequence]);
        for (span = larger(tiles, (all + places - 1) / places);; span++) {
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

// First tile of this block when tiles go round from block `turn` on: who has one more changes from product to product.
DEVICE int first_tile(int *turn, int tiles) {
    int grid = num_blocks(), first = (block_id() - *turn + grid) % grid;
    *turn = (*turn + tiles) % grid;
    return first;
}

DEVICE void produce(const Round *round) {
    Place place = {0, 0};
    int turn = 0;
    u64 policy = policy_read_once();
    for (int index = 0; index < round->num_layers; index++) {
        const Layer *layer = &round->layers[index];
        produce_product(
            &place, QKV, layer->qkv, HIDDEN, CHUNK_HIDDEN, QKV_TILES, first_tile(&turn, QKV_TILES), policy);
        produce_kv(&place, round, layer, WARPS / round->row_tiles_of_pairs, policy);
        produce_product(
            &place, OUTPUT, layer->output, Q_SIZE, CHUNK_ATTENDED, HIDDEN / TILE, first_tile(&turn, HIDDEN / TILE), policy);
        produce_product(
            &place, GATE_UP, layer->gate_up, HIDDEN, CHUNK_HIDDEN, INTER / 8, first_tile(&turn, INTER / 8), policy);
        produce_product(
            &place, DOWN, layer->down, INTER, CHUNK_INTER, HIDDEN / TILE, first_tile(&turn, HIDDEN / TILE), policy);
    }
}

DEVICE void consume(const Round *round) {
    Place place = {0, 0};
    int turn = 0;
    u32 goal = 0;
    for (int index = 0; index < round->num_layers; index++) {
        const Layer *layer = &round->layers[index];
        compute_product(
            &place, round, layer, index, QKV, round->hidden, layer->input_norm, HIDDEN, CHUNK_HIDDEN, QKV_TILES,
            first_tile(&turn, QKV_TILES));
        consumers_meet(round, &goal);
        attend(&place, round, layer);
        consumers_meet(round, &goal);
        combine(round);
        consumers_meet(round, &goal);
        compute_product(
            &place, round, layer, index, OUTPUT, round->attended, 0, Q_SIZE, CHUNK_ATTENDED, HIDDEN / TILE,
            first_tile(&turn, HIDDEN / TILE));
        consumers_meet(round, &goal);
        compute_product(
            &place, round, layer, index, GATE_UP, round->hidden, layer->post_norm, HIDDEN, CHUNK_HIDDEN, INTER / 8,
            first_tile(&turn, INTER / 8));
        consumers_meet(round, &goal);
        compute_product(
            &place, round, layer, index, DOWN, round->act, 0, INTER, CHUNK_INTER, HIDDEN / TILE,
            first_tile(&turn, HIDDEN / TILE));
        if (index + 1 < round->num_layers) consumers_meet(round, &goal);
    }
}

KERNEL(THREADS) decoder_layers(const BY_VALUE Round round) {
    if (thread_id() == 0) {
        for (int slot = 0; slot < NUM_SLOTS; slot++) {
            signal_init(&shared()->full[slot], LANES);
            signal_init(&shared()->empty[slot], WARPS);
        }
    }
    plan_items(&round);
    if (thread_id() < CONSUMERS) {
        TAKE_REGISTERS(232);
        consume(&round);
    } else {
        GIVE_REGISTERS(40);
        produce(&round);
    }
}
