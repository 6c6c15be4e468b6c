/* Products of bf16 weights on Hopper: wgmma fed by tensor copies.
 *
 * The weights are the M side (128 rows a block, 64 a warpgroup), the tokens the N side (BN of them), so that few tokens
 * waste little and gate and up of an interleaved matrix meet in one thread. Two blocks form a cluster: they have the
 * same tokens and neighbouring rows, and each fetches half of the tokens for both, which is what keeps the path from L2
 * from being the limit (of 128 + 256 rows of a step only 128 + 128 are read by each block).
 *
 * One warp fetches, two warpgroups multiply, through a ring of stages. A cluster takes an item of work (rows, tokens,
 * part of the columns) after another. Where there are fewer tiles than clusters, a tile's columns are split: each part
 * leaves its sums in scratch, waits for the others, and finishes its share of the tokens, adding the parts in order, so
 * that the result never depends on who was first. */
#include "kernels/cuda/linear_sm90_ptx.cuh"

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#if CUDART_VERSION < 12050
#define cudaGetDriverEntryPointByVersion(name, out, version, flags, result)                                            \
    cudaGetDriverEntryPoint(name, out, flags, result)
#endif

#include "kernels/cuda/cuda_math.cuh"
#include "kernels/cuda/linear_private.h"

enum {
    TILE_ROWS = 128, /* weight rows a block */
    TILE_COLS = 64,  /* columns a stage: one row of the 128-byte swizzle */
    CONSUMERS = 256, /* threads of the two warpgroups that multiply */
    THREADS = CONSUMERS + 128,
    GROUP_TOKENS = 8, /* tiles of tokens that are taken together, so that a wave is about square and L2 serves it */
    CHUNK = 64,       /* tokens on their way through shared memory to y at a time */
    CHUNK_BYTES = CHUNK * 128,
    SPLIT_MAX = 8, /* parts of a tile's columns */
};

/* Results leave through shared memory in chunks of CHUNK tokens, BUFFERS of them a warpgroup in turn. Stages: what
 * fits; fewer than 128 KB of weights on their way to a multiprocessor leave memory idle (64 KB: 3.1 instead of 3.8
 * TB/s). */
template <int BN_, int STAGES_> struct form {
    static constexpr int BN = BN_, STAGES = STAGES_, NT = BN / 8;
    static constexpr int BUFFERS = BN > CHUNK ? 2 : 1;
    static constexpr int W_BYTES = TILE_ROWS * 128, X_BYTES = BN * 128, STAGE_BYTES = W_BYTES + X_BYTES;
    static constexpr int OUT_BYTES = 2 * BUFFERS * CHUNK_BYTES;
    static constexpr int SHARED = STAGES * STAGE_BYTES + OUT_BYTES + 1024 /* to a multiple of 1024 */ + 256;
};

/* A product cut into items: tiles of 256 rows and BN tokens, each in `split` parts of its steps of 64 columns. */
struct work {
    int steps, tiles_m, tiles_n, split, items;
};

struct product {
    void *y;
    const float *bias;
    int64_t y_stride;
    float4 *partial;    /* [tiles][2][split][NT][CONSUMERS] */
    unsigned *arrivals; /* [tiles][2], zero between launches */
    int rows, out;
    work now;
    int box; /* tokens that each block fetches for both: no more than there are, as what lies outside is slow to fetch
              */
    bool gated, gelu, accumulate, out_f32;
    bool boxes;  /* y is written by tensor copies (and read, where added to), in chunks of tokens; else by value */
    bool stream; /* weights are read once */
};

/* ---- the order of work ----------------------------------------------------------------------------------------------
 */

struct item {
    int row, token, part, tile; /* of the cluster's first row */
};

