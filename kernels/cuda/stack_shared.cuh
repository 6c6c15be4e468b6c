/* stack_shared.cuh: what producer and consumers of the decode stack (stack.cu) both know: how shared memory is laid
 * out, the barriers, how products are cut into tiles and attention into units. Device code of that kernel alone. */
#ifndef QUIRE_KERNELS_CUDA_STACK_SHARED_CUH
#define QUIRE_KERNELS_CUDA_STACK_SHARED_CUH

#include "kernels/cuda/stack.h"

#include <cuda_bf16.h>

#define CONSUMERS      256
#define CONSUMER_WARPS 8
#define TEAMS          4 /* of two warps, in attention */
#define SPANS_MAX      512
#define TAIL_BYTES     3584
/* A whole warpgroup for the producer, so that registers can be moved to the consumers. */
#define THREADS   (CONSUMERS + 128)
#define LOG2E     1.4426950408889634f
#define SUM_PITCH 68 /* floats from row to row of a warpgroup's 64 sums: 8 lanes by 4 rows meet in 32 banks */

/* Ring stages and K blocks of a slice by rows: 227 KB of shared memory hold the ring and [rows][slice] of x. */
/* A CTA keeps a slice of x in shared memory: with more rows slices become so narrow that to add their sums takes longer
 * than to read the weights. One tile of 8 rows (NB) is compiled: beyond STACK_ROWS_SERVED others are faster. */
template <int NB> struct plan {
    static constexpr int stages = 12;       /* a multiple of the attention teams, see there */
    static constexpr int slice_blocks = 20; /* K blocks of a slice at most */
    static constexpr int x_bytes = NB * 128 * slice_blocks;
    static constexpr int sum_bytes = 2 * NB * SUM_PITCH * 4;
    static constexpr int shared_bytes = stages * STACK_STAGE_BYTES + x_bytes + sum_bytes + TAIL_BYTES;
    static_assert(shared_bytes <= 227 * 1024, "shared memory of an SM");
    static_assert(stages % TEAMS == 0 && x_bytes >= CONSUMER_WARPS * STACK_GROUP_VALUES * 4, "attention's needs");
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define STACK_DEVICE 1
#endif

#ifdef STACK_DEVICE

/* ---- shared memory, barriers, copies ------------------------------------------------------------------------------
 */

enum product { PRODUCT_QKV, PRODUCT_O, PRODUCT_GATE_UP, PRODUCT_DOWN, PRODUCT_OUTPUT, PRODUCTS };

struct cut {
    int rows, row_tiles, k_blocks, slices; /* of the matrix */
    int begin, end;                        /* tiles of this CTA */
};

struct tail { /* behind ring and x */
    uint64_t full[12], empty[12];
    float stats[CONSUMER_WARPS][STACK_GROUP_MAX][2];
    int32_t unit_begin[STACK_ROWS_MAX + 1]; /* attention units before row n */
    int32_t cta_begin[STACK_CTAS_MAX + 1];  /* attention units before CTA c */
    uint16_t span[SPANS_MAX]; /* first and last CTA (times 256) of each (row, KV head), as far as it goes */
    int32_t kv_len[STACK_ROWS_MAX], slot[STACK_ROWS_MAX];
    struct cut cut[PRODUCTS];
};
static_assert(sizeof(struct tail) <= TAIL_BYTES, "tail of shared memory");

__device__ __forceinline__ uint32_t shared_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* Gives up after about 2 s (4e9 cycles): a wait that long is a bug, and a trap is better than a hang. */
__device__ __noinline__ void wait_failed(const struct stack_args &a, int what) {
    *a.error = (uint32_t)what;
    __threadfence_system();
    __trap();
}

__device__ __forceinline__ bool bar_try(uint32_t bar, uint32_t parity) {
    uint32_t ok;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(ok)
                 : "r"(bar), "r"(parity)
                 : "memory");
    return ok != 0;
}

