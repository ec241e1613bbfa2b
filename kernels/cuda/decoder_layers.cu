// A range of dense decoder layers for a few rows in one resident kernel: as many blocks as multiprocessors, each there from
// the first layer to the last.
//
// Reading the weights takes nearly all of the time, so nothing may interrupt it. One warp of a block, the producer, has
// the block's share of all weights and of the committed KV copied into a ring of shared memory, in the order of their use and
// as far ahead as the ring holds; it never waits for activations, since what it reads does not depend on them. Other warps
// compute what lies in the ring. Blocks meet after most phases of a layer, while their rings fill up.
//
// Phases of a layer: q, k and v with norm, rotation and KV write; attention, by splits and their combination or by whole
// heads; output; gate and up with norm and activation; down, which begins with what gate and up have already finished. Sizes
// come as macros:
//   HIDDEN INTER HEADS KV_HEADS HEAD_DIM PAGE_SIZE
//   ROW_TILES     of 8 rows
//   BLOCKS        of a launch
//   GROUP_QKV GROUP_OUTPUT GROUP_GATE_UP GROUP_DOWN     tiles of 16 outputs that are computed side by side
//   GROUP_TILES   the largest of them
//   CHUNK_HIDDEN CHUNK_ATTENDED CHUNK_INTER     inputs a ring slot, by product
//   SLOT_BYTES NUM_SLOTS                        of the ring

// Where there are about as many heads of sequences as blocks, and those alike, a block takes one with all its slots.
DEVICE int should_be_whole(const Round *round, int all, int longest) {
    int pairs = round->rows_each * GROUP;
    return pairs <= WARPS && PARTS * pairs * (PART_COLUMNS + 2) <= BATCH * RED_FLOATS &&
           round->sequences * KV_HEADS <= BLOCKS && longest <= all / BLOCKS + COMBINED_SLOTS;
}

DEVICE void plan_whole(const Round *round) {
    int block = block_id(), is_mine = block < round->sequences * KV_HEADS, sequence = is_mine ? block / KV_HEADS : -1;
    int steps = is_mine ? committed_steps(shared()->starts[sequence]) : 0, each = (steps + WARPS - 1) / WARPS;
    shared()->sequence = sequence;
    shared()->head = block % KV_HEADS;
    shared()->most = each;
    for (int warp = 0; warp < WARPS; warp++) {
        int first = smaller(warp * each, steps);
        Item item = {sequence, block % KV_HEADS, first, smaller(each, steps - first)};
        shared()->items[warp] = item;
    }
}

// How committed slots are shared out, the same for every layer. One item a stream of KV, of which a block has several.
DEVICE void plan_items(const Round *round) {
    int thread = thread_id(), tiles = round->row_tiles_of_pairs, streams = WARPS / tiles;
    if (thread < round->sequences) shared()->starts[thread] = round->starts[thread];
    block_sync();
    if (thread == 0) {
        int places = BLOCKS * streams, all = 0, longest = 0, span, items, wide;
        for (int sequence = 0; sequence < round->sequences; sequence++) {
            int steps = committed_steps(shared()->starts[sequence]);
            all += KV_HEADS * steps;
            longest = larger(longest, steps);
        }
        shared()->is_whole = should_be_whole(round, all, longest);
        if (shared()->is_whole) {
            plan_whole(round);
        } else {
            // Two slots an item where each block has some: half as many splits to combine.
            wide = smaller(2, (all + BLOCKS - 1) / BLOCKS);
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
                int at = block_id() + BLOCKS * stream, sequence = round->sequences - 1;
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
    }
    block_sync();
}

DEVICE void consumers_meet(const Round *round, u32 *goal) {
    *goal += BLOCKS;
    part_sync(CONSUMERS);
    if (thread_id() == 0) {
        arrive(round->met);
        await(round->met, *goal);
    }
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
        if (shared()->is_whole) {
            attend_whole(&place, round, layer);
        } else {
            Spread spread;
            begin_pair(&spread, round, layer, &shares, task_of(&shares, 0));
            attend(&place, round);
            consumers_meet(round, &goal);
            combine(round, layer, &shares, &spread);
        }
        consumers_meet(round, &goal);
        compute_product(&place, round, layer, index, OUTPUT, round->attended, 0, &turn);
        consumers_meet(round, &goal);
        compute_product(&place, round, layer, index, GATE_UP, round->hidden, layer->post_norm, &turn);
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