static __device__ __forceinline__ item item_of(const work &p, int index, int bn) {
    item it;
    it.part = index % p.split;
    it.tile = index / p.split;
    const int group = it.tile / (GROUP_TOKENS * p.tiles_m), begin = group * GROUP_TOKENS;
    const int width = p.tiles_n - begin < GROUP_TOKENS ? p.tiles_n - begin : GROUP_TOKENS;
    const int at = it.tile - begin * p.tiles_m;
    it.row = at / width * 2 * TILE_ROWS;
    it.token = (begin + at % width) * bn;
    return it;
}

static __device__ __forceinline__ int part_begin(const work &p, int part) {
    return (int)((int64_t)p.steps * part / p.split);
}

/* ---- results --------------------------------------------------------------------------------------------------------
 */

static __device__ __forceinline__ uint32_t pack(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<uint32_t &>(pair);
}

static __device__ __forceinline__ float activate(float v, bool gelu) {
    if (!gelu) return __fdividef(v, 1.0f + __expf(-v)); /* 0 where the sum overflows */
    const float inner = 0.7978845608028654f * (v + 0.044715f * v * v * v);
    return __fdividef(v, 1.0f + __expf(-2.0f * inner)); /* v / 2 * (1 + tanh(inner)) */
}

static __device__ __forceinline__ void value_store(const product &p, int token, int row, float v) {
    if (token >= p.rows || row >= p.out) return;
    const int64_t at = (int64_t)token * p.y_stride + row;
    if (p.out_f32) {
        float *y = static_cast<float *>(p.y) + at;
        *y = p.accumulate ? v + *y : v;
    } else {
        __nv_bfloat16 *y = static_cast<__nv_bfloat16 *>(p.y) + at;
        *y = __float2bfloat16_rn(p.accumulate ? v + __bfloat162float(*y) : v);
    }
}

/* What becomes of the two tokens of one row that a thread has, or of gate and up of one output. */
static __device__ __forceinline__ void pair_store(const product &p, int token, int row, const float *s, float add_upper,
                                                  float add_lower) {
    if (p.gated) {
        const int at = row / 16 * 8 + row % 16;
        if (row >= p.out) return;
        value_store(p, token, at, activate(s[0] + add_upper, p.gelu) * (s[2] + add_lower));
        value_store(p, token + 1, at, activate(s[1] + add_upper, p.gelu) * (s[3] + add_lower));
        return;
    }
    value_store(p, token, row, s[0] + add_upper), value_store(p, token + 1, row, s[1] + add_upper);
    value_store(p, token, row + 8, s[2] + add_lower), value_store(p, token + 1, row + 8, s[3] + add_lower);
}

/* Two neighbours as bf16, what is stored of them added first. */
static __device__ __forceinline__ uint32_t pack_onto(uint32_t old, float low, float high) {
    const float2 before = __bfloat1622float2(reinterpret_cast<__nv_bfloat162 &>(old));
    return pack(low + before.x, high + before.y);
}

/* One chunk of tokens, tiles of 8 from FIRST on, as bf16 into shared memory: [token][64 rows, or 32 where gated], the
 * swizzle of the tensor copy that takes it from there. Where y is added to, it lies there already. */
