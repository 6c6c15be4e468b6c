#include "kernels/cpu/attention.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "kernels/cpu/cpu_ops.h"

#define LOG2_E 1.44269504f

/* One launch, the same for all workers. */
struct attention_launch {
    const struct op_attention_args *args;
    const struct attention_plan *plan;
    const struct attention_kernels *kernels;
    _Atomic uint32_t *counters; /* [counter_count]: items of a tile that are done */
    float *stats;               /* [pairs, n_heads, 2]: largest score and sum */
    float *sums;                /* [pairs, n_heads, head_dim] */
    char *scratch;              /* [workers, scratch_bytes] */
    size_t scratch_bytes;
    int32_t rows, stride; /* of scratch: rows of a tile at most, floats from one to the next */
    bool f16;
};

/* A worker's own memory while it does an item. */
struct attention_scratch {
    float *q;      /* [rows, stride] scaled queries */
    float *block;  /* [ATTENTION_BLOCK, stride] packed keys or f32 values */
    float *scores; /* [rows, ATTENTION_SCORE_STRIDE] */
    struct attention_sums split, total;
};

/* One item as a worker sees it. Row r is query token r / heads and head head_begin + r % heads. */
struct attention_work {
    const struct attention_launch *launch;
    const struct attention_tile *tile;
    struct attention_scratch scratch;
    const int32_t *pages; /* of the sequence */
    int32_t head_begin, heads, kv_head, rows;
    int32_t key_end;                                /* of the item: keys from there on are not fetched */
    int32_t lo[ATTENTION_ROWS], hi[ATTENTION_ROWS]; /* what each row sees of the block or split at hand */
};

static const struct attention_kernels *attention_kernels_get(enum cpu_isa isa) {
#if defined(__x86_64__)
    if (isa == CPU_ISA_AVX512) return &attention_kernels_avx512;
    if (isa == CPU_ISA_AVX2) return &attention_kernels_avx2;
#endif
    return &attention_kernels_portable;
}

/* Floats of one worker's scratch: queries, two sums, a block, scores, statistics. */
static size_t scratch_floats(int32_t rows, int32_t stride) {
    return (size_t)(3 * rows + ATTENTION_BLOCK) * (size_t)stride + (size_t)rows * ATTENTION_SCORE_STRIDE +
           4 * ATTENTION_ROWS;
}

static struct attention_scratch scratch_of(const struct attention_launch *launch, int32_t worker) {
    float *p = (float *)(void *)(launch->scratch + (size_t)worker * launch->scratch_bytes);
    size_t rows = (size_t)launch->rows, stride = (size_t)launch->stride;
    struct attention_scratch s = {.q = p};
    s.block = s.q + rows * stride;
    s.split.values = s.block + ATTENTION_BLOCK * stride;
    s.total.values = s.split.values + rows * stride;
    s.scores = s.total.values + rows * stride;
    s.split.largest = s.scores + rows * ATTENTION_SCORE_STRIDE;
    s.split.sum = s.split.largest + ATTENTION_ROWS;
    s.total.largest = s.split.sum + ATTENTION_ROWS;
    s.total.sum = s.total.largest + ATTENTION_ROWS;
    s.split.values_stride = s.total.values_stride = launch->stride;
    return s;
}

static void sums_clear(const struct attention_sums *sums, int32_t rows) {
    for (int32_t r = 0; r < rows; r++) {
        sums->largest[r] = -INFINITY;
        sums->sum[r] = 0.0f;
    }
    memset(sums->values, 0, (size_t)rows * (size_t)sums->values_stride * sizeof(float));
}

static void queries_load(struct attention_work *work) {
    const struct op_attention_args *args = work->launch->args;
    const int64_t head_dim = args->kv.head_dim;
    const float scale = args->scale * LOG2_E;
    float *restrict out = work->scratch.q;
    for (int64_t i = 0; i < work->tile->q_count; i++) {
        const float *q =
            (const float *)args->q + (work->tile->q_begin + i) * args->q_stride + work->head_begin * head_dim;
        for (int32_t h = 0; h < work->heads; h++, q += head_dim, out += work->launch->stride)
            for (int64_t d = 0; d < head_dim; d++) out[d] = q[d] * scale;
    }
}

