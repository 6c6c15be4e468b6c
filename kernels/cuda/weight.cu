/* The kernels behind weight.c: raw rows of a file, already on the device, to the layout that is multiplied; and random
 * values made in place. */
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/quant.cuh"
#include "kernels/cuda/weight_kernels.h"

/* Where row `row` of part `part` lies: in groups of 8 of each part where the matrix is gated. */
static __device__ __forceinline__ int64_t row_place(const weight_target &t, int64_t row) {
    if (t.gate_part < 0) return t.row_begin + row;
    return row / CUDA_GATE_ROWS * (2 * CUDA_GATE_ROWS) + t.gate_part * CUDA_GATE_ROWS + row % CUDA_GATE_ROWS;
}

static __device__ __forceinline__ uint16_t read_u16(const unsigned char *p) { /* rows may begin at any byte */
    return (uint16_t)(p[0] | p[1] << 8);
}
static __device__ __forceinline__ uint32_t read_u32(const unsigned char *p) {
    return (uint32_t)read_u16(p) | (uint32_t)read_u16(p + 2) << 16;
}

/* raw [rows, cols] of dtype, first row `first` of its part, to bf16 [*, pitch]. A thread an element. */
static __global__ void plain_kernel(const unsigned char *raw, weight_target t, enum dtype dtype, int64_t first,
                                    int64_t rows, int64_t cols) {
    const int64_t count = rows * cols, step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
        const int64_t row = i / cols, col = i % cols;
        __nv_bfloat16 *out = reinterpret_cast<__nv_bfloat16 *>(t.data) + row_place(t, first + row) * t.pitch + col;
        if (dtype == DTYPE_F32)
            *out = __float2bfloat16_rn(__uint_as_float(read_u32(raw + 4 * i)));
        else if (dtype == DTYPE_F16)
            *out = __float2bfloat16_rn(__half2float(__ushort_as_half(read_u16(raw + 2 * i))));
        else
            *out = __ushort_as_bfloat16(read_u16(raw + 2 * i));
    }
}

/* One block of 32 columns into its place; `block` in GGUF's layout. */
static __device__ void block_store(const unsigned char *block, const weight_target &t, const quant_layout &l,
                                   enum dtype dtype, int64_t row, int64_t index) {
    uint16_t *scale =
        reinterpret_cast<uint16_t *>(t.data + l.scales_at) + (row * l.scale_pitch + index) * (l.scale_bytes / 2);
    scale[0] = read_u16(block);
    if (l.scale_bytes == 4) scale[1] = read_u16(block + 2);
    block += l.scale_bytes;
    uint32_t *quants = reinterpret_cast<uint32_t *>(t.data + (row * l.blocks + index) * l.quant_bytes);
    if (dtype == DTYPE_Q8_0) {
        for (int i = 0; i < 8; i++) quants[i] = read_u32(block + 4 * i);
        return;
    }
    if (l.high) {
        const uint32_t bits = read_u32(block);
        uint32_t high = 0;
        for (int j = 0; j < 32; j++) high |= (bits >> j & 1u) << (j / 8 * 8 + j % 8 / 2 + (j & 1) * 4);
        reinterpret_cast<uint32_t *>(t.data + l.high_at)[row * l.high_pitch + index] = high;
        block += 4;
    }
    for (int word = 0; word < 4; word++) { /* column j is in the low half of byte j, column 16 + j in its high half */
        uint32_t packed = 0;
        for (int i = 0; i < 8; i++) {
            const int j = 8 * word + i;
            const uint32_t q = (uint32_t)block[j % 16] >> (j < 16 ? 0 : 4) & 15u;
            packed |= q << (4 * (i / 2) + 16 * (i & 1));
        }
        quants[word] = packed;
    }
}

/* A thread a block. */
static __global__ void blocks_kernel(const unsigned char *raw, weight_target t, quant_layout l, enum dtype dtype,
                                     int32_t raw_bytes, int64_t first, int64_t rows) {
    const int64_t count = rows * l.blocks, step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step)
        block_store(raw + i * raw_bytes, t, l, dtype, row_place(t, first + i / l.blocks), i % l.blocks);
}

/* ---- random values: a pure function of seed, row and column --------------------------------------------------------
 */

