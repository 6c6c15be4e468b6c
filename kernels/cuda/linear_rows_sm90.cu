/* Products of up to 16 rows with a bf16 matrix, at the speed of memory: y = x w^T for one decode step's tokens.
 *
 * A block streams tiles of 16 matrix rows by 1024 columns (32 KB) through a ring in shared memory, one bulk copy a row
 * (2 KB: rows of 1 KB reach 3.8 TB/s on an H200, of 2 KB 4.4); 8 warps split the columns of a tile among themselves.
 * The matrix is the M side of mma.m16n8k16, the tokens are N, so 8 tokens cost what one costs. Columns are permuted
 * alike on both sides, so that a lane's part of four neighbouring products is one 16-byte load: lane (g, q) takes
 * columns 8 q .. 8 q + 7 of 32, of matrix rows g and g + 8 and of token g.
 *
 * The partial sums of the 8 warps meet in shared memory in a fixed order. One block a multiprocessor; it begins while
 * the kernel before it still runs and fills its ring then, since the matrix is nobody's result.
 *
 * Measured on an H200, all products of Llama 8B with the head and five small kernels a layer between them, in a
 * graph: 3.88 ms at one row (3.87 TB/s of weights), 3.99 at 8, 4.35 at 16; of 1B 0.79, 0.79 and 0.88. A ring of 2 or 3
 * stages, so that the next product's block fits beside this one's, is slower (4.4 to 5.3 ms): early blocks take
 * bandwidth from those in need. */
#include "kernels/cuda/cuda_math.cuh"
#include "kernels/cuda/linear_private.h"

#define TILE_ROWS        16
#define TILE_COLS        1024
#define WARPS            8
#define WARP_COLS        (TILE_COLS / WARPS)
#define STAGES           4                    /* 132 KB in flight: what memory needs for its latency, and half more */
#define PITCH            (TILE_COLS * 2 + 64) /* bytes: neighbouring rows lie 16 banks apart */
#define STAGE_BYTES      (TILE_ROWS * PITCH)
#define SUM_VALUES(NT)   (WARPS * TILE_ROWS * 8 * (NT)) /* f32, twice: a tile's sums are read while the next come */
#define SHARED_BYTES(NT) (STAGES * STAGE_BYTES + 2 * SUM_VALUES(NT) * 4 + 2 * STAGES * 8)

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

static __device__ __forceinline__ uint32_t shared_at(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* Gives up after about 10 s: a wait that long is a bug, and a trap is better than a hang. */
static __device__ __forceinline__ void barrier_await(uint32_t barrier, uint32_t parity) {
    uint32_t done = 0;
    const long long begin = clock64();
    do {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
        if (!done && clock64() - begin > 20000000000ll) __trap();
    } while (!done);
}

static __device__ __forceinline__ uint4 load_shared(uint32_t at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}

static __device__ __forceinline__ void mma_pair(float (&d)[4], const uint4 &low, const uint4 &high, const uint4 &x) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(low.x), "r"(high.x), "r"(low.y), "r"(high.y), "r"(x.x), "r"(x.y));
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(low.z), "r"(high.z), "r"(low.w), "r"(high.w), "r"(x.z), "r"(x.w));
}

/* ---- the warp that fetches ----------------------------------------------------------------------------------------
 */

static __device__ __forceinline__ void rows_fetch(const struct linear_product &p, uint32_t ring, uint32_t full,
                                                  uint32_t empty) {
    const int lane = (int)threadIdx.x % 32, tiles = (p.out + TILE_ROWS - 1) / TILE_ROWS;
    const char *w = (const char *)p.w;
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    int stage = 0;
    uint32_t parity = 1; /* the ring is empty at first */
    for (int tile = (int)blockIdx.x; tile < tiles; tile += (int)gridDim.x) {
        const int rows = min(TILE_ROWS, p.out - tile * TILE_ROWS);
        const char *row = w + ((size_t)tile * TILE_ROWS + (size_t)lane) * (size_t)p.pitch * 2;
        for (int k = 0; k < p.cols; k += TILE_COLS) {
            const uint32_t bytes = (uint32_t)min(TILE_COLS, p.cols - k) * 2;
            barrier_await(empty + 8 * stage, parity);
            if (lane == 0)
                asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full + 8 * stage),
                             "r"(bytes * (uint32_t)rows)
                             : "memory");
            __syncwarp();
            if (lane < rows)
                asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
                             "[%1], %2, [%3], %4;" ::"r"(ring + (uint32_t)stage * STAGE_BYTES + (uint32_t)lane * PITCH),
                             "l"(row + (size_t)k * 2), "r"(bytes), "r"(full + 8 * stage), "l"(policy)
                             : "memory");
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    }
}

/* ---- the warps that multiply --------------------------------------------------------------------------------------
 */

/* Tokens' columns k .. k + 127 of this warp's share, one 16-byte piece a lane for each 32 columns and 8 tokens. */
template <int NT> struct tokens_part {
    uint4 x[NT][WARP_COLS / 32];
    __device__ __forceinline__ void load(const struct linear_product &p, int k, int lane) {
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < WARP_COLS / 32; i++) {
                const int token = n * 8 + lane / 4, column = k + i * 32 + lane % 4 * 8;
                x[n][i] = make_uint4(0, 0, 0, 0);
                if (token < p.rows && column < p.cols)
                    x[n][i] =
                        *(const uint4 *)((const __nv_bfloat16 *)p.x + (size_t)token * (size_t)p.x_stride + column);
            }
    }
};

