// The products of `decoder_layers.cu`, with what becomes of their sums.
#pragma once


typedef struct {
    uint4 values[ROW_TILES], norm;
} Inputs;

// Eight inputs of every 8th row from `row` on, and of the norm's weight.
DEVICE void load_inputs(Inputs *to, const bf16 *x, const bf16 *norm, int k, int row, int rows) {
    const uint4 none = {0, 0, 0, 0};
    UNROLL
    for (int tile = 0; tile < ROW_TILES; tile++) {
        to->values[tile] = none;
        if (8 * tile + row < rows) to->values[tile] = load_fresh_16(x + in_blocks(8 * tile + row, k));
    }
    if (norm) to->norm = load_constant_16(norm + k);
}

DEVICE u32 scale_pair(u32 pair, u32 norm, float *squares) {
    float low = low_half(pair), high = high_half(pair);
    *squares += low * low + high * high;
    return multiply_bf16(pair, norm);
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

// Whether a warp has a step `s` of 32 inputs in every chunk; where all have one, nothing need be asked.
DEVICE int has_step(int chunk, int warp, int s) {
    return WARPS * (s + 1) <= chunk / 32 || (WARPS * s < chunk / 32 && warp + WARPS * s < chunk / 32);
}

// 32 inputs of a tile's upper and lower outputs and of all rows.
DEVICE void multiply_tile(float (*acc)[4], uint4 upper, uint4 lower, const Inputs *inputs) {
    UNROLL
    for (int tile = 0; tile < ROW_TILES; tile++) {
        uint4 value = inputs->values[tile];
        multiply_add(acc[tile], upper.x, lower.x, upper.y, lower.y, value.x, value.y);
    }
    UNROLL
    for (int tile = 0; tile < ROW_TILES; tile++) {
        uint4 value = inputs->values[tile];
        multiply_add(acc[tile], upper.z, lower.z, upper.w, lower.w, value.z, value.w);
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
        i64 at = in_blocks(row, tile * TILE + i);
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
        round->act[in_blocks(row, tile * 8 + i)] = to_bf16(gated);
    } else {
        bf16 first = to_bf16(rounded(a) + early->a), second = to_bf16(rounded(b) + early->b);
        i64 at = (i64)row * HIDDEN + tile * TILE + i;
        int is_last = product == DOWN && index + 1 == round->num_layers;
        bf16 *to = is_last ? round->out + at : round->hidden + in_blocks(row, tile * TILE + i);
        to[0] = first;
        to[8] = second;
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

// Blocks compute gate and up in rounds of `GROUP_GATE_UP` tiles each; every round has a counter of the blocks that are done.
DEVICE int act_rounds(void) {
    int most = (tiles_of(GATE_UP) + BLOCKS - 1) / BLOCKS;
    return (most + GROUP_GATE_UP - 1) / GROUP_GATE_UP;
}
DEVICE u32 *act_counter(const Round *round, int number) { return round->met + (1 + number) * COUNTER_WORDS; }

// Waits for all rounds that columns up to `last` of the activations come from; `known` are known to be over.
DEVICE void await_act(const Round *round, int index, int last, int *known) {
    int columns = 8 * GROUP_GATE_UP * BLOCKS;
    for (; *known * columns <= last; (*known)++) await(act_counter(round, *known), (index + 1) * BLOCKS);
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
    int thread = thread_id(), warp = thread / LANES, lane = thread % LANES;
    int first = first_tile(turn, product);
    int line = line_of(lane / 4);
    int from = warp / 2 * 1024 + swizzled(line, warp % 2 * 4 + lane % 4);  // two steps share a line
    int finished = 0, known = 0;  // rounds of gate and up
    for (int begin = first; begin < tiles; begin += group * BLOCKS) {
        int count = smaller(group, (tiles - begin + BLOCKS - 1) / BLOCKS);
        float acc[GROUP_TILES][ROW_TILES][4], squares[ROW_TILES];
        Inputs ahead[AHEAD][MAX_STEPS];
        Early early[ITEMS] = {{0, 0, 0}};  // or all of it would be kept from product to product
        UNROLL
        for (int d = 0; d < AHEAD; d++) {
            if (d * chunk >= inputs) break;
            if (product == DOWN) await_act(round, index, (d + 1) * chunk - 1, &known);
            UNROLL
            for (int s = 0; s < MAX_STEPS; s++)
                if (has_step(chunk, warp, s)) {
                    int column = d * chunk + (warp + WARPS * s) * 32 + lane % 4 * 8;
                    load_inputs(&ahead[d][s], x, norm, column, lane / 4, round->rows);
                }
        }
        UNROLL
        for (int item = 0; item < ITEMS; item++) {
            int at = thread + CONSUMERS * item, j = at / (8 * ROWS), row = at / 8 % ROWS;
            if (j < smaller(count, BATCH) && row < round->rows)
                prepare(&early[item], round, product, begin + j * BLOCKS, at % 8, row);
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
                        if (has_step(chunk, warp, s)) scale_inputs(&ahead[d][s], squares);
                }
                // A tile is read while the one before is multiplied, whose slot is left then.
                uint4 upper[2][MAX_STEPS] = {{{0, 0, 0, 0}}}, lower[2][MAX_STEPS] = {{{0, 0, 0, 0}}};
                int held = 0;
                UNROLL
                for (int j = 0; j <= GROUP_TILES; j++) {
                    int here = place->slot;
                    if (j < group && j < count) {
                        const unsigned char *slot = ring_slot(here) + from;
                        signal_wait(&shared()->full[here], place->parity);
                        UNROLL
                        for (int s = 0; s < MAX_STEPS; s++)
                            if (has_step(chunk, warp, s)) {
                                upper[j % 2][s] = load_shared_16(slot + WARPS * s * 512);
                                lower[j % 2][s] = load_shared_16(slot + WARPS * s * 512 + 16 * chunk);
                            }
                        step(place);
                    }
                    if (j > 0 && j <= group && j <= count) {
                        u32 read = 0;
                        UNROLL
                        for (int s = 0; s < MAX_STEPS; s++)
                            if (has_step(chunk, warp, s)) {
                                uint4 high = upper[(j - 1) % 2][s], low = lower[(j - 1) % 2][s];
                                multiply_tile(acc[j - 1], high, low, &ahead[d][s]);
                                read |= high.x | low.x;
                            }
                        leave_slot(round, held, 1, read);
                    }
                    held = here;
                }
                int next = k + AHEAD * chunk;
                if (next >= inputs) continue;
                if (product == DOWN) await_act(round, index, next + chunk - 1, &known);
                UNROLL
                for (int s = 0; s < MAX_STEPS; s++)
                    if (has_step(chunk, warp, s)) {
                        int column = next + (warp + WARPS * s) * 32 + lane % 4 * 8;
                        load_inputs(&ahead[d][s], x, norm, column, lane / 4, round->rows);
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
                        int tile = begin + (done + j) * BLOCKS;
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
        if (product == GATE_UP && thread == 0) arrive(act_counter(round, finished++));
    }
    if (product == GATE_UP && thread == 0)
        while (finished < act_rounds()) arrive(act_counter(round, finished++));
}
