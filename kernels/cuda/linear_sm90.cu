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

#include "kernels/cuda/linear_private.h"

enum {
    TILE_ROWS = 128, /* weight rows a block */
    TILE_COLS = 64,  /* columns a stage: one row of the 128-byte swizzle */
    CONSUMERS = 256, /* threads of the two warpgroups that multiply */
    THREADS = CONSUMERS + 128,
    GROUP_TOKENS = 8, /* tiles of tokens that are taken together, so that a wave is about square and L2 serves it */
    CHUNK = 64,       /* tokens on their way through shared memory to y at a time */
};

template <int BN_, int STAGES_> struct form {
    static constexpr int BN = BN_, STAGES = STAGES_, NT = BN / 8;
    static constexpr int W_BYTES = TILE_ROWS * 128, X_BYTES = BN * 128, STAGE_BYTES = W_BYTES + X_BYTES;
    static constexpr int OUT_BYTES = 2 * CHUNK * 128; /* a chunk a warpgroup */
    static constexpr int SHARED = STAGES * STAGE_BYTES + OUT_BYTES + 1024 /* to a multiple of 1024 */ + 256;
};

struct product {
    void *y;
    const float *bias;
    int64_t y_stride;
    float4 *partial;    /* [tiles][2][split][NT][CONSUMERS] */
    unsigned *arrivals; /* [tiles][2], zero between launches */
    int rows, out, steps;
    int tiles_m, tiles_n, split, items;
    bool gated, gelu, accumulate, out_f32, pieces; /* pieces: y takes 16 bytes at a time */
    bool stream;                                   /* weights are read once */
};

/* ---- the order of work ----------------------------------------------------------------------------------------------
 */

struct item {
    int row, token, part, tile; /* of the cluster's first row */
};

