/* op_attention against softmax written out in double precision, on every backend; and the promise that the bits of a
 * query's result depend on that query alone: not on the batch, the chunk, the number of threads, nor on which pages
 * hold the keys. CUDA promises that in batch-invariant mode only; without it each result is held against the reference.
 *
 * The stated error: 2e-5 in f32; on CUDA also a rounding to bf16 of the weights (so of the sum of weights times the
 * sizes of the values) and one of the result. */
#include "ops_support.h"

#include "kernels/cpu/cpu_ops.h"

#include "kernels/attention_plan.h"
#include "kernels/backend_internal.h"
#ifdef QUIRE_CUDA
#include "kernels/cuda/cuda_attention.h"
#include "kernels/cuda/cuda_ops.h"
#endif

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

enum { SEQS_MAX = 8 };

struct attention_case {
    int32_t n_heads, n_kv_heads, head_dim, page_size, window;
    enum dtype dtype; /* of the cache on the CPU; bf16 on CUDA */
    float soft_cap;
    bool sinks;
    int32_t seqs, len[SEQS_MAX]; /* whole contexts */
};

/* The contexts of a case: q, k and v of every position of every sequence, and the pages that hold them. */
struct world {
    const struct attention_case *c;
    struct backend *backend;
    struct tensors tensors;
    float *q[SEQS_MAX], *k[SEQS_MAX], *v[SEQS_MAX]; /* [len, heads, head_dim], rounded as the device keeps them */
    float *sinks, *sinks_device;                    /* [n_heads] */
    int32_t max_pages, *table, *table_device;       /* [seqs, max_pages] */
    struct kv_layer kv;
    size_t pool_bytes;
    bool aligned; /* rows of q and out begin at 16 bytes */
};

/* Page numbers in an order of `order`'s making; pages that no one holds are full of NaN, so that reading one shows. */
static void world_place(struct world *w, uint64_t order) {
    const struct attention_case *c = w->c;
    int32_t pages = c->seqs * w->max_pages + 1, *free_pages = zeros(pages, sizeof *free_pages);
    unsigned char *empty = malloc(w->pool_bytes);
    memset(empty, 0xff, w->pool_bytes);
    TEST_ERR_PASS(backend_upload(w->backend, w->kv.base, empty, w->pool_bytes, err));
    free(empty);
    for (int32_t i = 0; i < pages; i++) free_pages[i] = i;
    for (int32_t i = pages - 1; i > 0; i--) {
        int32_t j = random_below(&order, i + 1), page = free_pages[i];
        free_pages[i] = free_pages[j];
        free_pages[j] = page;
    }
    assert_true((size_t)pages * w->kv.page_stride_bytes <= w->pool_bytes);
    for (int32_t s = 0, next = 0; s < c->seqs; s++)
        for (int32_t p = 0; p < w->max_pages; p++) w->table[s * w->max_pages + p] = free_pages[next++];
    free(free_pages);
    TEST_ERR_PASS(backend_upload(w->backend, w->table_device, w->table,
                                 (size_t)(c->seqs * w->max_pages) * sizeof *w->table, err));
    for (int32_t s = 0; s < c->seqs; s++) {
        const int64_t width = c->n_kv_heads * c->head_dim, count = c->len[s] * width;
        int32_t *positions = zeros(c->len[s], sizeof *positions), q_start[] = {0, c->len[s]};
        struct tensors t = {.backend = w->backend};
        for (int32_t i = 0; i < c->len[s]; i++) positions[i] = i;
        step_begin(w->backend);
        struct op_kv_write_args args = {
            .k = tensor_act(&t, w->k[s], count),
            .v = tensor_act(&t, w->v[s], count),
            .kv_stride = width,
            .positions = step_i32(w->backend, positions, c->len[s]),
            .shape = step_shape(w->backend, (struct attention_shape){q_start, &c->len[s], &s, 1, c->len[s]}),
            .kv = w->kv,
            .table = {w->table_device, w->max_pages},
        };
        step_commit(w->backend);
        TEST_ERR_PASS(op_kv_write(w->backend, &args, err));
        tensors_free(&t);
        free(positions);
    }
}

