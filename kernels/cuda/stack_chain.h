/* stack_chain.h: up to four products of a decode step in one kernel, each of which reads what the one before wrote.
 * Between stack.c, which fills this in for a layer, and stack_chain_sm90.cu. Rank thread; launches are captured like
 * any op's. Knows nothing of attention, pages or layers. */
#ifndef QUIRE_KERNELS_CUDA_STACK_CHAIN_H
#define QUIRE_KERNELS_CUDA_STACK_CHAIN_H

#include "kernels/cuda/linear_private.h"

#ifdef __cplusplus
extern "C" {
#endif

#define CHAIN_ROWS_MAX 32
#define CHAIN_PRODUCTS 4
/* What chain_launch keeps between launches, zero: a counter a product, one of exits. */
#define CHAIN_COUNTERS (CHAIN_PRODUCTS + 1)

/* What becomes of the sums. */
enum chain_kind {
    CHAIN_PLAIN,    /* y = sums, [rows, out] bf16 */
    CHAIN_GATED,    /* y = silu(gate) * up of interleaved rows, [rows, out / 2] bf16 */
    CHAIN_RESIDUAL, /* residual += sums; y = residual * (norm + norm_offset), not yet divided by the root mean square */
};

struct chain_product {
    const void *w; /* [out, cols] bf16, rows `pitch` apart */
    const void *x; /* [rows, cols] bf16, without gaps */
    void *y;
    const float *norm; /* [out] f32, of CHAIN_RESIDUAL */
    int64_t pitch;
    int32_t out, cols;
    enum chain_kind kind;
    bool scaled; /* x is y of a CHAIN_RESIDUAL before: the sums are divided by the root mean square of its residual */
};

struct chain {
    struct chain_product products[CHAIN_PRODUCTS];
    int32_t count, rows, hidden;
    void *residual;     /* [rows, hidden] bf16 */
    float *squares;     /* [(hidden + 15) / 16, CHAIN_ROWS_MAX] f32: no more tiles than that */
    unsigned *counters; /* [CHAIN_COUNTERS] */
    float norm_eps, norm_offset;
    uint64_t *trace; /* NULL, or of a bench */
};

int chain_open(const struct linear_sm90 *sm90,
               int *clusters); /* a cudaError_t; how many clusters of blocks run at once */
int chain_launch(const struct linear_sm90 *sm90, int clusters, cudaStream_t stream, const struct chain *chain);

#ifdef __cplusplus
}
#endif

#endif
