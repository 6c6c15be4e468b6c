/* Products of bf16 weights with up to 8 rows on Hopper: what counts is that memory is never idle.
 *
 * A block takes tiles of 16 weight rows in turn; its 8 warps share the columns of a tile, and each streams its part
 * through a ring of its own in shared memory by tensor copies, which run on into the next tile while the sums of this
 * one meet. All of x lies in shared memory. The weights are the M side of mma.m16n8k16, the rows of x the N side.
 *
 * The first ring of weights is fetched while the kernel before still runs. Sums of the warps are added in order. */
#include "kernels/cuda/linear_sm90_ptx.cuh"

#include <cuda_bf16.h>

#include "kernels/cuda/cuda_math.cuh"
#include "kernels/cuda/linear_private.h"

enum {
    WARPS = 8,
    THREADS = 32 * WARPS,
    ROWS = 8,  /* of x at most */
    TILE = 16, /* weight rows */
    UNIT = 64, /* columns of a box: one row of the 128-byte swizzle */
    UNIT_BYTES = TILE * 128,
    STAGE_BYTES = 2 * UNIT_BYTES,
    SUM_BYTES = 2 * WARPS * TILE * ROWS * 4, /* of two tiles in turn */
    BAR_BYTES = 512,
};

struct product {
    const __nv_bfloat16 *x;
    void *y;
    const float *bias;
    int64_t x_stride, y_stride;
    int rows, out, cols, units, tiles;
    int x_pitch; /* of a row in shared memory: a multiple of 128 bytes and 16 more, so that 8 rows fall on all banks */
    bool gated, gelu, accumulate, out_f32;
};

static int x_pitch_of(int cols) {
    return (cols + UNIT - 1) / UNIT * UNIT + 8;
}

static size_t shared_of(int rows, int cols, int stages) {
    return 1024 + (size_t)WARPS * stages * STAGE_BYTES + SUM_BYTES + BAR_BYTES + (size_t)rows * x_pitch_of(cols) * 2;
}

/* ---- the ring of a warp ---------------------------------------------------------------------------------------------
 */

template <int STAGES> struct ring {
    uint32_t stage, full; /* shared memory: [STAGES][STAGE_BYTES] and [STAGES] barriers */
    int from, to;         /* units of the warp */
    int tile, unit, slot; /* what is fetched next */
    uint64_t policy;

    __device__ __forceinline__ void fetch(const CUtensorMap *map, const product &p, int lane) {
        if (tile >= p.tiles || from >= to) return;
        const int count = to - unit < 2 ? to - unit : 2;
        if (lane == 0) {
            const uint32_t barrier = full + 8 * slot, at = stage + slot * STAGE_BYTES;
            sm90::barrier_expect(barrier, count * UNIT_BYTES);
            for (int i = 0; i < count; i++)
                sm90::copy_box(at + i * UNIT_BYTES, map, barrier, (unit + i) * UNIT, tile * TILE, policy);
        }
        unit += count;
        if (unit >= to) unit = from, tile += (int)gridDim.x;
        slot = slot + 1 == STAGES ? 0 : slot + 1;
    }
};

/* ---- a unit of 64 columns -------------------------------------------------------------------------------------------
 */

static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* box: [16 rows][64 columns] as the tensor copy left it; x: this thread's row of x at column 2t of the unit. */
static __device__ __forceinline__ void unit_multiply(float (&even)[4], float (&odd)[4], uint32_t box, uint32_t x,
                                                     int lane) {
    const int row = lane % 16;
#pragma unroll
    for (int k = 0; k < UNIT / 16; k++) {
        uint32_t a[4], b0, b1;
        const int piece = 2 * k + lane / 16;
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                     : "r"(box + row * 128 + ((piece ^ (row & 7)) << 4))
                     : "memory");
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(b0) : "r"(x + k * 32) : "memory");
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(b1) : "r"(x + k * 32 + 16) : "memory");
        if (k & 1)
            mma(odd, a, b0, b1);
        else
            mma(even, a, b0, b1);
    }
}

