#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/dense.h"

struct rms_norm {
    const struct op_rms_norm_args *args;
    const struct dense_kernels *kernels;
    int64_t tile_rows;
};

static void rms_norm_tile(void *ctx, int64_t tile, int32_t worker) {
    const struct rms_norm *norm = ctx;
    const struct op_rms_norm_args *args = norm->args;
    int64_t begin = tile * norm->tile_rows, end = begin + norm->tile_rows;
    if (end > args->rows) end = args->rows;
    for (int64_t r = begin; r < end; r++) {
        const float *delta = args->delta ? (const float *)args->delta + r * args->delta_stride : NULL;
        norm->kernels->rms_norm((float *)args->x + r * args->x_stride, delta, args->weight,
                                (float *)args->out + r * args->out_stride, args->dim, args->eps, args->weight_offset);
    }
}

int cpu_op_rms_norm(struct backend *backend, const struct op_rms_norm_args *args, struct err *err) {
    struct rms_norm norm = {args, dense_kernels_get(backend->cpu->isa), args->rows};
    if (args->rows == 0) return 0;
    if (args->rows * args->dim >= DENSE_TEAM_VALUES)
        norm.tile_rows = (DENSE_TEAM_VALUES / 4 + args->dim - 1) / args->dim;
    team_run(backend->cpu->team, rms_norm_tile, &norm, (args->rows + norm.tile_rows - 1) / norm.tile_rows);
    return 0;
}
