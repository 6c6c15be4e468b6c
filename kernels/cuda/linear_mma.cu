/* Products on the tensor cores of any GPU from compute capability 8.0 on: bf16 or quantised weights, any shape.
 *
 * The weights are the M side of mma.m16n8k16 (16 rows of a matrix), the tokens the N side (8 of them), so that few
 * tokens waste little, and that gate and up of an interleaved matrix meet in one thread. Columns are taken in blocks of
 * 32, two mma each; since the order of columns inside a block is free as long as both sides agree, thread t of a
 * quad takes columns 8t .. 8t+7: one 16-byte load of x, and of bf16 weights, or one word of 4-bit quants.
 *
 * Quants become bf16 integers, which is exact; a block's products are summed by the tensor cores in f32 and then
 * scaled in f32. The minimum of q4_1 and q5_1 is multiplied by the block's sum of x, which a third mma with ones gives.
 * So the result is that of exact weights, but for f32 rounding.
 *
 * Tiles come through shared memory by cp.async in several stages. WK > 1: the warps of a block share its columns and
 * their sums are added in order of warp at the end. WK = 1: one chain over all columns in order, whatever the tile. */
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/cuda_math.cuh"
#include "kernels/cuda/linear_private.h"
#include "kernels/cuda/quant.h"

enum kind { BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 };

/* ---- stage 1: what a tile is, and how it lies in shared memory ------------------------------------------------------
 */

template <int KIND_, int MT_, int NT_, int WM_, int WN_, int WK_, int KB_, int STAGES_> struct tile {
    static constexpr int KIND = KIND_, MT = MT_, NT = NT_, WM = WM_, WN = WN_, WK = WK_, KB = KB_, STAGES = STAGES_;
    static constexpr int THREADS = 32 * WM * WN * WK;
    static constexpr int BM = 16 * MT * WM, BN = 8 * NT * WN;               /* weight rows, tokens */
    static constexpr int UNIT = KIND == BF16 ? 64 : KIND == Q8_0 ? 32 : 16; /* bytes of 32 columns of a row */
    static constexpr int SCALE = KIND == BF16 ? 0 : KIND == Q4_1 || KIND == Q5_1 ? 4 : 2;
    static constexpr int HIGH = KIND == Q5_0 || KIND == Q5_1 ? 4 : 0;
    static constexpr int W_BYTES = BM * KB * UNIT, HIGH_BYTES = BM * KB * HIGH, SCALE_BYTES = BM * KB * SCALE;
    static constexpr int X_BYTES = BN * KB * 64;
    static constexpr int STAGE_BYTES = W_BYTES + HIGH_BYTES + SCALE_BYTES + X_BYTES;
    static constexpr int SUM_BYTES = WK > 1 ? (WK - 1) * WM *WN * 32 * MT *NT * 4 * 4 : 0;
    static constexpr int SHARED = STAGES * STAGE_BYTES > SUM_BYTES ? STAGES *STAGE_BYTES : SUM_BYTES;
};

/* Where unit kb of row `row` lies: units of one row are exchanged so that the rows a warp reads at once (8 of 16 bytes,
 * 4 of 32 or 2 of 64 in one pass over the banks) fall on different banks. */
template <int UNIT, int KB> static __device__ __forceinline__ int unit_place(int row, int kb) {
    constexpr int PASS = 128 / UNIT, STEP = PASS / KB > 1 ? PASS / KB : 1, MASK = (KB < PASS ? KB : PASS) - 1;
    return (row * KB + (kb ^ (row / STEP & MASK))) * UNIT;
}

struct product { /* of the kernel; the arrays of a segment */
    const unsigned char *w, *high, *scales;
    int64_t w_bytes, high_bytes, scale_bytes; /* from row to row */
    const __nv_bfloat16 *x;
    int64_t x_stride, y_stride;
    const float *bias;
    void *y;
    int rows, out, cols, blocks; /* blocks of 32 columns, the last may be part */
    int tile_first;              /* of this launch: tile of weight rows of its blockIdx.y 0 */
    bool x_aligned, gated, gelu, accumulate, out_f32;
};

/* ---- stage 2: from global to shared memory --------------------------------------------------------------------------
 */