static __device__ __forceinline__ item item_of(const product &p, int index, int bn) {
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

static __device__ __forceinline__ int part_begin(const product &p, int part) {
    return (int)((int64_t)p.steps * part / p.split);
}

/* ---- results --------------------------------------------------------------------------------------------------------
 */

static __device__ __forceinline__ uint32_t pack(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<uint32_t &>(pair);
}

static __device__ __forceinline__ float activate(float v, bool gelu) {
    if (!gelu) return v / (1.0f + __expf(-v));
    const float inner = 0.7978845608028654f * (v + 0.044715f * v * v * v);
    return v / (1.0f + __expf(-2.0f * inner)); /* v / 2 * (1 + tanh(inner)) */
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

/* Sums of tokens [first, last) tiles of 8 to y. row: of the warpgroup's first; room: its chunk of shared memory. */
template <class F>
static __device__ __forceinline__ void results_store(const product &p, float (&d)[F::NT * 4], int row, int token,
                                                     int first, int last, unsigned char *room, int group) {
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
    if (!p.pieces) {
#pragma unroll
        for (int n = 0; n < F::NT; n++) {
            asm volatile("" ::: "memory"); /* one tile of 8 at a time: addresses of all would not fit in registers */
            if (n < first || n >= last) continue;
            const int at = token + n * 8 + 2 * t;
            const float *s = d + 4 * n;
            value_store(p, at, upper, s[0] + add_upper), value_store(p, at + 1, upper, s[1] + add_upper);
            value_store(p, at, lower, s[2] + add_lower), value_store(p, at + 1, lower, s[3] + add_lower);
        }
        return;
    }
    const uint32_t base = sm90::shared_of(room);
    const int width = p.gated ? 4 : 8; /* pieces of 16 bytes a token */
    const int out_row = p.gated ? row / 2 : row, out_rows = p.gated ? p.out / 2 : p.out;
    __nv_bfloat16 *y = static_cast<__nv_bfloat16 *>(p.y);
#pragma unroll
    for (int chunk = 0; chunk < F::NT; chunk += CHUNK / 8) {
        const int end = chunk + CHUNK / 8 < F::NT ? chunk + CHUNK / 8 : F::NT;
        if (end <= first || chunk >= last) continue;
#pragma unroll
        for (int n = chunk; n < end; n += 2) {
            asm volatile("" ::: "memory");
            if (n < first || n >= last) continue;
            const float *s = d + 4 * n;
            const int row_of = (n - chunk) * 8 + lane % 8; /* token in the chunk, of matrix 0 */
            if (p.gated) {
                const uint32_t a = pack(activate(s[0] + add_upper, p.gelu) * (s[2] + add_lower),
                                        activate(s[1] + add_upper, p.gelu) * (s[3] + add_lower));
                const uint32_t b = pack(activate(s[4] + add_upper, p.gelu) * (s[6] + add_lower),
                                        activate(s[5] + add_upper, p.gelu) * (s[7] + add_lower));
                const int to = row_of + (lane / 8 & 1) * 8;
                sm90::store_transposed_2(base + to * 64 + (warp ^ (to >> 1 & 3)) * 16, a, b);
            } else {
                const int to = row_of + lane / 16 * 8, piece = 2 * warp + (lane / 8 & 1);
                sm90::store_transposed_4(
                    base + to * 128 + (piece ^ (to & 7)) * 16, pack(s[0] + add_upper, s[1] + add_upper),
                    pack(s[2] + add_lower, s[3] + add_lower), pack(s[4] + add_upper, s[5] + add_upper),
                    pack(s[6] + add_lower, s[7] + add_lower));
            }
        }
        sm90::named_sync<128>(1 + group);
        const int from = chunk > first ? 0 : (first - chunk) * 8, to = (end < last ? end : last) * 8 - chunk * 8;
        for (int i = from * width + thread; i < to * width; i += 128) {
            const int at = i / width, piece = i % width;
            const int swizzled = p.gated ? piece ^ (at >> 1 & 3) : piece ^ (at & 7);
            const uint4 v = *reinterpret_cast<const uint4 *>(room + at * width * 16 + swizzled * 16);
            const int to_token = token + chunk * 8 + at, to_row = out_row + piece * 8;
            if (to_token < p.rows && to_row < out_rows)
                *reinterpret_cast<uint4 *>(y + (int64_t)to_token * p.y_stride + to_row) = v;
        }
        sm90::named_sync<128>(1 + group);
    }
}

/* The parts of a tile meet: each adds all parts, in order, for its own share of the tokens. */
template <class F>
static __device__ __forceinline__ void parts_join(const product &p, float (&d)[F::NT * 4], int slot, int part,
                                                  int first, int last) {
    int thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    float4 *base = p.partial + (int64_t)slot * p.split * F::NT * CONSUMERS + thread;
    float4 *mine = base + (int64_t)part * F::NT * CONSUMERS;
#pragma unroll
    for (int n = 0; n < F::NT; n++)
        if (n < first || n >= last)
            __stcg(mine + n * CONSUMERS, make_float4(d[4 * n], d[4 * n + 1], d[4 * n + 2], d[4 * n + 3]));
    __threadfence();
    sm90::named_sync<CONSUMERS>(3);
    unsigned *arrivals = p.arrivals + slot;
    if (thread == 0) {
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrivals) : "memory");
        const uint64_t begin_ns = sm90::clock_ns();
        unsigned seen;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(arrivals) : "memory");
            if (sm90::clock_ns() - begin_ns > 2000000000u) sm90::give_up(2);
        } while (seen < (unsigned)p.split);
    }
    sm90::named_sync<CONSUMERS>(3);
#pragma unroll
    for (int n = 0; n < F::NT; n++) {
        asm volatile("" ::: "memory");
        if (n < first || n >= last) continue;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int k = 0; k < p.split; k++) {
            float4 v = make_float4(d[4 * n], d[4 * n + 1], d[4 * n + 2], d[4 * n + 3]);
            if (k != part) v = __ldcg(base + ((int64_t)k * F::NT + n) * CONSUMERS);
            sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
        }
        d[4 * n] = sum.x, d[4 * n + 1] = sum.y, d[4 * n + 2] = sum.z, d[4 * n + 3] = sum.w;
    }
    /* The last one out leaves zero for the next launch. */
    sm90::named_sync<CONSUMERS>(3);
    if (thread == 0 && atomicAdd(arrivals, 1u) == 2 * (unsigned)p.split - 1) atomicExch(arrivals, 0u);
}

/* ---- the kernel -----------------------------------------------------------------------------------------------------
 */