static __device__ __forceinline__ uint64_t hash64(uint64_t seed, uint64_t place) { /* SplitMix64 of a counter */
    uint64_t z = seed + (place + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* 8 columns a thread: sign and mantissa from one byte each, under a fixed exponent; 16 bytes stored at once. */
static __global__ void dummy_plain_kernel(weight_target t, dummy_values d) {
    const int64_t groups = t.pitch / 8, count = d.rows * groups, step = (int64_t)gridDim.x * blockDim.x;
    const uint32_t exponent = d.scale;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
        const int64_t row = i / groups, group = i % groups;
        const uint64_t place = (uint64_t)(d.first_row + row) << 29 | (uint64_t)(d.first_col / 8 + group);
        const uint64_t bits = hash64(d.seed, place);
        uint32_t words[4];
#pragma unroll
        for (int w = 0; w < 4; w++) {
            const uint32_t two = (uint32_t)(bits >> (16 * w)) & 0xffffu;
            const int64_t col = group * 8 + w * 2;
            const uint32_t low = col < d.cols ? (two & 0x7fu) | (two & 0x80u) << 8 | exponent << 7 : 0;
            const uint32_t high = col + 1 < d.cols ? (two >> 8 & 0x7fu) | (two & 0x8000u) | exponent << 7 : 0;
            words[w] = low | high << 16;
        }
        unsigned char *out = t.data + (row_place(t, row) * t.pitch + group * 8) * 2;
        *reinterpret_cast<uint4 *>(out) = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

/* A block a thread: random quants under a fixed scale. */
static __global__ void dummy_blocks_kernel(weight_target t, quant_layout l, dummy_values d) {
    const int64_t count = d.rows * l.blocks, step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
        const int64_t row = row_place(t, i / l.blocks), index = i % l.blocks;
        const uint64_t place = (uint64_t)(d.first_row + i / l.blocks) << 29 |
                               (uint64_t)(d.first_col / CUDA_QUANT_BLOCK + index) << 3;
        uint64_t *quants = reinterpret_cast<uint64_t *>(t.data + (row * l.blocks + index) * l.quant_bytes);
        for (int w = 0; w < l.quant_bytes / 8; w++) quants[w] = hash64(d.seed, place + (uint64_t)w);
        if (l.high)
            reinterpret_cast<uint32_t *>(t.data + l.high_at)[row * l.high_pitch + index] =
                (uint32_t)hash64(d.seed, place + 7);
        uint16_t *out =
            reinterpret_cast<uint16_t *>(t.data + l.scales_at) + (row * l.scale_pitch + index) * (l.scale_bytes / 2);
        out[0] = (uint16_t)d.scale;
        if (l.scale_bytes == 4) out[1] = (uint16_t)(d.scale >> 16);
    }
}

/* ---- launchers -----------------------------------------------------------------------------------------------------
 */

enum { THREADS = 256, BLOCKS_MAX = 132 * 16 }; /* two waves of full multiprocessors, then each thread goes on */

static unsigned grid_of(int64_t count) {
    const int64_t blocks = (count + THREADS - 1) / THREADS;
    return (unsigned)(blocks < BLOCKS_MAX ? blocks : (int64_t)BLOCKS_MAX);
}

extern "C" void weight_launch_rows(cudaStream_t stream, const unsigned char *raw, const struct weight_target *target,
                                   enum dtype dtype, int64_t first, int64_t rows, int64_t cols) {
    if (!dtype_is_quantised(dtype)) {
        plain_kernel<<<grid_of(rows * cols), THREADS, 0, stream>>>(raw, *target, dtype, first, rows, cols);
        return;
    }
    const quant_layout l = quant_layout_of(dtype, target->segment_rows, cols);
    const int32_t raw_bytes = l.quant_bytes + l.scale_bytes + (l.high ? 4 : 0);
    blocks_kernel<<<grid_of(rows * l.blocks), THREADS, 0, stream>>>(raw, *target, l, dtype, raw_bytes, first, rows);
}

extern "C" void weight_launch_dummy(cudaStream_t stream, const struct weight_target *target, enum dtype dtype,
                                    const struct dummy_values *dummy) {
    if (!dtype_is_quantised(dtype)) {
        dummy_plain_kernel<<<grid_of(dummy->rows * target->pitch / 8), THREADS, 0, stream>>>(*target, *dummy);
        return;
    }
    const quant_layout l = quant_layout_of(dtype, target->segment_rows, dummy->cols);
    dummy_blocks_kernel<<<grid_of(dummy->rows * l.blocks), THREADS, 0, stream>>>(*target, l, *dummy);
}