static void round_all(enum dtype dtype, float *x, int64_t count) {
    for (int64_t i = 0; i < count; i++) x[i] = (float)dtype_rounded(dtype, (double)x[i]);
}

static void world_init(struct world *w, const struct attention_case *c, struct backend *backend) {
    uint64_t seed = (uint64_t)(c->n_heads * 7 + c->head_dim);
    const enum dtype dtype = on_cuda(backend) ? DTYPE_BF16 : c->dtype;
    int32_t longest = 0;
    *w = (struct world){.c = c, .backend = backend, .tensors = {.backend = backend}};
    for (int32_t s = 0; s < c->seqs; s++) {
        longest = c->len[s] > longest ? c->len[s] : longest;
        w->q[s] = random_values(&seed, (int64_t)c->len[s] * c->n_heads * c->head_dim, 2.0);
        w->k[s] = random_values(&seed, (int64_t)c->len[s] * c->n_kv_heads * c->head_dim, 1.0);
        w->v[s] = random_values(&seed, (int64_t)c->len[s] * c->n_kv_heads * c->head_dim, 1.0);
        round_all(act_dtype(backend), w->q[s], (int64_t)c->len[s] * c->n_heads * c->head_dim);
        round_all(dtype, w->k[s], (int64_t)c->len[s] * c->n_kv_heads * c->head_dim);
        round_all(dtype, w->v[s], (int64_t)c->len[s] * c->n_kv_heads * c->head_dim);
    }
    w->sinks = random_values(&seed, c->n_heads, 1.0);
    w->sinks_device = tensor_f32(&w->tensors, w->sinks, c->n_heads);
    w->max_pages = (longest + c->page_size - 1) / c->page_size + 1;
    w->table = zeros(c->seqs * w->max_pages, sizeof *w->table);
    w->table_device = tensor_i32(&w->tensors, w->table, c->seqs * w->max_pages);
    w->kv = (struct kv_layer){
        .dtype = dtype, .page_size = c->page_size, .n_kv_heads = c->n_kv_heads, .head_dim = c->head_dim};
    w->kv.page_stride_bytes =
        2 * (size_t)c->n_kv_heads * (size_t)c->page_size * (size_t)c->head_dim * dtype_bytes(dtype);
    w->pool_bytes = (size_t)(c->seqs * w->max_pages + 1) * w->kv.page_stride_bytes;
    TEST_ERR_PASS(backend_alloc(backend, MEMORY_KV, w->pool_bytes, &w->kv.base, err));
    world_place(w, 1);
}

static void world_deinit(struct world *w) {
    for (int32_t s = 0; s < w->c->seqs; s++) free(w->q[s]), free(w->k[s]), free(w->v[s]);
    free(w->sinks), free(w->table);
    tensors_free(&w->tensors);
    backend_free(w->backend, MEMORY_KV, w->kv.base, w->pool_bytes);
}

/* Queries first[s] .. end[s] - 1 of each sequence (none where equal) in one batch on `backend`, cut for `workers`; the
 * results go to out[s] [len, n_heads, head_dim]. */
