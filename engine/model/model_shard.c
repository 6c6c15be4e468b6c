/* A rank's share of a model (Shoeybi et al. 2019, Megatron-LM, section 3): q, k, v, gate and up by rows, o and down by
 * columns, the two tables by vocabulary. KV heads are replicated where there are fewer than ranks. */
#include <stdio.h>

#include "engine/base/arith.h"
#include "engine/model/model_private.h"

#define SLICE_STEP 64 /* ids: what tiles and vectors of every kernel divide */

#define CUDA_FFN_STEP 8 /* rows of gate and of up that lie side by side there (kernels/cuda/cuda_weight.h) */

/* What a spec does not say but its slices depend on: the largest block of o's and down's columns, and the step of the
 * feed-forward's width. */
struct steps {
    int32_t o, down, ffn;
};

static int32_t role_block(const struct model_files *files, enum tensor_role role) {
    int32_t block = 1;
    struct model_tensor tensor;
    for (int32_t layer = 0; layer < files->spec.layers; layer++)
        if (model_files_tensor(files, role, layer, &tensor, NULL) == 0 &&
            dtype_info(tensor.dtype)->block_values > block)
            block = dtype_info(tensor.dtype)->block_values;
    return block;
}

/* Why the model cannot be spread over so many ranks, with the arithmetic; false: it can. */
static bool divides_not(const struct model_spec *spec, const struct steps *steps, int32_t ranks, char *why,
                        size_t room) {
    const int32_t heads = spec->n_heads / ranks, columns = heads * spec->head_dim, ffn = spec->ffn / ranks;
    if (spec->n_heads % ranks)
        snprintf(why, room, "%d heads / %d leave a rest of %d", spec->n_heads, ranks, spec->n_heads % ranks);
    else if (spec->n_kv_heads % ranks && ranks % spec->n_kv_heads)
        snprintf(why, room, "%d KV heads can neither be divided among %d ranks nor be the same on %d / %d of them",
                 spec->n_kv_heads, ranks, ranks, spec->n_kv_heads);
    else if (spec->ffn % ranks)
        snprintf(why, room, "a feed-forward width of %d / %d leaves a rest of %d", spec->ffn, ranks, spec->ffn % ranks);
    else if (ffn % steps->ffn)
        snprintf(why, room, "a feed-forward width of %d / %d = %d is no multiple of %d", spec->ffn, ranks, ffn,
                 steps->ffn);
    else if (columns % steps->o)
        snprintf(why, room, "%d heads / %d * %d = %d columns are no whole blocks of %d quantised values", spec->n_heads,
                 ranks, spec->head_dim, columns, steps->o);
    else if (ffn % steps->down)
        snprintf(why, room, "a feed-forward width of %d / %d = %d is no whole blocks of %d quantised values", spec->ffn,
                 ranks, ffn, steps->down);
    else if ((int64_t)shard_vocab(spec->vocab, ranks) * (ranks - 1) >= spec->vocab)
        snprintf(why, room, "a vocabulary of %d leaves nothing for the last of %d ranks", spec->vocab, ranks);
    else
        return false;
    return true;
}

/* The numbers of ranks that would do: "1, 3, 9". */
static void ranks_list(const struct model_spec *spec, const struct steps *steps, char *out, size_t room) {
    char why[160];
    size_t used = 0;
    out[0] = '\0';
    for (int32_t ranks = 1; ranks <= COMM_RANKS_MAX && used + 8 < room; ranks++)
        if (ranks == 1 || !divides_not(spec, steps, ranks, why, sizeof why))
            used += (size_t)snprintf(out + used, room - used, "%s%d", used ? ", " : "", ranks);
}

int shard_spec(const struct model_files *files, const struct backend *backend, int32_t ranks, struct model_spec *out,
               struct err *err) {
    char why[160], list[160];
    const struct model_spec *full = &files->spec;
    *out = *full;
    if (ranks <= 1) return 0;
    const struct steps steps = {role_block(files, ROLE_O), role_block(files, ROLE_DOWN),
                                backend_info(backend)->device == DEVICE_CUDA ? CUDA_FFN_STEP : 1};
    if (divides_not(full, &steps, ranks, why, sizeof why)) {
        ranks_list(full, &steps, list, sizeof list);
        return err_set_field(err, ERR_UNSUPPORTED, "tensor-parallel-size",
                             "--tensor-parallel-size %d does not divide this model: %s; what does: %s", ranks, why,
                             list);
    }
    out->n_heads /= ranks;
    out->n_kv_heads = full->n_kv_heads > ranks ? full->n_kv_heads / ranks : 1;
    out->ffn /= ranks;
    return 0;
}

