/* sample_block.cuh: what a block of the sampler does together: fold, scan, find and sort, all in shared memory. Masses
 * are fixed-point integers, so that no sum depends on its order.
 *
 * Every function here is called by all SAMPLE_THREADS threads of the block. */
#ifndef QUIRE_KERNELS_CUDA_SAMPLE_BLOCK_CUH
#define QUIRE_KERNELS_CUDA_SAMPLE_BLOCK_CUH

#include <stdint.h>

#include "kernels/cuda/sample.h"

#define SAMPLE_THREADS (SAMPLE_WARPS * 32)
#define SAMPLE_FULL    0xffffffffu

/* Candidates that are picked from a row and sorted in shared memory; more go by passes over the row. */
#define SAMPLE_FEW 2048

/* Bins of a histogram over a row. */
#define SAMPLE_BINS 1024

typedef unsigned long long u64;

/* Fraction bits of a mass. A weight is at most 1, so a row of 2^20 stays below 2^61; what is below 2^-40 of the largest
 * weight is never drawn. */
#define SAMPLE_MASS_BITS 40

struct sample_shared {
    u64 keys[SAMPLE_FEW];
    u64 mass[SAMPLE_SEGMENTS_MAX];
    uint32_t bins[SAMPLE_BINS], bins_high[SAMPLE_BINS];
    u64 of_warp[SAMPLE_WARPS];
    double sum_of_warp[SAMPLE_WARPS];
    uint32_t low_of_warp[SAMPLE_WARPS];
    uint16_t list[SAMPLE_FEW];
    int found, count, arrived_last;
    uint32_t key;
    u64 above;
};

