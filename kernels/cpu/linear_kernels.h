/* linear_kernels.h: what a set of instructions brings to matrix multiplication: one table, chosen at backend_open. A
 * kernel multiplies some groups of a weight with some rows of x. Called inside tiles, by any worker; no state.
 *
 * The bits of a result depend on its row of x and its row of the weight alone. Every kernel keeps to one order for any
 * number of rows:
 *   int8: acc = 0; for each block of 32 columns: acc = fma((float)sum(q * x.q), d * x.d, acc), and where there is a
 *         minimum m: acc = fma(m, x.s, acc). The sum is of integers and exact.
 *   f32:  acc = 0; for each column: acc = fma(w, x, acc).
 * Then bias, then what y held before. Instruction sets may differ from each other (portable code rounds twice where it
 * has no fma). */
#ifndef QUIRE_KERNELS_CPU_LINEAR_KERNELS_H
#define QUIRE_KERNELS_CPU_LINEAR_KERNELS_H

#include "kernels/cpu/weight.h"

/* 32 activations rounded to int8: x = d * q. */
struct act_block {
    int8_t q[QUANT_BLOCK]; /* -127 .. 127 */
    float d;               /* max |x| / 127 */
    float s;               /* d * sum(q) */
    int32_t correction;    /* -128 * sum(q), for weights kept as q + 128 */
};

/* One segment of a weight against all rows of x. */
struct linear_job {
    const struct weight_segment *segment;
    struct group_layout layout;
    int64_t cols, blocks;      /* blocks of 32 columns, the last one may be short for plain dtypes */
    const struct act_block *q; /* [rows, blocks], of the int8 kernels */
    const float *x;            /* [rows, cols] f32, stride x_stride, of the f32 kernels */
    int64_t x_stride;
    const float *bias; /* [segment rows] f32 or NULL */
    float *y;          /* [rows, segment rows] f32, stride y_stride */
    int64_t y_stride;
    bool accumulate;
};

/* Groups [group_begin, group_end) of the weight times rows [row_begin, row_end) of x. */
typedef void linear_fn(const struct linear_job *job, int64_t group_begin, int64_t group_end, int64_t row_begin,
                       int64_t row_end);

struct linear_kernels {
    /* x [cols] f32, cols a multiple of 32, to blocks. A NaN or infinity in a block makes its d NaN or infinite. */
    void (*quantize)(const float *x, int64_t cols, struct act_block *out);
    linear_fn *int8[DTYPE_COUNT]; /* quantised dtypes */
    linear_fn *f32[DTYPE_COUNT];  /* all dtypes that multiply */
};

extern const struct linear_kernels linear_kernels_portable;
#if defined(__x86_64__)
extern const struct linear_kernels linear_kernels_avx2;
extern const struct linear_kernels linear_kernels_avx512;
void quantize_avx2(const float *x, int64_t cols, struct act_block *out); /* both tables' quantize */
#endif

/* Stores what a group gave for one row of x: acc [16] f32. The slow and general way, for a group that is not full. */
static inline void linear_store_tail(const struct linear_job *job, int64_t row, int64_t first, int64_t lanes,
                                     const float *acc) {
    float *y = job->y + row * job->y_stride + first;
    for (int64_t lane = 0; lane < lanes; lane++) {
        float v = acc[lane];
        if (job->bias) v += job->bias[first + lane];
        if (job->accumulate) v += y[lane];
        y[lane] = v;
    }
}

/* While some rows are multiplied by one group, the next group is fetched piece by piece: asked for all at once it would
 * fill the miss buffers (24 lines on Zen 3), and not at all it would come at the pace of the first row. */
struct prefetch {
    const uint8_t *at, *end;
    size_t step;
};

static inline struct prefetch prefetch_group(const struct linear_job *job, int64_t group, int64_t group_end,
                                             int64_t rows, int64_t rows_a_call) {
    struct prefetch p = {0};
    if (group >= group_end || rows < rows_a_call) return p;
    size_t bytes = job->segment->group_bytes, calls = (size_t)(rows / rows_a_call);
    p.at = job->segment->data + (size_t)group * bytes;
    p.end = p.at + bytes;
    p.step = (bytes / calls + 63) & ~(size_t)63;
    return p;
}

static inline void prefetch_some(struct prefetch *p) {
    const uint8_t *end = (size_t)(p->end - p->at) < p->step ? p->end : p->at + p->step;
    for (; p->at < end; p->at += 64) __builtin_prefetch(p->at);
}

/* The lines of y that a tile will write. Rows of y are often a multiple of 4 KB apart, which is one set of the caches
 * for all of them: without this every store waits for its line (67 Gmac/s and not 90 with rows 12 KB apart, Zen 3). */
static inline void prefetch_results(int rows, const struct linear_job *job, int64_t group, int64_t row) {
    for (int r = 0; r < rows; r++) __builtin_prefetch(job->y + (row + r) * job->y_stride + group * GROUP_ROWS, 1);
}

#endif
