/* Up to four products of a decode step in one kernel (o, gate and up, down, the next layer's q, k and v): weights
 * stream on while one product ends and the next waits for its tokens.
 *
 * As in linear_sm90.cu the weights are wgmma's M side, the tokens N. A cluster of 4 blocks has a tile of up to 256
 * matrix rows, each block an eighth of its columns; so all multiprocessors stream evenly, whatever the shape, and
 * nothing but a share of the tokens is read twice. The sums of the 8 meet in shared memory: block r of the cluster gets
 * those of tokens 8 r .. 8 r + 7 from all (56 KB leave a block for every 256 KB to 1 MB of weights that come), adds
 * them in order and stores. That costs no fence and no memory's latency, which under full load is 2 us.
 *
 * The norm between two products is the work of those who have the sums of the first: they add the residual, store it,
 * store it again times the norm's weight as the next product's x, and leave the sum of its squares. A token's root mean
 * square is a factor of a whole row of that product's result, applied there.
 *
 * Between two products every block waits until all have stored (a counter a product); by then its ring is full of the
 * next product's weights: 128 KB a multiprocessor are 4 us of memory's time, about what sums, stores and the wait take.
 */
#include "kernels/cuda/linear_sm90_ptx.cuh"

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "kernels/cuda/cuda_math.cuh"
#include "kernels/cuda/stack_chain.h"

enum {
    TILE_ROWS = 256,             /* matrix rows of a cluster at a time, at most */
    TILE_COLS = 64,              /* columns a stage: one row of the 128-byte swizzle */
    BLOCKS = TILE_ROWS / 64 / 2, /* of 64 rows that a warpgroup has */
    SLICES = 4,                  /* blocks of a cluster */
    SHARED_MAX = 227 * 1024,
    CONSUMERS = 256, /* threads of the two warpgroups that multiply */
    THREADS = CONSUMERS + 128,
};

template <int BN_> struct form {
    static constexpr int BN = BN_, NT = BN / 8;
    static constexpr int PASSES = (NT + SLICES - 1) / SLICES; /* sums of 8 tokens a block at a time */
    static constexpr int W_BYTES = TILE_ROWS * 128, X_BYTES = BN * 128, STAGE_BYTES = W_BYTES + X_BYTES;
    /* [SLICES][TILE_ROWS / 64][128] float4: the sums of all blocks for 8 of this one's tokens */
    static constexpr int SUMS_BYTES = SLICES * TILE_ROWS / 64 * 2048;
    static constexpr int STAGES = (SHARED_MAX - 2048 - SUMS_BYTES) / STAGE_BYTES;
    static constexpr int SUMS = STAGES * STAGE_BYTES, FACTORS = SUMS + SUMS_BYTES;
    static constexpr int SQUARES = FACTORS + PASSES * 8 * 4, BARRIERS = SQUARES + 8 * 8 * 4;
    static constexpr int SHARED = BARRIERS + 8 * (2 * STAGES + 3) + 1024 /* to a multiple of 1024 */;
    static_assert(SHARED <= SHARED_MAX, "a block's shared memory");
};

struct product {
    CUtensorMap w, x;
    __nv_bfloat16 *y;
    const float *norm;
    int64_t y_stride;
    int out, steps, tile_rows, tiles;
    int kind;
    bool scaled;
};

