/* attention_prefill_sm90_ptx.cuh: the instructions of sm_90a that the Hopper prefill kernel is made of, each as one
 * inline function: transaction barriers in shared memory, tensor copies (TMA), warpgroup matrix products (wgmma) and
 * what goes with them. Device code only; knows no attention. */
#ifndef QUIRE_KERNELS_CUDA_ATTENTION_PREFILL_SM90_PTX_CUH
#define QUIRE_KERNELS_CUDA_ATTENTION_PREFILL_SM90_PTX_CUH

#include <cuda.h>
#include <stdint.h>

/* ---- barriers ---- */

__device__ __forceinline__ uint32_t shared_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ bool mbarrier_try(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n\t.reg .pred p;\n\t"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, p;\n\t}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return done != 0;
}

__device__ __forceinline__ uint64_t globaltimer_ns() {
    uint64_t ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}

/* Waits until the phase of that parity is over. After 2 s something is broken: a store to an address that never exists
 * ends the kernel with an error, where a hang would keep the GPU. (A trap would do, but with one in a loop ptxas gives
 * up the register counts of setmaxnreg and spills.) */
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    if (mbarrier_try(barrier, parity)) return;
    const uint64_t begin_ns = globaltimer_ns();
    while (!mbarrier_try(barrier, parity)) {
        if (globaltimer_ns() - begin_ns > 2000000000u) *(volatile uint32_t *)(uintptr_t)16 = barrier;
    }
}

template <int THREADS> __device__ __forceinline__ void named_sync(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

template <int THREADS> __device__ __forceinline__ void named_arrive(int id) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

/* Ordinary stores to shared memory become visible to TMA and wgmma, and the other way round. */
__device__ __forceinline__ void fence_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* ---- registers of a warpgroup ---- */

template <int COUNT> __device__ __forceinline__ void registers_give() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT> __device__ __forceinline__ void registers_take() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

/* ---- tensor copies ---- */

__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void tma_load_3d(uint32_t shared, const CUtensorMap *map, uint32_t barrier, int c0, int c1,
                                            int c2) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
                 "%5}], [%2];" ::"r"(shared),
                 "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
                 : "memory");
}

__device__ __forceinline__ void tma_load_4d(uint32_t shared, const CUtensorMap *map, uint32_t barrier, int c0, int c1,
                                            int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
                 "%5, %6}], [%2];" ::"r"(shared),
                 "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}

/* ---- warpgroup products ---- */

__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/* Registers that a product in flight writes or reads: keeps the compiler from moving uses across a wait. */
template <int COUNT> __device__ __forceinline__ void registers_pin(float (&x)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(x[i])::"memory");
}

template <int COUNT> __device__ __forceinline__ void registers_pin(uint32_t (&x)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+r"(x[i])::"memory");
}

/* A matrix of bf16 in shared memory as TMA lays it with the 128-byte swizzle: panels of 64 values, 128 bytes a row, 8
 * rows (1024 bytes) a repeat. `panel_bytes` matters only where the panel's direction is the one that is not summed
 * over and it is longer than 64 (V): the step from panel to panel. */