template <int BYTES> static __device__ __forceinline__ void copy_async(uint32_t to, const void *from, int valid) {
    if (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(valid)
                     : "memory");
}

static __device__ __forceinline__ int clamp_bytes(int64_t left, int piece) {
    return left <= 0 ? 0 : left < piece ? (int)left : piece;
}

/* ROWS rows of KB units of UNIT bytes; bytes beyond row_bytes and rows beyond rows_valid become zero. */
template <int ROWS, int UNIT, int KB, int THREADS, bool SWIZZLE>
static __device__ __forceinline__ void tile_load(uint32_t to, const unsigned char *from, int64_t pitch, int rows_valid,
                                                 int64_t at, int64_t row_bytes) {
    constexpr int WIDTH = UNIT * KB, PIECE = WIDTH < 16 ? WIDTH : 16, PIECES = WIDTH / PIECE;
#pragma unroll
    for (int base = 0; base < ROWS * PIECES; base += THREADS) {
        const int i = base + (int)threadIdx.x;
        if (ROWS * PIECES % THREADS != 0 && i >= ROWS * PIECES) break;
        const int row = i / PIECES, byte = i % PIECES * PIECE;
        int place = row * WIDTH + byte;
        if (SWIZZLE) place = unit_place<UNIT, KB>(row, byte / UNIT) + byte % UNIT;
        const int valid = row < rows_valid ? clamp_bytes(row_bytes - at - byte, PIECE) : 0;
        copy_async<PIECE>(to + place, valid ? from + row * pitch + at + byte : from, valid);
    }
}

/* The same for x that no 16-byte load may read. */
template <class T> static __device__ void x_load_slow(unsigned char *to, const product &p, int token, int column) {
    for (int i = threadIdx.x; i < T::BN * T::KB * 32; i += T::THREADS) {
        const int row = i / (T::KB * 32), c = i % (T::KB * 32);
        const bool valid = token + row < p.rows && column + c < p.cols;
        const __nv_bfloat16 v =
            valid ? p.x[(int64_t)(token + row) * p.x_stride + column + c] : __float2bfloat16_rn(0.0f);
        *reinterpret_cast<__nv_bfloat16 *>(to + unit_place<64, T::KB>(row, c / 32) + c % 32 * 2) = v;
    }
}

template <class T>
static __device__ __forceinline__ void w_load(unsigned char *shared, const product &p, int m, int block) {
    const uint32_t to = (uint32_t)__cvta_generic_to_shared(shared);
    const int rows = p.out - m;
    tile_load<T::BM, T::UNIT, T::KB, T::THREADS, true>(to, p.w + m * p.w_bytes, p.w_bytes, rows,
                                                       (int64_t)block * T::UNIT, p.w_bytes);
    if (T::HIGH)
        tile_load<T::BM, 4, T::KB, T::THREADS, false>(to + T::W_BYTES, p.high + m * p.high_bytes, p.high_bytes, rows,
                                                      (int64_t)block * 4, p.high_bytes);
    if (T::SCALE)
        tile_load<T::BM, T::SCALE ? T::SCALE : 4, T::KB, T::THREADS, false>(
            to + T::W_BYTES + T::HIGH_BYTES, p.scales + m * p.scale_bytes, p.scale_bytes, rows,
            (int64_t)block * T::SCALE, p.scale_bytes);
}

template <class T>
static __device__ __forceinline__ void x_load(unsigned char *shared, const product &p, int token, int block) {
    const uint32_t to = (uint32_t)__cvta_generic_to_shared(shared);
    constexpr int X_AT = T::W_BYTES + T::HIGH_BYTES + T::SCALE_BYTES;
    if (p.x_aligned)
        tile_load<T::BN, 64, T::KB, T::THREADS, true>(
            to + X_AT, reinterpret_cast<const unsigned char *>(p.x + (int64_t)token * p.x_stride), p.x_stride * 2,
            p.rows - token, (int64_t)block * 64, (int64_t)p.cols * 2);
    else
        x_load_slow<T>(shared + X_AT, p, token, block * 32);
}

/* ---- stage 3: one block of 32 columns -------------------------------------------------------------------------------
 */

static __device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                           uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

