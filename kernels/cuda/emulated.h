// The functions of `hopper.h` on a CPU: every thread is a coroutine, and one that waits lets the next one run. For trying
// kernels, one launch at a time.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

typedef uint16_t bf16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int64_t i64;
typedef struct {
    u32 x, y, z, w;
} uint4;

// Of a tensor: where it lies, bytes from element to element of dimensions 1 to 4, elements of a box in every dimension.
typedef struct {
    u64 address, strides[4], box[5], unused[6];
} TileMap;

#define KERNEL(threads) static void
#define DEVICE static inline
#define UNROLL
#define TAKE_REGISTERS(count)
#define GIVE_REGISTERS(count)
#define UNROLL_8
#define BY_VALUE
#define NOTHING (-INFINITY)

enum { MAX_THREADS = 384, MAX_BLOCKS = 8, SHARED_BYTES = 232448, STACK_BYTES = 1 << 16, WARP = 32 };

typedef struct {
    int arrived, round;
} Meeting;

typedef struct {
    Meeting meeting;
    u64 given[WARP][8];
} WarpExchange;

typedef struct {
    Meeting block, part;
    WarpExchange warps[MAX_THREADS / WARP];
    unsigned char *shared;
} Block;

typedef struct {
    ucontext_t context;
    int thread, block, is_done;
    char *stack;
} Coroutine;

// A signal in 8 bytes: arrivals still missing of the phase, how many a phase needs, parity and bytes still missing.
typedef struct {
    int8_t missing, arrivals, parity, unused;
    int32_t bytes;
} Signal;

static Block emulated_blocks[MAX_BLOCKS];
static Coroutine emulated_threads[MAX_BLOCKS * MAX_THREADS];
static Coroutine *running;
static ucontext_t scheduler;
static int emulated_num_threads;
static u64 idle_turns;

static void yield(void) {
    if (++idle_turns > 400000000ull) {
        fprintf(stderr, "emulated kernel: every thread waits\n");
        abort();
    }
    swapcontext(&running->context, &scheduler);
}

static void meet_in(Meeting *meeting, int threads) {
    int round = meeting->round;
    if (++meeting->arrived == threads) {
        meeting->arrived = 0;
        meeting->round++;
        idle_turns = 0;
        return;
    }
    while (meeting->round == round) yield();
}

DEVICE unsigned char *shared_base(void) { return emulated_blocks[running->block].shared; }
DEVICE int thread_id(void) { return running->thread; }
DEVICE int block_id(void) { return running->block; }
DEVICE void block_sync(void) { meet_in(&emulated_blocks[running->block].block, emulated_num_threads); }
DEVICE void part_sync(int threads) { meet_in(&emulated_blocks[running->block].part, threads); }

static WarpExchange *my_warp(void) { return &emulated_blocks[running->block].warps[running->thread / WARP]; }
DEVICE void warp_sync(void) { meet_in(&my_warp()->meeting, WARP); }
DEVICE u32 exchange_from(u32 value, int from) {
    WarpExchange *warp = my_warp();
    warp->given[running->thread % WARP][0] = value;
    warp_sync();
    u32 result = (u32)warp->given[from][0];
    warp_sync();
    return result;
}
DEVICE u32 exchange_xor(u32 value, int mask) { return exchange_from(value, running->thread % WARP ^ mask); }