/* First position that the query at `position` sees. */
static int32_t key_first(const struct attention_work *work, int32_t position) {
    const int32_t window = work->launch->plan->window;
    return window > 0 && position >= window ? position - window + 1 : 0;
}

/* True when every row sees all of begin .. end - 1. */
static bool rows_see_all(const struct attention_work *work, int32_t begin, int32_t end) {
    const struct attention_tile *tile = work->tile;
    return end <= tile->position + 1 && key_first(work, tile->position + tile->q_count - 1) <= begin;
}

/* The part of [begin, end) that each row sees, relative to begin. */
static void rows_see(struct attention_work *work, int32_t begin, int32_t end) {
    for (int32_t i = 0; i < work->tile->q_count; i++) {
        int32_t position = work->tile->position + i;
        int32_t first = key_first(work, position);
        int32_t lo = first > begin ? first - begin : 0;
        int32_t hi = (position + 1 < end ? position + 1 : end) - begin;
        for (int32_t h = 0; h < work->heads; h++) {
            work->lo[i * work->heads + h] = lo;
            work->hi[i * work->heads + h] = hi;
        }
    }
}

/* Positions begin .. end - 1 of K (0) or V (1), cut at the end of the page. */
static struct attention_run page_run(const struct attention_work *work, int32_t begin, int32_t end, int32_t k_or_v) {
    const struct kv_layer *kv = &work->launch->args->kv;
    int32_t page = begin / kv->page_size, offset = begin - page * kv->page_size, left = kv->page_size - offset;
    size_t element = work->launch->f16 ? 2 : 4;
    size_t row =
        ((size_t)k_or_v * (size_t)kv->n_kv_heads + (size_t)work->kv_head) * (size_t)kv->page_size + (size_t)offset;
    return (struct attention_run){
        .data = (const char *)kv->base + (size_t)work->pages[page] * kv->page_stride_bytes +
                row * (size_t)kv->head_dim * element,
        .stride = kv->head_dim,
        .count = end - begin < left ? end - begin : left,
        .f16 = work->launch->f16,
    };
}

/* Few rows: the kernels take keys and values as they lie. Many: it pays to put them in order for all rows once. */
static bool rows_are_many(const struct attention_work *work) {
    return work->rows > 2 * work->launch->kernels->rows;
}

/* The whole range as one run, packed keys or f32 values. */
static struct attention_run block_load(const struct attention_work *work, int32_t begin, int32_t end, int32_t k_or_v) {
    const struct attention_launch *launch = work->launch;
    const int32_t head_dim = launch->args->kv.head_dim;
    float *out = work->scratch.block;
    for (int32_t at = begin; at < end;) {
        struct attention_run run = page_run(work, at, end, k_or_v);
        if (k_or_v == 0)
            launch->kernels->pack(&run, head_dim, at - begin, out);
        else
            launch->kernels->widen(&run, head_dim, out + (int64_t)(at - begin) * launch->stride, launch->stride);
        at += run.count;
    }
    return (struct attention_run){.data = out, .stride = launch->stride, .count = end - begin, .packed = k_or_v == 0};
}

/* While keys are read the values of the same positions are fetched, and with the values the keys of the next block. */
static struct attention_run next_run(const struct attention_work *work, int32_t begin, int32_t end, int32_t k_or_v) {
    if (rows_are_many(work) && (work->launch->f16 || k_or_v == 0)) return block_load(work, begin, end, k_or_v);
    struct attention_run run = page_run(work, begin, end, k_or_v);
    int32_t next = k_or_v ? begin + ATTENTION_BLOCK : begin;
    if (next < work->key_end) run.ahead = page_run(work, next, next + 1, !k_or_v).data;
    return run;
}

/* Keys begin .. end - 1, all in the block that starts at `block`: scores, weights, weighted values. */
static void block_add(struct attention_work *work, int32_t block, int32_t begin, int32_t end) {
    const struct attention_launch *launch = work->launch;
    const struct attention_kernels *kernels = launch->kernels;
    const int32_t head_dim = launch->args->kv.head_dim;
    float *scores = work->scratch.scores;
    const bool all = rows_see_all(work, begin, end);
    if (!all) rows_see(work, block, block + ATTENTION_BLOCK);
    for (int32_t at = begin; at < end;) {
        struct attention_run run = next_run(work, at, end, 0);
        kernels->scores(work->scratch.q, launch->stride, work->rows, head_dim, &run, scores + (at - block));
        at += run.count;
    }
    kernels->weights(scores, work->rows, head_dim, begin - block, end - block, all ? NULL : work->lo,
                     all ? NULL : work->hi, launch->args->soft_cap * LOG2_E, &work->scratch.split);
    for (int32_t at = begin; at < end;) {
        struct attention_run run = next_run(work, at, end, 1);
        kernels->values(scores + (at - block), work->rows, head_dim, &run, &work->scratch.split);
        at += run.count;
    }
}