template <class F, int FIRST>
static __device__ __forceinline__ void chunk_fill(const product &p, const float (&d)[F::NT * 4], uint32_t base,
                                                  int warp, int lane, float add_upper, float add_lower) {
    constexpr int COUNT = CHUNK / 8;
#pragma unroll
    for (int n = 0; n < COUNT; n += 2) {
        const float *s = d + 4 * (FIRST + n);
        const int first = n * 8 + lane % 8;
        if (p.gated) {
            const int to = first + (lane / 8 & 1) * 8;
            sm90::store_transposed_2(base + to * 64 + (warp ^ (to >> 1 & 3)) * 16,
                                     pack(activate(s[0] + add_upper, p.gelu) * (s[2] + add_lower),
                                          activate(s[1] + add_upper, p.gelu) * (s[3] + add_lower)),
                                     pack(activate(s[4] + add_upper, p.gelu) * (s[6] + add_lower),
                                          activate(s[5] + add_upper, p.gelu) * (s[7] + add_lower)));
        } else {
            const int to = first + lane / 16 * 8, piece = 2 * warp + (lane / 8 & 1);
            const uint32_t at = base + to * 128 + (piece ^ (to & 7)) * 16;
            if (p.accumulate) {
                const uint4 old = sm90::load_transposed_4(at);
                sm90::store_transposed_4(at, pack_onto(old.x, s[0] + add_upper, s[1] + add_upper),
                                         pack_onto(old.y, s[2] + add_lower, s[3] + add_lower),
                                         pack_onto(old.z, s[4] + add_upper, s[5] + add_upper),
                                         pack_onto(old.w, s[6] + add_lower, s[7] + add_lower));
            } else {
                sm90::store_transposed_4(
                    at, pack(s[0] + add_upper, s[1] + add_upper), pack(s[2] + add_lower, s[3] + add_lower),
                    pack(s[4] + add_upper, s[5] + add_upper), pack(s[6] + add_lower, s[7] + add_lower));
            }
        }
    }
}

/* A warpgroup's room for chunks: BUFFERS of them, and barriers for what y had before, where it is added to. */
struct chunk_room {
    uint32_t at, came; /* came: [BUFFERS] barriers */
    uint32_t phases;   /* a bit a buffer */
};

/* By one thread, when the chunk that was there has left: y's values of the tiles of tokens from `tile` on. */
template <class F>
static __device__ __forceinline__ void chunk_ask(const CUtensorMap *map_y, const chunk_room &room, int row, int token,
                                                 int tile) {
    const int buffer = tile / (CHUNK / 8) % F::BUFFERS;
    sm90::barrier_expect(room.came + 8 * buffer, CHUNK_BYTES);
    sm90::copy_box(room.at + buffer * CHUNK_BYTES, map_y, room.came + 8 * buffer, row, token + tile * 8,
                   sm90::policy_last());
}

/* Chunks from FIRST on that lie in [first, last). Where y is added to, the first BUFFERS have been asked for. */
template <class F, int FIRST>
static __device__ __forceinline__ void
chunks_store(const product &p, const CUtensorMap *map_y, const float (&d)[F::NT * 4], int row, int token, int first,
             int last, chunk_room &room, int group, int thread, float add_upper, float add_lower) {
    if (FIRST >= first && FIRST < last) {
        constexpr int BUFFER = FIRST / (CHUNK / 8) % F::BUFFERS;
        const uint32_t base = room.at + BUFFER * CHUNK_BYTES;
        if (p.accumulate) {
            const int behind = FIRST + (F::BUFFERS - 1) * (CHUNK / 8); /* into the place of the chunk before this one */
            if (thread == 0 && FIRST > first && behind < last) {
                sm90::copies_wait_read<0>();
                chunk_ask<F>(map_y, room, row, token, behind);
            }
            sm90::barrier_wait(room.came + 8 * BUFFER, room.phases >> BUFFER & 1);
            room.phases ^= 1u << BUFFER;
        } else {
            if (thread == 0) sm90::copies_wait_read<F::BUFFERS - 1>(); /* what was in this place has left it */
            sm90::named_sync<128>(1 + group);
        }
        chunk_fill<F, FIRST>(p, d, base, thread / 32, thread % 32, add_upper, add_lower);
        sm90::fence_for_copies();
        sm90::named_sync<128>(1 + group);
        if (thread == 0) {
            sm90::copy_box_out(map_y, base, p.gated ? row / 2 : row, token + FIRST * 8);
            sm90::copies_commit();
        }
    }
    if constexpr (FIRST + CHUNK / 8 < F::NT)
        chunks_store<F, FIRST + CHUNK / 8>(p, map_y, d, row, token, first, last, room, group, thread, add_upper,
                                           add_lower);
}

