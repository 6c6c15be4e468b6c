#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/dense.h"

/* Values of a tile: 4096 take 4 us of one core. A row is cut into such pieces at fixed places. */
#define GATED_ACT_TILE_VALUES 4096

struct gated_act {
    const struct op_gated_act_args *args;
    const struct dense_kernels *kernels;
    int64_t pieces; /* tiles of a row */
    int64_t rows;   /* rows of a tile, where a row is one piece */
};

static void gated_act_tile(void *ctx, int64_t tile, int32_t worker) {
    const struct gated_act *act = ctx;
    const struct op_gated_act_args *args = act->args;
    int64_t ffn = args->ffn, begin = tile / act->pieces * act->rows, end = begin + act->rows;
    if (end > args->rows) end = args->rows;
    int64_t from = tile % act->pieces * GATED_ACT_TILE_VALUES, count = ffn - from;
    if (count > GATED_ACT_TILE_VALUES) count = GATED_ACT_TILE_VALUES;
    for (int64_t r = begin; r < end; r++) {
        const float *gate = (const float *)args->gate_up + r * 2 * ffn + from;
        act->kernels->gated_act(gate, gate + ffn, (float *)args->out + r * ffn + from, count, args->activation);
    }
}

int cpu_op_gated_act(struct backend *backend, const struct op_gated_act_args *args, struct err *err) {
    if (args->rows == 0) return 0;
    struct gated_act act = {.args = args, .kernels = dense_kernels_get(backend->cpu->isa)};
    act.pieces = (args->ffn + GATED_ACT_TILE_VALUES - 1) / GATED_ACT_TILE_VALUES;
    act.rows = act.pieces > 1 ? 1 : (GATED_ACT_TILE_VALUES + args->ffn - 1) / args->ffn;
    team_run(backend->cpu->team, gated_act_tile, &act, (args->rows + act.rows - 1) / act.rows * act.pieces);
    return 0;
}