struct work {
    product p[CHAIN_PRODUCTS];
    __nv_bfloat16 *residual;
    float *squares; /* [tiles][CHAIN_ROWS_MAX], of the last CHAIN_RESIDUAL */
    unsigned *counters;
    uint64_t *trace;
    int64_t hidden;
    int count, rows, box;
    float norm_eps, norm_offset;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* ---- the order of work ----------------------------------------------------------------------------------------------
 * Cluster c has tiles c, c + clusters and so on; block r of it the r-th quarter of the steps. */

struct place {
    uint32_t stages, full, empty;      /* [STAGES] each: stages, barriers of filled and of free ones */
    uint32_t sums, came, taken;        /* room for sums; all have come here; all that were sent have been taken */
    uint32_t ready;                    /* the factors of the tokens are there */
    int rank, cluster, clusters, live; /* live: tiles of 8 tokens that have some; tile n is block n % 8's */
};

static __device__ __forceinline__ int step_begin(const product &p, int rank) {
    return p.steps * rank / SLICES;
}

static __device__ __forceinline__ unsigned *done_of(const work &a, int product) {
    return a.counters + product;
}

static __device__ __forceinline__ void count_up(unsigned *counter) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

/* Gives up after 10 s: a wait that long is a bug, and an error is better than a hang. */
static __device__ __forceinline__ void count_wait(const unsigned *counter, unsigned target, uint32_t why) {
    unsigned seen;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    if (seen >= target) return;
    const uint64_t begin_ns = sm90::clock_ns();
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
        if (sm90::clock_ns() - begin_ns > 10000000000u) sm90::give_up(why);
    } while (seen < target);
}

static __device__ __forceinline__ void fence_proxies() {
    asm volatile("fence.proxy.async;" ::: "memory");
}

#ifdef CHAIN_TRACE
static __device__ __forceinline__ void trace(const work &a, int product, int what) {
    if (a.trace) a.trace[(blockIdx.x * CHAIN_PRODUCTS + product) * 8 + what] = sm90::clock_ns();
}
#else
static __device__ __forceinline__ void trace(const work &, int, int) {}
#endif

/* ---- the warp that fetches ------------------------------------------------------------------------------------------
 */

template <class F> struct fetcher {
    const work &a;
    const place &at;
    uint64_t first, last; /* policies */
    int slot;
    uint32_t phase;

    __device__ __forceinline__ void weights(const product &p, int tile, int step) {
        sm90::barrier_wait(at.empty + 8 * slot, phase ^ 1);
        sm90::barrier_expect(at.full + 8 * slot, (p.tile_rows + a.box) * 128);
        sm90::copy_box(at.stages + slot * F::STAGE_BYTES, &p.w, at.full + 8 * slot, step * TILE_COLS,
                       tile * p.tile_rows, first);
    }
    __device__ __forceinline__ void tokens(const product &p, int step, int to) {
        sm90::copy_box(at.stages + to * F::STAGE_BYTES + F::W_BYTES, &p.x, at.full + 8 * to, step * TILE_COLS, 0, last);
    }
    __device__ __forceinline__ void advance() {
        if (++slot == F::STAGES) slot = 0, phase ^= 1;
    }
    /* The ring fills with weights before the tokens are known. */
    __device__ __forceinline__ void run(int i) {
        const product &p = a.p[i];
        const int begin = step_begin(p, at.rank), steps = step_begin(p, at.rank + 1) - begin;
        const int mine = at.cluster < p.tiles ? (p.tiles - at.cluster + at.clusters - 1) / at.clusters : 0;
        const int units = mine * steps, early = min((int)F::STAGES, units), from = slot;
        int tile = at.cluster, step = 0;
        for (int k = 0; k < early; k++, advance()) {
            weights(p, tile, begin + step);
            if (++step == steps) step = 0, tile += at.clusters;
        }
        if (i == 0) {
            grid_wait();
        } else if (early > 0) {
            count_wait(done_of(a, i - 1), gridDim.x, 32);
            fence_proxies();
        }
        trace(a, i, 0);
        for (int k = 0; k < early; k++) tokens(p, begin + k % steps, (from + k) % F::STAGES);
        for (int k = early; k < units; k++, advance()) {
            weights(p, tile, begin + step);
            tokens(p, begin + step, slot);
            if (++step == steps) step = 0, tile += at.clusters;
        }
        trace(a, i, 1);
    }
};

/* ---- the warp that prepares the factors -----------------------------------------------------------------------------
 */