/* Sums of tokens [first, last) tiles of 8 to y. row: of the warpgroup's first; room: its two chunks. */
template <class F>
static __device__ __forceinline__ void results_store(const product &p, const CUtensorMap *map_y, float (&d)[F::NT * 4],
                                                     int row, int token, int first, int last, chunk_room &room,
                                                     int group) {
    int thread = threadIdx.x % 128;
    asm volatile("" : "+r"(thread)); /* else addresses of all tiles are kept in registers from item to item */
    const int warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const int upper = row + warp * 16 + g, lower = upper + 8;
    float add_upper = 0.0f, add_lower = 0.0f;
    if (p.bias && upper < p.out) { /* out is a multiple of 16 where gated */
        add_upper = p.bias[p.gated ? upper / 16 * 8 + upper % 16 : upper];
        if (p.gated)
            add_lower = p.bias[p.out / 2 + upper / 16 * 8 + upper % 16];
        else if (lower < p.out)
            add_lower = p.bias[lower];
    }
    if (p.boxes) {
        chunks_store<F, 0>(p, map_y, d, row, token, first, last, room, group, thread, add_upper, add_lower);
        return;
    }
#pragma unroll
    for (int n = 0; n < F::NT; n++) {
        asm volatile("" ::: "memory"); /* one tile of 8 at a time: addresses of all would not fit in registers */
        if (n >= first && n < last) pair_store(p, token + n * 8 + 2 * t, upper, d + 4 * n, add_upper, add_lower);
    }
}

/* Adds the other parts of tiles [FIRST, FIRST + COUNT) to part PART's own, in order. */
template <class F, int PART, int COUNT>
static __device__ __forceinline__ void share_add(const product &p, float (&d)[F::NT * 4], const float4 *base) {
    constexpr int FIRST = PART * COUNT, BATCH = COUNT < 8 ? COUNT : 8;
    for (int k = 0; k < p.now.split; k++) {
        if (k == PART) continue;
#pragma unroll
        for (int n = FIRST; n < FIRST + COUNT; n += BATCH) {
            float4 v[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; i++) v[i] = __ldcg(base + ((int64_t)k * F::NT + n + i) * CONSUMERS);
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                float *s = d + 4 * (n + i);
                s[0] += v[i].x, s[1] += v[i].y, s[2] += v[i].z, s[3] += v[i].w;
            }
        }
    }
}

template <class F, int SPLIT, int PART = 0>
static __device__ __forceinline__ void share_find(const product &p, float (&d)[F::NT * 4], const float4 *base,
                                                  int part) {
    if constexpr (F::NT / SPLIT >= 1) {
        if (part == PART) share_add<F, PART, F::NT / SPLIT>(p, d, base);
        if constexpr (PART + 1 < SPLIT) share_find<F, SPLIT, PART + 1>(p, d, base, part);
    }
}

/* The last one out leaves zero for the next launch. */
static __device__ __forceinline__ void parts_leave(const product &p, unsigned *arrivals, int thread) {
    if (thread == 0 && atomicAdd(arrivals, 1u) == 2 * (unsigned)p.now.split - 1) atomicExch(arrivals, 0u);
}