static __device__ __forceinline__ uint32_t bf16_subtract(uint32_t a, uint32_t b) {
    __nv_bfloat162 r = __hsub2(reinterpret_cast<__nv_bfloat162 &>(a), reinterpret_cast<__nv_bfloat162 &>(b));
    return reinterpret_cast<uint32_t &>(r);
}

/* Columns 8t .. 8t+7 of one row as bf16: the values, or the integers of a quantised block. 0x4300 is 128 in bf16 with
 * seven bits of integer below it, so that an OR adds a quant and a subtraction makes it exact. */
template <int KIND, int KB>
static __device__ __forceinline__ void row_values(uint32_t (&v)[4], const unsigned char *w, const unsigned char *high,
                                                  int row, int kb, int t) {
    const unsigned char *unit = w + unit_place < KIND == BF16 ? 64 : KIND == Q8_0 ? 32 : 16, KB > (row, kb);
    if (KIND == BF16) {
        const uint4 u = *reinterpret_cast<const uint4 *>(unit + 16 * t);
        v[0] = u.x, v[1] = u.y, v[2] = u.z, v[3] = u.w;
    } else if (KIND == Q8_0) {
        /* 0x4b0000nn is 2^23 + nn in f32; signed bytes are shifted by 128 to be nn */
        const uint2 u = *reinterpret_cast<const uint2 *>(unit + 8 * t);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t bytes = (i < 2 ? u.x : u.y) ^ 0x80808080u;
            const float a = __uint_as_float(__byte_perm(bytes, 0x4b000000u, i & 1 ? 0x7442 : 0x7440)) - 8388736.0f;
            const float b = __uint_as_float(__byte_perm(bytes, 0x4b000000u, i & 1 ? 0x7443 : 0x7441)) - 8388736.0f;
            __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
            v[i] = reinterpret_cast<uint32_t &>(pair);
        }
    } else {
        const uint32_t u = *reinterpret_cast<const uint32_t *>(unit + 4 * t);
        const uint32_t zero = KIND == Q4_0   ? 0x43084308u
                              : KIND == Q5_0 ? 0x43104310u
                                             : 0x43004300u; /* 128 + 8, 16, 0 */
        uint32_t five = 0;
        if (KIND == Q5_0 || KIND == Q5_1) {
            const uint32_t h = *(high + (row * KB + kb) * 4 + t);
            five = (h & 0x0fu) | (h & 0xf0u) << 12;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t q = (u >> (4 * i) & 0x000f000fu) | 0x43004300u;
            if (KIND == Q5_0 || KIND == Q5_1) q |= (five >> i & 0x00010001u) << 4;
            v[i] = bf16_subtract(q, zero);
        }
    }
}

template <class T>
static __device__ __forceinline__ void block_multiply(float (&sum)[T::MT][T::NT][4], const unsigned char *stage, int wm,
                                                      int wn, int kb, int g, int t) {
    constexpr uint32_t ONES = 0x3f803f80u;
    constexpr bool MINIMUM = T::SCALE == 4;
    const unsigned char *high = stage + T::W_BYTES, *scales = high + T::HIGH_BYTES, *x = scales + T::SCALE_BYTES;
    uint4 b[T::NT];
#pragma unroll
    for (int n = 0; n < T::NT; n++)
        b[n] = *reinterpret_cast<const uint4 *>(x + unit_place<64, T::KB>((wn * T::NT + n) * 8 + g, kb) + 16 * t);
    float x_sum[T::NT][4] = {};
    if (MINIMUM) {
#pragma unroll
        for (int n = 0; n < T::NT; n++) {
            mma(x_sum[n], ONES, ONES, ONES, ONES, b[n].x, b[n].y);
            mma(x_sum[n], ONES, ONES, ONES, ONES, b[n].z, b[n].w);
        }
    }
#pragma unroll
    for (int m = 0; m < T::MT; m++) {
        const int row = (wm * T::MT + m) * 16 + g;
        uint32_t upper[4], lower[4];
        row_values<T::KIND, T::KB>(upper, stage, high, row, kb, t);
        row_values<T::KIND, T::KB>(lower, stage, high, row + 8, kb, t);
        if (T::KIND == BF16) {
#pragma unroll
            for (int n = 0; n < T::NT; n++) {
                mma(sum[m][n], upper[0], lower[0], upper[1], lower[1], b[n].x, b[n].y);
                mma(sum[m][n], upper[2], lower[2], upper[3], lower[3], b[n].z, b[n].w);
            }
            continue;
        }
        const __half *s0 = reinterpret_cast<const __half *>(scales + (row * T::KB + kb) * T::SCALE);
        const __half *s1 = s0 + 8 * T::KB * T::SCALE / 2;
        const float d0 = __half2float(s0[0]), d1 = __half2float(s1[0]);
        const float m0 = MINIMUM ? __half2float(s0[1]) : 0.0f, m1 = MINIMUM ? __half2float(s1[1]) : 0.0f;
#pragma unroll
        for (int n = 0; n < T::NT; n++) {
            float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            mma(c, upper[0], lower[0], upper[1], lower[1], b[n].x, b[n].y);
            mma(c, upper[2], lower[2], upper[3], lower[3], b[n].z, b[n].w);
            float *s = sum[m][n];
            s[0] = fmaf(d0, c[0], s[0]), s[1] = fmaf(d0, c[1], s[1]);
            s[2] = fmaf(d1, c[2], s[2]), s[3] = fmaf(d1, c[3], s[3]);
            if (MINIMUM) {
                s[0] = fmaf(m0, x_sum[n][0], s[0]), s[1] = fmaf(m0, x_sum[n][1], s[1]);
                s[2] = fmaf(m1, x_sum[n][0], s[2]), s[3] = fmaf(m1, x_sum[n][1], s[3]);
            }
        }
    }
}

