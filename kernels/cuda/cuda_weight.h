/* cuda_weight.h: how the CUDA backend keeps a matrix. Plain dtypes (f32, f16, bf16 sources) become bf16, row-major, the
 * last dimension contiguous; quantised ones keep their bits in a layout that the kernels load in 16-byte pieces. Made
 * by the rank thread before ready, immutable after. */
#ifndef QUIRE_KERNELS_CUDA_CUDA_WEIGHT_H
#define QUIRE_KERNELS_CUDA_CUDA_WEIGHT_H

#include "kernels/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows of gate and of up that lie side by side in a WEIGHT_GATED matrix: 8 rows of gate, the same 8 of up, the next 8
 * of gate, and so on. A thread of a tensor-core tile (mma m16, wgmma m64) holds rows r and r + 8 of its 16, so gate and
 * up of one output lie in one thread and the activation is applied before anything is stored. ffn must be a multiple of
 * 8; op_linear of a WEIGHT_GATED matrix gives its columns in this order, and gated_act of the CUDA backend is only used
 * on them through cuda_gated_act_interleaved. */
#define CUDA_GATE_ROWS 8

struct cuda_weight_segment {
    enum dtype dtype; /* DTYPE_BF16 or a quantised dtype */
    int64_t row_begin, rows;
    void *data; /* device; bf16: [rows, pitch] row-major; quantised: see quant.h's layout */
};

struct cuda_weight {
    struct weight base;
    int64_t pitch; /* values from one bf16 row to the next: cols rounded up to 8, so that rows begin at 16 bytes */
    unsigned char *data;   /* all segments, 256-byte aligned, MEMORY_WEIGHTS */
    int32_t segment_count; /* neighbouring parts of one dtype are one segment; 1 for all-bf16 matrices */
    struct cuda_weight_segment segments[];
};

static inline const struct cuda_weight *cuda_weight_of(const struct weight *weight) {
    return (const struct cuda_weight *)(const void *)weight;
}

/* True for a matrix that is one block of bf16 rows: what wgmma kernels, bulk copies and cuBLASLt take. */
static inline bool cuda_weight_plain(const struct weight *weight) {
    const struct cuda_weight *w = cuda_weight_of(weight);
    return w->segment_count == 1 && w->segments[0].dtype == DTYPE_BF16;
}

/* True where gate and up lie in groups of CUDA_GATE_ROWS. A WEIGHT_GATED matrix whose halves differ in dtype (one of
 * them quantised, or each in its own way) is two segments, one below the other. */
static inline bool cuda_weight_interleaved(const struct weight *weight) {
    return (weight->flags & WEIGHT_GATED) && cuda_weight_of(weight)->segment_count == 1;
}

bool cuda_weight_bytes(const struct backend *backend, const struct weight_part *parts, int32_t part_count, int64_t cols,
                       unsigned flags, size_t *bytes);
int cuda_weight_prepare(struct backend *backend, const struct weight_part *parts, int32_t part_count, int64_t rows,
                        int64_t cols, unsigned flags, struct weight **out, struct err *err);
int cuda_weight_dummy(struct backend *backend, const struct weight_part *parts, int32_t part_count, int64_t rows,
                      int64_t cols, unsigned flags, uint64_t seed, struct weight **out, struct err *err);
void cuda_weight_free(struct backend *backend, struct weight *weight);

/* linear.c: the handle and the table of algorithms. */
int cuda_linear_open(struct backend *backend, struct err *err);
void cuda_linear_close(struct backend *backend);

#ifdef __cplusplus
}
#endif

#endif
