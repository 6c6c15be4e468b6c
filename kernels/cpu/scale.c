#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/dense.h"

#define SCALE_TILE_VALUES 16384 /* 64 KB: 5 us */

struct scale {
    const struct op_scale_args *args;
    const struct dense_kernels *kernels;
};

static void scale_tile(void *ctx, int64_t tile, int32_t worker) {
    const struct scale *scale = ctx;
    const struct op_scale_args *args = scale->args;
    int64_t begin = tile * SCALE_TILE_VALUES, count = args->count - begin;
    if (count > SCALE_TILE_VALUES) count = SCALE_TILE_VALUES;
    scale->kernels->scale((float *)args->x + begin, count, args->scale, args->cap);
}

int cpu_op_scale(struct backend *backend, const struct op_scale_args *args, struct err *err) {
    struct scale scale = {args, dense_kernels_get(backend->cpu->isa)};
    team_run(backend->cpu->team, scale_tile, &scale, (args->count + SCALE_TILE_VALUES - 1) / SCALE_TILE_VALUES);
    return 0;
}