/* The parts of a tile meet: each adds all of them for its own share of the tokens. */
template <class F>
static __device__ __forceinline__ void parts_join(const product &p, float (&d)[F::NT * 4], int slot, int part,
                                                  int first, int last, int live) {
    int thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    float4 *base = p.partial + (int64_t)slot * p.now.split * F::NT * CONSUMERS + thread;
    float4 *mine = base + (int64_t)part * F::NT * CONSUMERS;
#pragma unroll
    for (int n = 0; n < F::NT; n++)
        if ((n < first || n >= last) && n < live)
            __stcg(mine + n * CONSUMERS, make_float4(d[4 * n], d[4 * n + 1], d[4 * n + 2], d[4 * n + 3]));
    sm90::named_sync<CONSUMERS>(3);
    unsigned *arrivals = p.arrivals + slot;
    if (thread == 0) {
        __threadfence();
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrivals) : "memory");
        const uint64_t begin_ns = sm90::clock_ns();
        unsigned seen;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(arrivals) : "memory");
            if (sm90::clock_ns() - begin_ns > 2000000000u) sm90::give_up(2);
        } while (seen < (unsigned)p.now.split);
    }
    sm90::named_sync<CONSUMERS>(3);
    if (live <= first) return parts_leave(p, arrivals, thread);
    if (p.now.split == 2) share_find<F, 2>(p, d, base, part);
    if (p.now.split == 4) share_find<F, 4>(p, d, base, part);
    if (p.now.split == 8) share_find<F, 8>(p, d, base, part);
    sm90::named_sync<CONSUMERS>(3);
    parts_leave(p, arrivals, thread);
}

/* ---- the kernel -----------------------------------------------------------------------------------------------------
 */

/* What the two sides of the ring share: shared-memory addresses, and who this block is. */
struct place {
    uint32_t stages, full, empty, room, came; /* [STAGES] stages, barriers of filled and free ones; chunk_room's two */
    int rank, cluster, clusters;
};

/* The side that fetches; one thread. */
template <class F>
static __device__ __forceinline__ void stages_fill(const CUtensorMap *map_w, const CUtensorMap *map_x, const product &p,
                                                   const place &at) {
    const uint64_t last = sm90::policy_last(), w_policy = p.stream ? sm90::policy_first() : last;
    const auto fetch_w = [&](const item &it, int step, int to) {
        sm90::barrier_expect(at.full + 8 * to, F::W_BYTES + 2 * p.box * 128);
        sm90::copy_box(at.stages + to * F::STAGE_BYTES, map_w, at.full + 8 * to, step * TILE_COLS,
                       it.row + at.rank * TILE_ROWS, w_policy);
    };
    const auto fetch_x = [&](const item &it, int step, int to) {
        sm90::copy_box_both(at.stages + to * F::STAGE_BYTES + F::W_BYTES + at.rank * p.box * 128, map_x,
                            at.full + 8 * to, step * TILE_COLS, it.token + at.rank * p.box, last);
    };
    sm90::map_prefetch(map_w);
    sm90::map_prefetch(map_x);
    /* The first ring of weights comes while the kernel before still runs: only x is its result. */
    const item first = item_of(p.now, at.cluster, F::BN);
    const int begin = part_begin(p.now, first.part), first_end = part_begin(p.now, first.part + 1);
    const int early = first_end - begin < F::STAGES ? first_end - begin : F::STAGES;
    for (int i = 0; i < early; i++) fetch_w(first, begin + i, i);
    grid_wait();
    for (int i = 0; i < early; i++) fetch_x(first, begin + i, i);
    int slot = early % F::STAGES;
    uint32_t phase = early / F::STAGES;
    for (int index = at.cluster; index < p.now.items; index += at.clusters) {
        const item it = item_of(p.now, index, F::BN);
        const int from = part_begin(p.now, it.part) + (index == at.cluster ? early : 0);
        for (int step = from, end = part_begin(p.now, it.part + 1); step < end; step++) {
            sm90::barrier_wait(at.empty + 8 * slot, phase ^ 1);
            fetch_w(it, step, slot);
            fetch_x(it, step, slot);
            if (++slot == F::STAGES) slot = 0, phase ^= 1;
        }
    }
    grid_release();
}

