/* cuda_math.cuh: what kernels of several topics share: bf16 values in 16-byte pieces, sums over a warp and a block, the
 * two instructions of programmatic dependent launch and the launch that uses them. Device code alone, plus launch
 * templates for the .cu files; knows no op. */
#ifndef QUIRE_KERNELS_CUDA_CUDA_MATH_CUH
#define QUIRE_KERNELS_CUDA_CUDA_MATH_CUH

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "kernels/cuda/cuda.h"

/* ---- bf16 ---------------------------------------------------------------------------------------------------------
 * Two values in a 32-bit word, the first in the low half. Widening is a shift or a mask. */

static __device__ __forceinline__ float bf16_low(uint32_t pair) {
    return __uint_as_float(pair << 16);
}

static __device__ __forceinline__ float bf16_high(uint32_t pair) {
    return __uint_as_float(pair & 0xffff0000u);
}

static __device__ __forceinline__ uint32_t bf16_pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *(const uint32_t *)(const void *)&pair;
}

static __device__ __forceinline__ float bf16_round(float x) {
    return __bfloat162float(__float2bfloat16_rn(x));
}

static __device__ __forceinline__ void bf16_unpack8(const uint4 &bits, float *v) {
    v[0] = bf16_low(bits.x), v[1] = bf16_high(bits.x), v[2] = bf16_low(bits.y), v[3] = bf16_high(bits.y);
    v[4] = bf16_low(bits.z), v[5] = bf16_high(bits.z), v[6] = bf16_low(bits.w), v[7] = bf16_high(bits.w);
}

static __device__ __forceinline__ uint4 bf16_pack8(const float *v) {
    return make_uint4(bf16_pack(v[0], v[1]), bf16_pack(v[2], v[3]), bf16_pack(v[4], v[5]), bf16_pack(v[6], v[7]));
}

/* N values at p, widened: 8 in one 16-byte load (p aligned so), or 1. */
template <int N> static __device__ __forceinline__ void bf16_load(const __nv_bfloat16 *p, float *v) {
    static_assert(N == 1 || N == 8, "one value or 16 bytes");
    if constexpr (N == 8)
        bf16_unpack8(*(const uint4 *)(const void *)p, v);
    else
        v[0] = __bfloat162float(*p);
}

template <int N> static __device__ __forceinline__ void bf16_store(__nv_bfloat16 *p, const float *v) {
    static_assert(N == 1 || N == 8, "one value or 16 bytes");
    if constexpr (N == 8)
        *(uint4 *)(void *)p = bf16_pack8(v);
    else
        *p = __float2bfloat16_rn(v[0]);
}

/* The same in two halves, for loads that are under way while registers are few: 8 values are 4 registers until widened.
 */
template <int N> struct bf16_piece;
template <> struct bf16_piece<8> { uint4 bits; };
template <> struct bf16_piece<1> { __nv_bfloat16 bits; };

template <int N> static __device__ __forceinline__ bf16_piece<N> bf16_fetch(const __nv_bfloat16 *p) {
    return *(const bf16_piece<N> *)(const void *)p;
}

static __device__ __forceinline__ void bf16_widen(const bf16_piece<8> &piece, float *v) {
    bf16_unpack8(piece.bits, v);
}

static __device__ __forceinline__ void bf16_widen(const bf16_piece<1> &piece, float *v) {
    v[0] = __bfloat162float(piece.bits);
}

/* N f32 values at p: pieces of 16 bytes where N is 4 or 8. Read-only data (weights, tables). */
template <int N> static __device__ __forceinline__ void f32_load(const float *p, float *v) {
    static_assert(N == 1 || N == 4 || N == 8, "one value, 16 bytes, or twice that");
    if constexpr (N == 1) {
        v[0] = __ldg(p);
    } else {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            const float4 piece = __ldg((const float4 *)(const void *)(p + i));
            v[i] = piece.x, v[i + 1] = piece.y, v[i + 2] = piece.z, v[i + 3] = piece.w;
        }
    }
}

/* ---- sums ---------------------------------------------------------------------------------------------------------
 * Every lane gets the result; the order is fixed. */

/* Over groups of LANES neighbouring lanes (a power of two). All 32 lanes must take part. */
template <int LANES = 32> static __device__ __forceinline__ float lanes_sum(float x) {
#pragma unroll
    for (int apart = LANES / 2; apart > 0; apart /= 2) x += __shfl_xor_sync(0xffffffffu, x, apart);
    return x;
}

template <int LANES = 32> static __device__ __forceinline__ float lanes_max(float x) {
#pragma unroll
    for (int apart = LANES / 2; apart > 0; apart /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, apart));
    return x;
}

/* Over a block of whole warps, at most 32. `shared` [32] f32 is free again after the caller's next barrier. */
static __device__ __forceinline__ float block_sum(float x, float *shared) {
    const int warps = (int)(blockDim.x + 31) / 32, warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    x = lanes_sum(x);
    if (warps == 1) return x;
    if (lane == 0) shared[warp] = x;
    __syncthreads();
    return lanes_sum(lane < warps ? shared[lane] : 0.0f);
}

/* ---- programmatic dependent launch --------------------------------------------------------------------------------
 * A kernel launched by cuda_launch_next may begin while the one before still runs. Until grid_wait it reads only what
 * was there before the step (weights, tables); after it, everything issued before is done and visible. Every thread
 * calls it before its first access to what ops write, so that what follows may rely on the whole chain being done.
 * grid_release lets the next kernel begin early; it promises nothing about this one's results. Both do nothing in a
 * kernel that was launched plainly, or compiled for less than sm_90.
 *
 * The rule: a kernel whose successor reads results of this step before its own wait must itself wait before it
 * releases. For when the successor begins, it knows only that its predecessor has been released: if that waited first,
 * all before it is done; if not, nothing is. So
 * 1. decode attention reads page table, keys and values of earlier tokens before its wait: qkv_finish, kv_write and
 *    rope, one of which it follows, wait and then release;
 * 2. qkv_finish reads step memory before its wait. The copy that fills it is launched plainly, and the ops that a step
 *    begins with (table_update, kv_copy, embed) wait and then release, so nothing after them begins before it is done;
 * 3. the products (linear_mma, linear_rows, linear_sm90) may release before they wait: those that may follow them read
 *    but weights, tables and step memory before their wait. */

static __device__ __forceinline__ void grid_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

static __device__ __forceinline__ void grid_release() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* Launches on the backend's stream; as a dependent launch where the sm_90a kernels run (portable code has no wait, so
 * there it must not begin early). The kernel must call grid_wait as above. */
template <typename... Formal, typename... Actual>
static inline int cuda_launch_next(struct backend *backend, const char *name, struct err *err,
                                   void (*kernel)(Formal...), dim3 grid, dim3 block, size_t shared_bytes,
                                   Actual... actual) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = backend->cuda->stream;
    config.attrs = &attribute;
    config.numAttrs = backend->cuda->kernels == CUDA_KERNELS_SM90A ? 1 : 0;
    return cuda_failed(backend, cudaLaunchKernelEx(&config, kernel, static_cast<Formal>(actual)...), name, __FILE__,
                       __LINE__, err);
}

/* ---- launch shapes ------------------------------------------------------------------------------------------------
 */

static inline bool cuda_aligned16(const void *p) {
    return ((uintptr_t)p & 15) == 0;
}

static inline int64_t cuda_pieces(int64_t count, int64_t size) {
    return (count + size - 1) / size;
}

#endif