static void world_run(struct world *w, struct backend *backend, int32_t workers, const int32_t *first,
                      const int32_t *end, float **out) {
    const struct attention_case *c = w->c;
    int32_t q_start[SEQS_MAX + 1] = {0}, kv_len[SEQS_MAX], slots[SEQS_MAX], seqs = 0, longest = 1;
    const int64_t width = (int64_t)c->n_heads * c->head_dim;
    const int64_t q_stride = width + (w->aligned ? 16 : 5), out_stride = width + (w->aligned ? 8 : 2);
    for (int32_t s = 0; s < c->seqs; s++) {
        if (first[s] == end[s]) continue;
        slots[seqs] = s;
        kv_len[seqs] = end[s];
        longest = end[s] > longest ? end[s] : longest;
        q_start[seqs + 1] = q_start[seqs] + end[s] - first[s];
        seqs++;
    }
    int32_t tokens = q_start[seqs];
    struct tensors t = {.backend = backend};
    float *q = zeros(tokens * q_stride, sizeof *q), *got = zeros(tokens * out_stride, sizeof *got);
    for (int32_t i = 0; i < seqs; i++)
        for (int32_t r = q_start[i]; r < q_start[i + 1]; r++)
            memcpy(q + r * q_stride, w->q[slots[i]] + (first[slots[i]] + r - q_start[i]) * width,
                   (size_t)width * sizeof *q);
    struct arena arena;
    arena_init(&arena);
    step_begin(backend);
    struct attention_shape shape = step_shape(backend, (struct attention_shape){q_start, kv_len, slots, seqs, tokens});
    struct attention_plan_options options = {shape,        c->n_heads, c->n_kv_heads, c->head_dim,
                                             c->page_size, c->window,  workers};
    const size_t step_before = backend->step.used;
    const struct attention_plan *plan = attention_plan_make(backend, &options, &arena);
    assert_non_null(plan);
    assert_true(backend->step.used - step_before <=
                attention_plan_step_bytes(backend, tokens, seqs, longest, c->n_heads, c->head_dim));
    step_commit(backend);
    size_t bytes = attention_workspace_bytes(backend, tokens, seqs, longest, c->n_heads, c->head_dim);
    void *room = tensor_room(&t, tokens * out_stride);
    struct op_attention_args args = {
        .q = tensor_act(&t, q, tokens * q_stride),
        .out = room,
        .q_stride = q_stride,
        .out_stride = out_stride,
        .n_heads = c->n_heads,
        .shape = shape,
        .kv = w->kv,
        .table = {w->table_device, w->max_pages},
        .plan = plan,
        .workspace = tensor_filled(&t, bytes), /* an op finds there what another has left */
        .workspace_bytes = bytes,
        .scale = 1.0f / sqrtf((float)c->head_dim),
        .soft_cap = c->soft_cap,
        .window = c->window,
        .sinks = c->sinks ? w->sinks_device : NULL,
    };
    TEST_ERR_PASS(op_attention(backend, &args, err));
    act_read(backend, got, room, tokens * out_stride);
    for (int32_t i = 0; i < seqs; i++)
        for (int32_t r = q_start[i]; r < q_start[i + 1]; r++)
            memcpy(out[slots[i]] + (first[slots[i]] + r - q_start[i]) * width, got + r * out_stride,
                   (size_t)width * sizeof *got);
    tensors_free(&t);
    arena_deinit(&arena);
    free(q), free(got);
}

/* One head of one query in double precision, out [head_dim]; and the same sum of the values' sizes in reach. */
static void reference(const struct world *w, int32_t s, int32_t position, int32_t head, double *out, double *reach) {
    const struct attention_case *c = w->c;
    int32_t kv_head = head * c->n_kv_heads / c->n_heads, d = c->head_dim;
    int32_t first = c->window && position >= c->window ? position - c->window + 1 : 0;
    double *score = zeros(position + 1, sizeof *score), largest = c->sinks ? (double)w->sinks[head] : -INFINITY;
    const float *q = w->q[s] + ((int64_t)position * c->n_heads + head) * d;
    for (int32_t t = first; t <= position; t++) {
        const float *k = w->k[s] + ((int64_t)t * c->n_kv_heads + kv_head) * d;
        for (int32_t i = 0; i < d; i++) score[t] += (double)q[i] * (double)k[i];
        score[t] /= sqrt((double)d);
        if (c->soft_cap > 0.0f) score[t] = (double)c->soft_cap * tanh(score[t] / (double)c->soft_cap);
        largest = fmax(largest, score[t]);
    }
    double sum = c->sinks ? exp((double)w->sinks[head] - largest) : 0.0;
    memset(out, 0, (size_t)d * sizeof *out);
    memset(reach, 0, (size_t)d * sizeof *reach);
    for (int32_t t = first; t <= position; t++) {
        const float *v = w->v[s] + ((int64_t)t * c->n_kv_heads + kv_head) * d;
        double weight = exp(score[t] - largest);
        sum += weight;
        for (int32_t i = 0; i < d; i++) {
            const double value = weight * (double)v[i];
            out[i] += value;
            reach[i] += fabs(value);
        }
    }
    for (int32_t i = 0; i < d; i++) out[i] /= sum, reach[i] /= sum;
    free(score);
}

static void outs_init(const struct world *w, float **out) {
    for (int32_t s = 0; s < w->c->seqs; s++)
        out[s] = zeros((int64_t)w->c->len[s] * w->c->n_heads * w->c->head_dim, sizeof **out);
}

