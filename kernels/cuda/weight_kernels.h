/* weight_kernels.h: what weight.c asks of weight.cu: to lay rows that are already on the device into a matrix, or to
 * make them up there. The rank thread calls; the launches go to the stream in order. Private to weight.c and weight.cu.
 */
#ifndef QUIRE_KERNELS_CUDA_WEIGHT_KERNELS_H
#define QUIRE_KERNELS_CUDA_WEIGHT_KERNELS_H

#include "kernels/cuda/cuda_weight.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One part's place in a segment. */
struct weight_target {
    unsigned char *data;  /* of the segment, device */
    int64_t segment_rows; /* of the whole segment */
    int64_t pitch;        /* bf16 segments: values from row to row */
    int64_t row_begin;    /* of the part in its segment; not read where gate_part is set */
    int32_t gate_part;    /* 0 gate, 1 up: rows go to groups of CUDA_GATE_ROWS in turn; -1: one below the other */
};

/* raw: [rows, cols] of dtype as in the file, device, the part's rows from `first` on. */
void weight_launch_rows(cudaStream_t stream, const unsigned char *raw, const struct weight_target *target,
                        enum dtype dtype, int64_t first, int64_t rows, int64_t cols);

/* Random values in the part's rows, as in those from first_row and columns from first_col on of the matrix that it is a
 * slice of. scale: bf16 targets: the biased exponent of every value; quantised: f16 scale, and the f16 minimum in the
 * upper half. */
struct dummy_values {
    int64_t rows, cols, first_row, first_col;
    uint64_t seed;
    uint32_t scale;
};
void weight_launch_dummy(cudaStream_t stream, const struct weight_target *target, enum dtype dtype,
                         const struct dummy_values *dummy);

#ifdef __cplusplus
}
#endif

#endif
