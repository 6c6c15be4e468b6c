/* op_linear on the CPU: rounds x to int8 once, cuts the product into tiles, hands them to the team. */
#include "engine/base/arith.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/linear_kernels.h"

static const struct linear_kernels *kernels_of(enum cpu_isa isa) {
#if defined(__x86_64__)
    if (isa == CPU_ISA_AVX2) return &linear_kernels_avx2;
    if (isa == CPU_ISA_AVX512) return &linear_kernels_avx512;
#endif
    return &linear_kernels_portable;
}

/* ---- rounding x ---------------------------------------------------------------------------------------------------
 */

struct quantize_ctx {
    const struct linear_kernels *kernels;
    const float *x; /* [rows, cols] f32, stride x_stride */
    struct act_block *q;
    int64_t rows, cols, x_stride, rows_per_tile;
};

static void quantize_tile(void *arg, int64_t tile, int32_t worker) {
    const struct quantize_ctx *ctx = arg;
    int64_t begin = tile * ctx->rows_per_tile, end = i64_min(begin + ctx->rows_per_tile, ctx->rows);
    for (int64_t row = begin; row < end; row++)
        ctx->kernels->quantize(ctx->x + row * ctx->x_stride, ctx->cols, ctx->q + row * (ctx->cols / QUANT_BLOCK));
}

/* A block takes some 10 ns: 128 blocks a tile are about the cost of handing a tile out, and fewer in all are not worth
 * waking anyone. */
enum { QUANTIZE_BLOCKS_PER_TILE = 128 };

static void quantize_rows(struct backend *backend, struct quantize_ctx *ctx) {
    ctx->rows_per_tile = i64_max(1, QUANTIZE_BLOCKS_PER_TILE * QUANT_BLOCK / ctx->cols);
    team_run(backend->cpu->team, quantize_tile, ctx, (ctx->rows + ctx->rows_per_tile - 1) / ctx->rows_per_tile);
}

/* ---- tiles --------------------------------------------------------------------------------------------------------
 */

struct tile_ctx {
    struct linear_job job;
    linear_fn *fn;
    int64_t rows, groups_per_tile, rows_per_tile, group_tiles;
};

static void linear_tile(void *arg, int64_t tile, int32_t worker) {
    const struct tile_ctx *ctx = arg;
    int64_t group = tile % ctx->group_tiles * ctx->groups_per_tile, row = tile / ctx->group_tiles * ctx->rows_per_tile;
    ctx->fn(&ctx->job, group, i64_min(group + ctx->groups_per_tile, ctx->job.segment->groups), row,
            i64_min(row + ctx->rows_per_tile, ctx->rows));
}

/* Bytes of x that one tile goes over again for each group. A second-level cache of 512 KB has room for more, but the
 * lines of y that pass through it fall into few sets when rows are 4 KB apart: with 12 KB between rows of y, 76 KB of x
 * give 101 Gmac/s a core, 203 KB give 95 (Zen 3). Weights are read once for each tile of rows, which costs 1 GB/s. */
enum { TILE_X_BYTES = 96 * 1024 };

/* A tile is at most this much work: 2M multiply-adds take 15 to 30 us at 70 to 130 G/s and, when x has one row, their
 * 1.3 MB of q4_1 would take 100 us at 12 GB/s; so bytes are limited apart, to 128 KB or 10 us. A worker that loses its
 * processor holds up one tile; handing a tile out costs 0.1 us. */
enum { TILE_MACS = 2 * 1000 * 1000, TILE_WEIGHT_BYTES = 128 * 1024 };

/* And a small matrix still makes so many tiles a thread, so that the end comes for all at nearly the same time. */
enum { TILES_PER_THREAD = 6 };

static int64_t clamp(int64_t value, int64_t low, int64_t high) {
    return i64_max(low, i64_min(value, high));
}