/* Fills scratch.split with one split: nothing else of the context enters it. */
static void split_add(struct attention_work *work, int32_t split) {
    const struct attention_tile *tile = work->tile;
    int32_t begin = split * ATTENTION_SPLIT, end = begin + ATTENTION_SPLIT;
    int32_t first = key_first(work, tile->position);
    if (begin < first) begin = first; /* pages before the window may be gone */
    if (end > tile->position + tile->q_count) end = tile->position + tile->q_count;
    sums_clear(&work->scratch.split, work->rows);
    for (int32_t at = begin; at < end;) {
        int32_t block = at - at % ATTENTION_BLOCK;
        int32_t stop = end < block + ATTENTION_BLOCK ? end : block + ATTENTION_BLOCK;
        block_add(work, block, at, stop);
        at = stop;
    }
}

/* total += one split of one row, both brought to the larger of their scales, so that one factor is 1. The splits of a
 * row are folded in rising order, whoever computed them. */
static void fold(const struct attention_work *work, int32_t r, float largest, float sum, const float *values) {
    const struct attention_sums *total = &work->scratch.total;
    float before = total->largest[r], a = 1.0f, b = 1.0f;
    if (before >= largest)
        b = exp2f(largest - before);
    else
        a = exp2f(before - largest);
    work->launch->kernels->fold(total->values + r * total->values_stride, a, values, b,
                                work->launch->args->kv.head_dim);
    total->sum[r] = total->sum[r] * a + sum * b;
    total->largest[r] = before >= largest ? before : largest;
}

/* out = values / sum. A sink takes part in the sum only. */
static void row_finish(const struct attention_work *work, int32_t r, int64_t token, int64_t head) {
    const struct op_attention_args *args = work->launch->args;
    const struct attention_sums *total = &work->scratch.total;
    const int32_t head_dim = args->kv.head_dim;
    float factor = 1.0f, sum = total->sum[r];
    if (args->sinks) {
        float sink = args->sinks[head] * LOG2_E, most = total->largest[r] > sink ? total->largest[r] : sink;
        factor = exp2f(total->largest[r] - most);
        sum = sum * factor + exp2f(sink - most);
    }
    work->launch->kernels->finish(total->values + r * total->values_stride, factor / sum,
                                  (float *)args->out + token * args->out_stride + head * head_dim, head_dim);
}

static void rows_finish(const struct attention_work *work) {
    int32_t r = 0;
    for (int32_t i = 0; i < work->tile->q_count; i++)
        for (int32_t h = 0; h < work->heads; h++, r++)
            row_finish(work, r, work->tile->q_begin + i, work->head_begin + h);
}

/* Where row r's result for a split lies in the workspace, in rows. */
static size_t pair_row(const struct attention_work *work, int32_t r, int32_t split) {
    const struct attention_tile *tile = work->tile;
    size_t pair = (size_t)(tile->pair_begin + r / work->heads * tile->split_count + split - tile->split_begin);
    return pair * (size_t)work->launch->plan->n_heads + (size_t)(work->head_begin + r % work->heads);
}

static void split_store(const struct attention_work *work, int32_t split) {
    const struct attention_launch *launch = work->launch;
    const struct attention_sums *sums = &work->scratch.split;
    const size_t head_dim = (size_t)launch->args->kv.head_dim;
    for (int32_t r = 0; r < work->rows; r++) {
        size_t row = pair_row(work, r, split);
        launch->stats[2 * row] = sums->largest[r];
        launch->stats[2 * row + 1] = sums->sum[r];
        memcpy(launch->sums + row * head_dim, sums->values + r * sums->values_stride, head_dim * sizeof(float));
    }
}

