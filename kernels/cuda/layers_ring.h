// What the parts of `decoder_layers.cu` share: sizes, what a launch is told, and the ring with its producer.
#pragma once

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
    // Slots on their way. Three keep memory busy; with more, whatever else is asked of L2 waits longer behind them.
    IN_FLIGHT = 3,
    BATCH = 3,  // tiles whose sums meet at once
    RED_FLOATS = WARPS * TILE * RED_STRIDE,  // of a tile
    ITEMS = (BATCH * 8 * ROWS + CONSUMERS - 1) / CONSUMERS,  // pairs of sums that a thread finishes
    PARTS = WARPS + 1,  // of a head that one block attends: a warp's share of the committed slots each, and the tail
    PART_COLUMNS = 64,  // of parts that meet at once
    COMBINED_SLOTS = 16,  // ring slots more that a block may take if nothing need be combined then
    COUNTER_WORDS = 32,  // a line of memory for every counter
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
    bf16 *hidden;             // the residual stream, in blocks of columns: see `in_blocks`
    bf16 *out;                // [rows, HIDDEN], behind the last layer
    bf16 *q;                  // [rows, Q_SIZE]
    bf16 *attended, *act;     // in blocks of columns
    float *partial, *state;   // [items, pairs, HEAD_DIM], [items, pairs, 2]
    u32 *met;                 // counters, 0 at the start: of meetings, and of each round of gate and up
    const int *positions;     // see TreeBatch
    const i64 *row_slots, *visible;
    const int *starts, *page_tables;
    const float *cos, *sin;   // [positions, HALF]
    bf16 *features[MAX_FEATURES];  // [rows, HIDDEN] each
    i64 page_stride;          // elements
    int feature_after[MAX_FEATURES];  // layers, 0 for none
    int num_layers, rows, sequences, rows_each, num_tail, max_pages, row_tiles_of_pairs;
    u32 nothing;              // 0, which the compiler does not know
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
    int is_whole;             // blocks attend whole heads: items are the shares of this block's one
    int sequence, head;       // of that one; sequence -1 for none
    float squares[WARPS][ROWS];
    float red[BATCH * RED_FLOATS];
} Shared;

enum { RING_AT = (sizeof(Shared) + 1023) / 1024 * 1024 };

_Static_assert(NUM_SLOTS >= WARPS + IN_FLIGHT, "the next slot of a warp must not be more than a ring away");
_Static_assert(RING_AT + NUM_SLOTS * SLOT_BYTES <= SHARED_BYTES, "the ring does not fit");
_Static_assert(sizeof(Layer) % 64 == 0, "maps must lie at multiples of 64 bytes");

DEVICE Shared *shared(void) { return (Shared *)shared_base(); }
DEVICE unsigned char *ring_slot(int slot) { return shared_base() + RING_AT + slot * SLOT_BYTES; }
// Where the 16-byte piece `piece` of a line lies.
DEVICE int swizzled(int line, int piece) { return line * 128 + ((piece ^ (line & 7)) << 4); }
// Leaves a slot to the producer once what this warp asked of it is there: a word of each load is in `read`. Without that
// the signal can overtake loads, which queue behind others that wait for L2, and the slot is overwritten.
DEVICE void leave_slot(const Round *round, int slot, int arrivals, u32 read) {
    warp_sync();
    if (thread_id() % LANES == 0) signal_arrive(&shared()->empty[slot], arrivals + (int)(read & round->nothing));
}
// A permutation of 8 lines: those that a step reads side by side lie in different banks.
DEVICE int line_of(int lane) { return (lane >> 1) + 4 * (lane & 1); }
DEVICE int committed_steps(int start) { return (start + KV_TOKENS - 1) / KV_TOKENS; }
// Inputs of products lie in blocks of 32 columns, row behind row in each: what a warp reads at once lies side by side.
DEVICE i64 in_blocks(int row, int column) { return (i64)(column / 32 * ROWS + row) * 32 + column % 32; }
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

// Past slots of others. A signal is read right only by those that have seen one at most a ring before it.
DEVICE void skip(Place *place, int slots) {
    place->slot += slots;
    place->parity ^= place->slot / NUM_SLOTS & 1;
    place->slot %= NUM_SLOTS;
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
    int first = (block_id() - *turn + BLOCKS) % BLOCKS;
    *turn = (*turn + tiles_of(product)) % BLOCKS;
    return first;
}



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
    int lane = thread_id() % LANES, first = first_tile(turn, product);
    for (int begin = first; begin < tiles; begin += group * BLOCKS) {
        int count = smaller(group, (tiles - begin + BLOCKS - 1) / BLOCKS);
        for (int k = 0; k < inputs; k += chunk)
            for (int j = 0; j < count; j++) {
                u64 *full = &shared()->full[place->slot];
                await_slot(place);
                if (lane == 0) {
                    signal_expect(full, TILE * 2 * chunk);
                    for (int half = 0; half < 2; half++) {
                        unsigned char *to = ring_slot(place->slot) + half * 16 * chunk;
                        copy_box_3(to, map, 0, weight_row(product, begin + j * BLOCKS, 8 * half), k / 64, full, policy);
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
