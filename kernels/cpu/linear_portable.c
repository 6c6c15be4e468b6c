/* Matrix multiplication in plain C, for machines without the instruction sets that have files of their own. Written so
 * that compilers vectorise the inner loops with whatever the base architecture has. */
#include <math.h>
#include <string.h>

#include "kernels/cpu/linear_kernels.h"

enum { LANES = GROUP_ROWS, ROWS_AT_ONCE = 8 };

static void quantize_portable(const float *x, int64_t cols, struct act_block *out) {
    for (int64_t begin = 0; begin < cols; begin += QUANT_BLOCK, x += QUANT_BLOCK, out++) {
        uint32_t bits_max = 0; /* |x| compared as integers: the order is the same, and a NaN is the greatest of all */
        float amax;
        for (int i = 0; i < QUANT_BLOCK; i++) {
            uint32_t bits;
            memcpy(&bits, &x[i], 4);
            bits &= 0x7fffffffu;
            bits_max = bits > bits_max ? bits : bits_max;
        }
        memcpy(&amax, &bits_max, 4);
        float inverse = amax > 0 ? 127.0f / amax : 0.0f;
        bool finite = bits_max < 0x7f800000u && inverse < INFINITY;
        if (!finite && bits_max < 0x7f800000u) amax = inverse = 0; /* so small that 127 / amax overflows: zero */
        int32_t sum = 0;
        for (int i = 0; i < QUANT_BLOCK; i++) {
            int32_t q = finite ? (int32_t)lrintf(x[i] * inverse) : 0;
            out->q[i] = (int8_t)q;
            sum += q;
        }
        out->d = amax / 127.0f;
        out->correction = -128 * sum;
        out->s = out->d * (float)sum;
    }
}

/* A block of a group as int16, q minus nothing: w [LANES][32]. */
static void block_unpack(enum dtype dtype, const uint8_t *quants, int16_t *w) {
    bool q5 = dtype == DTYPE_Q5_0 || dtype == DTYPE_Q5_1;
    for (int lane = 0; lane < LANES; lane++, w += QUANT_BLOCK) {
        for (int v = 0; v < (dtype == DTYPE_Q8_0 ? 8 : 4); v++) {
            for (int i = 0; i < 4; i++) {
                uint8_t byte = quants[(v * LANES + lane) * 4 + i];
                if (dtype == DTYPE_Q8_0) {
                    w[4 * v + i] = (int8_t)byte;
                    continue;
                }
                uint8_t high = q5 ? quants[(4 * LANES + lane) * 4 + i] : 0;
                w[4 * v + i] = (int16_t)((byte & 15) | (high >> v & 1) << 4);
                w[16 + 4 * v + i] = (int16_t)(byte >> 4 | (high >> (v + 4) & 1) << 4);
            }
        }
    }
}

static float half_at(const uint8_t *p) {
    uint16_t half;
    memcpy(&half, p, 2);
    return f16_to_f32(half);
}

/* Scales and minimums of a block; those of q4_0 and q5_0 are the offset's. False where there are no minimums. */
static bool block_scales(enum dtype dtype, const struct group_layout *layout, const uint8_t *block, float *d,
                         float *m) {
    for (int64_t lane = 0; lane < LANES; lane++) {
        d[lane] = half_at(block + layout->scales_at + 2 * lane);
        m[lane] = dtype == DTYPE_Q4_0 ? -8 * d[lane] : dtype == DTYPE_Q5_0 ? -16 * d[lane] : 0;
        if (layout->minimums_at) m[lane] = half_at(block + layout->minimums_at + 2 * lane);
    }
    return dtype != DTYPE_Q8_0;
}

static int32_t dot32(const int16_t *w, const int16_t *x) {
    int32_t sum = 0;
    for (int i = 0; i < QUANT_BLOCK; i++) sum += w[i] * x[i];
    return sum;
}