/* ---- results --------------------------------------------------------------------------------------------------------
 */

static __device__ __forceinline__ float activate(float v, bool gelu) {
    if (!gelu) return __fdividef(v, 1.0f + __expf(-v)); /* 0 where the sum overflows */
    const float inner = 0.7978845608028654f * (v + 0.044715f * v * v * v);
    return __fdividef(v, 1.0f + __expf(-2.0f * inner)); /* v / 2 * (1 + tanh(inner)) */
}

static __device__ __forceinline__ void value_store(const product &p, int token, int row, float v) {
    const int64_t at = (int64_t)token * p.y_stride + row;
    if (p.out_f32) {
        float *y = static_cast<float *>(p.y) + at;
        *y = p.accumulate ? v + *y : v;
    } else {
        __nv_bfloat16 *y = static_cast<__nv_bfloat16 *>(p.y) + at;
        *y = __float2bfloat16_rn(p.accumulate ? v + __bfloat162float(*y) : v);
    }
}

/* sums [WARPS][ROWS][TILE] of one tile; a thread a value, or an output of gate and up. */
static __device__ __forceinline__ void tile_store(const product &p, const float *sums, int tile) {
    const int token = threadIdx.x / TILE, r = threadIdx.x % TILE, row = tile * TILE + r;
    if (threadIdx.x >= TILE * ROWS || token >= p.rows || row >= p.out || (p.gated && r >= TILE / 2)) return;
    float v = 0.0f, up = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) v += sums[(w * ROWS + token) * TILE + r];
    if (!p.gated) {
        value_store(p, token, row, p.bias ? v + p.bias[row] : v);
        return;
    }
#pragma unroll
    for (int w = 0; w < WARPS; w++) up += sums[(w * ROWS + token) * TILE + r + TILE / 2];
    const int at = tile * (TILE / 2) + r;
    if (p.bias) v += p.bias[at], up += p.bias[p.out / 2 + at];
    value_store(p, token, at, activate(v, p.gelu) * up);
}

/* ---- the kernel -----------------------------------------------------------------------------------------------------
 */