static void split_fold(struct attention_work *work, int32_t split, bool stored) {
    const struct attention_launch *launch = work->launch;
    const struct attention_sums *from = &work->scratch.split;
    const size_t head_dim = (size_t)launch->args->kv.head_dim;
    rows_see(work, split * ATTENTION_SPLIT, (split + 1) * ATTENTION_SPLIT);
    for (int32_t r = 0; r < work->rows; r++) {
        if (work->lo[r] >= work->hi[r]) continue;
        if (stored) {
            size_t row = pair_row(work, r, split);
            fold(work, r, launch->stats[2 * row], launch->stats[2 * row + 1], launch->sums + row * head_dim);
        } else {
            fold(work, r, from->largest[r], from->sum[r], from->values + r * from->values_stride);
        }
    }
}

/* The item that ends last folds what all items of its tile have stored. */
static void tile_fold(struct attention_work *work, int32_t head_tile) {
    const struct attention_tile *tile = work->tile;
    _Atomic uint32_t *counter = &work->launch->counters[tile->counter + head_tile];
    uint32_t done = atomic_fetch_add_explicit(counter, 1, memory_order_acq_rel) + 1;
    if (done != (uint32_t)tile->parts) return;
    sums_clear(&work->scratch.total, work->rows);
    for (int32_t s = 0; s < tile->split_count; s++) split_fold(work, tile->split_begin + s, true);
    rows_finish(work);
}

static void item_run(void *ctx, int64_t index, int32_t worker) {
    const struct attention_launch *launch = ctx;
    const struct attention_plan *plan = launch->plan;
    const struct op_attention_args *args = launch->args;
    const struct attention_item *item = &plan->items[index / plan->head_tiles];
    int32_t head_tile = (int32_t)(index % plan->head_tiles);
    struct attention_work work = {.launch = launch, .tile = &plan->tiles[item->tile]};
    work.scratch = scratch_of(launch, worker);
    work.heads = plan->tile_heads;
    work.head_begin = head_tile * work.heads;
    work.kv_head = (int32_t)((int64_t)work.head_begin * plan->n_kv_heads / plan->n_heads);
    work.rows = work.tile->q_count * work.heads;
    work.pages = args->table.pages + (int64_t)args->shape.slots[work.tile->seq] * args->table.max_pages;
    const bool whole = work.tile->pair_begin < 0;
    int32_t last = work.tile->position + work.tile->q_count;
    work.key_end = item->split_end * ATTENTION_SPLIT < last ? item->split_end * ATTENTION_SPLIT : last;
    queries_load(&work);
    if (whole) sums_clear(&work.scratch.total, work.rows);
    for (int32_t split = item->split_begin; split < item->split_end; split++) {
        split_add(&work, split);
        if (whole)
            split_fold(&work, split, false);
        else
            split_store(&work, split);
    }
    if (whole)
        rows_finish(&work);
    else
        tile_fold(&work, head_tile);
}

int cpu_op_attention(struct backend *backend, const struct op_attention_args *args, struct err *err) {
    const struct cpu *cpu = backend->cpu;
    const struct attention_plan *plan = args->plan;
    struct attention_workspace space = attention_workspace_of(plan->pair_count, plan->n_heads, plan->head_dim);
    struct attention_launch launch = {
        .args = args,
        .plan = plan,
        .kernels = attention_kernels_get(cpu->isa),
        .counters = args->workspace,
        .stats = (float *)(void *)((char *)args->workspace + space.stats_offset),
        .sums = (float *)(void *)((char *)args->workspace + space.sums_offset),
        .rows = attention_tile_rows(plan->head_dim),
        .stride = (plan->head_dim + 15) / 16 * 16,
        .f16 = args->kv.dtype == DTYPE_F16,
    };
    launch.scratch_bytes = scratch_floats(launch.rows, launch.stride) * sizeof(float);
    launch.scratch = cpu_scratch(backend, launch.scratch_bytes * (size_t)team_threads(cpu->team));
    if (!launch.scratch) return err_set(err, ERR_NOMEM, "no memory for the scratch of attention");
    if (plan->counter_count) memset(args->workspace, 0, (size_t)plan->counter_count * sizeof(uint32_t));
    team_run(cpu->team, item_run, &launch, (int64_t)plan->item_count * plan->head_tiles);
    return 0;
}
