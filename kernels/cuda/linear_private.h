/* linear_private.h: one product as the kernels behind op_linear see it, and their launchers. linear.c decides which one
 * runs; the .cu files know nothing of each other. Rank thread; every launch goes to the stream in order and may be
 * captured. */
#ifndef QUIRE_KERNELS_CUDA_LINEAR_PRIVATE_H
#define QUIRE_KERNELS_CUDA_LINEAR_PRIVATE_H

#include "kernels/cuda/cublaslt.h"
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
/* early: may begin while the kernel before ends (sm_90 code alone waits for it inside). A cudaError_t. */
int linear_mma_launch(cudaStream_t stream, const struct linear_product *p, bool invariant, bool early);

/* linear_sm90.cu: wgmma fed by tensor copies; bf16 weights, x of whole 16-byte pieces. */
#define LINEAR_SM90_ARRIVALS 1024 /* twice the tiles of a product whose columns are split: fewer than clusters */
struct linear_sm90 {
    void *encode;       /* cuTensorMapEncodeTiled */
    unsigned *arrivals; /* device [LINEAR_SM90_ARRIVALS], zero between launches */
    int clusters;       /* of two blocks, that run at once */
    int sms;
};
int linear_sm90_open(struct linear_sm90 *sm90, int sms); /* a cudaError_t */
void linear_sm90_close(struct linear_sm90 *sm90);
bool linear_sm90_takes(const struct linear_product *p);
/* How evenly the tiles of a product, or the parts of its columns, fill the clusters: 0 .. 1. */
double linear_sm90_fill(const struct linear_sm90 *sm90, const struct linear_product *p);
/* scratch: CUDA_SCRATCH_BYTES. A cudaError_t. */
int linear_sm90_launch(const struct linear_sm90 *sm90, cudaStream_t stream, void *scratch,
                       const struct linear_product *p);

/* A CUtensorMap of [rows, cols] bf16 in boxes of box_rows rows and 64 columns; a cudaError_t. */
int linear_sm90_map(const struct linear_sm90 *sm90, void *map, const void *data, int64_t rows, int64_t cols,
                    int64_t stride, int box_rows);

/* linear_rows_sm90.cu: up to 16 rows, bf16 weights, columns in whole 64-byte pieces; gated too. */
#define LINEAR_ROWS_MAX 16
int linear_rows_open(void); /* a cudaError_t, as the launch's */
bool linear_rows_takes(const struct linear_product *p);
int linear_rows_launch(cudaStream_t stream, int sms, const struct linear_product *p);

/* linear_gemm.c: cuBLASLt; bf16 weights, everything in whole 16-byte pieces, no bias, not gated. */
#define GEMM_CHOICES 256 /* shapes of a model times classes of rows: 5 times 14, with some of other strides */
struct gemm_class {
    int32_t out, cols, rows, pitches; /* rows: the class's upper end; pitches: strides, f32 and accumulate in one */
};
struct gemm_choice {
    struct gemm_class key;
    bool known;
    cublasLtMatmulAlgo_t algorithm;
};
struct linear_gemm {
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t w, x, y;
    cublasLtMatmulPreference_t preference;
    bool measured; /* the table was measured with this library on such a GPU */
    struct gemm_choice choices[GEMM_CHOICES];
};
int linear_gemm_open(struct linear_gemm *gemm, const struct cuda *cuda); /* these return a cublasStatus_t */
void linear_gemm_close(struct linear_gemm *gemm);
bool linear_gemm_takes(const struct linear_product *p);
int linear_gemm_launch(struct linear_gemm *gemm, cudaStream_t stream, void *scratch, const struct linear_product *p);

/* What cuda_linear_open keeps. */
struct cuda_linear {
    struct linear_gemm gemm;
    struct linear_sm90 sm90; /* clusters is 0 where this GPU, or a switch, has none */
};

#ifdef __cplusplus
}
#endif

#endif
