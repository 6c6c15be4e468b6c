#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/dense.h"

struct rope {
    const struct op_rope_args *args;
    const struct dense_kernels *kernels;
    int64_t tile_tokens;
};

static void rope_tile(void *ctx, int64_t tile, int32_t worker) {
    const struct rope *rope = ctx;
    const struct op_rope_args *args = rope->args;
    int64_t begin = tile * rope->tile_tokens, end = begin + rope->tile_tokens;
    if (end > args->tokens) end = args->tokens;
    for (int64_t t = begin; t < end; t++) {
        const float *cos_sin = args->cos_sin + (int64_t)args->positions[t] * args->rotary_dim;
        rope->kernels->rope((float *)args->q + t * args->q_stride, cos_sin, args->n_heads, args->head_dim,
                            args->rotary_dim, args->kind);
        rope->kernels->rope((float *)args->k + t * args->k_stride, cos_sin, args->n_kv_heads, args->head_dim,
                            args->rotary_dim, args->kind);
    }
}

int cpu_op_rope(struct backend *backend, const struct op_rope_args *args, struct err *err) {
    if (args->kind == ROPE_NONE || args->tokens == 0) return 0;
    struct rope rope = {args, dense_kernels_get(backend->cpu->isa), args->tokens};
    int64_t width = (args->n_heads + args->n_kv_heads) * args->head_dim;
    if (args->tokens * width >= DENSE_TEAM_VALUES) rope.tile_tokens = (DENSE_TEAM_VALUES / 4 + width - 1) / width;
    team_run(backend->cpu->team, rope_tile, &rope, (args->tokens + rope.tile_tokens - 1) / rope.tile_tokens);
    return 0;
}