static void outs_deinit(const struct world *w, float **out) {
    for (int32_t s = 0; s < w->c->seqs; s++) free(out[s]);
}

static void expect_query(const struct world *w, float **out, int32_t s, int32_t position) {
    const struct attention_case *c = w->c;
    double *want = zeros(c->head_dim, sizeof *want), *reach = zeros(c->head_dim, sizeof *reach);
    for (int32_t h = 0; h < c->n_heads; h++) {
        reference(w, s, position, h, want, reach);
        for (int32_t i = 0; i < c->head_dim; i++) {
            const double got = (double)out[s][((int64_t)position * c->n_heads + h) * c->head_dim + i];
            const double tolerance = 2e-5 + act_slack(w->backend, reach[i]) + act_slack(w->backend, want[i]);
            if (!(fabs(got - want[i]) <= tolerance))
                fail_msg("%s, %d/%d heads of %d, pages of %d, window %d: sequence %d, position %d, head %d, value %d: "
                         "got %.6g, want %.6g, tolerance %.2g",
                         backend_info(w->backend)->isa, c->n_heads, c->n_kv_heads, c->head_dim, c->page_size, c->window,
                         s, position, h, i, got, want[i], tolerance);
        }
    }
    free(want), free(reach);
}

/* Every step-th query of [first, end) of each sequence, and the last one. */
static void expect_reference(const struct world *w, float **out, const int32_t *first, const int32_t *end,
                             int32_t step) {
    for (int32_t s = 0; s < w->c->seqs; s++) {
        for (int32_t t = first[s]; t < end[s]; t += step) expect_query(w, out, s, t);
        if (first[s] < end[s]) expect_query(w, out, s, end[s] - 1);
    }
}

static void expect_same(const struct world *w, float **a, float **b, const int32_t *first, const int32_t *end,
                        const char *what) {
    const int64_t width = (int64_t)w->c->n_heads * w->c->head_dim;
    for (int32_t s = 0; s < w->c->seqs; s++)
        for (int32_t t = first[s]; t < end[s]; t++)
            if (memcmp(a[s] + t * width, b[s] + t * width, (size_t)width * sizeof **a) != 0)
                fail_msg("%s: sequence %d, position %d differs", what, s, t);
}

/* Chunks of one sequence after the other, each alone; the last tokens one by one, as decode does. */
static void chunks_run(struct world *w, int32_t chunk, int32_t workers, bool same_bits, float **all, float **some) {
    const struct attention_case *c = w->c;
    int32_t first[SEQS_MAX] = {0}, end[SEQS_MAX] = {0};
    for (int32_t s = 0; s < c->seqs; s++) {
        const int32_t most = test_quick() ? 1 : 40, from = chunk == 1 && c->len[s] > most ? c->len[s] - most : 0;
        for (int32_t t = from; t < c->len[s]; t += chunk) {
            memset(first, 0, sizeof first), memset(end, 0, sizeof end);
            first[s] = t;
            end[s] = t + chunk < c->len[s] ? t + chunk : c->len[s];
            world_run(w, w->backend, workers, first, end, some);
            if (same_bits)
                expect_same(w, all, some, first, end, "alone");
            else
                expect_reference(w, some, first, end, 1000);
        }
    }
}

/* All in one batch; each alone; in chunks of several sizes; prefill and decode mixed, in other pages; decode alone, cut
 * for several numbers of workers. */
static void case_run(const struct attention_case *c, struct backend *backend, bool same_bits, bool aligned) {
    struct world w;
    float *all[SEQS_MAX], *some[SEQS_MAX];
    int32_t first[SEQS_MAX] = {0};
    world_init(&w, c, backend);
    w.aligned = aligned;
    outs_init(&w, all);
    outs_init(&w, some);
    world_run(&w, backend, 2, first, c->len, all);
    expect_reference(&w, all, first, c->len, 37);
    const int32_t chunks[] = {1, 7, 64, 100};
    for (size_t i = 0; i < COUNT(chunks); i++)
        if (!test_quick() || chunks[i] == 1 || chunks[i] == 100)
            chunks_run(&w, chunks[i], i % 2 ? 64 : 1, same_bits, all, some);
    world_place(&w, 99);
    const int32_t workers[] = {5, 1, 3, 0};
    for (size_t i = 0; i < COUNT(workers); i++) {
        for (int32_t s = 0; s < c->seqs; s++) {
            first[s] = c->len[s] - 1 - (i ? 0 : s % 3);
            first[s] = first[s] < 0 ? 0 : first[s];
        }
        world_run(&w, backend, workers[i], first, c->len, some);
        expect_reference(&w, some, first, c->len, 1);
        if (same_bits) expect_same(&w, all, some, first, c->len, "mixed batch, other pages");
    }
    outs_deinit(&w, all);
    outs_deinit(&w, some);
    world_deinit(&w);
}