template <class F>
static __global__ void __launch_bounds__(THREADS, 1)
    sm90_kernel(const __grid_constant__ CUtensorMap map_w, const __grid_constant__ CUtensorMap map_x,
                const __grid_constant__ product p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ unsigned char shared_raw[];
    unsigned char *stages = shared_raw + ((1024 - (sm90::shared_of(shared_raw) & 1023)) & 1023);
    unsigned char *room = stages + F::STAGES * F::STAGE_BYTES;
    const uint32_t stage_at = sm90::shared_of(stages);
    const uint32_t full = sm90::shared_of(room + F::OUT_BYTES), empty = full + 8 * F::STAGES;
    const int rank = (int)sm90::cluster_rank(), cluster = (int)blockIdx.x / 2, clusters = (int)gridDim.x / 2;
    const int group = threadIdx.x / 128;
    if (threadIdx.x == 0) {
        for (int s = 0; s < F::STAGES; s++) {
            sm90::barrier_init(full + 8 * s, 1);
            sm90::barrier_init(empty + 8 * s, 4); /* two warpgroups of two blocks */
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    sm90::cluster_sync();
    int slot = 0;
    uint32_t phase = 0;
    if (group == 2) {
        sm90::registers_give<40>();
        if (threadIdx.x == CONSUMERS) {
            sm90::map_prefetch(&map_w);
            sm90::map_prefetch(&map_x);
            const uint64_t last = sm90::policy_last(), w_policy = p.stream ? sm90::policy_first() : last;
            for (int index = cluster; index < p.items; index += clusters) {
                const item it = item_of(p, index, F::BN);
                const int row = it.row + rank * TILE_ROWS, token = it.token + rank * (F::BN / 2);
                for (int step = part_begin(p, it.part), end = part_begin(p, it.part + 1); step < end; step++) {
                    const uint32_t stage = stage_at + slot * F::STAGE_BYTES;
                    sm90::barrier_wait(empty + 8 * slot, phase ^ 1);
                    sm90::barrier_expect(full + 8 * slot, F::STAGE_BYTES);
                    sm90::copy_box(stage, &map_w, full + 8 * slot, step * TILE_COLS, row, w_policy);
                    sm90::copy_box_both(stage + F::W_BYTES + rank * (F::X_BYTES / 2), &map_x, full + 8 * slot,
                                        step * TILE_COLS, token, last);
                    if (++slot == F::STAGES) slot = 0, phase ^= 1;
                }
            }
        }
    } else {
        sm90::registers_take<232>();
        float d[F::NT * 4];
        for (int index = cluster; index < p.items; index += clusters) {
            const item it = item_of(p, index, F::BN);
            const int begin = part_begin(p, it.part), end = part_begin(p, it.part + 1);
            for (int step = begin; step < end; step++) {
                sm90::barrier_wait(full + 8 * slot, phase);
                const uint32_t stage = stage_at + slot * F::STAGE_BYTES;
                const uint64_t a = sm90::tile_of(stage + group * 64 * 128), b = sm90::tile_of(stage + F::W_BYTES);
                sm90::wgmma_fence();
#pragma unroll
                for (int k = 0; k < TILE_COLS / 16; k++) /* 16 columns are 32 bytes, in units of 16 */
                    sm90::wgmma<F::BN>::run(d, a + 2 * k, b + 2 * k, step > begin || k > 0);
                sm90::wgmma_commit();
                sm90::wgmma_wait<1>(); /* the step before is done: its stage is free */
                if (step > begin && threadIdx.x % 128 < 2)
                    sm90::barrier_arrive_at(empty + 8 * (slot ? slot - 1 : F::STAGES - 1), threadIdx.x % 128);
                if (++slot == F::STAGES) slot = 0, phase ^= 1;
            }
            sm90::wgmma_wait<0>();
#pragma unroll
            for (int i = 0; i < F::NT * 4; i++) asm volatile("" : "+f"(d[i])::"memory");
            if (threadIdx.x % 128 < 2)
                sm90::barrier_arrive_at(empty + 8 * (slot ? slot - 1 : F::STAGES - 1), threadIdx.x % 128);
            int first = 0, last = F::NT;
            if (p.split > 1) {
                first = F::NT / p.split * it.part, last = first + F::NT / p.split;
                parts_join<F>(p, d, it.tile * 2 + rank, it.part, first, last);
            }
            results_store<F>(p, d, it.row + rank * TILE_ROWS + group * 64, it.token, first, last,
                             room + group * CHUNK * 128, group);
        }
    }
    sm90::cluster_sync(); /* no block leaves while the other may still write to it */
#endif
}

/* ---- the launcher ---------------------------------------------------------------------------------------------------
 * Stages: what fits beside 16 KB for results, at least 160 KB on their way to a multiprocessor. */

typedef form<16, 10> form16;
typedef form<32, 9> form32;
typedef form<64, 8> form64;
typedef form<128, 6> form128;
typedef form<256, 4> form256;

typedef CUresult (*encode_function)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                    const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                                    CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* [rows, cols] bf16 in boxes of box_rows rows and 64 columns; what lies outside reads as zero. */
static int map_make(const struct linear_sm90 *s, CUtensorMap *map, const void *data, int64_t rows, int64_t cols,
                    int64_t stride, int box_rows) {
    const cuuint64_t sizes[2] = {(cuuint64_t)cols, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)stride * 2};
    const cuuint32_t box[2] = {TILE_COLS, (cuuint32_t)box_rows}, steps[2] = {1, 1};
    const CUresult code = reinterpret_cast<encode_function>(s->encode)(
        map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void *>(data), sizes, strides, box, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return code == CUDA_SUCCESS ? (int)cudaSuccess : (int)cudaErrorInvalidValue;
}

/* A launch in clusters of two blocks. */
struct pairs {
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute cluster[1] = {};
    pairs(int clusters, size_t shared, cudaStream_t stream) {
        config.gridDim = dim3(2 * (unsigned)clusters), config.blockDim = dim3(THREADS);
        config.dynamicSmemBytes = shared, config.stream = stream;
        cluster[0].id = cudaLaunchAttributeClusterDimension;
        cluster[0].val.clusterDim.x = 2, cluster[0].val.clusterDim.y = 1, cluster[0].val.clusterDim.z = 1;
        config.attrs = cluster, config.numAttrs = 1;
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

template <class F>
static cudaError_t form_launch(const struct linear_sm90 *s, cudaStream_t stream, const CUtensorMap &w,
                               const CUtensorMap &x, const product &p) {
    pairs launch(p.items < s->clusters ? p.items : s->clusters, F::SHARED, stream);
    return cudaLaunchKernelEx(&launch.config, sm90_kernel<F>, w, x, p);
}

extern "C" int linear_sm90_open(struct linear_sm90 *s) {
    cudaDriverEntryPointQueryResult found;
    cudaError_t e =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &s->encode, 12000, cudaEnableDefault, &found);
    if (!e && (found != cudaDriverEntryPointSuccess || !s->encode)) e = cudaErrorNotSupported;
    if (!e) e = form_open<form16>(s);
    if (!e) e = form_open<form32>(s);
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

extern "C" int linear_sm90_launch(const struct linear_sm90 *s, cudaStream_t stream, void *scratch,
                                  const struct linear_product *args) {
    const int rows = args->rows;
    const int bn = rows <= 16 ? 16 : rows <= 32 ? 32 : rows <= 64 ? 64 : rows <= 128 ? 128 : 256;
    product p = {};
    p.y = args->y, p.bias = args->bias, p.y_stride = args->y_stride;
    p.partial = static_cast<float4 *>(scratch), p.arrivals = s->arrivals;
    p.rows = rows, p.out = args->out, p.steps = (args->cols + TILE_COLS - 1) / TILE_COLS;
    p.tiles_m = (args->out + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS), p.tiles_n = (rows + bn - 1) / bn;
    const int tiles = p.tiles_m * p.tiles_n;
    /* Each part of a tile must have a cluster of its own at once, a share of the tokens (two tiles of 8) and some
     * steps. */
    p.split = 1;
    while (2 * p.split * tiles <= s->clusters && 4 * p.split * 8 <= bn && p.steps >= 8 * p.split) p.split *= 2;
    p.items = tiles * p.split;
    p.gated = args->gated, p.gelu = args->activation == ACTIVATION_GELU_TANH;
    p.accumulate = args->accumulate, p.out_f32 = args->out_f32;
    p.pieces = !args->out_f32 && !args->accumulate && args->y_stride % 8 == 0 && (uintptr_t)args->y % 16 == 0 &&
               args->out % (args->gated ? 16 : 8) == 0;
    p.stream = p.tiles_n == 1;
    CUtensorMap w, x;
    int e = map_make(s, &w, args->w, args->out, args->cols, args->pitch, TILE_ROWS);
    if (!e) e = map_make(s, &x, args->x, rows, args->cols, args->x_stride, bn / 2);
    if (e) return e;
    switch (bn) {
    case 16:
        return (int)form_launch<form16>(s, stream, w, x, p);
    case 32:
        return (int)form_launch<form32>(s, stream, w, x, p);
    case 64:
        return (int)form_launch<form64>(s, stream, w, x, p);
    case 128:
        return (int)form_launch<form128>(s, stream, w, x, p);
    default:
        return (int)form_launch<form256>(s, stream, w, x, p);
    }
}