/* 1 / root mean square of the residual of each of this block's tokens, from the sums of squares of a tile each. */
static __device__ __forceinline__ void factors_make(const work &a, const place &at, float *factors, int lane,
                                                    int passes) {
    for (int i = 1; i < a.count; i++) {
        if (!a.p[i].scaled) continue;
        count_wait(done_of(a, i - 1), gridDim.x, 48);
        for (int pass = 0; pass < passes; pass++) {
            float sum = 0.0f;
            for (int k = lane / 8; k < a.p[i - 1].tiles; k += 4)
                sum += __ldcg(a.squares + k * CHAIN_ROWS_MAX + (pass * SLICES + at.rank) * 8 + lane % 8);
            sum += __shfl_xor_sync(~0u, sum, 8);
            sum += __shfl_xor_sync(~0u, sum, 16);
            if (lane < 8) factors[pass * 8 + lane] = rsqrtf(sum / (float)a.hidden + a.norm_eps);
        }
        __syncwarp();
        if (lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at.ready) : "memory");
    }
}

/* ---- results --------------------------------------------------------------------------------------------------------
 * A thread has, of 64 rows each, rows upper and upper + 8 of two of the block's tokens: s[0], s[1] and s[2], s[3]. */

static __device__ __forceinline__ float silu(float v) {
    return __fdividef(v, 1.0f + __expf(-v)); /* 0 where the sum overflows */
}

struct rows_at {
    int upper, token, last; /* last: behind the tile's last row */
};

static __device__ __forceinline__ void plain_store(const work &a, const product &p, const float (&s)[4],
                                                   const rows_at &at, const float (&factor)[2]) {
    const bool gated = p.kind == CHAIN_GATED;
    __nv_bfloat16 *y = p.y + (gated ? at.upper / 16 * 8 + at.upper % 16 : at.upper);
    if (at.upper >= at.last) return; /* tiles are of 16 rows, matrices may end at 8 */
#pragma unroll
    for (int j = 0; j < 2; j++) {
        if (at.token + j >= a.rows) continue;
        const float v = s[j] * factor[j], w = s[2 + j] * factor[j];
        __nv_bfloat16 *to = y + (int64_t)(at.token + j) * p.y_stride;
        to[0] = __float2bfloat16_rn(gated ? silu(v) * w : v);
        if (!gated && at.upper + 8 < at.last) to[8] = __float2bfloat16_rn(w);
    }
}

/* What the residual and the norm's weights were, loaded while the products are made. */
struct residual_before {
    float r[4], g[2];
};

static __device__ __forceinline__ residual_before residual_load(const work &a, const product &p, const rows_at &at) {
    residual_before b = {};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = at.upper + 8 * i;
        if (row >= at.last) continue;
        b.g[i] = p.norm[row] + a.norm_offset;
#pragma unroll
        for (int j = 0; j < 2; j++)
            if (at.token + j < a.rows)
                b.r[2 * i + j] = __uint_as_float(
                    (uint32_t)__ldcg((const unsigned short *)a.residual + (int64_t)(at.token + j) * a.hidden + row)
                    << 16);
    }
    return b;
}

static __device__ __forceinline__ void residual_store(const work &a, const product &p, const float (&s)[4],
                                                      const residual_before &before, const rows_at &at,
                                                      float (&squares)[2]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = at.upper + 8 * i;
        if (row >= at.last) continue;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            if (at.token + j >= a.rows) continue;
            const __nv_bfloat16 v = __float2bfloat16_rn(before.r[2 * i + j] + s[2 * i + j]);
            const float f = __bfloat162float(v);
            const int64_t to = (int64_t)(at.token + j) * a.hidden + row;
            a.residual[to] = v, p.y[to] = __float2bfloat16_rn(f * before.g[i]);
            squares[j] += f * f;
        }
    }
}

/* ---- the sums of a cluster ------------------------------------------------------------------------------------------
 */

static __device__ __forceinline__ uint32_t shared_in(uint32_t address, int rank) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

