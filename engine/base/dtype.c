#include "engine/base/dtype.h"

#include "engine/base/arith.h"
#include "engine/base/check.h"

static const struct dtype_info dtype_table[DTYPE_COUNT] = {
    [DTYPE_F32] = {"f32", 1, 4},     [DTYPE_F16] = {"f16", 1, 2},     [DTYPE_BF16] = {"bf16", 1, 2},
    [DTYPE_I32] = {"i32", 1, 4},     [DTYPE_I8] = {"i8", 1, 1},       [DTYPE_Q4_0] = {"q4_0", 32, 18},
    [DTYPE_Q4_1] = {"q4_1", 32, 20}, [DTYPE_Q5_0] = {"q5_0", 32, 22}, [DTYPE_Q5_1] = {"q5_1", 32, 24},
    [DTYPE_Q8_0] = {"q8_0", 32, 34},
};

const struct dtype_info *dtype_info(enum dtype dtype) {
    CHECK((unsigned)dtype < DTYPE_COUNT);
    return &dtype_table[dtype];
}

bool dtype_row_bytes(enum dtype dtype, int64_t cols, size_t *bytes) {
    const struct dtype_info *info = dtype_info(dtype);
    if (cols < 0 || cols % info->block_values != 0) return false;
    return size_mul((size_t)(cols / info->block_values), (size_t)info->block_bytes, bytes);
}
