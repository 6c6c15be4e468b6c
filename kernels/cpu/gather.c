#include <string.h>

#include "kernels/cpu/cpu_ops.h"

/* A step gathers one row a sequence: copying 32 rows of 576 takes 3 us, less than the team would save. */
int cpu_op_gather_rows(struct backend *backend, const struct op_gather_rows_args *args, struct err *err) {
    for (int64_t r = 0; r < args->rows; r++)
        memcpy((float *)args->out + r * args->dim, (const float *)args->x + (int64_t)args->row_index[r] * args->dim,
               (size_t)args->dim * sizeof(float));
    return 0;
}