/* To another block's shared memory, counted by its barrier; zeros of a block that has no columns. */
static __device__ __forceinline__ void send(uint32_t to, const float *v, bool any, uint32_t barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
        "f"(any ? v[0] : 0.0f), "f"(any ? v[1] : 0.0f), "f"(any ? v[2] : 0.0f), "f"(any ? v[3] : 0.0f), "r"(barrier)
        : "memory");
}

static __device__ __forceinline__ float4 sums_load(uint32_t at) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
}

/* ---- the warps that multiply ----------------------------------------------------------------------------------------
 * Warpgroup g has the tile's rows 64 g .. 64 g + 63 and 128 + 64 g and so on, as far as the tile goes. */

template <class F> struct multiplier {
    const work &a;
    const place &at;
    const float *factors; /* [PASSES][8] */
    float *squares;       /* [8 warps][8 tokens] */
    int group, slot;
    uint32_t phase, factors_phase, came_phase, taken; /* taken: how often sums were sent */

    __device__ __forceinline__ void multiply(float (&d)[BLOCKS][F::NT * 4], int steps) {
        const int signal = threadIdx.x % 128;
        for (int step = 0; step < steps; step++) {
            sm90::barrier_wait(at.full + 8 * slot, phase);
            const uint32_t stage = at.stages + slot * F::STAGE_BYTES;
            const uint64_t x = sm90::tile_of(stage + F::W_BYTES);
            sm90::wgmma_fence();
#pragma unroll
            for (int b = 0; b < BLOCKS; b++) { /* one that lies behind the tile's end too: nobody looks at it */
                const uint64_t w = sm90::tile_of(stage + (2 * b + group) * 64 * 128);
#pragma unroll
                for (int k = 0; k < TILE_COLS / 16; k++) /* 16 columns are 32 bytes, in units of 16 */
                    sm90::wgmma<F::BN>::run(d[b], w + 2 * k, x + 2 * k, step > 0 || k > 0);
            }
            sm90::wgmma_commit();
            sm90::wgmma_wait<0>(); /* the stage is wanted back at once: there are but few, and time enough */
#pragma unroll
            for (int b = 0; b < BLOCKS; b++)
#pragma unroll
                for (int i = 0; i < F::NT * 4; i++) asm volatile("" : "+f"(d[b][i])::"memory");
            if (signal == 0)
                asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at.empty + 8 * slot) : "memory");
            if (++slot == F::STAGES) slot = 0, phase ^= 1;
        }
    }

    /* Each block's part of the sums goes to whom the tokens belong to. */
    template <int PASS>
    __device__ __forceinline__ void sums_send(const float (&d)[BLOCKS][F::NT * 4], int blocks, bool any) {
        int thread = threadIdx.x % 128;
        asm volatile("" : "+r"(thread)); /* else addresses are kept in registers */
        if (taken > 0) sm90::barrier_wait(at.taken, (taken - 1) & 1);
#pragma unroll
        for (int n = PASS * SLICES; n < F::NT && n < (PASS + 1) * SLICES; n++) {
            if (n >= at.live) continue;
            const uint32_t to =
                shared_in(at.sums, n % SLICES) + (uint32_t)(at.rank * (TILE_ROWS / 64) * 2048 + thread * 16);
            const uint32_t came = shared_in(at.came, n % SLICES);
#pragma unroll
            for (int b = 0; b < BLOCKS; b++)
                if (b < blocks) send(to + (uint32_t)(2 * b + group) * 2048, d[b] + 4 * n, any, came);
        }
    }

    __device__ __forceinline__ void squares_store(float (&sum)[2], int tile, int pass) {
        const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            sum[j] += __shfl_xor_sync(~0u, sum[j], 4);
            sum[j] += __shfl_xor_sync(~0u, sum[j], 8);
            sum[j] += __shfl_xor_sync(~0u, sum[j], 16);
            if (lane < 4) squares[warp * 8 + lane * 2 + j] = sum[j];
        }
        sm90::named_sync<CONSUMERS>(3);
        if (threadIdx.x < 8) {
            float all = 0.0f;
#pragma unroll
            for (int w = 0; w < 8; w++) all += squares[w * 8 + threadIdx.x];
            __stcg(a.squares + tile * CHAIN_ROWS_MAX + (pass * SLICES + at.rank) * 8 + threadIdx.x, all);
        }
    }

    __device__ __forceinline__ rows_at rows_of(const product &p, int tile, int block, int pass) const {
        int thread = threadIdx.x % 128;
        asm volatile("" : "+r"(thread));
        const int begin = tile * p.tile_rows;
        return {begin + (2 * block + group) * 64 + thread / 32 * 16 + thread % 32 / 4,
                (pass * SLICES + at.rank) * 8 + thread % 4 * 2, min(begin + p.tile_rows, p.out)};
    }

    /* This block's tokens: what all blocks of the cluster have sent, added in order, and stored. */
    __device__ __forceinline__ void sums_take(int i, int tile, int blocks, int pass,
                                              const residual_before (&before)[BLOCKS]) {
        const product &p = a.p[i];
        float factor[2] = {1.0f, 1.0f}, square[2] = {};
        sm90::barrier_wait(at.came, came_phase);
        came_phase ^= 1;
        trace_one(i, 3);
        float s[BLOCKS][4] = {};
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            if (b >= blocks) continue;
#pragma unroll
            for (int r = 0; r < SLICES; r++) {
                const float4 v = sums_load(at.sums + (uint32_t)(r * (TILE_ROWS / 64) + 2 * b + group) * 2048 +
                                           threadIdx.x % 128 * 16);
                s[b][0] += v.x, s[b][1] += v.y, s[b][2] += v.z, s[b][3] += v.w;
            }
        }
        sm90::named_sync<CONSUMERS>(3);
        sums_taken();
        if (p.scaled) {
            sm90::barrier_wait(at.ready, factors_phase);
            factor[0] = factors[pass * 8 + threadIdx.x % 4 * 2];
            factor[1] = factors[pass * 8 + threadIdx.x % 4 * 2 + 1];
        }
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            if (b >= blocks) continue;
            const rows_at rows = rows_of(p, tile, b, pass);
            if (p.kind == CHAIN_RESIDUAL)
                residual_store(a, p, s[b], before[b], rows, square);
            else
                plain_store(a, p, s[b], rows, factor);
        }
        if (p.kind == CHAIN_RESIDUAL) squares_store(square, tile, pass);
    }

    /* Room for the next: every block tells all. */
    __device__ __forceinline__ void sums_taken() const {
        if (threadIdx.x < SLICES) sm90::barrier_arrive_at(at.taken, threadIdx.x);
    }

    __device__ __forceinline__ void trace_one(int i, int what) const {
        if (threadIdx.x == 0) trace(a, i, what);
    }

    template <int PASS>
    __device__ __forceinline__ void passes_run(int i, int tile, int blocks, const float (&d)[BLOCKS][F::NT * 4],
                                               bool any, const residual_before (&before)[F::PASSES][BLOCKS]) {
        const bool mine = PASS * SLICES + at.rank < at.live;
        if (mine && threadIdx.x == 0) sm90::barrier_expect(at.came, SLICES * ((a.p[i].tile_rows + 63) / 64) * 2048);
        sums_send<PASS>(d, blocks, any);
        if (mine)
            sums_take(i, tile, blocks, PASS, before[PASS]);
        else
            sums_taken();
        taken++;
        if constexpr (PASS + 1 < F::PASSES) passes_run<PASS + 1>(i, tile, blocks, d, any, before);
    }

    __device__ __forceinline__ void run(int i) {
        const product &p = a.p[i];
        const int steps = step_begin(p, at.rank + 1) - step_begin(p, at.rank);
        const int blocks = ((p.tile_rows + 63) / 64 - group + 1) / 2;
        float d[BLOCKS][F::NT * 4];
        residual_before before[F::PASSES][BLOCKS];
        if (p.scaled) factors_phase ^= 1;
        for (int tile = at.cluster; tile < p.tiles; tile += at.clusters) {
            if (p.kind == CHAIN_RESIDUAL)
#pragma unroll
                for (int k = 0; k < F::PASSES * BLOCKS; k++)
                    before[k / BLOCKS][k % BLOCKS] = residual_load(a, p, rows_of(p, tile, k % BLOCKS, k / BLOCKS));
            multiply(d, steps);
            trace_one(i, 2);
            passes_run<0>(i, tile, blocks, d, steps > 0, before);
        }
        if (p.scaled) sm90::barrier_wait(at.ready, factors_phase); /* nobody waits for a counter at the end */
        fence_proxies(); /* the next product's tensor copies read what was stored */
        sm90::named_sync<CONSUMERS>(3);
        if (threadIdx.x == 0) {
            count_up(done_of(a, i));
            trace(a, i, 4);
        }
    }
};