static const struct attention_case cases[] = {
    {9, 3, 64, 64, 0, DTYPE_F16, 0, false, 4, {600, 1, 65, 257}},
    {9, 3, 64, 64, 0, DTYPE_F32, 0, false, 3, {300, 16, 63}},
    {8, 8, 128, 16, 0, DTYPE_F16, 0, false, 2, {290, 33}},
    {8, 1, 96, 32, 0, DTYPE_F16, 0, false, 2, {270, 5}},
    {4, 1, 256, 128, 0, DTYPE_F16, 0, false, 2, {260, 130}},
    {5, 1, 72, 16, 0, DTYPE_F16, 0, false, 2, {280, 17}},
    {7, 7, 8, 16, 0, DTYPE_F32, 0, false, 2, {100, 3}},
    {6, 2, 64, 16, 100, DTYPE_F16, 0, false, 2, {700, 101}},
    {6, 2, 40, 32, 300, DTYPE_F32, 0, true, 2, {640, 20}},
    {4, 2, 64, 64, 0, DTYPE_F16, 20.0f, false, 2, {300, 64}},
    {8, 2, 64, 64, 0, DTYPE_F16, 30.0f, true, 2, {520, 3}},
    {60, 1, 16, 16, 7, DTYPE_F16, 0, false, 1, {140}},
    {2, 1, 512, 16, 0, DTYPE_F16, 0, true, 1, {70}},
    {32, 8, 128, 64, 0, DTYPE_F16, 0, false, 3, {530, 64, 129}},
    {16, 1, 128, 32, 0, DTYPE_F16, 0, true, 2, {260, 31}},
    {40, 2, 64, 16, 50, DTYPE_F16, 0, false, 2, {200, 77}},
};

/* The CPU promises equal bits, CUDA only in batch-invariant mode. */
static void cases_all(struct backend *backend) {
    for (size_t i = 0; i < COUNT(cases); i++) {
        if (on_cuda(backend)) case_run(&cases[i], backend, false, true);
        if (!on_cuda(backend) || !test_quick()) case_run(&cases[i], backend, !on_cuda(backend), false);
    }
}

static void test_cases(void **state) {
    for_each_backend(cases_all);
}

static void test_batch_invariant(void **state) {
    const char *const kernels[] = {"sm_90a", "portable"};
    int ran = 0;
    for (size_t k = 0; k < COUNT(kernels); k++) {
        struct backend *backend = backend_cuda(kernels[k], true);
        if (!backend) continue;
        TEST_ERR_PASS(backend_step_open(backend, TEST_STEP_BYTES, err));
        for (size_t i = 0; i < COUNT(cases); i += test_quick() ? 4 : 1) case_run(&cases[i], backend, true, true);
        backend_close(backend);
        ran++;
    }
    if (!ran) {
        print_message("skipped: no GPU\n");
        skip();
    }
}

static void test_threads(void **state) {
    for (int isa = 0; isa < CPU_ISA_COUNT; isa++) {
        float *one[SEQS_MAX], *more[SEQS_MAX];
        struct world w;
        int32_t first[SEQS_MAX] = {0, 0, 60};
        struct backend *backend = backend_for((enum cpu_isa)isa, 1);
        if (!backend) continue;
        TEST_ERR_PASS(backend_step_open(backend, TEST_STEP_BYTES, err));
        first[0] = cases[0].len[0] - 2;
        world_init(&w, &cases[0], backend);
        outs_init(&w, one);
        outs_init(&w, more);
        world_run(&w, backend, 1, first, cases[0].len, one);
        for (int32_t threads = 2; threads <= 3; threads++) {
            struct backend *other = backend_for((enum cpu_isa)isa, threads);
            TEST_ERR_PASS(backend_step_open(other, TEST_STEP_BYTES, err));
            world_run(&w, other, threads, first, cases[0].len, more);
            expect_same(&w, one, more, first, cases[0].len, "threads");
            backend_close(other);
        }
        outs_deinit(&w, one);
        outs_deinit(&w, more);
        world_deinit(&w);
        backend_close(backend);
    }
}