__device__ __forceinline__ void bar_wait(const struct stack_args &a, uint32_t bar, uint32_t parity) {
    if (bar_try(bar, parity)) return;
    const long long begin = clock64();
    while (!bar_try(bar, parity))
        if (clock64() - begin > 4000000000ll) wait_failed(a, 1);
}

__device__ __forceinline__ void bar_arrive(uint32_t bar, uint32_t count) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

__device__ __forceinline__ void bar_expect(uint32_t bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

__device__ __forceinline__ void consumers_sync() {
    asm volatile("bar.sync 1, 256;" ::: "memory");
}

/* Arrivals at the grid barrier in a step, see consumer::run: five a layer, one before them and one behind. */
__device__ __forceinline__ uint64_t barrier_arrivals(int layers) {
    return (uint64_t)(5 * layers + 2) * gridDim.x;
}
/* The barrier counts on from step to step, and every step adds as much: what it showed before this one follows from any
 * look at it until the last arrival, which this CTA's is one of. */
__device__ __forceinline__ uint64_t barrier_base(const struct stack_args &a) {
    uint64_t seen;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(a.barrier) : "memory");
    return seen - seen % barrier_arrivals(a.layer_count);
}
__device__ __forceinline__ void barrier_wait(const struct stack_args &a, uint64_t target) {
    uint64_t seen;
    const long long begin = clock64();
    for (;;) {
        asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(a.barrier) : "memory");
        if (seen >= target) return;
        if (clock64() - begin > 4000000000ll) wait_failed(a, 2);
    }
}

/* What the rows' lengths decide the consumers prepare; the producer waits for it, the consumers not for that. */
__device__ __forceinline__ void rows_known_tell() {
    asm volatile("bar.arrive 4, %0;" ::"n"(CONSUMERS + 32) : "memory");
}
__device__ __forceinline__ void rows_known_wait() {
    asm volatile("bar.sync 4, %0;" ::"n"(CONSUMERS + 32) : "memory");
}

/* A place in the ring: the slot and how often it was gone round. */
template <int ST> struct ring_place {
    int slot;
    uint32_t parity;
    __device__ __forceinline__ void advance(int n) {
        slot += n;
        parity ^= (uint32_t)(slot / ST) & 1u;
        slot %= ST;
    }
    __device__ __forceinline__ void next() {
        if (++slot == ST) {
            slot = 0;
            parity ^= 1;
        }
    }
};

/* ---- how a product is cut -----------------------------------------------------------------------------------------
 */

/* The first K block of slice s, which may be one past the last. */
__device__ __forceinline__ int slice_begin(const struct cut &c, int s) {
    return (int)((uint32_t)(s * c.k_blocks) / (uint32_t)c.slices);
}

/* As few slices as x has room for; if it goes, a number that divides the CTAs, so that none has to stage two: 12 slices
 * of 18 or 19 blocks for K = 14336 and 132 CTAs cost 2 % by their unequal width, a second staging 10 %. */
__device__ __forceinline__ struct cut cut_of(int rows, int cols, int slice_max) {
    struct cut c;
    const int ctas = (int)gridDim.x, cta = (int)blockIdx.x;
    c.rows = rows;
    c.row_tiles = (rows + STACK_TILE_ROWS - 1) / STACK_TILE_ROWS;
    c.k_blocks = cols / STACK_TILE_COLS;
    c.slices = (c.k_blocks + slice_max - 1) / slice_max;
    int even = c.slices;
    while (even <= c.k_blocks && even <= 2 * c.slices && ctas % even) even++;
    if (even <= c.k_blocks && even <= 2 * c.slices) {
        c.slices = even;
        const int each = ctas / even, slice = cta / each, part = cta % each;
        const int begin = slice_begin(c, slice) * c.row_tiles, tiles = slice_begin(c, slice + 1) * c.row_tiles - begin;
        c.begin = begin + tiles * part / each;
        c.end = begin + tiles * (part + 1) / each;
    } else {
        const uint32_t tiles = (uint32_t)(c.row_tiles * c.k_blocks); /* times 132: far below 2^32 */
        c.begin = (int)(tiles * (uint32_t)cta / (uint32_t)ctas);
        c.end = (int)(tiles * (uint32_t)(cta + 1) / (uint32_t)ctas);
    }
    return c;
}