/* The last block out leaves zeros for the next launch. */
static __device__ __forceinline__ void counters_clear(const work &a) {
    unsigned *exits = done_of(a, CHAIN_PRODUCTS);
    __threadfence();
    if (atomicAdd(exits, 1u) + 1 < gridDim.x) return;
    for (int i = 0; i <= CHAIN_PRODUCTS; i++) __stcg(done_of(a, i), 0u);
}

#endif

template <class F> static __global__ void __launch_bounds__(THREADS, 1) chain_kernel(const __grid_constant__ work a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ unsigned char shared_raw[];
    unsigned char *shared = shared_raw + (1024 - sm90::shared_of(shared_raw) % 1024) % 1024;
    place at;
    at.stages = sm90::shared_of(shared), at.sums = at.stages + F::SUMS;
    at.full = at.stages + F::BARRIERS, at.empty = at.full + 8 * F::STAGES, at.ready = at.empty + 8 * F::STAGES;
    at.came = at.ready + 8, at.taken = at.came + 8;
    at.rank = (int)sm90::cluster_rank(), at.cluster = (int)blockIdx.x / SLICES, at.clusters = (int)gridDim.x / SLICES;
    at.live = (a.rows + 7) / 8;
    float *factors = (float *)(shared + F::FACTORS), *squares = (float *)(shared + F::SQUARES);
    if (threadIdx.x == 0) {
        for (int s = 0; s < F::STAGES; s++) {
            sm90::barrier_init(at.full + 8 * s, 1);
            sm90::barrier_init(at.empty + 8 * s, 2); /* two warpgroups */
        }
        sm90::barrier_init(at.ready, 1);
        sm90::barrier_init(at.came, 1);
        sm90::barrier_init(at.taken, SLICES);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    sm90::cluster_sync();
    if (threadIdx.x >= CONSUMERS) {
        sm90::registers_give<56>();
        const int thread = threadIdx.x - CONSUMERS;
        if (thread >= 32 && thread < 64) {
            grid_wait();
            factors_make(a, at, factors, thread - 32, F::PASSES);
        } else if (thread == 0) {
            fetcher<F> f = {a, at, sm90::policy_first(), sm90::policy_last(), 0, 0};
            for (int i = 0; i < a.count; i++) {
                sm90::map_prefetch(&a.p[i].w);
                sm90::map_prefetch(&a.p[i].x);
            }
            for (int i = 0; i < a.count; i++) f.run(i);
            grid_release();
        }
    } else {
        sm90::registers_take<224>();
        multiplier<F> m = {a, at, factors, squares, (int)threadIdx.x / 128, 0, 0, 1, 0, 0};
        grid_wait();
        for (int i = 0; i < a.count; i++) m.run(i);
        if (threadIdx.x == 0) counters_clear(a);
    }
    sm90::cluster_sync(); /* no block leaves while another may still write to it */
#endif
}

/* ---- the launcher ---------------------------------------------------------------------------------------------------
 */

typedef form<16> form16;
typedef form<32> form32;

/* Clusters of blocks, that may begin while the kernel before ends. */
struct clustered {
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attributes[2] = {};
    clustered(int clusters, size_t shared, cudaStream_t stream) {
        config.gridDim = dim3(SLICES * (unsigned)clusters), config.blockDim = dim3(THREADS);
        config.dynamicSmemBytes = shared, config.stream = stream;
        attributes[0].id = cudaLaunchAttributeClusterDimension;
        attributes[0].val.clusterDim.x = SLICES, attributes[0].val.clusterDim.y = 1, attributes[0].val.clusterDim.z = 1;
        attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[1].val.programmaticStreamSerializationAllowed = 1;
        config.attrs = attributes, config.numAttrs = 2;
    }
};

template <class F> static cudaError_t form_open(int sms, int *clusters) {
    cudaError_t e = cudaFuncSetAttribute(chain_kernel<F>, cudaFuncAttributeMaxDynamicSharedMemorySize, F::SHARED);
    if (e) return e;
    clustered all(sms / SLICES, F::SHARED, NULL);
    int found = 0;
    e = cudaOccupancyMaxActiveClusters(&found, chain_kernel<F>, &all.config);
    if (!e && found < *clusters) *clusters = found;
    return e;
}

template <class F> static int form_launch(int clusters, cudaStream_t stream, const work &a) {
    clustered launch(clusters, F::SHARED, stream);
    return (int)cudaLaunchKernelEx(&launch.config, chain_kernel<F>, a);
}

/* As few rounds of tiles as can be, all of about equal height, in whole groups of 8 rows of gate and 8 of up. */
static void tiles_cut(int clusters, product *p) {
    const int rounds = (p->out + TILE_ROWS * clusters - 1) / (TILE_ROWS * clusters);
    p->tile_rows = ((p->out + rounds * clusters - 1) / (rounds * clusters) + 15) / 16 * 16;
    p->tiles = (p->out + p->tile_rows - 1) / p->tile_rows;
}

static int product_fill(const struct linear_sm90 *sm90, int clusters, const struct chain *chain,
                        const struct chain_product *from, int box, product *to) {
    to->y = static_cast<__nv_bfloat16 *>(from->y), to->norm = from->norm;
    to->y_stride = from->kind == CHAIN_GATED ? from->out / 2 : from->out;
    to->out = from->out, to->steps = (from->cols + TILE_COLS - 1) / TILE_COLS;
    to->kind = from->kind, to->scaled = from->scaled;
    tiles_cut(clusters, to);
    int e = linear_sm90_map(sm90, &to->w, from->w, from->out, from->cols, from->pitch, to->tile_rows);
    return e ? e : linear_sm90_map(sm90, &to->x, from->x, chain->rows, from->cols, from->cols, box);
}

extern "C" int chain_open(const struct linear_sm90 *sm90, int *clusters) {
    *clusters = sm90->sms / SLICES;
    cudaError_t e = form_open<form16>(sm90->sms, clusters);
    if (!e) e = form_open<form32>(sm90->sms, clusters);
    return (int)e;
}

extern "C" int chain_launch(const struct linear_sm90 *sm90, int clusters, cudaStream_t stream,
                            const struct chain *chain) {
    work a = {};
    a.residual = static_cast<__nv_bfloat16 *>(chain->residual), a.squares = chain->squares;
    a.counters = chain->counters, a.trace = chain->trace;
    a.hidden = chain->hidden, a.count = chain->count, a.rows = chain->rows;
    a.box = (chain->rows + 7) / 8 * 8; /* whole repeats of the swizzle */
    a.norm_eps = chain->norm_eps, a.norm_offset = chain->norm_offset;
    for (int i = 0; i < chain->count; i++) {
        const int e = product_fill(sm90, clusters, chain, &chain->products[i], a.box, &a.p[i]);
        if (e) return e;
    }
    return chain->rows <= 16 ? form_launch<form16>(clusters, stream, a) : form_launch<form32>(clusters, stream, a);
}