/* NaN of one sequence stays with it; in that sequence it shows. As prefill, and as decode. */
static void nan_all(struct backend *backend) {
    struct world w;
    float *clean[SEQS_MAX], *got[SEQS_MAX];
    const struct attention_case *c = &cases[0];
    const int64_t width = (int64_t)c->n_heads * c->head_dim;
    for (int decode = 0; decode < 2; decode++) {
        int32_t first[SEQS_MAX] = {0}, end[SEQS_MAX] = {0};
        world_init(&w, c, backend);
        outs_init(&w, clean);
        outs_init(&w, got);
        for (int32_t s = 0; s < c->seqs && decode; s++) first[s] = c->len[s] - 1;
        world_run(&w, backend, 2, first, c->len, clean);
        for (int i = 0; i < c->head_dim; i++) w.k[2][30 * c->n_kv_heads * c->head_dim + i] = NAN;
        world_place(&w, 1);
        world_run(&w, backend, 2, first, c->len, got);
        memcpy(end, c->len, sizeof end);
        end[2] = first[2];
        expect_same(&w, clean, got, first, end, "neighbours of NaN");
        for (int32_t t = decode ? first[2] : 30; t < c->len[2]; t++) assert_true(isnan(got[2][t * width]));
        outs_deinit(&w, clean);
        outs_deinit(&w, got);
        world_deinit(&w);
    }
}

static void test_nan(void **state) {
    for_each_backend(nan_all);
}

/* Every (query, split) that is visible is in exactly one item, within the workspace that was promised. */
static void plan_check(const struct attention_plan_options *options, uint64_t *seed) {
    struct arena arena;
    arena_init(&arena);
    const struct attention_plan *plan = attention_plan_build(options, &arena);
    const struct attention_shape *shape = &options->shape;
    int32_t *covered = zeros(plan->tile_count, sizeof *covered), *queries = zeros(shape->tokens, sizeof *queries);
    int32_t pairs = 0, longest = 0;
    for (int32_t i = 0; i < plan->tile_count; i++) {
        const struct attention_tile *tile = &plan->tiles[i];
        for (int32_t q = 0; q < tile->q_count; q++) queries[tile->q_begin + q]++;
        int32_t last = tile->position + tile->q_count - 1;
        assert_int_equal(tile->position - (tile->q_begin - shape->q_start[tile->seq]),
                         shape->kv_len[tile->seq] - shape->q_start[tile->seq + 1] + shape->q_start[tile->seq]);
        assert_int_equal(tile->split_begin + tile->split_count, last / ATTENTION_SPLIT + 1);
        assert_true(tile->q_count * plan->tile_heads <= ATTENTION_ROWS);
        if (tile->pair_begin >= 0) {
            assert_int_equal(tile->pair_begin, pairs);
            pairs += tile->q_count * tile->split_count;
        }
        longest = shape->kv_len[tile->seq] > longest ? shape->kv_len[tile->seq] : longest;
    }
    for (int32_t q = 0; q < shape->tokens; q++) assert_int_equal(queries[q], 1);
    for (int32_t i = 0; i < plan->item_count; i++) {
        const struct attention_item *item = &plan->items[i];
        assert_true(item->split_begin < item->split_end);
        covered[item->tile] += item->split_end - item->split_begin;
    }
    for (int32_t i = 0; i < plan->tile_count; i++) assert_int_equal(covered[i], plan->tiles[i].split_count);
    assert_int_equal(pairs, plan->pair_count);
    assert_true(attention_workspace_of(pairs, plan->n_heads, plan->head_dim).bytes <=
                cpu_attention_bytes(NULL, shape->tokens, shape->seqs, longest, plan->n_heads, plan->head_dim));
    free(covered), free(queries);
    arena_deinit(&arena);
}

