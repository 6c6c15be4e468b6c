/* The part of ops.h about weights: checks of the contract, then the device's own. */
#include "engine/base/arith.h"
#include "engine/base/dtype.h"
#include "kernels/backend_internal.h"
#include "kernels/cpu/weight.h"

enum { WEIGHT_PARTS_MAX = 16 };

/* Rows of all parts together; false where the parts break the contract. */
static bool parts_rows(const struct weight_part *parts, int32_t part_count, int64_t cols, int64_t *rows) {
    *rows = 0;
    if (part_count < 1 || part_count > WEIGHT_PARTS_MAX || cols < 1 || cols > INT32_MAX) return false;
    for (int32_t i = 0; i < part_count; i++) {
        size_t row_bytes;
        if (parts[i].rows < 1 || parts[i].rows > INT32_MAX || (unsigned)parts[i].dtype >= DTYPE_COUNT) return false;
        if (!dtype_row_bytes(parts[i].dtype, cols, &row_bytes)) return false;
        *rows += parts[i].rows;
    }
    return *rows <= INT32_MAX;
}

bool weight_prepared_bytes(const struct backend *backend, const struct weight_part *parts, int32_t part_count,
                           int64_t cols, unsigned flags, size_t *bytes) {
    int64_t rows;
    if (!parts_rows(parts, part_count, cols, &rows)) return false;
    return cpu_weight_bytes(backend, parts, part_count, cols, bytes);
}

int weight_prepare(struct backend *backend, const struct weight_part *parts, int32_t part_count, int64_t cols,
                   unsigned flags, struct weight **out, struct err *err) {
    int64_t rows;
    if (!parts_rows(parts, part_count, cols, &rows))
        return err_set(err, ERR_INVALID, "a weight of %lld columns in %d parts breaks the contract", (long long)cols,
                       part_count);
    return cpu_weight_prepare(backend, parts, part_count, rows, cols, flags, out, err);
}

void weight_free(struct backend *backend, struct weight *weight) {
    if (weight) cpu_weight_free(backend, weight);
}

int64_t weight_rows(const struct weight *weight) {
    return weight->rows;
}
int64_t weight_cols(const struct weight *weight) {
    return weight->cols;
}
size_t weight_bytes(const struct weight *weight) {
    return weight->bytes;
}