/* A key that compares as the values do; -0 and 0 are equal. Not for NaN. */
static __device__ __forceinline__ uint32_t key_of(float value) {
    uint32_t bits = __float_as_uint(value + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

static __device__ __forceinline__ float value_of(uint32_t key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

/* The larger one; NaN if one is NaN. */
static __device__ __forceinline__ float max_nan(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

static __device__ __forceinline__ float exp2_fast(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

static __device__ __forceinline__ u64 mass_of(double weight) {
    return (u64)__double2ull_rn(weight * (double)(1ull << SAMPLE_MASS_BITS));
}

static __device__ __forceinline__ u64 mass_of(float weight) {
    return (u64)__float2ull_rn(weight * (float)(1ull << SAMPLE_MASS_BITS));
}

static __device__ __forceinline__ int warp_index() {
    return (int)threadIdx.x >> 5;
}

static __device__ __forceinline__ int lane_index() {
    return (int)threadIdx.x & 31;
}

/* Adds to a 64-bit bin kept as two halves, as shared memory adds 32 bits at once: who overflows the low one carries. */
static __device__ __forceinline__ void bin_add(struct sample_shared *s, int bin, u64 value) {
    uint32_t low = (uint32_t)value, high = (uint32_t)(value >> 32);
    uint32_t before = atomicAdd(&s->bins[bin], low);
    high += before + low < before;
    if (high) atomicAdd(&s->bins_high[bin], high);
}

static __device__ __forceinline__ u64 bin_read(const struct sample_shared *s, int bin) {
    return (u64)s->bins_high[bin] << 32 | s->bins[bin];
}

static __device__ void bins_clear(struct sample_shared *s) {
    __syncthreads();
    for (int i = (int)threadIdx.x; i < SAMPLE_BINS; i += SAMPLE_THREADS) s->bins[i] = s->bins_high[i] = 0;
    __syncthreads();
}

static __device__ u64 block_sum(struct sample_shared *s, u64 value) {
    for (int offset = 16; offset; offset >>= 1) value += __shfl_xor_sync(SAMPLE_FULL, value, offset);
    __syncthreads();
    if (lane_index() == 0) s->of_warp[warp_index()] = value;
    __syncthreads();
    u64 sum = 0;
    for (int w = 0; w < SAMPLE_WARPS; w++) sum += s->of_warp[w];
    return sum;
}

/* In the order of lanes and warps, which is fixed. */
static __device__ double block_sum_double(struct sample_shared *s, double value) {
    for (int offset = 16; offset; offset >>= 1) value += __shfl_xor_sync(SAMPLE_FULL, value, offset);
    __syncthreads();
    if (lane_index() == 0) s->sum_of_warp[warp_index()] = value;
    __syncthreads();
    double sum = 0.0;
    for (int w = 0; w < SAMPLE_WARPS; w++) sum += s->sum_of_warp[w];
    return sum;
}

/* The largest of all (NaN if any is), and the lowest id among those that are the largest. */
static __device__ float block_max(struct sample_shared *s, float value, uint32_t *id) {
    float most = value;
    for (int offset = 16; offset; offset >>= 1) most = max_nan(most, __shfl_xor_sync(SAMPLE_FULL, most, offset));
    uint32_t low = __reduce_min_sync(SAMPLE_FULL, value == most ? *id : SAMPLE_FULL);
    __syncthreads();
    if (lane_index() == 0) {
        s->sum_of_warp[warp_index()] = (double)most;
        s->low_of_warp[warp_index()] = low;
    }
    __syncthreads();
    float all = (float)s->sum_of_warp[0];
    *id = s->low_of_warp[0];
    for (int w = 1; w < SAMPLE_WARPS; w++) {
        float other = (float)s->sum_of_warp[w];
        if (other > all) *id = s->low_of_warp[w];
        if (other == all) *id = min(*id, s->low_of_warp[w]);
        all = max_nan(all, other);
    }
    return all;
}

/* A thread's place in the running sum over items that the threads own in runs of equal length. */
struct block_run {
    int begin, end;
    u64 below, own, total;
};

template <class Mass> static __device__ struct block_run block_scan(struct sample_shared *s, int count, Mass mass) {
    int each = (count + SAMPLE_THREADS - 1) / SAMPLE_THREADS;
    struct block_run run;
    run.begin = min(count, (int)threadIdx.x * each);
    run.end = min(count, run.begin + each);
    run.own = 0;
    for (int i = run.begin; i < run.end; i++) run.own += mass(i);
    u64 sum = run.own;
    for (int offset = 1; offset < 32; offset <<= 1) {
        u64 before = __shfl_up_sync(SAMPLE_FULL, sum, offset);
        if (lane_index() >= offset) sum += before;
    }
    __syncthreads();
    if (lane_index() == 31) s->of_warp[warp_index()] = sum;
    __syncthreads();
    run.below = sum - run.own;
    run.total = 0;
    for (int w = 0; w < SAMPLE_WARPS; w++) {
        if (w < warp_index()) run.below += s->of_warp[w];
        run.total += s->of_warp[w];
    }
    return run;
}

/* The first item that lifts the sum above the target (the last that has mass where the target is out of reach); -1
 * where none has any. *below becomes the sum before it. */
template <class Mass>
static __device__ int block_find(struct sample_shared *s, const struct block_run *run, u64 target, Mass mass,
                                 u64 *below) {
    if (run->total == 0) return -1;
    target = min(target, run->total - 1);
    if (run->below <= target && target < run->below + run->own) { /* one thread's */
        u64 sum = run->below;
        for (int i = run->begin; i < run->end; i++) {
            u64 m = mass(i);
            if (sum + m > target) {
                s->found = i;
                s->above = sum;
                break;
            }
            sum += m;
        }
    }
    __syncthreads();
    int found = s->found;
    *below = s->above;
    __syncthreads();
    return found;
}

/* Sorts keys [count] upwards (bitonic; what lies behind up to the next power of two is overwritten). */
static __device__ __noinline__ void block_sort(struct sample_shared *s, int count) {
    int size = 2;
    while (size < count) size <<= 1;
    for (int i = count + (int)threadIdx.x; i < size; i += SAMPLE_THREADS) s->keys[i] = ~0ull;
    __syncthreads();
    for (int run = 2; run <= size; run <<= 1) {
        for (int step = run >> 1; step; step >>= 1) {
            for (int p = (int)threadIdx.x; p < size / 2; p += SAMPLE_THREADS) {
                int a = 2 * p - (p & (step - 1)), b = a + step;
                u64 x = s->keys[a], y = s->keys[b];
                if ((x > y) == ((a & run) == 0)) {
                    s->keys[a] = y;
                    s->keys[b] = x;
                }
            }
            __syncthreads();
        }
    }
}

#endif