/* ---- stage 4: results -----------------------------------------------------------------------------------------------
 */

static __device__ __forceinline__ void value_store(const product &p, int token, int row, float v) {
    if (token >= p.rows || row >= p.out) return;
    const int64_t at = (int64_t)token * p.y_stride + row;
    if (p.bias) v += p.bias[row];
    if (p.out_f32) {
        float *y = static_cast<float *>(p.y) + at;
        *y = p.accumulate ? v + *y : v;
    } else {
        __nv_bfloat16 *y = static_cast<__nv_bfloat16 *>(p.y) + at;
        *y = __float2bfloat16_rn(p.accumulate ? v + __bfloat162float(*y) : v);
    }
}

static __device__ __forceinline__ float activate(float v, bool gelu) {
    if (!gelu) return v / (1.0f + __expf(-v));
    const float inner = 0.7978845608028654f * (v + 0.044715f * v * v * v);
    return v / (1.0f + __expf(-2.0f * inner)); /* v / 2 * (1 + tanh(inner)) */
}

/* row: of gate in the interleaved matrix */
static __device__ __forceinline__ void gated_store(const product &p, int token, int row, float gate, float up) {
    if (token >= p.rows || row >= p.out) return;
    const int at = row / 16 * 8 + row % 16;
    if (p.bias) gate += p.bias[at], up += p.bias[p.out / 2 + at];
    static_cast<__nv_bfloat16 *>(p.y)[(int64_t)token * p.y_stride + at] =
        __float2bfloat16_rn(activate(gate, p.gelu) * up);
}

/* Adds the sums of the other warps that share these rows and tokens, in order. True for the warp that has them all. */
template <class T>
static __device__ __forceinline__ bool sums_join(float (&sum)[T::MT][T::NT][4], float *room, int place, int wk,
                                                 int lane) {
    constexpr int VALUES = T::MT * T::NT * 4, OTHERS = T::WM * T::WN;
    __syncthreads(); /* the stages are read no more */
    float *flat = &sum[0][0][0];
    if (wk > 0)
        for (int i = 0; i < VALUES; i++) room[(((wk - 1) * OTHERS + place) * VALUES + i) * 32 + lane] = flat[i];
    __syncthreads();
    if (wk > 0) return false;
    for (int k = 0; k < T::WK - 1; k++)
#pragma unroll
        for (int i = 0; i < VALUES; i++) flat[i] += room[((k * OTHERS + place) * VALUES + i) * 32 + lane];
    return true;
}

