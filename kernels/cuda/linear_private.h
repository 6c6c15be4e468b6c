/* linear_private.h: one product as the kernels behind op_linear see it, and their launchers. linear.c decides which one
 * runs; the .cu files know nothing of each other. Rank thread; every launch goes to the stream in order and may be
 * captured. */
#ifndef QUIRE_KERNELS_CUDA_LINEAR_PRIVATE_H
#define QUIRE_KERNELS_CUDA_LINEAR_PRIVATE_H

#include "kernels/cuda/cuda_weight.h"

#ifdef __cplusplus
extern "C" {
#endif

/* y = x w^T (+ bias) (+ y) for one segment of a matrix; where gated, y = act(gate) * up of interleaved rows. */
struct linear_product {
    const void *x;     /* [rows, cols] bf16, stride x_stride */
    const void *w;     /* [out, cols] dtype: bf16 with `pitch`, or quant.h's layout */
    const float *bias; /* [out] f32 or NULL; gated: gate [out / 2], then up */
    void *y;           /* [rows, out] (gated: [rows, out / 2]) bf16 or f32, stride y_stride */
    int64_t x_stride, y_stride, pitch;
    int32_t rows, out, cols;
    enum dtype dtype;
    enum activation activation; /* of gated */
    bool gated, accumulate, out_f32;
};

/* linear_mma.cu: any GPU from 8.0 on, any shape, any dtype. invariant: the sum over columns in one order for every
 * number of rows; else few rows are summed in several chains, which is faster. */
int linear_mma_open(const struct cuda *cuda); /* raises limits of shared memory, once; a cudaError_t */
int linear_mma_launch(cudaStream_t stream, const struct linear_product *p, bool invariant); /* a cudaError_t */

#ifdef __cplusplus
}
#endif

#endif