/* One finished tile: the first TILE_ROWS * 8 * NT sums, 8 partial ones each, become outputs. */
template <int NT> static __device__ void rows_store(const struct linear_product &p, int tile, const float *sums) {
    const int outputs = p.gated ? TILE_ROWS / 2 : TILE_ROWS;
    for (int i = (int)threadIdx.x; i < outputs * 8 * NT; i += 128) {
        const int token = i / outputs, m = i % outputs, row = tile * TILE_ROWS + m;
        if (token >= p.rows || row >= p.out) continue;
        float v = 0, up = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) {
            const float *part = sums + ((size_t)warp * NT * 8 + (size_t)token) * TILE_ROWS;
            v += part[m];
            if (p.gated) up += part[m + 8];
        }
        int64_t to = row;
        if (p.gated) {
            to = (int64_t)tile * 8 + m;
            if (p.bias) v += p.bias[to], up += p.bias[p.out / 2 + to];
            v = bf16_round(v), up = bf16_round(up);
            const float cube = 0.044715f * v * v * v;
            v = p.activation == ACTIVATION_SILU ? v / (1.0f + __expf(-v))
                                                : 0.5f * v * (1.0f + tanhf(0.7978845608f * (v + cube)));
            v *= up;
        } else if (p.bias) {
            v += p.bias[row];
        }
        to += (int64_t)token * p.y_stride;
        if (p.out_f32) {
            float *y = (float *)p.y + to;
            *y = p.accumulate ? *y + v : v;
        } else {
            __nv_bfloat16 *y = (__nv_bfloat16 *)p.y + to;
            *y = __float2bfloat16_rn(p.accumulate ? __bfloat162float(*y) + v : v);
        }
    }
}

template <int NT>
static __device__ __forceinline__ void rows_multiply(const struct linear_product &p, uint32_t ring, uint32_t full,
                                                     uint32_t empty, float *sums) {
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int tiles = (p.out + TILE_ROWS - 1) / TILE_ROWS, begin = warp * WARP_COLS;
    const uint32_t mine = ring + (uint32_t)g * PITCH + (uint32_t)(begin * 2 + q * 16);
    struct tokens_part<NT> now, next;
    int stage = 0, turn = 0;
    uint32_t parity = 0;
    if ((int)blockIdx.x < tiles) now.load(p, begin, lane);
    for (int tile = (int)blockIdx.x; tile < tiles; tile += (int)gridDim.x, turn ^= 1) {
        float d[NT][4] = {};
        for (int k = 0; k < p.cols; k += TILE_COLS) {
            next.load(p, (k + TILE_COLS < p.cols ? k + TILE_COLS : 0) + begin, lane);
            barrier_await(full + 8 * stage, parity);
            const uint32_t at = mine + (uint32_t)stage * STAGE_BYTES;
#pragma unroll
            for (int i = 0; i < WARP_COLS / 32; i++) {
                if (k + begin + i * 32 >= p.cols) break;
                const uint4 low = load_shared(at + (uint32_t)i * 64),
                            high = load_shared(at + 8 * PITCH + (uint32_t)i * 64);
#pragma unroll
                for (int n = 0; n < NT; n++) mma_pair(d[n], low, high, now.x[n][i]);
            }
            __syncwarp();
            if (lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(empty + 8 * stage) : "memory");
            if (++stage == STAGES) stage = 0, parity ^= 1;
            now = next;
        }
        float *part = sums + turn * SUM_VALUES(NT) + warp * NT * 8 * TILE_ROWS;
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) part[(n * 8 + q * 2 + j % 2) * TILE_ROWS + g + j / 2 * 8] = d[n][j];
        asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory");
        if (warp < 4) rows_store<NT>(p, tile, sums + turn * SUM_VALUES(NT));
    }
}

#endif

template <int NT>
static __global__ void __launch_bounds__(WARPS * 32 + 32, 1)
    rows_kernel(const __grid_constant__ struct linear_product p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(128) unsigned char shared[];
    const uint32_t ring = shared_at(shared);
    float *sums = (float *)(shared + STAGES * STAGE_BYTES);
    const uint32_t full = shared_at(sums + 2 * SUM_VALUES(NT)), empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full + 8 * i) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(empty + 8 * i), "n"(WARPS) : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    grid_release();
    if (threadIdx.x >= WARPS * 32) {
        rows_fetch(p, ring, full, empty);
    } else {
        grid_wait();
        rows_multiply<NT>(p, ring, full, empty, sums);
    }
#endif
}

bool linear_rows_takes(const struct linear_product *p) {
    return p->dtype == DTYPE_BF16 && p->rows >= 1 && p->rows <= LINEAR_ROWS_MAX && p->cols % 32 == 0 &&
           p->pitch % 8 == 0 && p->x_stride % 8 == 0 && ((uintptr_t)p->x & 15) == 0 && ((uintptr_t)p->w & 15) == 0 &&
           (!p->gated || p->out % TILE_ROWS == 0);
}

int linear_rows_open(void) {
    cudaError_t code =
        cudaFuncSetAttribute(rows_kernel<1>, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES(1));
    if (code == cudaSuccess)
        code = cudaFuncSetAttribute(rows_kernel<2>, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES(2));
    return (int)code;
}

int linear_rows_launch(cudaStream_t stream, int sms, const struct linear_product *p) {
    const int tiles = (p->out + TILE_ROWS - 1) / TILE_ROWS;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)(tiles < sms ? tiles : sms));
    config.blockDim = dim3(WARPS * 32 + 32);
    config.dynamicSmemBytes = p->rows <= 8 ? SHARED_BYTES(1) : SHARED_BYTES(2);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return (int)cudaLaunchKernelEx(&config, p->rows <= 8 ? rows_kernel<1> : rows_kernel<2>, *p);
}
