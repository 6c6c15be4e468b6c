/* linear_sm90_ptx.cuh: the instructions of sm_90a that linear_sm90.cu is made of, each as one inline function: barriers
 * that count bytes, tensor copies to one or both blocks of a cluster, warpgroup products, transposing stores to shared
 * memory. Device code only; knows no product. */
#ifndef QUIRE_KERNELS_CUDA_LINEAR_SM90_PTX_CUH
#define QUIRE_KERNELS_CUDA_LINEAR_SM90_PTX_CUH

#include <cuda.h>
#include <stdint.h>

namespace sm90 {

static __device__ __forceinline__ uint32_t shared_of(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* ---- barriers ------------------------------------------------------------------------------------------------------
 */

static __device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

static __device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

/* The same barrier in block `rank` of the cluster. */
static __device__ __forceinline__ void barrier_arrive_at(uint32_t barrier, uint32_t rank) {
    asm volatile("{\n\t.reg .b32 remote;\n\t"
                 "mapa.shared::cluster.u32 remote, %0, %1;\n\t"
                 "mbarrier.arrive.shared::cluster.b64 _, [remote];\n\t}" ::"r"(barrier),
                 "r"(rank)
                 : "memory");
}

static __device__ __forceinline__ bool barrier_try(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n\t.reg .pred p;\n\t"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, p;\n\t}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return done != 0;
}

static __device__ __forceinline__ uint64_t clock_ns() {
    uint64_t ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}

/* Ends the kernel with an error: a store to an address that never exists. A trap in a loop would make ptxas give up the
 * register counts of setmaxnreg. */
static __device__ __forceinline__ void give_up(uint32_t why) {
    *(volatile uint32_t *)(uintptr_t)16 = why;
}

/* Waits until the phase of that parity is over; after 2 s something is broken, and an error is better than a hang. */
static __device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    if (barrier_try(barrier, parity)) return;
    const uint64_t begin_ns = clock_ns();
    while (!barrier_try(barrier, parity))
        if (clock_ns() - begin_ns > 2000000000u) give_up(barrier);
}

template <int THREADS> static __device__ __forceinline__ void named_sync(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

static __device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

static __device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
    return rank;
}

/* ---- tensor copies -------------------------------------------------------------------------------------------------
 */

static __device__ __forceinline__ uint64_t policy_first() { /* evicted first: read once */
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

static __device__ __forceinline__ uint64_t policy_last() { /* evicted last: read by every block */
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

static __device__ __forceinline__ void map_prefetch(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

static __device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap *map, uint32_t barrier, int column,
                                                int row, uint64_t policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
                 "[%1, {%3, %4}], [%2], %5;" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(column), "r"(row), "l"(policy)
                 : "memory");
}

/* To the same place in both blocks of the cluster, and counted by both barriers. */
static __device__ __forceinline__ void copy_box_both(uint32_t to, const CUtensorMap *map, uint32_t barrier, int column,
                                                     int row, uint64_t policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::"
                 "cache_hint [%0], [%1, {%3, %4}], [%2], %5, %6;" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(column), "r"(row), "h"((uint16_t)3), "l"(policy)
                 : "memory");
}

/* From shared memory to global; by one thread, which waits for its own. */
static __device__ __forceinline__ void copy_box_out(const CUtensorMap *map, uint32_t from, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from),
                 "r"(column), "r"(row)
                 : "memory");
}

static __device__ __forceinline__ void copies_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* Until all but the last PENDING groups have read their shared memory. */
template <int PENDING> static __device__ __forceinline__ void copies_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

static __device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* Ordinary stores to shared memory become visible to tensor copies. */
static __device__ __forceinline__ void fence_for_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* ---- warpgroup products --------------------------------------------------------------------------------------------
 */

static __device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

static __device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING> static __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/* A tile of rows of 64 bf16 as a tensor copy lays it with the 128-byte swizzle: 8 rows a repeat of 1024 bytes. */
static __device__ __forceinline__ uint64_t tile_of(uint32_t address) {
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

#define SM90_D8(d, i)                                                                                                  \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]),        \
        "+f"(d[i + 7])
#define SM90_D16(d, i)  SM90_D8(d, i), SM90_D8(d, i + 8)
#define SM90_D32(d, i)  SM90_D16(d, i), SM90_D16(d, i + 16)
#define SM90_D64(d, i)  SM90_D32(d, i), SM90_D32(d, i + 32)
#define SM90_D128(d, i) SM90_D64(d, i), SM90_D64(d, i + 64)

/* d (+)= a b^T: a [64, 16], b [N, 16], both in shared memory, columns contiguous; d: 4 * (N / 8) values a thread, from
 * nothing where `more` is 0. */
template <int N> struct wgmma;

#define SM90_WGMMA(n, count, list, a_at, b_at, more_at)                                                                \
    template <> struct wgmma<n> {                                                                                      \
        static __device__ __forceinline__ void run(float (&d)[count], uint64_t a, uint64_t b, int more) {              \
            asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" #more_at ", 0;\n\t"                                  \
                         "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" list "}, %" #a_at ", %" #b_at    \
                         ", p, 1, 1, 0, 0;\n\t}"                                                                       \
                         : SM90_D##count(d, 0)                                                                         \
                         : "l"(a), "l"(b), "r"(more));                                                                 \
        }                                                                                                              \
    };

#define SM90_LIST_8  "%0, %1, %2, %3, %4, %5, %6, %7"
#define SM90_LIST_16 SM90_LIST_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define SM90_LIST_32 SM90_LIST_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SM90_LIST_64                                                                                                   \
    SM90_LIST_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, "   \
                 "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SM90_LIST_128                                                                                                  \
    SM90_LIST_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, "   \
                 "%83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, "   \
                 "%102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, "    \
                 "%118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

SM90_WGMMA(16, 8, SM90_LIST_8, 8, 9, 10)
SM90_WGMMA(32, 16, SM90_LIST_16, 16, 17, 18)
SM90_WGMMA(64, 32, SM90_LIST_32, 32, 33, 34)
SM90_WGMMA(128, 64, SM90_LIST_64, 64, 65, 66)
SM90_WGMMA(256, 128, SM90_LIST_128, 128, 129, 130)

/* ---- transposing stores --------------------------------------------------------------------------------------------
 * Fragments of 8 x 8: a thread holds two neighbours of a row; stored, each row of 16 bytes is a column. Lane l gives
 * the address of row l % 8 of matrix l / 8. */

static __device__ __forceinline__ void store_transposed_4(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}

/* The same way back. */
static __device__ __forceinline__ uint4 load_transposed_4(uint32_t from) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from)
                 : "memory");
    return v;
}

static __device__ __forceinline__ void store_transposed_2(uint32_t to, uint32_t a, uint32_t b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(a), "r"(b) : "memory");
}

template <int COUNT> static __device__ __forceinline__ void registers_give() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT> static __device__ __forceinline__ void registers_take() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

} // namespace sm90

#endif