/* Up to ROWS_AT_ONCE rows against one group; a block is unpacked once for all of them. */
static void group_int8(const struct linear_job *job, const uint8_t *group, int64_t row, int64_t rows,
                       float (*acc)[LANES]) {
    enum dtype dtype = job->segment->dtype;
    const struct group_layout layout = group_layout(dtype, job->cols);
    memset(acc, 0, (size_t)rows * sizeof *acc);
    for (int64_t b = 0; b < job->blocks; b++, group += layout.block_bytes) {
        int16_t w[LANES * QUANT_BLOCK], x[QUANT_BLOCK];
        float d[LANES], m[LANES];
        block_unpack(dtype, group, w);
        bool minimums = block_scales(dtype, &layout, group, d, m);
        for (int64_t r = 0; r < rows; r++) {
            const struct act_block *q = &job->q[(row + r) * job->blocks + b];
            for (int i = 0; i < QUANT_BLOCK; i++) x[i] = q->q[i];
            for (int lane = 0; lane < LANES; lane++) {
                acc[r][lane] += (float)dot32(w + lane * QUANT_BLOCK, x) * (d[lane] * q->d);
                if (minimums) acc[r][lane] += m[lane] * q->s;
            }
        }
    }
}

static void group_f32(const struct linear_job *job, const uint8_t *group, int64_t row, int64_t rows,
                      float (*acc)[LANES]) {
    memset(acc, 0, (size_t)rows * sizeof *acc);
    for (int64_t b = 0; b < job->blocks; b++) {
        float w[QUANT_BLOCK][LANES];
        int64_t left = job->cols - b * QUANT_BLOCK, count = left < QUANT_BLOCK ? left : QUANT_BLOCK;
        group_block_dequant(job->segment->dtype, job->cols, false, group, b, (int32_t)count, w[0]);
        for (int64_t r = 0; r < rows; r++) {
            const float *x = job->x + (row + r) * job->x_stride + b * QUANT_BLOCK;
            for (int64_t c = 0; c < count; c++)
                for (int lane = 0; lane < LANES; lane++) acc[r][lane] += w[c][lane] * x[c];
        }
    }
}

static void linear_portable(const struct linear_job *job, bool int8, int64_t group_begin, int64_t group_end,
                            int64_t row_begin, int64_t row_end) {
    const struct weight_segment *segment = job->segment;
    float acc[ROWS_AT_ONCE][LANES];
    for (int64_t g = group_begin; g < group_end; g++) {
        const uint8_t *group = segment->data + (size_t)g * segment->group_bytes;
        int64_t first = g * LANES, lanes = segment->rows - first < LANES ? segment->rows - first : LANES;
        for (int64_t row = row_begin; row < row_end; row += ROWS_AT_ONCE) {
            int64_t rows = row_end - row < ROWS_AT_ONCE ? row_end - row : ROWS_AT_ONCE;
            if (int8)
                group_int8(job, group, row, rows, acc);
            else
                group_f32(job, group, row, rows, acc);
            for (int64_t r = 0; r < rows; r++) linear_store_tail(job, row + r, first, lanes, acc[r]);
        }
    }
}

static void linear_int8(const struct linear_job *job, int64_t group_begin, int64_t group_end, int64_t row_begin,
                        int64_t row_end) {
    linear_portable(job, true, group_begin, group_end, row_begin, row_end);
}

static void linear_f32(const struct linear_job *job, int64_t group_begin, int64_t group_end, int64_t row_begin,
                       int64_t row_end) {
    linear_portable(job, false, group_begin, group_end, row_begin, row_end);
}

const struct linear_kernels linear_kernels_portable = {
    .quantize = quantize_portable,
    .int8 = {[DTYPE_Q4_0] = linear_int8,
             [DTYPE_Q4_1] = linear_int8,
             [DTYPE_Q5_0] = linear_int8,
             [DTYPE_Q5_1] = linear_int8,
             [DTYPE_Q8_0] = linear_int8},
    .f32 = {[DTYPE_F32] = linear_f32,
            [DTYPE_F16] = linear_f32,
            [DTYPE_BF16] = linear_f32,
            [DTYPE_Q4_0] = linear_f32,
            [DTYPE_Q4_1] = linear_f32,
            [DTYPE_Q5_0] = linear_f32,
            [DTYPE_Q5_1] = linear_f32,
            [DTYPE_Q8_0] = linear_f32},
};