/* Where tile t lies: its slice begins at K block k_begin and is k_width blocks wide. */
struct tile {
    int k_begin, k_width, row_tile, k;
};
__device__ __forceinline__ int slice_of(const struct cut &c, int block) {
    return (int)(((uint32_t)(block + 1) * (uint32_t)c.slices - 1) / (uint32_t)c.k_blocks);
}
__device__ __forceinline__ struct tile tile_of(const struct cut &c, int t) {
    struct tile w;
    const int slice = slice_of(c, t / c.row_tiles);
    w.k_begin = slice_begin(c, slice);
    w.k_width = slice_begin(c, slice + 1) - w.k_begin;
    const int rest = t - w.k_begin * c.row_tiles;
    w.row_tile = rest / w.k_width;
    w.k = rest - w.row_tile * w.k_width;
    return w;
}

/* ---- attention units ----------------------------------------------------------------------------------------------
 * Unit u is a chunk of keys of one (row, KV head); ordered by row, head, chunk. CTA c takes u with c the largest such
 * that floor(c units / ctas) <= u. */

struct unit {
    int row, head, chunk, chunks;
};
__device__ __forceinline__ struct unit unit_of(const struct tail *tail, int rows, int n_kv_heads, int u) {
    struct unit w;
    int low = 0, high = rows;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (tail->unit_begin[middle] <= u)
            low = middle;
        else
            high = middle;
    }
    w.row = low;
    w.chunks = (tail->unit_begin[low + 1] - tail->unit_begin[low]) / n_kv_heads;
    const int rest = u - tail->unit_begin[low];
    w.head = rest / w.chunks;
    w.chunk = rest - w.head * w.chunks;
    return w;
}

/* The last CTA that begins at or before unit u: it has u. */
__device__ __forceinline__ int unit_cta(const struct tail *tail, int u) {
    int low = 0, high = (int)gridDim.x;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (tail->cta_begin[middle] <= u)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Where CTA c begins. To begin a second (row, head) costs a CTA as much as several units, so as long as there are CTAs
 * for it each has units of one only: a row's heads get as many CTAs as fit its share of all units. With more (row,
 * head)s than that, all CTAs get equally many units. */
__device__ __forceinline__ int unit_cut(const struct tail *tail, int rows, int n_kv_heads, int cta) {
    const int units = tail->unit_begin[rows], ctas = (int)gridDim.x;
    int before = 0; /* CTAs of the rows before */
    for (int n = 0; n < rows; n++) {
        const int begin = tail->unit_begin[n], chunks = (tail->unit_begin[n + 1] - begin) / n_kv_heads;
        const int each = min(chunks, max((int)((uint32_t)chunks * (uint32_t)ctas / (uint32_t)units), 1));
        if (cta >= before && cta < before + each * n_kv_heads) {
            const int head = (cta - before) / each, part = (cta - before) % each;
            cta = begin + head * chunks + (int)((uint32_t)chunks * (uint32_t)part / (uint32_t)each);
            before = -1;
            break;
        }
        before += each * n_kv_heads;
    }
    return before < 0 ? cta : units;
}
__device__ __forceinline__ int cut_ctas(const struct tail *tail, int rows, int n_kv_heads) { /* that it asks for */
    int sum = 0;
    for (int n = 0; n < rows; n++) {
        const int chunks = (tail->unit_begin[n + 1] - tail->unit_begin[n]) / n_kv_heads;
        sum += n_kv_heads * min(chunks, max((int)((uint32_t)chunks * gridDim.x / (uint32_t)tail->unit_begin[rows]), 1));
    }
    return sum;
}

#endif

#endif