#ifdef QUIRE_CUDA
/* The tiles of prefill: each query of a sequence that is prefill once, at its position. */
static void cuda_prefill_check(const struct cuda_attention_plan *plan, const struct attention_shape *shape,
                               int32_t least) {
    int32_t *queries = zeros(shape->tokens, sizeof *queries);
    for (int32_t i = 0; i < plan->prefill.tile_count; i++) {
        const struct prefill_tile *tile = &plan->prefill.tiles[i];
        const int32_t end = shape->q_start[tile->seq + 1];
        assert_true(tile->q_count > 0 && tile->q_count <= plan->prefill.tile_rows);
        assert_true(tile->q_begin >= shape->q_start[tile->seq] && tile->q_begin + tile->q_count <= end);
        assert_int_equal(tile->position, shape->kv_len[tile->seq] - (end - tile->q_begin));
        assert_int_equal(tile->kv_len, shape->kv_len[tile->seq]);
        assert_int_equal(tile->slot, shape->slots[tile->seq]);
        for (int32_t q = 0; q < tile->q_count; q++) queries[tile->q_begin + q]++;
    }
    for (int32_t s = 0; s < shape->seqs; s++)
        for (int32_t q = shape->q_start[s]; q < shape->q_start[s + 1]; q++)
            assert_int_equal(queries[q], shape->q_start[s + 1] - shape->q_start[s] >= least);
    free(queries);
}

/* What a CTA has of a unit that it shares with others. */
struct unit_share {
    int32_t first_cta, last_cta, ctas; /* ctas 0: no CTA has any of it yet */
    int64_t blocks;
    int32_t colour; /* -1: not known yet */
};

/* One CTA's place among the others is as the kernel will take it from the plan. */
static void cuda_share_check(const struct decode_share *share, int32_t cta, struct unit_share *units, int32_t first,
                             int32_t last) {
    const bool before = units[first].first_cta < cta,
               after = units[last].first_cta == cta && units[last].last_cta > cta;
    assert_int_equal(share->first_before, before ? units[first].first_cta : -1);
    assert_int_equal(share->last_before, before ? units[first].last_cta : -1);
    assert_int_equal(share->last_after, after ? units[last].last_cta : -1);
    if (before) assert_int_equal(share->colour_before, units[first].colour);
    if (after) units[last].colour = share->colour_before ^ 1;
}

/* The warps' pieces: all blocks of all units once, in order, in as equal pieces as can be. */
static void cuda_decode_check(const struct decode_plan *plan, const struct attention_plan_options *options) {
    const unsigned char *work = plan->work;
    const int32_t keys = decode_block_keys(options->head_dim), most = decode_tile_heads_max(options->head_dim);
    const int32_t tiles = options->n_kv_heads * ((options->n_heads / options->n_kv_heads + most - 1) / most);
    const int32_t unit_count = plan->seqs * tiles;
    const struct decode_share *shares = (const void *)(work + ((size_t)plan->ctas * sizeof(int32_t) + 15) / 16 * 16);
    const struct decode_range *warps = (const void *)(shares + plan->ctas), *seqs = warps + plan->ctas * plan->warps;
    struct unit_share *units = zeros(unit_count, sizeof *units);
    int32_t *first = zeros(plan->ctas, sizeof *first), *last = zeros(plan->ctas, sizeof *last), unit = 0;
    int32_t smallest = INT32_MAX, largest = 0;
    for (int32_t i = 0; i < plan->ctas; i++) assert_int_equal(((const int32_t *)plan->work)[i], 0);
    for (int32_t c = 0; c < plan->ctas; c++) {
        first[c] = last[c] = -1;
        for (int32_t i = 0; i < plan->warps; i++) {
            const struct decode_range *warp = &warps[c * plan->warps + i];
            if (warp->count && (warp->count < smallest)) smallest = warp->count;
            largest = warp->count > largest ? warp->count : largest;
            for (int32_t b = 0; b < warp->count; b++) {
                const int32_t s = unit / tiles, kv_len = seqs[s].kv_len;
                const int32_t lo = options->window && kv_len > options->window ? (kv_len - options->window) / keys : 0;
                if (b == 0) {
                    assert_int_equal(warp->seq * tiles + warp->tile, unit);
                    assert_int_equal(warp->block, units[unit].blocks);
                    assert_true(warp->row == seqs[s].row && warp->slot == seqs[s].slot && warp->kv_len == kv_len);
                }
                if (first[c] < 0) first[c] = unit;
                if (last[c] != unit) units[unit].ctas++;
                if (units[unit].blocks == 0) units[unit].first_cta = c, units[unit].colour = -1;
                units[unit].last_cta = c;
                last[c] = unit;
                if (++units[unit].blocks == (kv_len + keys - 1) / keys - lo) unit++;
            }
        }
    }
    assert_int_equal(unit, unit_count);
    assert_true(largest - smallest <= 1);
    for (int32_t u = 0; u < unit_count; u++)
        assert_int_equal(units[u].ctas, units[u].last_cta - units[u].first_cta + 1);
    for (int32_t c = 0; c < plan->ctas; c++)
        if (first[c] >= 0) cuda_share_check(&shares[c], c, units, first[c], last[c]);
    free(units), free(first), free(last);
}

