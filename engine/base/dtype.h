/* dtype.h: the element types of tensors, and how many bytes a row of them takes. Immutable tables; any thread. */
#ifndef QUIRE_BASE_DTYPE_H
#define QUIRE_BASE_DTYPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum dtype {
    DTYPE_F32,
    DTYPE_F16,
    DTYPE_BF16,
    DTYPE_I32,
    DTYPE_I8,
    DTYPE_Q4_0, /* blocks of 32 values along the row, GGUF layouts */
    DTYPE_Q4_1,
    DTYPE_Q5_0,
    DTYPE_Q5_1,
    DTYPE_Q8_0,
    DTYPE_COUNT
};

struct dtype_info {
    const char *name;     /* "f32", "q4_1" */
    int32_t block_values; /* values in a block: 1 for plain types, 32 for the quantised */
    int32_t block_bytes;
};

const struct dtype_info *dtype_info(enum dtype dtype);

/* Bytes of one row of `cols` values; false when cols is no whole number of blocks or the product overflows. */
bool dtype_row_bytes(enum dtype dtype, int64_t cols, size_t *bytes);

#ifdef __cplusplus
}
#endif

#endif
