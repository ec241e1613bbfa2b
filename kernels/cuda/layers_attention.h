// Attention of `decoder_layers.cu` over committed slots that lie in the ring, 16 (row, head) pairs at once.
#pragma once


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

// Returns a word of everything that was read last.
DEVICE u32 attend_step(Softmax *softmax, const Round *round, const unsigned char *slot, int left) {
    int lane = thread_id() % LANES;
    u32 read = 0;
    float scores[KV_TOKENS / 8][4];
    UNROLL
    for (int block = 0; block < KV_TOKENS / 8; block++)
        UNROLL
        for (int c = 0; c < 4; c++) scores[block][c] = 0;
    UNROLL
    for (int b = 0; b < KV_BLOCKS; b++)
        UNROLL
        for (int block = 0; block < KV_TOKENS / 8; block++) {
            int line = (8 * block + token_of(lane / 4)) * KV_LINES + b / 2;
            add_scores(softmax, scores[block], b, load_shared_16(slot + swizzled(line, b % 2 * 4 + lane % 4)));
        }
    UNROLL
    for (int block = 0; block < KV_TOKENS / 8; block++) {
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
            read |= v.x;
        }
    }
    return read;
}

// All sums of a half's row.
DEVICE float whole_total(const Softmax *softmax, int half) {
    float total = softmax->total[half];
    total += as_float(exchange_xor(as_bits(total), 1));
    return total + as_float(exchange_xor(as_bits(total), 2));
}

DEVICE void end_softmax(const Softmax *softmax, const Round *round, int item, int pair_tile) {
    int lane = thread_id() % LANES, pairs = round->row_tiles_of_pairs * 16;
    UNROLL
    for (int half = 0; half < 2; half++) {
        float total = whole_total(softmax, half);
        int pair = pair_tile * 16 + lane / 4 + 8 * half;
        if (pair >= round->rows_each * GROUP) continue;
        i64 at = (i64)item * pairs + pair;
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

// The slots of this warp's item. The ring has one of every item in turn; warps leave those of other items to others.
DEVICE void attend_item(const Place *place, const Round *round, Softmax *softmax, int stream, int streams) {
    Item mine = shared()->items[stream];
    for (int index = 0; index < mine.count; index++) {
        int before = 0;
        for (int other = 0; other < streams; other++) {
            int count = shared()->items[other].count;
            before += smaller(count, index) + (other < stream && count > index);
        }
        Place here = *place;
        skip(&here, before);
        signal_wait(&shared()->full[here.slot], here.parity);
        int left = shared()->starts[mine.sequence] - (mine.first + index) * KV_TOKENS;
        leave_slot(round, here.slot, streams, attend_step(softmax, round, ring_slot(here.slot), left));
    }
}

DEVICE void skip_items(Place *place, int streams) {
    int all = 0;
    for (int stream = 0; stream < streams; stream++) all += shared()->items[stream].count;
    skip(place, all);
}

DEVICE void attend(Place *place, const Round *round) {
    int warp = thread_id() / LANES, tiles = round->row_tiles_of_pairs;
    int streams = WARPS / tiles, stream = warp / tiles, tile = warp % tiles;
    const Item *mine = &shared()->items[stream];
    if (mine->count > 0) {
        Softmax softmax;
        begin_softmax(&softmax, round, mine->sequence, mine->head, tile);
        attend_item(place, round, &softmax, stream, streams);
        end_softmax(&softmax, round, block_id() + BLOCKS * stream, tile);
    }
    skip_items(place, streams);
}
