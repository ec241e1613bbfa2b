// A barrier for a handful of threads that meet every few microseconds. It spins briefly and then sleeps: on a busy machine
// a longer spin would take the processor from the very thread that is waited for.
#pragma once

#include <stdatomic.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

enum { BARRIER_SPINS = 1000 };

typedef struct {
    _Alignas(64) _Atomic int arrived;
    _Alignas(64) _Atomic int phase;
    _Atomic int sleepers;
} Barrier;

static inline void barrier_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static inline void barrier_sleep(Barrier *barrier, int phase) {
#if defined(__linux__)
    atomic_fetch_add(&barrier->sleepers, 1);
    while (atomic_load(&barrier->phase) == phase) syscall(SYS_futex, &barrier->phase, FUTEX_WAIT_PRIVATE, phase, NULL, NULL, 0);
    atomic_fetch_sub(&barrier->sleepers, 1);
#else
    while (atomic_load(&barrier->phase) == phase) sched_yield();
#endif
}

static inline void barrier_wait(Barrier *barrier, int num_threads) {
    if (num_threads == 1) return;
    const int phase = atomic_load(&barrier->phase);
    if (atomic_fetch_add(&barrier->arrived, 1) + 1 == num_threads) {
        atomic_store(&barrier->arrived, 0);
        atomic_store(&barrier->phase, phase + 1);
#if defined(__linux__)
        if (atomic_load(&barrier->sleepers)) syscall(SYS_futex, &barrier->phase, FUTEX_WAKE_PRIVATE, num_threads, NULL, NULL, 0);
#endif
        return;
    }
    for (int spin = 0; spin < BARRIER_SPINS; spin++) {
        if (atomic_load_explicit(&barrier->phase, memory_order_acquire) != phase) return;
        barrier_pause();
    }
    barrier_sleep(barrier, phase);
}