template <class T> static __global__ void __launch_bounds__(T::THREADS) mma_kernel(const __grid_constant__ product p) {
    extern __shared__ __align__(128) unsigned char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int wk = warp / (T::WM * T::WN), place = warp % (T::WM * T::WN), wm = place % T::WM, wn = place / T::WM;
    const int token = (int)blockIdx.x * T::BN, m = (p.tile_first + (int)blockIdx.y) * T::BM;
    const int steps = (p.blocks + T::KB - 1) / T::KB;
    float sum[T::MT][T::NT][4] = {};
    /* The first weights come while the kernel before still runs: only x is its result. */
#pragma unroll
    for (int s = 0; s < T::STAGES - 1; s++)
        if (s < steps) w_load<T>(shared + s * T::STAGE_BYTES, p, m, s * T::KB);
    grid_release();
    grid_wait();
#pragma unroll
    for (int s = 0; s < T::STAGES - 1; s++) {
        if (s < steps) x_load<T>(shared + s * T::STAGE_BYTES, p, token, s * T::KB);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    int slot = 0, next = T::STAGES - 1;
    for (int step = 0; step < steps; step++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(T::STAGES - 2) : "memory");
        __syncthreads();
        if (step + T::STAGES - 1 < steps) {
            w_load<T>(shared + next * T::STAGE_BYTES, p, m, (step + T::STAGES - 1) * T::KB);
            x_load<T>(shared + next * T::STAGE_BYTES, p, token, (step + T::STAGES - 1) * T::KB);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        const unsigned char *stage = shared + slot * T::STAGE_BYTES;
        const int left = p.blocks - step * T::KB;
#pragma unroll
        for (int kb = 0; kb < T::KB; kb += T::WK)
            if (kb + wk < left) block_multiply<T>(sum, stage, wm, wn, kb + wk, g, t);
        slot = slot + 1 == T::STAGES ? 0 : slot + 1;
        next = next + 1 == T::STAGES ? 0 : next + 1;
    }
    if (T::WK > 1 && !sums_join<T>(sum, reinterpret_cast<float *>(shared), place, wk, lane)) return;
#pragma unroll
    for (int a = 0; a < T::MT; a++) {
#pragma unroll
        for (int n = 0; n < T::NT; n++) {
            const int row = m + (wm * T::MT + a) * 16 + g, first = token + (wn * T::NT + n) * 8 + 2 * t;
            const float *s = sum[a][n];
            if (p.gated) {
                gated_store(p, first, row, s[0], s[2]);
                gated_store(p, first + 1, row, s[1], s[3]);
                continue;
            }
            value_store(p, first, row, s[0]);
            value_store(p, first + 1, row, s[1]);
            value_store(p, first, row + 8, s[2]);
            value_store(p, first + 1, row + 8, s[3]);
        }
    }
}

/* ---- the launcher ---------------------------------------------------------------------------------------------------
 * Shared memory of every tile stays below 99 KB, what a block of any GPU from 8.0 on may have. */

/* Up to 8, 16 and 32 tokens, columns shared by the warps: weights in flight a multiprocessor are what counts. */
template <int K> struct few8 : tile<K, K == BF16 ? 1 : 2, 1, 1, 1, 8, K == BF16 || K == Q8_0 ? 8 : 16, 4> {};
template <int K> struct few16 : tile<K, K == BF16 ? 1 : 2, 2, 1, 1, 8, 8, 4> {};
template <int K> struct few32 : tile<K, 2, 4, 1, 1, 4, 8, K == Q4_0 || K == Q4_1 ? 4 : 3> {};
/* One chain over the columns: up to 8 tokens, up to 64, more. */
template <int K> struct chain8 : tile<K, 1, 1, 2, 1, 1, 8, 4> {};
template <int K> struct chain64 : tile<K, 2, 4, 2, 2, 1, 2, 4> {};
template <int K> struct chain128 : tile<K, 2, 8, 4, 2, 1, 2, K == BF16 ? 3 : 4> {};

template <class T> static cudaError_t tile_open() {
    static_assert(T::SHARED <= 99 * 1024, "more shared memory than every GPU has");
    return cudaFuncSetAttribute(mma_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, T::SHARED);
}

/* A grid has 65535 blocks along y at most: rows of a vocabulary above a million go in several launches. */
template <class T> static cudaError_t tile_launch(cudaStream_t stream, const product &whole, bool early) {
    constexpr int TILES_MAX = 65535;
    const int tiles = (whole.out + T::BM - 1) / T::BM;
    product p = whole;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.blockDim = dim3(T::THREADS), config.dynamicSmemBytes = T::SHARED, config.stream = stream;
    config.attrs = &attribute, config.numAttrs = early ? 1 : 0;
    cudaError_t e = cudaSuccess;
    for (; p.tile_first < tiles && !e; p.tile_first += TILES_MAX) {
        const int left = tiles - p.tile_first;
        config.gridDim =
            dim3((unsigned)((p.rows + T::BN - 1) / T::BN), (unsigned)(left < TILES_MAX ? left : TILES_MAX));
        e = cudaLaunchKernelEx(&config, mma_kernel<T>, p);
    }
    return e;
}

template <int K> static cudaError_t kind_open() {
    cudaError_t e = tile_open<few8<K>>();
    if (!e) e = tile_open<few16<K>>();
    if (!e) e = tile_open<few32<K>>();
    if (!e) e = tile_open<chain8<K>>();
    if (!e) e = tile_open<chain64<K>>();
    if (!e) e = tile_open<chain128<K>>();
    return e;
}

template <int K> static cudaError_t kind_launch(cudaStream_t stream, const product &p, bool invariant, bool early) {
    if (!invariant && p.rows <= 8) return tile_launch<few8<K>>(stream, p, early);
    if (!invariant && p.rows <= 16) return tile_launch<few16<K>>(stream, p, early);
    if (!invariant && p.rows <= 32) return tile_launch<few32<K>>(stream, p, early);
    if (p.rows <= 8) return tile_launch<chain8<K>>(stream, p, early);
    if (p.rows <= 64) return tile_launch<chain64<K>>(stream, p, early);
    return tile_launch<chain128<K>>(stream, p, early);
}

extern "C" int linear_mma_open(const struct cuda *cuda) {
    cudaError_t e = kind_open<BF16>();
    if (!e) e = kind_open<Q4_0>();
    if (!e) e = kind_open<Q4_1>();
    if (!e) e = kind_open<Q5_0>();
    if (!e) e = kind_open<Q5_1>();
    if (!e) e = kind_open<Q8_0>();
    return (int)e;
}

extern "C" int linear_mma_launch(cudaStream_t stream, const struct linear_product *args, bool invariant, bool early) {
    product p = {};
    p.w = static_cast<const unsigned char *>(args->w);
    if (args->dtype == DTYPE_BF16) {
        p.w_bytes = args->pitch * 2;
    } else {
        const quant_layout l = quant_layout_of(args->dtype, args->out, args->cols);
        p.high = p.w + l.high_at, p.scales = p.w + l.scales_at;
        p.w_bytes = l.blocks * l.quant_bytes, p.high_bytes = l.high_pitch * 4;
        p.scale_bytes = l.scale_pitch * l.scale_bytes;
    }
    p.x = static_cast<const __nv_bfloat16 *>(args->x);
    p.x_stride = args->x_stride, p.y_stride = args->y_stride;
    p.x_aligned = args->x_stride % 8 == 0 && (uintptr_t)args->x % 16 == 0;
    p.bias = args->bias, p.y = args->y;
    p.rows = args->rows, p.out = args->out, p.cols = args->cols, p.blocks = (args->cols + 31) / 32;
    p.gated = args->gated, p.gelu = args->activation == ACTIVATION_GELU_TANH;
    p.accumulate = args->accumulate, p.out_f32 = args->out_f32;
    switch (args->dtype) {
    case DTYPE_BF16:
        return (int)kind_launch<BF16>(stream, p, invariant, early);
    case DTYPE_Q4_0:
        return (int)kind_launch<Q4_0>(stream, p, invariant, early);
    case DTYPE_Q4_1:
        return (int)kind_launch<Q4_1>(stream, p, invariant, early);
    case DTYPE_Q5_0:
        return (int)kind_launch<Q5_0>(stream, p, invariant, early);
    case DTYPE_Q5_1:
        return (int)kind_launch<Q5_1>(stream, p, invariant, early);
    default:
        return (int)kind_launch<Q8_0>(stream, p, invariant, early);
    }
}
