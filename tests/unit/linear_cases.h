/* linear_cases.h: random matrices in GGUF layouts, their values in double, and the backends of this machine. Shared by
 * the tests of weights and of matrix multiplication; the decoding here is written apart from the kernels'. */
#ifndef QUIRE_TESTS_LINEAR_CASES_H
#define QUIRE_TESTS_LINEAR_CASES_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/mem.h"
#include "kernels/ops.h"

static const enum dtype case_dtypes[] = {DTYPE_F32,  DTYPE_F16,  DTYPE_BF16, DTYPE_Q4_0,
                                         DTYPE_Q4_1, DTYPE_Q5_0, DTYPE_Q5_1, DTYPE_Q8_0};
enum { CASE_DTYPES = sizeof case_dtypes / sizeof case_dtypes[0] };

struct random {
    uint64_t state;
};

static inline uint32_t random_u32(struct random *r) {
    r->state = r->state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(r->state >> 32);
}

static inline float random_f32(struct random *r) {
    return (float)(int32_t)random_u32(r) * 0x1p-31f;
} /* -1 .. 1 */

/* A half of either sign between 2^-7 and 2^-3, any fraction. */
static inline uint16_t random_f16(struct random *r) {
    uint32_t u = random_u32(r);
    return (uint16_t)((u & 0x83ffu) | (8 + (u >> 16) % 4) << 10);
}

static inline double half_value(uint16_t h) {
    int exponent = h >> 10 & 31, fraction = h & 1023;
    double v = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
    return h & 0x8000 ? -v : v;
}

static inline bool dtype_quantised(enum dtype dtype) {
    return dtype_info(dtype)->block_values == 32;
}

/* [rows, cols] of a dtype; free with mem_free. */
static inline uint8_t *matrix_random(struct random *r, enum dtype dtype, int64_t rows, int64_t cols) {
    size_t row_bytes = 0;
    if (!dtype_row_bytes(dtype, cols, &row_bytes)) abort();
    size_t bytes = (size_t)rows * row_bytes, block = (size_t)dtype_info(dtype)->block_bytes;
    uint8_t *data = mem_alloc(bytes);
    for (size_t i = 0; i < bytes; i++) data[i] = (uint8_t)(random_u32(r) >> 13);
    for (size_t at = 0; at < bytes; at += block) {
        uint16_t half = random_f16(r);
        float value = random_f32(r);
        if (dtype == DTYPE_F32)
            memcpy(data + at, &value, 4);
        else if (dtype == DTYPE_BF16)
            memcpy(data + at, (uint8_t *)&value + 2, 2);
        else
            memcpy(data + at, &half, 2);
        half = random_f16(r);
        if (dtype == DTYPE_Q4_1 || dtype == DTYPE_Q5_1) memcpy(data + at + 2, &half, 2);
    }
    return data;
}

/* Value of one column of one row, after ggml's description of the formats. */
static inline double matrix_value(const uint8_t *data, enum dtype dtype, int64_t cols, int64_t row, int64_t col) {
    size_t row_bytes = 0;
    if (!dtype_row_bytes(dtype, cols, &row_bytes)) abort();
    int64_t values = dtype_info(dtype)->block_values;
    const uint8_t *block =
        data + (size_t)row * row_bytes + (size_t)(col / values) * (size_t)dtype_info(dtype)->block_bytes;
    int j = (int)(col % values);
    uint16_t half, min = 0;
    uint32_t bits = 0;
    float value;
    memcpy(&half, block, 2);
    switch (dtype) {
    case DTYPE_F32:
        memcpy(&value, block, 4);
        return (double)value;
    case DTYPE_BF16:
        bits = (uint32_t)half << 16;
        memcpy(&value, &bits, 4);
        return (double)value;
    case DTYPE_F16:
        return half_value(half);
    case DTYPE_Q8_0:
        return half_value(half) * (int8_t)block[2 + j];
    case DTYPE_Q4_0:
        return half_value(half) * ((j < 16 ? block[2 + j] & 15 : block[2 + j - 16] >> 4) - 8);
    case DTYPE_Q4_1:
        memcpy(&min, block + 2, 2);
        return half_value(half) * (j < 16 ? block[4 + j] & 15 : block[4 + j - 16] >> 4) + half_value(min);
    case DTYPE_Q5_0:
        memcpy(&bits, block + 2, 4);
        return half_value(half) *
               (((j < 16 ? block[6 + j] & 15 : block[6 + j - 16] >> 4) | (int)(bits >> j & 1) << 4) - 16);
    case DTYPE_Q5_1:
        memcpy(&min, block + 2, 2);
        memcpy(&bits, block + 4, 4);
        return half_value(half) * ((j < 16 ? block[8 + j] & 15 : block[8 + j - 16] >> 4) | (int)(bits >> j & 1) << 4) +
               half_value(min);
    default:
        abort();
    }
}

/* Opens a backend of one instruction set; NULL when this machine lacks it or QUIRE_CPU_ISA names another. The one that
 * is named must be there: the program ends otherwise. */
static inline struct backend *case_backend(const char *isa, int32_t threads, enum cpu_activations activations) {
    struct backend_options options = {
        .device = DEVICE_CPU, .threads = threads, .cpu_activations = activations, .cpu_isa = isa};
    struct backend *backend = NULL;
    const char *only = getenv("QUIRE_CPU_ISA");
    if (only && *only && strcmp(only, isa) != 0) return NULL;
    if (backend_open(&options, &backend, NULL) == 0) return backend;
    if (only && *only) {
        fprintf(stderr, "QUIRE_CPU_ISA asks for %s, which this machine lacks\n", isa);
        exit(1);
    }
    return NULL;
}

static const char *const case_isas[] = {"portable", "avx2", "avx512"};
enum { CASE_ISAS = 3 };

/* Says what is not tested here. */
static inline int cases_announce(void **state) {
    for (int i = 0; i < CASE_ISAS; i++) {
        struct backend *backend = case_backend(case_isas[i], 1, CPU_ACTIVATIONS_INT8);
        if (backend)
            backend_close(backend);
        else
            fprintf(stderr, "skipped: %s is not of this machine, or not asked for\n", case_isas[i]);
    }
    return 0;
}

#endif