/* The side that multiplies; warpgroup `group` has 64 rows of the block's 128. */
template <class F>
static __device__ __forceinline__ void stages_multiply(const product &p, const CUtensorMap *map_y, const place &at,
                                                       int group) {
    const int signal = threadIdx.x % 128; /* threads 0 and 1 tell block 0 and 1 that a stage is free */
    float d[F::NT * 4];
    chunk_room room = {at.room + group * F::BUFFERS * CHUNK_BYTES, at.came + 8 * group * F::BUFFERS, 0};
    int slot = 0;
    uint32_t phase = 0;
    grid_wait();
    for (int index = at.cluster; index < p.now.items; index += at.clusters) {
        const item it = item_of(p.now, index, F::BN);
        const int begin = part_begin(p.now, it.part), end = part_begin(p.now, it.part + 1);
        const int row = it.row + at.rank * TILE_ROWS + group * 64;
        const int first = F::NT / p.now.split * it.part, last = first + F::NT / p.now.split;
        if (p.boxes && p.accumulate && signal == 0) { /* y comes while the products are made */
            sm90::copies_wait_read<0>();
            for (int i = 0, n = first; i < F::BUFFERS && n < last; i++, n += CHUNK / 8)
                chunk_ask<F>(map_y, room, row, it.token, n);
        }
        for (int step = begin; step < end; step++) {
            sm90::barrier_wait(at.full + 8 * slot, phase);
            const uint32_t stage = at.stages + slot * F::STAGE_BYTES;
            const uint64_t a = sm90::tile_of(stage + group * 64 * 128), b = sm90::tile_of(stage + F::W_BYTES);
            sm90::wgmma_fence();
#pragma unroll
            for (int k = 0; k < TILE_COLS / 16; k++) /* 16 columns are 32 bytes, in units of 16 */
                sm90::wgmma<F::BN>::run(d, a + 2 * k, b + 2 * k, step > begin || k > 0);
            sm90::wgmma_commit();
            sm90::wgmma_wait<1>(); /* the step before is done: its stage is free */
            if (step > begin && signal < 2)
                sm90::barrier_arrive_at(at.empty + 8 * (slot ? slot - 1 : F::STAGES - 1), signal);
            if (++slot == F::STAGES) slot = 0, phase ^= 1;
        }
        sm90::wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < F::NT * 4; i++) asm volatile("" : "+f"(d[i])::"memory");
        if (signal < 2) sm90::barrier_arrive_at(at.empty + 8 * (slot ? slot - 1 : F::STAGES - 1), signal);
        if (p.now.split > 1) {
            const int live = (p.rows - it.token + 7) / 8; /* tiles of 8 that have tokens */
            parts_join<F>(p, d, it.tile * 2 + at.rank, it.part, first, last, live);
        }
        results_store<F>(p, map_y, d, row, it.token, first, last, room, group);
    }
    if (signal == 0) sm90::copies_wait();
}

