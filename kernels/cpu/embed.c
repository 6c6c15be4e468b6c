#include <string.h>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/dense.h"

struct embed {
    const struct op_embed_args *args;
    const struct dense_kernels *kernels;
    int64_t tile_tokens;
};

static void embed_tile(void *ctx, int64_t tile, int32_t worker) {
    const struct embed *embed = ctx;
    const struct op_embed_args *args = embed->args;
    int64_t begin = tile * embed->tile_tokens, end = begin + embed->tile_tokens;
    if (end > args->tokens) end = args->tokens;
    for (int64_t t = begin; t < end; t++) {
        float *out = (float *)args->out + t * args->hidden;
        int32_t id = args->token_ids[t];
        if (id < 0) id = args->last_token[args->token_slots[t]];
        id -= args->first_id;
        if (id < 0 || id >= weight_rows(args->table)) {
            memset(out, 0, (size_t)args->hidden * sizeof *out);
            continue;
        }
        cpu_weight_row_dequant(args->table, id, out);
        if (args->scale != 1.0f) embed->kernels->scale(out, args->hidden, args->scale, 0.0f);
    }
}

/* The ids come from another room and one of them from the sampler: a wrong one must not read beyond the table. */
static int ids_check(const struct op_embed_args *args, struct err *err) {
    int64_t vocab = args->vocab ? args->vocab : weight_rows(args->table);
    for (int64_t t = 0; t < args->tokens; t++) {
        int32_t id = args->token_ids[t];
        if (id == -1 && args->last_token && args->token_slots) id = args->last_token[args->token_slots[t]];
        if (id < 0 || id >= vocab)
            return err_set(err, ERR_INVALID, "op_embed: token id %d of row %lld is outside the vocabulary of %lld", id,
                           (long long)t, (long long)vocab);
    }
    return 0;
}

int cpu_op_embed(struct backend *backend, const struct op_embed_args *args, struct err *err) {
    int rc = ids_check(args, err);
    if (rc || args->tokens == 0) return rc;
    struct embed embed = {args, dense_kernels_get(backend->cpu->isa), args->tokens};
    if (args->tokens * args->hidden >= DENSE_TEAM_VALUES)
        embed.tile_tokens = (DENSE_TEAM_VALUES / 4 + args->hidden - 1) / args->hidden;
    team_run(backend->cpu->team, embed_tile, &embed, (args->tokens + embed.tile_tokens - 1) / embed.tile_tokens);
    return 0;
}
