#include <string.h>

#include "engine/base/check.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/dense.h"

/* Tokens of a tile: 16 tokens of 3 heads of 64 are 24 KB read and 12 KB written, 2 us. */
#define KV_TILE_TOKENS 16

struct kv_write {
    const struct op_kv_write_args *args;
    const struct dense_kernels *kernels;
    int64_t tile_tokens;
};

static void kv_store(const struct kv_write *write, const float *x, int32_t page, int32_t offset, int32_t k_or_v) {
    const struct kv_layer *kv = &write->args->kv;
    const size_t size = (size_t)kv->page_size, dim = (size_t)kv->head_dim, heads = (size_t)kv->n_kv_heads;
    const size_t element = kv->dtype == DTYPE_F16 ? 2 : 4;
    char *out = (char *)kv->base + (size_t)page * kv->page_stride_bytes;
    for (size_t h = 0; h < heads; h++, x += dim) {
        void *row = out + ((((size_t)k_or_v * heads + h) * size) + (size_t)offset) * dim * element;
        if (kv->dtype == DTYPE_F16)
            write->kernels->narrow(x, row, kv->head_dim);
        else
            memcpy(row, x, dim * sizeof(float));
    }
}

static void kv_write_tile(void *ctx, int64_t tile, int32_t worker) {
    const struct kv_write *write = ctx;
    const struct op_kv_write_args *args = write->args;
    const struct attention_shape *shape = &args->shape;
    int64_t begin = tile * write->tile_tokens, end = begin + write->tile_tokens;
    if (end > shape->tokens) end = shape->tokens;
    int32_t s = 0;
    for (int64_t t = begin; t < end; t++) {
        while (shape->q_start[s + 1] <= t) s++;
        int32_t position = args->positions[t];
        int32_t page =
            args->table.pages[(int64_t)shape->slots[s] * args->table.max_pages + position / args->kv.page_size];
        int32_t offset = position % args->kv.page_size;
        kv_store(write, (const float *)args->k + t * args->kv_stride, page, offset, 0);
        kv_store(write, (const float *)args->v + t * args->kv_stride, page, offset, 1);
    }
}

int cpu_op_kv_write(struct backend *backend, const struct op_kv_write_args *args, struct err *err) {
    struct kv_write write = {args, dense_kernels_get(backend->cpu->isa), KV_TILE_TOKENS};
    int64_t values = args->shape.tokens * (int64_t)args->kv.n_kv_heads * args->kv.head_dim * 2;
    if (values < DENSE_TEAM_VALUES) write.tile_tokens = args->shape.tokens;
    if (args->shape.tokens > 0)
        team_run(backend->cpu->team, kv_write_tile, &write,
                 (args->shape.tokens + write.tile_tokens - 1) / write.tile_tokens);
    return 0;
}

int cpu_op_kv_copy(struct backend *backend, const struct op_kv_copy_args *args, struct err *err) {
    const struct kv_layer *kv = &args->kv;
    size_t bytes = 2 * (size_t)kv->n_kv_heads * (size_t)kv->page_size * (size_t)kv->head_dim *
                   (size_t)dtype_info(kv->dtype)->block_bytes;
    for (int32_t i = 0; i < args->count; i++)
        memmove((char *)kv->base + (size_t)args->dst_pages[i] * kv->page_stride_bytes,
                (const char *)kv->base + (size_t)args->src_pages[i] * kv->page_stride_bytes, bytes);
    return 0;
}

int cpu_op_table_update(struct backend *backend, const struct op_table_update_args *args, struct err *err) {
    const int32_t count = args->capacity ? *args->count : 0;
    CHECK(count >= 0 && count <= args->capacity);
    for (int32_t i = 0; i < count; i++) {
        const struct kv_table_delta *delta = &args->deltas[i];
        CHECK(delta->slot >= 0 && delta->slot < args->slots && delta->index >= 0 && delta->index < args->max_pages);
        args->pages[(size_t)delta->slot * (size_t)args->max_pages + (size_t)delta->index] = delta->page;
    }
    return 0;
}