DEVICE float as_float(u32 bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
DEVICE u32 as_bits(float value) {
    u32 bits;
    memcpy(&bits, &value, 4);
    return bits;
}
DEVICE float exp2_of(float value) { return exp2f(value); }
DEVICE float rsqrt_of(float value) { return 1.0f / sqrtf(value); }
static u32 round_bf16(float value) {
    u32 bits = as_bits(value);
    if (value != value) return 0x7fc0;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
DEVICE u32 pack_bf16(float low, float high) { return round_bf16(low) | round_bf16(high) << 16; }

DEVICE uint4 load_fresh_16(const void *from) { return *(const uint4 *)from; }
DEVICE float load_fresh_float(const float *from) { return *from; }
DEVICE u32 load_fresh_bf16(const bf16 *from) { return *from; }
DEVICE uint4 load_constant_16(const void *from) { return *(const uint4 *)from; }
DEVICE uint4 load_shared_16(const void *from) { return *(const uint4 *)from; }

static float half_of(u64 word, int high) { return as_float(high ? (u32)word & 0xffff0000u : (u32)word << 16); }
DEVICE u32 multiply_bf16(u32 a, u32 b) { return pack_bf16(half_of(a, 0) * half_of(b, 0), half_of(a, 1) * half_of(b, 1)); }

DEVICE void multiply_add(float *acc, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    WarpExchange *warp = my_warp();
    int lane = running->thread % WARP;
    u64 words[6] = {a0, a1, a2, a3, b0, b1};
    memcpy(warp->given[lane], words, sizeof words);
    warp_sync();
    for (int c = 0; c < 4; c++) {
        int row = lane / 4 + 8 * (c / 2), column = lane % 4 * 2 + c % 2;
        float sum = 0;
        for (int k = 0; k < 16; k++) {
            int from = k % 8 / 2, is_late = k / 8;
            u64 a = warp->given[row % 8 * 4 + from][row / 8 + 2 * is_late];
            u64 b = warp->given[column * 4 + from][4 + is_late];
            sum += half_of(a, k % 2) * half_of(b, k % 2);
        }
        acc[c] += sum;
    }
    warp_sync();
}

DEVICE uint4 load_matrices_transposed(const void *row) {
    WarpExchange *warp = my_warp();
    int lane = running->thread % WARP;
    u32 result[4];
    warp->given[lane][0] = (u64)(uintptr_t)row;
    warp_sync();
    for (int matrix = 0; matrix < 4; matrix++) {
        const bf16 *low = (const bf16 *)(uintptr_t)warp->given[8 * matrix + lane % 4 * 2][0];
        const bf16 *high = (const bf16 *)(uintptr_t)warp->given[8 * matrix + lane % 4 * 2 + 1][0];
        result[matrix] = low[lane / 4] | (u32)high[lane / 4] << 16;
    }
    warp_sync();
    return (uint4){result[0], result[1], result[2], result[3]};
}

static void signal_settle(Signal *signal) {
    if (signal->missing || signal->bytes) return;
    signal->missing = signal->arrivals;
    signal->parity ^= 1;
    idle_turns = 0;
}
DEVICE void signal_init(u64 *place, int arrivals) {
    *(Signal *)place = (Signal){(int8_t)arrivals, (int8_t)arrivals, 0, 0, 0};
}
DEVICE void signal_arrive(u64 *place, int arrivals) {
    Signal *signal = (Signal *)place;
    signal->missing -= (int8_t)arrivals;
    if (signal->missing < 0) abort();
    signal_settle(signal);
}
DEVICE void signal_expect(u64 *place, int bytes) {
    ((Signal *)place)->bytes += bytes;
    signal_arrive(place, 1);
}
DEVICE void signals_ready(void) {}
DEVICE void signal_wait(u64 *place, int parity) {
    while (((Signal *)place)->parity == parity) yield();
}
DEVICE u64 policy_read_once(void) { return 0; }
DEVICE void copy_box_5(void *to, const TileMap *map, int a, int b, int c, int d, int e, u64 *place, u64 policy) {
    const unsigned char *from = (const unsigned char *)(uintptr_t)map->address + 2 * a + b * map->strides[0] +
                                c * map->strides[1] + d * map->strides[2] + e * map->strides[3];
    unsigned char *shared = shared_base();
    size_t begin = (size_t)((unsigned char *)to - shared), line = 0;
    if (map->box[0] != 64 || begin % 1024) abort();
    for (u64 v = 0; v < map->box[4]; v++)
        for (u64 w = 0; w < map->box[3]; w++)
            for (u64 z = 0; z < map->box[2]; z++)
                for (u64 y = 0; y < map->box[1]; y++, line++)
                    for (int piece = 0; piece < 8; piece++) {
                        const unsigned char *here = from + y * map->strides[0] + z * map->strides[1] +
                                                    w * map->strides[2] + v * map->strides[3] + 16 * piece;
                        memcpy(shared + begin + 128 * line + ((piece ^ (int)(line & 7)) << 4), here, 16);
                    }
    (void)policy;
    Signal *signal = (Signal *)place;
    signal->bytes -= (int32_t)(128 * line);
    if (signal->bytes < 0) abort();
    signal_settle(signal);
}
DEVICE void copy_box_3(void *to, const TileMap *map, int a, int b, int c, u64 *place, u64 policy) {
    copy_box_5(to, map, a, b, c, 0, 0, place, policy);
}
DEVICE void arrive(u32 *counter) {
    ++*counter;
    idle_turns = 0;
}
DEVICE void await(const u32 *counter, u32 goal) {
    while (*counter < goal) yield();
}

static void (*emulated_body)(void);
static void emulated_start(void) {
    emulated_body();
    running->is_done = 1;
    swapcontext(&running->context, &scheduler);
}

// Runs `body` on every thread of so many blocks.
static void emulate(void (*body)(void), int blocks, int threads) {
    if (blocks > MAX_BLOCKS || threads > MAX_THREADS) abort();
    emulated_body = body;
    emulated_num_threads = threads;
    idle_turns = 0;
    int alive = blocks * threads;
    for (int block = 0; block < blocks; block++) {
        memset(&emulated_blocks[block], 0, sizeof(Block));
        emulated_blocks[block].shared = aligned_alloc(1024, SHARED_BYTES);
        memset(emulated_blocks[block].shared, 0xff, SHARED_BYTES);  // NaN wherever nothing was written
        for (int thread = 0; thread < threads; thread++) {
            Coroutine *one = &emulated_threads[block * threads + thread];
            one->thread = thread;
            one->block = block;
            one->is_done = 0;
            one->stack = malloc(STACK_BYTES);
            getcontext(&one->context);
            one->context.uc_stack.ss_sp = one->stack;
            one->context.uc_stack.ss_size = STACK_BYTES;
            one->context.uc_link = &scheduler;
            makecontext(&one->context, emulated_start, 0);
        }
    }
    while (alive)
        for (int index = 0; index < blocks * threads; index++) {
            running = &emulated_threads[index];
            if (running->is_done) continue;
            swapcontext(&scheduler, &running->context);
            alive -= running->is_done;
        }
    for (int index = 0; index < blocks * threads; index++) free(emulated_threads[index].stack);
    for (int block = 0; block < blocks; block++) free(emulated_blocks[block].shared);
}