__device__ __forceinline__ uint64_t wgmma_matrix(uint32_t address, uint32_t panel_bytes) {
    return (uint64_t)((address & 0x3FFFF) >> 4) | (uint64_t)(panel_bytes >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 |
           (uint64_t)1 << 62;
}

#define WGMMA_LIST_8   "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_LIST_16  WGMMA_LIST_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_LIST_24  WGMMA_LIST_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_LIST_32  WGMMA_LIST_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_LIST_40  WGMMA_LIST_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_LIST_48  WGMMA_LIST_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_LIST_56  WGMMA_LIST_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_LIST_64  WGMMA_LIST_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_LIST_72  WGMMA_LIST_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define WGMMA_LIST_80  WGMMA_LIST_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_LIST_88  WGMMA_LIST_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define WGMMA_LIST_96  WGMMA_LIST_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_LIST_104 WGMMA_LIST_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define WGMMA_LIST_112 WGMMA_LIST_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_LIST_120 WGMMA_LIST_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define WGMMA_LIST_128 WGMMA_LIST_120 ", %120, %121, %122, %123, %124, %125, %126, %127"

#define WGMMA_8(m, d, i)                                                                                               \
    m(d[(i)]), m(d[(i) + 1]), m(d[(i) + 2]), m(d[(i) + 3]), m(d[(i) + 4]), m(d[(i) + 5]), m(d[(i) + 6]), m(d[(i) + 7])
#define WGMMA_16(m, d, i)  WGMMA_8(m, d, i), WGMMA_8(m, d, (i) + 8)
#define WGMMA_32(m, d, i)  WGMMA_16(m, d, i), WGMMA_16(m, d, (i) + 16)
#define WGMMA_48(m, d, i)  WGMMA_32(m, d, i), WGMMA_16(m, d, (i) + 32)
#define WGMMA_64(m, d, i)  WGMMA_32(m, d, i), WGMMA_32(m, d, (i) + 32)
#define WGMMA_128(m, d, i) WGMMA_64(m, d, i), WGMMA_64(m, d, (i) + 64)

/* d = a b^T (first) or d += a b^T; a [64, 16] and b [n, 16], both in shared memory with the summed direction
 * contiguous. d: 4 * (n / 8) values a thread. */
template <int N> struct wgmma_ss;
/* The same with a in registers. */
template <int N> struct wgmma_rt;
/* d += a b; a [64, 16] in registers, b [16, n] in shared memory with n contiguous. */
template <int N> struct wgmma_rs;

#define WGMMA_SS(n, count, a_at, b_at)                                                                                 \
    template <> struct wgmma_ss<n> {                                                                                   \
        static __device__ __forceinline__ void first(float (&d)[count], uint64_t a, uint64_t b) {                      \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" WGMMA_LIST_##count               \
                         "}, %" #a_at ", %" #b_at ", 0, 1, 1, 0, 0;"                                                   \
                         : WGMMA_##count("=f", d, 0)                                                                   \
                         : "l"(a), "l"(b));                                                                            \
        }                                                                                                              \
        static __device__ __forceinline__ void more(float (&d)[count], uint64_t a, uint64_t b) {                       \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" WGMMA_LIST_##count               \
                         "}, %" #a_at ", %" #b_at ", 1, 1, 1, 0, 0;"                                                   \
                         : WGMMA_##count("+f", d, 0)                                                                   \
                         : "l"(a), "l"(b));                                                                            \
        }                                                                                                              \
    };

#define WGMMA_RT(n, count, a0_at, a1_at, a2_at, a3_at, b_at)                                                           \
    template <> struct wgmma_rt<n> {                                                                                   \
        static __device__ __forceinline__ void first(float (&d)[count], const uint32_t *a, uint64_t b) {               \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" WGMMA_LIST_##count               \
                         "}, {%" #a0_at ", %" #a1_at ", %" #a2_at ", %" #a3_at "}, %" #b_at ", 0, 1, 1, 0;"            \
                         : WGMMA_##count("=f", d, 0)                                                                   \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                        \
        }                                                                                                              \
        static __device__ __forceinline__ void more(float (&d)[count], const uint32_t *a, uint64_t b) {                \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" WGMMA_LIST_##count               \
                         "}, {%" #a0_at ", %" #a1_at ", %" #a2_at ", %" #a3_at "}, %" #b_at ", 1, 1, 1, 0;"            \
                         : WGMMA_##count("+f", d, 0)                                                                   \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                        \
        }                                                                                                              \
    };

#define WGMMA_RS(n, count, a0_at, a1_at, a2_at, a3_at, b_at)                                                           \
    template <> struct wgmma_rs<n> {                                                                                   \
        static __device__ __forceinline__ void more(float (&d)[count], const uint32_t *a, uint64_t b) {                \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" WGMMA_LIST_##count               \
                         "}, {%" #a0_at ", %" #a1_at ", %" #a2_at ", %" #a3_at "}, %" #b_at ", 1, 1, 1, 1;"            \
                         : WGMMA_##count("+f", d, 0)                                                                   \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                        \
        }                                                                                                              \
    };

WGMMA_SS(64, 32, 32, 33)
WGMMA_SS(128, 64, 64, 65)
WGMMA_RT(128, 64, 64, 65, 66, 67, 68)
WGMMA_RS(64, 32, 32, 33, 34, 35, 36)
WGMMA_RS(96, 48, 48, 49, 50, 51, 52)
WGMMA_RS(128, 64, 64, 65, 66, 67, 68)
WGMMA_RS(256, 128, 128, 129, 130, 131, 132)

#endif
