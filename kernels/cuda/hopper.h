// What the kernels ask of a GPU of compute capability 9.0, as functions: the only file with machine instructions.
// `emulated.h` gives the same functions for a CPU, so that kernels can be tried without a GPU.
#pragma once

typedef unsigned short bf16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// What the copy engine is told of a tensor; made by the host.
typedef struct __align__(64) {
    u64 words[16];
} TileMap;

enum { SHARED_BYTES = 232448 };  // that a block may have
#define _Static_assert static_assert
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads, 1)
#define DEVICE static __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define TAKE_REGISTERS(count) asm volatile("setmaxnreg.inc.sync.aligned.u32 " #count ";")
#define GIVE_REGISTERS(count) asm volatile("setmaxnreg.dec.sync.aligned.u32 " #count ";")
#define UNROLL_8 _Pragma("unroll 8")
#define BY_VALUE __grid_constant__
#define NOTHING __int_as_float(0xff800000)  // the smallest score: minus infinity

extern __shared__ __align__(1024) unsigned char shared_memory[];

DEVICE unsigned char *shared_base(void) { return shared_memory; }
DEVICE int thread_id(void) { return threadIdx.x; }
DEVICE int block_id(void) { return blockIdx.x; }

DEVICE u32 shared_address(const void *pointer) { return (u32)__cvta_generic_to_shared(pointer); }

DEVICE void block_sync(void) { __syncthreads(); }
// A barrier of the first `threads` threads, apart from `block_sync`.
DEVICE void part_sync(int threads) { asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory"); }
DEVICE void warp_sync(void) { __syncwarp(); }
DEVICE u32 exchange_from(u32 value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
DEVICE u32 exchange_xor(u32 value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }

DEVICE float as_float(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 as_bits(float value) { return __float_as_uint(value); }
DEVICE float exp2_of(float value) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}
DEVICE float rsqrt_of(float value) { return rsqrtf(value); }
// Two floats rounded to bfloat16, the first in the low half.
DEVICE u32 pack_bf16(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// Two products, each rounded to bfloat16.
DEVICE u32 multiply_bf16(u32 a, u32 b) {
    u32 result;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

// Reads of what other blocks wrote during this kernel: from L2, never from this processor's own cache.
DEVICE uint4 load_fresh_16(const void *from) { return __ldcg((const uint4 *)from); }
DEVICE float load_fresh_float(const float *from) { return __ldcg(from); }
DEVICE u32 load_fresh_bf16(const bf16 *from) { return __ldcg(from); }
// Reads of what no one writes during this kernel.
DEVICE uint4 load_constant_16(const void *from) { return __ldg((const uint4 *)from); }
DEVICE uint4 load_shared_16(const void *from) { return *(const uint4 *)from; }

// acc[16, 8] += a[16, 16] * b[16, 8] in the register layout of mma.m16n8k16.
DEVICE void multiply_add(float *acc, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices, transposed; lane l names row l % 8 of matrix l / 8.
DEVICE uint4 load_matrices_transposed(const void *row) {
    uint4 result;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(result.x), "=r"(result.y), "=r"(result.z), "=r"(result.w)
                 : "r"(shared_address(row)));
    return result;
}

DEVICE void signal_init(u64 *signal, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(signal)), "r"(arrivals) : "memory");
}
DEVICE void signal_arrive(u64 *signal, int arrivals) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0], %1; }" ::"r"(shared_address(signal)),
                 "r"(arrivals)
                 : "memory");
}
// One arrival, and so many bytes that copies will bring.
DEVICE void signal_expect(u64 *signal, int bytes) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(
                     shared_address(signal)),
                 "r"(bytes)
                 : "memory");
}
DEVICE void signals_ready(void) { asm volatile("fence.proxy.async;" ::: "memory"); }
DEVICE void signal_wait(u64 *signal, int parity) {
    asm volatile(
        "{\n .reg .pred done;\n"
        "again:\n mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        " @!done bra again;\n}" ::"r"(shared_address(signal)),
        "r"(parity)
        : "memory");
}

DEVICE u64 policy_read_once(void) {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// Copies of a box of a tensor into shared memory, by its first element; their bytes count towards `signal`.
DEVICE void copy_box_3(void *to, const TileMap *map, int a, int b, int c, u64 *signal, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(signal)), "r"(a), "r"(b), "r"(c), "l"(policy)
        : "memory");
}
DEVICE void copy_box_5(void *to, const TileMap *map, int a, int b, int c, int d, int e, u64 *signal, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(signal)), "r"(a), "r"(b), "r"(c), "r"(d), "r"(e), "l"(policy)
        : "memory");
}

// Counts this block as arrived. Its threads have met before: what they wrote is released with the one thread's fence, and a
// sequentially consistent one would cost more.
DEVICE void arrive(u32 *counter) {
    asm volatile("fence.acq_rel.gpu;\n red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
// Waits until `goal` blocks are counted; what they wrote before is then seen.
DEVICE void await(const u32 *counter, u32 goal) {
    u32 seen;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    } while (seen < goal);
}
