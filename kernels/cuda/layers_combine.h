// Attention of `decoder_layers.cu` becomes whole: slots of this round, and splits of other warps and blocks.
#pragma once

// A softmax of one (row, head) pair, spread over the lanes of a warp: columns lane, lane + 32, …
enum { EACH = HEAD_DIM / LANES };

typedef struct {
    float acc[EACH], most, total;
} Spread;

DEVICE void begin_spread(Spread *spread) {
    spread->most = NOTHING;
    spread->total = 0;
    UNROLL
    for (int e = 0; e < EACH; e++) spread->acc[e] = 0;
}

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
    while (shares.apart > 1 && BLOCKS * (WARPS / shares.apart) < shares.tasks) shares.apart /= 2;
    shares.part = thread_id() / LANES % shares.apart;
    return shares;
}

DEVICE int task_of(const Shares *shares, int turn) {
    int each = WARPS / shares->apart;
    return (turn * each + thread_id() / LANES / shares->apart) * BLOCKS + block_id();
}

DEVICE void begin_pair(Spread *spread, const Round *round, const Layer *layer, const Shares *shares, int task) {
    begin_spread(spread);
    if (task < shares->tasks)
        attend_tail(spread, round, layer, task / HEADS, task % HEADS, shares->part, shares->apart);
}

// Attention of every (row, head) pair from its tail, which `first` already has of the first ones, and its splits.
DEVICE void combine(const Round *round, const Layer *layer, const Shares *shares, const Spread *first) {
    int warp = thread_id() / LANES, lane = thread_id() % LANES, apart = shares->apart, part = shares->part;
    float *sums = shared()->red, *rest = shared()->red + WARPS * HEAD_DIM;
    for (int turn = 0; turn * BLOCKS * (WARPS / apart) < shares->tasks; turn++) {
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
                round->attended[in_blocks(task / HEADS, task % HEADS * HEAD_DIM + lane + LANES * e)] =
                    to_bf16(spread.acc[e] * factor);
        }
    }
}

// A part's columns from `begin` on and what they are relative to, for `attend_whole`.
DEVICE void share_part(const Softmax *softmax, int begin, float *parts, float *states, int pairs) {
    int warp = thread_id() / LANES, lane = thread_id() % LANES;
    UNROLL
    for (int half = 0; half < 2; half++) {
        float total = whole_total(softmax, half);
        int pair = lane / 4 + 8 * half;
        if (pair >= pairs) continue;
        float *to = parts + (warp * pairs + pair) * PART_COLUMNS + lane % 4 * 2;
        UNROLL
        for (int column = 0; column < PART_COLUMNS / 8; column++) {
            to[8 * column] = softmax->acc[begin / 8 + column][2 * half];
            to[8 * column + 1] = softmax->acc[begin / 8 + column][2 * half + 1];
        }
        if (lane % 4 == 0) {
            states[2 * (warp * pairs + pair)] = softmax->most[half];
            states[2 * (warp * pairs + pair) + 1] = total;
        }
    }
}

// Attention of all rows of a sequence and head by this block alone, so that nothing has to be combined with other blocks.
// Every warp attends to its share of the committed slots, and to the tail of one pair.
DEVICE void attend_whole(Place *place, const Round *round, const Layer *layer) {
    int thread = thread_id(), warp = thread / LANES, lane = thread % LANES, pairs = round->rows_each * GROUP;
    int sequence = shared()->sequence, head = shared()->head;
    if (sequence < 0) return;
    float *parts = shared()->red, *states = parts + PARTS * pairs * PART_COLUMNS;
    Softmax softmax;
    begin_softmax(&softmax, round, sequence, head, 0);
    attend_item(place, round, &softmax, warp, WARPS);
    skip_items(place, WARPS);
    // The first warps' slots come first.
    Spread tail;
    begin_spread(&tail);
    if (warp < pairs)
        attend_tail(
            &tail, round, layer, sequence * round->rows_each + warp / GROUP, head * GROUP + warp % GROUP, 0, 1);
    UNROLL
    for (int begin = 0; begin < HEAD_DIM; begin += PART_COLUMNS) {
        if (begin > 0) part_sync(CONSUMERS);  // the columns before are read
        share_part(&softmax, begin, parts, states, pairs);
        if (warp < pairs) {
            UNROLL
            for (int e = 0; e < PART_COLUMNS / LANES; e++)
                parts[(WARPS * pairs + warp) * PART_COLUMNS + lane + LANES * e] = tail.acc[begin / LANES + e];
            if (lane == 0) {
                states[2 * (WARPS * pairs + warp)] = tail.most;
                states[2 * (WARPS * pairs + warp) + 1] = tail.total;
            }
        }
        part_sync(CONSUMERS);
        for (int at = thread; at < pairs * PART_COLUMNS; at += CONSUMERS) {
            int pair = at / PART_COLUMNS, column = at % PART_COLUMNS;
            float most = NOTHING, total = 0, sum = 0;
            UNROLL
            for (int part = 0; part < PARTS; part++) most = fmaxf(most, states[2 * (part * pairs + pair)]);
            float finite = most == NOTHING ? 0.0f : most;
            UNROLL
            for (int part = 0; part < PARTS; part++) {
                float share = exp2_of(states[2 * (part * pairs + pair)] - finite);
                total += share * states[2 * (part * pairs + pair) + 1];
                sum += share * parts[(part * pairs + pair) * PART_COLUMNS + column];
            }
            int row = sequence * round->rows_each + pair / GROUP;
            round->attended[in_blocks(row, (head * GROUP + pair % GROUP) * HEAD_DIM + begin + column)] =
                to_bf16(total == 0 ? sum : sum / total);
        }
    }
}