/* All groups come before the next rows of x, so that those stay in the second-level cache. */
static int64_t tiles_plan(struct tile_ctx *ctx, int32_t threads, int64_t x_row_bytes) {
    const struct weight_segment *segment = ctx->job.segment;
    int64_t group_macs = GROUP_ROWS * ctx->job.cols, groups = segment->groups;
    /* a multiple of 8 rows, which all kernels take without a remainder, and tiles of rows as equal as that allows */
    int64_t rows_most = i64_max(8, TILE_X_BYTES / x_row_bytes);
    int64_t row_tiles = (ctx->rows + rows_most - 1) / rows_most;
    ctx->rows_per_tile = i64_min(ctx->rows, ((ctx->rows + row_tiles - 1) / row_tiles + 7) / 8 * 8);
    row_tiles = (ctx->rows + ctx->rows_per_tile - 1) / ctx->rows_per_tile;
    int64_t by_macs = TILE_MACS / (group_macs * ctx->rows_per_tile);
    int64_t by_bytes = TILE_WEIGHT_BYTES / (int64_t)segment->group_bytes;
    int64_t by_count = groups * row_tiles / (threads * TILES_PER_THREAD);
    ctx->groups_per_tile = clamp(i64_min(i64_min(by_macs, by_bytes), by_count), 1, groups);
    ctx->group_tiles = (groups + ctx->groups_per_tile - 1) / ctx->groups_per_tile;
    return ctx->group_tiles * row_tiles;
}

static void segment_run(struct backend *backend, const struct op_linear_args *args, const struct cpu_weight *weight,
                        const struct weight_segment *segment, const struct act_block *q) {
    const struct linear_kernels *kernels = kernels_of(backend->cpu->isa);
    struct tile_ctx ctx = {.rows = args->rows};
    bool int8 = q && kernels->int8[segment->dtype];
    ctx.fn = int8 ? kernels->int8[segment->dtype] : kernels->f32[segment->dtype];
    ctx.job = (struct linear_job){
        .segment = segment,
        .layout = group_layout(segment->dtype, weight->base.cols),
        .cols = weight->base.cols,
        .blocks = (weight->base.cols + QUANT_BLOCK - 1) / QUANT_BLOCK,
        .q = q,
        .x = args->x,
        .x_stride = args->x_stride,
        .bias = args->bias ? args->bias + segment->row_begin : NULL,
        .y = (float *)args->y + segment->row_begin,
        .y_stride = args->y_stride,
        .accumulate = args->accumulate,
    };
    int64_t x_row_bytes = int8 ? ctx.job.blocks * (int64_t)sizeof(struct act_block) : ctx.job.cols * 4;
    int64_t tiles = tiles_plan(&ctx, backend->info.threads, x_row_bytes);
    team_run(backend->cpu->team, linear_tile, &ctx, tiles);
}

static bool weight_any_quantised(const struct cpu_weight *weight) {
    for (int32_t s = 0; s < weight->segment_count; s++)
        if (dtype_info(weight->segments[s].dtype)->block_values > 1) return true;
    return false;
}

int cpu_op_linear(struct backend *backend, const struct op_linear_args *args, struct err *err) {
    const struct cpu_weight *weight = (const struct cpu_weight *)args->w;
    int64_t cols = weight->base.cols;
    struct act_block *q = NULL;
    if (args->rows < 1) return 0;
    if (backend->cpu->activations == CPU_ACTIVATIONS_INT8 && weight_any_quantised(weight)) {
        size_t blocks, bytes;
        if (!size_mul((size_t)args->rows, (size_t)(cols / QUANT_BLOCK), &blocks) ||
            !size_mul(blocks, sizeof *q, &bytes) || !(q = cpu_scratch(backend, bytes)))
            return err_set(err, ERR_FATAL, "no memory to round %lld rows of %lld activations to int8",
                           (long long)args->rows, (long long)cols);
        struct quantize_ctx ctx = {.kernels = kernels_of(backend->cpu->isa),
                                   .x = args->x,
                                   .q = q,
                                   .rows = args->rows,
                                   .cols = cols,
                                   .x_stride = args->x_stride};
        quantize_rows(backend, &ctx);
    }
    for (int32_t s = 0; s < weight->segment_count; s++) segment_run(backend, args, weight, &weight->segments[s], q);
    return 0;
}
