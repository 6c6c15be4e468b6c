/* A rank's share of a model (Shoeybi et al. 2019, Megatron-LM, section 3): q, k, v, gate and up by rows, o and down by
 * columns, the two tables by vocabulary. KV heads are replicated where there are fewer than ranks. */
#include <stdio.h>

#include "engine/base/arith.h"
#include "engine/model/model_private.h"

#define SLICE_STEP 64 /* ids: what tiles and vectors of every kernel divide */

bool shard_divides(const struct model_spec *spec, int32_t ranks) {
    bool kv = spec->n_kv_heads >= ranks ? spec->n_kv_heads % ranks == 0 : ranks % spec->n_kv_heads == 0;
    return spec->n_heads % ranks == 0 && kv && spec->ffn % ranks == 0 && spec->vocab >= ranks;
}

/* The numbers of ranks up to 64 that would do: "1, 3, 9". */
static void ranks_list(const struct model_spec *spec, char *out, size_t room) {
    size_t used = 0;
    out[0] = '\0';
    for (int32_t ranks = 1; ranks <= 64 && used + 8 < room; ranks++)
        if (shard_divides(spec, ranks))
            used += (size_t)snprintf(out + used, room - used, "%s%d", used ? ", " : "", ranks);
}

int shard_spec(const struct model_spec *full, int32_t ranks, struct model_spec *out, struct err *err) {
    char list[160];
    *out = *full;
    if (ranks <= 1) return 0;
    if (!shard_divides(full, ranks)) {
        ranks_list(full, list, sizeof list);
        return err_set_field(err, ERR_UNSUPPORTED, "tensor-parallel-size",
                             "--tensor-parallel-size %d does not divide this model: %d heads, %d KV heads, a "
                             "feed-forward width of %d; what does: %s",
                             ranks, full->n_heads, full->n_kv_heads, full->ffn, list);
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

int shard_tensor(const struct model_files *files, enum tensor_role role, const struct shard *shard,
                 struct model_tensor *tensor, size_t *stride_bytes, struct err *err) {
    const struct dtype_info *dtype = dtype_info(tensor->dtype);
    const struct range range = role_range(&files->spec, role, shard);
    size_t row_bytes = 0, first_bytes = 0;
    *stride_bytes = 0;
    if (shard->ranks <= 1 || range.count == 0) return 0;
    if (range.columns && (range.first % dtype->block_values || range.count % dtype->block_values))
        return err_set_field(err, ERR_UNSUPPORTED, "tensor-parallel-size",
                             "%s: %s: a rank's %lld columns of %s are no whole blocks of %d values: take a smaller "
                             "--tensor-parallel-size",
                             files->label, tensor->name, (long long)range.count, dtype->name, (int)dtype->block_values);
    dtype_row_bytes(tensor->dtype, tensor->cols, &row_bytes);
    if (range.columns) {
        dtype_row_bytes(tensor->dtype, range.first, &first_bytes);
        if (tensor->rows > 1) *stride_bytes = row_bytes;
        tensor->cols = range.count;
        dtype_row_bytes(tensor->dtype, range.count, &row_bytes);
    } else {
        first_bytes = row_bytes * (size_t)range.first;
        tensor->rows = range.count;
    }
    if (tensor->data) tensor->data = (const unsigned char *)tensor->data + first_bytes;
    tensor->bytes = row_bytes * (size_t)tensor->rows;
    return 0;
}