template <int STAGES>
static __global__ void __launch_bounds__(THREADS, 1)
    few_kernel(const __grid_constant__ CUtensorMap map_w, const __grid_constant__ product p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ unsigned char shared_raw[];
    unsigned char *shared = shared_raw + ((1024 - (sm90::shared_of(shared_raw) & 1023)) & 1023);
    float *sums = reinterpret_cast<float *>(shared + WARPS * STAGES * STAGE_BYTES);
    unsigned char *bars = reinterpret_cast<unsigned char *>(sums) + SUM_BYTES;
    __nv_bfloat16 *x = reinterpret_cast<__nv_bfloat16 *>(bars + BAR_BYTES);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    ring<STAGES> r;
    r.stage = sm90::shared_of(shared) + warp * STAGES * STAGE_BYTES;
    r.full = sm90::shared_of(bars) + warp * STAGES * 8;
    r.from = p.units * warp / WARPS, r.to = p.units * (warp + 1) / WARPS;
    r.tile = (int)blockIdx.x, r.unit = r.from, r.slot = 0;
    r.policy = sm90::policy_first();
    if (lane == 0) {
        for (int s = 0; s < STAGES; s++) sm90::barrier_init(r.full + 8 * s, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        sm90::fence_for_copies();
    }
    __syncwarp();
    for (int s = 0; s < STAGES; s++) r.fetch(&map_w, p, lane);
    grid_release();
    grid_wait();
    const int pieces = p.units * (UNIT / 8);
    for (int i = threadIdx.x; i < p.rows * pieces; i += THREADS) {
        const int row = i / pieces, column = i % pieces * 8;
        uint4 v = make_uint4(0, 0, 0, 0); /* beyond the columns weights read as zero; x must not be NaN there */
        if (column < p.cols) v = *reinterpret_cast<const uint4 *>(p.x + (int64_t)row * p.x_stride + column);
        *reinterpret_cast<uint4 *>(x + (int64_t)row * p.x_pitch + column) = v;
    }
    __syncthreads();
    const uint32_t x_at = sm90::shared_of(x) + ((g < p.rows ? g : 0) * p.x_pitch + 2 * t) * 2; /* others' are dropped */
    int slot = 0;
    uint32_t phase = 0;
    float *mine = sums + warp * ROWS * TILE, *tile_sums = sums;
    for (int tile = (int)blockIdx.x; tile < p.tiles; tile += (int)gridDim.x) {
        float even[4] = {}, odd[4] = {};
        for (int unit = r.from; unit < r.to; unit += 2) {
            const uint32_t box = r.stage + slot * STAGE_BYTES;
            sm90::barrier_wait(r.full + 8 * slot, phase);
            unit_multiply(even, odd, box, x_at + unit * UNIT * 2, lane);
            if (unit + 1 < r.to) unit_multiply(even, odd, box + UNIT_BYTES, x_at + (unit + 1) * UNIT * 2, lane);
            if (++slot == STAGES) slot = 0, phase ^= 1;
            __syncwarp();
            r.fetch(&map_w, p, lane);
        }
        mine[(2 * t) * TILE + g] = even[0] + odd[0], mine[(2 * t + 1) * TILE + g] = even[1] + odd[1];
        mine[(2 * t) * TILE + g + 8] = even[2] + odd[2], mine[(2 * t + 1) * TILE + g + 8] = even[3] + odd[3];
        __syncthreads();
        tile_store(p, tile_sums, tile);
        const int other = tile_sums == sums ? WARPS * ROWS * TILE : 0; /* read while the next tile's are written */
        tile_sums = sums + other, mine = tile_sums + warp * ROWS * TILE;
    }
#endif
}

/* ---- the launcher ---------------------------------------------------------------------------------------------------
 */

enum { SHARED_MAX = 227 * 1024 };

/* Stages that fit beside x: 4, or 3 where x is long; 0: none. */
static int stages_of(const struct linear_product *p) {
    if (shared_of(p->rows, p->cols, 4) <= SHARED_MAX) return 4;
    return shared_of(p->rows, p->cols, 3) <= SHARED_MAX ? 3 : 0;
}

extern "C" int linear_few_open(void) {
    cudaError_t e = cudaFuncSetAttribute(few_kernel<4>, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_MAX);
    if (!e) e = cudaFuncSetAttribute(few_kernel<3>, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_MAX);
    return (int)e;
}

extern "C" bool linear_few_takes(const struct linear_product *p) {
    return p->dtype == DTYPE_BF16 && p->rows <= ROWS && p->cols % 8 == 0 && p->x_stride % 8 == 0 &&
           (uintptr_t)p->x % 16 == 0 && stages_of(p) > 0;
}

extern "C" int linear_few_launch(const struct linear_sm90 *s, cudaStream_t stream, const struct linear_product *args) {
    product p = {};
    CUtensorMap w;
    p.x = static_cast<const __nv_bfloat16 *>(args->x), p.y = args->y, p.bias = args->bias;
    p.x_stride = args->x_stride, p.y_stride = args->y_stride;
    p.rows = args->rows, p.out = args->out, p.cols = args->cols;
    p.units = (args->cols + UNIT - 1) / UNIT, p.tiles = (args->out + TILE - 1) / TILE;
    p.x_pitch = x_pitch_of(args->cols);
    p.gated = args->gated, p.gelu = args->activation == ACTIVATION_GELU_TANH;
    p.accumulate = args->accumulate, p.out_f32 = args->out_f32;
    const int e = linear_sm90_map(s, &w, args->w, args->out, args->cols, args->pitch, TILE);
    if (e) return e;
    const int stages = stages_of(args);
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)(p.tiles < s->sms ? p.tiles : s->sms)), config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = shared_of(p.rows, p.cols, stages), config.stream = stream;
    config.attrs = &early, config.numAttrs = 1;
    return (int)cudaLaunchKernelEx(&config, stages == 4 ? few_kernel<4> : few_kernel<3>, w, p);
}