/* In whole steps where that leaves something for the last rank; else in smaller ones. */
int32_t shard_vocab(int32_t vocab, int32_t ranks) {
    int32_t step = ranks > 1 ? SLICE_STEP : 1, least = i32_ceil_div(vocab, ranks);
    while (step > 1 && (int64_t)i32_ceil_div(least, step) * step * (ranks - 1) >= vocab) step /= 2;
    return i32_ceil_div(least, step) * step;
}

int32_t shard_vocab_rows(int32_t vocab, const struct shard *shard) {
    const int32_t slice = shard_vocab(vocab, shard->ranks), first = slice * shard->rank;
    return vocab - first < slice ? vocab - first : slice;
}

/* Rows or columns of the whole tensor that are the rank's: [first, first + count) of one of the two. */
struct range {
    int64_t first, count;
    bool columns;
};

static struct range role_range(const struct model_spec *full, enum tensor_role role, const struct shard *shard) {
    const int64_t rank = shard->rank, ranks = shard->ranks;
    const int64_t heads = (int64_t)full->n_heads * full->head_dim / ranks, ffn = full->ffn / ranks;
    const int64_t kv_heads = full->n_kv_heads > ranks ? full->n_kv_heads / ranks : 1;
    const int64_t kv = kv_heads * full->head_dim, kv_first = rank * full->n_kv_heads / ranks * full->head_dim;
    switch (role) {
    case ROLE_EMBED:
    case ROLE_OUTPUT:
        return (struct range){rank * shard_vocab(full->vocab, shard->ranks), shard_vocab_rows(full->vocab, shard),
                              false};
    case ROLE_Q:
        return (struct range){rank * heads, heads, false};
    case ROLE_Q_BIAS:
        return (struct range){rank * heads, heads, true};
    case ROLE_K:
    case ROLE_V:
        return (struct range){kv_first, kv, false};
    case ROLE_K_BIAS:
    case ROLE_V_BIAS:
        return (struct range){kv_first, kv, true};
    case ROLE_O:
        return (struct range){rank * heads, heads, true};
    case ROLE_GATE:
    case ROLE_UP:
        return (struct range){rank * ffn, ffn, false};
    case ROLE_GATE_BIAS:
    case ROLE_UP_BIAS:
    case ROLE_DOWN:
        return (struct range){rank * ffn, ffn, true};
    default:
        return (struct range){0, 0, false}; /* whole on every rank */
    }
}

void shard_tensor(const struct model_files *files, enum tensor_role role, const struct shard *shard,
                  struct model_tensor *tensor, struct weight_part *part) {
    const struct range range = role_range(&files->spec, role, shard);
    size_t row_bytes = 0, first_bytes = 0;
    *part = (struct weight_part){.whole_cols = tensor->cols};
    dtype_row_bytes(tensor->dtype, tensor->cols, &row_bytes);
    if (shard->ranks > 1 && range.count > 0 && range.columns) {
        dtype_row_bytes(tensor->dtype, range.first, &first_bytes);
        part->first_col = range.first;
        if (tensor->rows > 1) part->stride_bytes = row_bytes;
        tensor->cols = range.count;
        dtype_row_bytes(tensor->dtype, range.count, &row_bytes);
    } else if (shard->ranks > 1 && range.count > 0) {
        first_bytes = row_bytes * (size_t)range.first;
        part->first_row = range.first;
        tensor->rows = range.count;
    }
    if (tensor->data) tensor->data = (const unsigned char *)tensor->data + first_bytes;
    tensor->bytes = row_bytes * (size_t)tensor->rows;
    part->data = tensor->data;
    part->dtype = tensor->dtype;
    part->rows = tensor->rows;
}