template <class F>
static __global__ void __launch_bounds__(THREADS, 1)
    sm90_kernel(const __grid_constant__ CUtensorMap map_w, const __grid_constant__ CUtensorMap map_x,
                const __grid_constant__ CUtensorMap map_y, const __grid_constant__ product p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ unsigned char shared_raw[];
    const int group = threadIdx.x / 128;
    place at;
    at.stages = (sm90::shared_of(shared_raw) + 1023) / 1024 * 1024;
    at.room = at.stages + F::STAGES * F::STAGE_BYTES;
    at.full = at.room + F::OUT_BYTES, at.empty = at.full + 8 * F::STAGES, at.came = at.empty + 8 * F::STAGES;
    at.rank = (int)sm90::cluster_rank(), at.cluster = (int)blockIdx.x / 2, at.clusters = (int)gridDim.x / 2;
    if (threadIdx.x == 0) {
        for (int s = 0; s < F::STAGES; s++) {
            sm90::barrier_init(at.full + 8 * s, 1);
            sm90::barrier_init(at.empty + 8 * s, 4); /* two warpgroups of two blocks */
        }
        for (int i = 0; i < 2 * F::BUFFERS; i++) sm90::barrier_init(at.came + 8 * i, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    sm90::cluster_sync();
    if (group == 2) {
        sm90::registers_give<40>();
        if (threadIdx.x == CONSUMERS) stages_fill<F>(&map_w, &map_x, p, at);
    } else {
        sm90::registers_take<232>();
        stages_multiply<F>(p, &map_y, at, group);
    }
    sm90::cluster_sync(); /* no block leaves while the other may still write to it */
#endif
}

/* ---- the launcher ---------------------------------------------------------------------------------------------------
 * Stages: what fits. */

typedef form<64, 8> form64;
typedef form<128, 6> form128;
typedef form<256, 4> form256;

typedef CUresult (*encode_function)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                    const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                                    CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* [rows, cols] bf16 in boxes of box_rows rows and 64 columns (or 32); what lies outside reads as zero. */
static int map_make(const struct linear_sm90 *s, CUtensorMap *map, const void *data, int64_t rows, int64_t cols,
                    int64_t stride, int box_rows, int box_cols = TILE_COLS) {
    const cuuint64_t sizes[2] = {(cuuint64_t)cols, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)stride * 2};
    const cuuint32_t box[2] = {(cuuint32_t)box_cols, (cuuint32_t)box_rows}, steps[2] = {1, 1};
    const CUresult code = reinterpret_cast<encode_function>(s->encode)(
        map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void *>(data), sizes, strides, box, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE, box_cols == TILE_COLS ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return code == CUDA_SUCCESS ? (int)cudaSuccess : (int)cudaErrorInvalidValue;
}

/* A launch in clusters of two blocks, that may begin while the kernel before ends. */
struct pairs {
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attributes[2] = {};
    pairs(int clusters, size_t shared, cudaStream_t stream) {
        config.gridDim = dim3(2 * (unsigned)clusters), config.blockDim = dim3(THREADS);
        config.dynamicSmemBytes = shared, config.stream = stream;
        attributes[0].id = cudaLaunchAttributeClusterDimension;
        attributes[0].val.clusterDim.x = 2, attributes[0].val.clusterDim.y = 1, attributes[0].val.clusterDim.z = 1;
        attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[1].val.programmaticStreamSerializationAllowed = 1;
        config.attrs = attributes, config.numAttrs = 2;
    }
};

template <class F> static cudaError_t form_open(struct linear_sm90 *s) {
    cudaError_t e = cudaFuncSetAttribute(sm90_kernel<F>, cudaFuncAttributeMaxDynamicSharedMemorySize, F::SHARED);
    if (e) return e;
    pairs all(66, F::SHARED, NULL);
    int clusters = 0;
    e = cudaOccupancyMaxActiveClusters(&clusters, sm90_kernel<F>, &all.config);
    if (!e && (s->clusters == 0 || clusters < s->clusters)) s->clusters = clusters;
    return e;
}

struct maps {
    CUtensorMap w, x, y;
};

template <class F>
static cudaError_t form_launch(const struct linear_sm90 *s, cudaStream_t stream, const maps &m, const product &p) {
    pairs launch(p.now.items < s->clusters ? p.now.items : s->clusters, F::SHARED, stream);
    return cudaLaunchKernelEx(&launch.config, sm90_kernel<F>, m.w, m.x, m.y, p);
}

/* Tokens of a tile. */
static int tokens_of(int rows) {
    return rows <= 64 ? 64 : rows <= 128 ? 128 : 256;
}

/* Each part of a tile must have a cluster of its own at once, a share of the tokens (a tile of 8) and some steps. */
static work work_of(const struct linear_sm90 *s, int rows, int out, int cols, int bn) {
    work w;
    w.steps = (cols + TILE_COLS - 1) / TILE_COLS;
    w.tiles_m = (out + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS), w.tiles_n = (rows + bn - 1) / bn;
    const int tiles = w.tiles_m * w.tiles_n;
    for (w.split = 1; 2 * w.split <= SPLIT_MAX && 2 * w.split * tiles <= s->clusters && 2 * w.split * 8 <= bn &&
                      w.steps >= 8 * w.split;)
        w.split *= 2;
    w.items = tiles * w.split;
    return w;
}

extern "C" int linear_sm90_map(const struct linear_sm90 *s, void *map, const void *data, int64_t rows, int64_t cols,
                               int64_t stride, int box_rows) {
    return map_make(s, static_cast<CUtensorMap *>(map), data, rows, cols, stride, box_rows);
}

extern "C" int linear_sm90_open(struct linear_sm90 *s, int sms) {
    s->sms = sms;
    cudaDriverEntryPointQueryResult found;
    cudaError_t e =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &s->encode, 12000, cudaEnableDefault, &found);
    if (!e && (found != cudaDriverEntryPointSuccess || !s->encode)) e = cudaErrorNotSupported;
    if (!e) e = form_open<form64>(s);
    if (!e) e = form_open<form128>(s);
    if (!e) e = form_open<form256>(s);
    if (!e && s->clusters < 1) e = cudaErrorNotSupported;
    if (!e) e = cudaMalloc((void **)&s->arrivals, LINEAR_SM90_ARRIVALS * sizeof(unsigned));
    if (!e) e = cudaMemset(s->arrivals, 0, LINEAR_SM90_ARRIVALS * sizeof(unsigned));
    return (int)e;
}

extern "C" void linear_sm90_close(struct linear_sm90 *s) {
    if (s->arrivals) cudaFree(s->arrivals);
    s->arrivals = NULL;
}

extern "C" bool linear_sm90_takes(const struct linear_product *p) {
    return p->dtype == DTYPE_BF16 && p->x_stride % 8 == 0 && (uintptr_t)p->x % 16 == 0 && !(p->gated && p->accumulate);
}

extern "C" double linear_sm90_fill(const struct linear_sm90 *s, const struct linear_product *p) {
    const work w = work_of(s, p->rows, p->out, p->cols, tokens_of(p->rows));
    const int rounds = (w.items + s->clusters - 1) / s->clusters;
    return (double)w.items / rounds / s->clusters;
}

extern "C" int linear_sm90_launch(const struct linear_sm90 *s, cudaStream_t stream, void *scratch,
                                  const struct linear_product *args) {
    const int rows = args->rows, bn = tokens_of(rows);
    product p = {};
    p.y = args->y, p.bias = args->bias, p.y_stride = args->y_stride;
    p.partial = static_cast<float4 *>(scratch), p.arrivals = s->arrivals;
    p.rows = rows, p.out = args->out, p.now = work_of(s, rows, args->out, args->cols, bn);
    p.gated = args->gated, p.gelu = args->activation == ACTIVATION_GELU_TANH;
    p.accumulate = args->accumulate, p.out_f32 = args->out_f32;
    p.boxes =
        !args->out_f32 && args->y_stride % 8 == 0 && (uintptr_t)args->y % 16 == 0 && bn / p.now.split % CHUNK == 0;
    p.stream = p.now.tiles_n == 1;
    p.box = p.stream ? (rows + 15) / 16 * 8 : bn / 2; /* whole repeats of the swizzle */
    maps m = {};
    int e = map_make(s, &m.w, args->w, args->out, args->cols, args->pitch, TILE_ROWS);
    if (!e) e = map_make(s, &m.x, args->x, rows, args->cols, args->x_stride, p.box);
    if (!e && p.boxes)
        e = map_make(s, &m.y, args->y, rows, args->gated ? args->out / 2 : args->out, args->y_stride, CHUNK,
                     args->gated ? 32 : 64);
    if (e) return e;
    switch (bn) {
    case 64:
        return (int)form_launch<form64>(s, stream, m, p);
    case 128:
        return (int)form_launch<form128>(s, stream, m, p);
    default:
        return (int)form_launch<form256>(s, stream, m, p);
    }
}
