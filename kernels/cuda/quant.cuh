/* quant.cuh: values of a quantised segment on the device, for kernels that look up single values. Those that multiply
 * decode whole fragments in their own way. */
#ifndef QUIRE_KERNELS_CUDA_QUANT_CUH
#define QUIRE_KERNELS_CUDA_QUANT_CUH

#include <cuda_fp16.h>

#include "kernels/cuda/quant.h"

/* Value of one column of one row; `l` is quant_layout_of this dtype and shape. */
static __device__ __forceinline__ float quant_value(const unsigned char *data, const quant_layout &l, enum dtype dtype,
                                                    int64_t row, int64_t col) {
    const int64_t block = col / CUDA_QUANT_BLOCK;
    const int j = (int)(col % CUDA_QUANT_BLOCK), word = j / 8, pair = j % 8 / 2, odd = j & 1;
    const unsigned char *quants = data + (row * l.blocks + block) * l.quant_bytes;
    const __half *scale =
        reinterpret_cast<const __half *>(data + l.scales_at) + (row * l.scale_pitch + block) * (l.scale_bytes / 2);
    const float d = __half2float(scale[0]);
    if (dtype == DTYPE_Q8_0) return d * (float)(signed char)quants[j];
    int q = (int)(reinterpret_cast<const uint32_t *>(quants)[word] >> (4 * pair + 16 * odd) & 15u);
    if (l.high) {
        const uint32_t high = reinterpret_cast<const uint32_t *>(data + l.high_at)[row * l.high_pitch + block];
        q |= (int)(high >> (8 * word + pair + 4 * odd) & 1u) << 4;
    }
    if (l.scale_bytes == 4) return d * (float)q + __half2float(scale[1]);
    return d * (float)(q - (dtype == DTYPE_Q5_0 ? 16 : 8));
}

#endif