/* On a device that is not there: the plan asks it for numbers only. */
static void cuda_plan_check(const struct attention_plan_options *options, uint64_t *seed) {
    struct cuda cuda = {
        .sms = 1 + random_below(seed, 140),
        .shared_bytes_max = random_below(seed, 2) ? 232448 : 101376,
        .kernels = CUDA_KERNELS_PORTABLE,
        .batch_invariant = random_below(seed, 5) == 0,
    };
    struct backend backend = {.cuda = &cuda};
    struct arena arena;
    arena_init(&arena);
    backend.step.bytes = cuda_plan_step_bytes(&backend, options->shape.tokens, options->shape.seqs, 9700,
                                              options->n_heads, options->head_dim);
    backend.step.host = aligned_alloc(64, (backend.step.bytes + 63) / 64 * 64);
    backend.step.open = true;
    struct attention_plan_options all = *options;
    all.workers = 0;
    const struct attention_plan *head = cuda_plan_make(&backend, &all, &arena);
    assert_non_null(head);
    const struct cuda_attention_plan *plan = cuda_attention_plan_of(head);
    const bool decodes = !cuda.batch_invariant && options->head_dim <= DECODE_HEAD_DIM_MAX;
    cuda_prefill_check(plan, &options->shape, decodes ? 2 : 1);
    assert_true(decodes || plan->decode.seqs == 0);
    if (plan->decode.seqs) cuda_decode_check(&plan->decode, options);
    assert_true(head->workspace_bytes <= cuda_attention_bytes(&backend, options->shape.tokens, options->shape.seqs,
                                                              9700, options->n_heads, options->head_dim));
    free(backend.step.host);
    arena_deinit(&arena);
}
#endif

static void test_plan(void **state) {
    uint64_t seed = 5;
    for (int round = 0; round < 500; round++) {
        int32_t q_start[33] = {0}, kv_len[32], slots[32] = {0}, seqs = 1 + random_below(&seed, 32);
        for (int32_t s = 0; s < seqs; s++) {
            int32_t queries = random_below(&seed, 3) ? 1 : 1 + random_below(&seed, 700);
            q_start[s + 1] = q_start[s] + queries;
            kv_len[s] = queries + random_below(&seed, random_below(&seed, 4) ? 300 : 9000);
        }
        int32_t kv_heads = 1 + random_below(&seed, 8);
        struct attention_plan_options options = {{q_start, kv_len, slots, seqs, q_start[seqs]},
                                                 kv_heads * (1 + random_below(&seed, 60)),
                                                 kv_heads,
                                                 8 * (1 + random_below(&seed, 64)),
                                                 16 << random_below(&seed, 4),
                                                 random_below(&seed, 2) ? 0 : 1 + random_below(&seed, 5000),
                                                 1 + random_below(&seed, 64)};
        plan_check(&options, &seed);
#ifdef QUIRE_CUDA
        cuda_plan_check(&options, &seed);
#endif
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plan),    cmocka_unit_test(test_cases), cmocka_unit_test(test_batch_invariant),
        cmocka_unit_test(test_threads), cmocka_unit_test(test_nan),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
