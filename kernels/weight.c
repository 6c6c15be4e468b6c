/* The part of ops.h about weights: checks of the contract, then the device's own. */
#include "engine/base/arith.h"
#include "engine/base/dtype.h"
#include "kernels/backend_internal.h"

enum { WEIGHT_PARTS_MAX = 16 };

/* Rows of all parts together; false where the parts break the contract. */
static bool parts_rows(const struct weight_part *parts, int32_t part_count, int64_t cols, unsigned flags,
                       int64_t *rows) {
    *rows = 0;
    if ((flags & WEIGHT_GATED) && (part_count != 2 || parts[0].rows != parts[1].rows)) return false;
    if (part_count < 1 || part_count > WEIGHT_PARTS_MAX || cols < 1 || cols > INT32_MAX) return false;
    for (int32_t i = 0; i < part_count; i++) {
        size_t row_bytes;
        if (parts[i].rows < 1 || parts[i].rows > INT32_MAX || (unsigned)parts[i].dtype >= DTYPE_COUNT) return false;
        if (!dtype_row_bytes(parts[i].dtype, cols, &row_bytes)) return false;
        if (parts[i].stride_bytes && parts[i].stride_bytes < row_bytes) return false;
        *rows += parts[i].rows;
    }
    return *rows <= INT32_MAX;
}

bool weight_prepared_bytes(const struct backend *backend, const struct weight_part *parts, int32_t part_count,
                           int64_t cols, unsigned flags, size_t *bytes) {
    int64_t rows;
    if (!parts_rows(parts, part_count, cols, flags, &rows)) return false;
    return backend->table->weight_bytes(backend, parts, part_count, cols, flags, bytes);
}

int weight_prepare(struct backend *backend, const struct weight_part *parts, int32_t part_count, int64_t cols,
                   unsigned flags, struct weight **out, struct err *err) {
    int64_t rows;
    if (!parts_rows(parts, part_count, cols, flags, &rows))
        return err_set(err, ERR_INVALID, "a weight of %lld columns in %d parts breaks the contract", (long long)cols,
                       part_count);
    return backend->table->weight_prepare(backend, parts, part_count, rows, cols, flags, out, err);
}

int weight_dummy(struct backend *backend, const struct weight_part *parts, int32_t part_count, int64_t cols,
                 unsigned flags, uint64_t seed, struct weight **out, struct err *err) {
    int64_t rows;
    bool whole = true;
    if (!backend->table->weight_dummy)
        return err_set(err, ERR_UNSUPPORTED, "this device makes no random weights of its own");
    for (int32_t i = 0; i < part_count; i++) {
        const struct weight_part *part = &parts[i];
        const int64_t step = dtype_info(part->dtype)->block_values > 1 ? dtype_info(part->dtype)->block_values : 8;
        whole = whole && part->first_row >= 0 && part->first_col >= 0 && part->first_col % step == 0 &&
                (part->whole_cols == 0 || part->first_col + cols <= part->whole_cols);
    }
    if (!whole || !parts_rows(parts, part_count, cols, flags, &rows))
        return err_set(err, ERR_INVALID, "a weight of %lld columns in %d parts breaks the contract", (long long)cols,
                       part_count);
    return backend->table->weight_dummy(backend, parts, part_count, rows, cols, flags, seed, out, err);
}

void weight_free(struct backend *backend, struct weight *weight) {
    if (weight) backend->table->weight_free(backend, weight);
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
