/* op_attention against softmax written out in double precision, and the promise that the bits of a query's result
 * depend on that query alone: not on the batch, the chunk, the number of threads, nor on which pages hold the keys. */
#include "ops_support.h"

#include "kernels/cpu/cpu_ops.h"

#include "kernels/attention_plan.h"

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

enum { SEQS_MAX = 8 };

struct attention_case {
    int32_t n_heads, n_kv_heads, head_dim, page_size, window;
    enum dtype dtype;
    float soft_cap;
    bool sinks;
    int32_t seqs, len[SEQS_MAX]; /* whole contexts */
};

/* The contexts of a case: q, k and v of every position of every sequence, and the pages that hold them. */
struct world {
    const struct attention_case *c;
    struct backend *backend;
    float *q[SEQS_MAX], *k[SEQS_MAX], *v[SEQS_MAX]; /* [len, heads, head_dim] */
    float *sinks;                                   /* [n_heads] */
    int32_t max_pages, *table;                      /* [seqs, max_pages] */
    struct kv_layer kv;
    void *pool;
    size_t pool_bytes;
};

static double half_rounded(double x) {
    if (x == 0.0) return 0.0;
    int exponent;
    frexp(x, &exponent);
    double unit = ldexp(1.0, exponent < -13 ? -24 : exponent - 11);
    return nearbyint(x / unit) * unit;
}

static double kv_value(const struct attention_case *c, float x) {
    return c->dtype == DTYPE_F16 ? half_rounded((double)x) : (double)x;
}

/* Page numbers in an order of `order`'s making; pages that no one holds are full of NaN, so that reading one shows. */
static void world_place(struct world *w, uint64_t order) {
    const struct attention_case *c = w->c;
    int32_t pages = c->seqs * w->max_pages + 1, *free_pages = zeros(pages, sizeof *free_pages);
    size_t page_bytes = w->kv.page_stride_bytes;
    memset(w->pool, 0xff, w->pool_bytes);
    for (int32_t i = 0; i < pages; i++) free_pages[i] = i;
    for (int32_t i = pages - 1; i > 0; i--) {
        int32_t j = random_below(&order, i + 1), page = free_pages[i];
        free_pages[i] = free_pages[j];
        free_pages[j] = page;
    }
    assert_true((size_t)pages * page_bytes <= w->pool_bytes);
    for (int32_t s = 0, next = 0; s < c->seqs; s++)
        for (int32_t p = 0; p < w->max_pages; p++) w->table[s * w->max_pages + p] = free_pages[next++];
    free(free_pages);
    for (int32_t s = 0; s < c->seqs; s++) {
        int32_t *positions = zeros(c->len[s], sizeof *positions), q_start[] = {0, c->len[s]};
        for (int32_t t = 0; t < c->len[s]; t++) positions[t] = t;
        struct op_kv_write_args args = {
            .k = w->k[s],
            .v = w->v[s],
            .kv_stride = c->n_kv_heads * c->head_dim,
            .positions = positions,
            .shape = {q_start, &c->len[s], &s, 1, c->len[s]},
            .kv = w->kv,
            .table = {w->table, w->max_pages},
        };
        TEST_ERR_PASS(op_kv_write(w->backend, &args, err));
        free(positions);
    }
}

static void world_init(struct world *w, const struct attention_case *c, struct backend *backend) {
    uint64_t seed = (uint64_t)(c->n_heads * 7 + c->head_dim);
    int32_t longest = 0;
    *w = (struct world){.c = c, .backend = backend};
    for (int32_t s = 0; s < c->seqs; s++) {
        longest = c->len[s] > longest ? c->len[s] : longest;
        w->q[s] = random_values(&seed, (int64_t)c->len[s] * c->n_heads * c->head_dim, 2.0);
        w->k[s] = random_values(&seed, (int64_t)c->len[s] * c->n_kv_heads * c->head_dim, 1.0);
        w->v[s] = random_values(&seed, (int64_t)c->len[s] * c->n_kv_heads * c->head_dim, 1.0);
    }
    w->sinks = random_values(&seed, c->n_heads, 1.0);
    w->max_pages = (longest + c->page_size - 1) / c->page_size + 1;
    w->table = zeros(c->seqs * w->max_pages, sizeof *w->table);
    size_t element = c->dtype == DTYPE_F16 ? 2 : 4;
    w->kv = (struct kv_layer){
        .dtype = c->dtype, .page_size = c->page_size, .n_kv_heads = c->n_kv_heads, .head_dim = c->head_dim};
    w->kv.page_stride_bytes = 2 * (size_t)c->n_kv_heads * (size_t)c->page_size * (size_t)c->head_dim * element;
    w->pool_bytes = (size_t)(c->seqs * w->max_pages + 1) * w->kv.page_stride_bytes;
    TEST_ERR_PASS(backend_alloc(backend, MEMORY_KV, w->pool_bytes, &w->pool, err));
    w->kv.base = w->pool;
    world_place(w, 1);
}

static void world_deinit(struct world *w) {
    for (int32_t s = 0; s < w->c->seqs; s++) free(w->q[s]), free(w->k[s]), free(w->v[s]);
    free(w->sinks), free(w->table);
    backend_free(w->backend, MEMORY_KV, w->pool, w->pool_bytes);
}

/* Queries first[s] .. end[s] - 1 of each sequence (none where equal) in one batch on `backend`, cut for `workers`; the
 * results go to out[s] [len, n_heads, head_dim]. */
static void world_run(struct world *w, struct backend *backend, int32_t workers, const int32_t *first,
                      const int32_t *end, float **out) {
    const struct attention_case *c = w->c;
    int32_t q_start[SEQS_MAX + 1] = {0}, kv_len[SEQS_MAX], slots[SEQS_MAX], seqs = 0, longest = 1;
    const int64_t width = (int64_t)c->n_heads * c->head_dim, q_stride = width + 5, out_stride = width + 2;
    for (int32_t s = 0; s < c->seqs; s++) {
        if (first[s] == end[s]) continue;
        slots[seqs] = s;
        kv_len[seqs] = end[s];
        longest = end[s] > longest ? end[s] : longest;
        q_start[seqs + 1] = q_start[seqs] + end[s] - first[s];
        seqs++;
    }
    int32_t tokens = q_start[seqs];
    float *q = zeros(tokens * q_stride, sizeof *q), *got = zeros(tokens * out_stride, sizeof *got);
    for (int32_t i = 0; i < seqs; i++)
        for (int32_t t = q_start[i]; t < q_start[i + 1]; t++)
            memcpy(q + t * q_stride, w->q[slots[i]] + (first[slots[i]] + t - q_start[i]) * width,
                   (size_t)width * sizeof *q);
    struct arena arena;
    arena_init(&arena);
    struct attention_shape shape = {q_start, kv_len, slots, seqs, tokens};
    struct attention_plan_options options = {shape,        c->n_heads, c->n_kv_heads, c->head_dim,
                                             c->page_size, c->window,  workers};
    const struct attention_plan *plan = attention_plan_build(&options, &arena);
    size_t bytes = attention_workspace_bytes(backend, tokens, seqs, longest, c->n_heads, c->head_dim);
    void *workspace = NULL;
    TEST_ERR_PASS(backend_alloc(backend, MEMORY_WORKSPACE, bytes, &workspace, err));
    memset(workspace, 0xff, bytes); /* an op finds there what another has left */
    struct op_attention_args args = {
        .q = q,
        .out = got,
        .q_stride = q_stride,
        .out_stride = out_stride,
        .n_heads = c->n_heads,
        .shape = shape,
        .kv = w->kv,
        .table = {w->table, w->max_pages},
        .plan = plan,
        .workspace = workspace,
        .workspace_bytes = bytes,
        .scale = 1.0f / sqrtf((float)c->head_dim),
        .soft_cap = c->soft_cap,
        .window = c->window,
        .sinks = c->sinks ? w->sinks : NULL,
    };
    TEST_ERR_PASS(op_attention(backend, &args, err));
    for (int32_t i = 0; i < seqs; i++)
        for (int32_t t = q_start[i]; t < q_start[i + 1]; t++)
            memcpy(out[slots[i]] + (first[slots[i]] + t - q_start[i]) * width, got + t * out_stride,
                   (size_t)width * sizeof *got);
    backend_free(backend, MEMORY_WORKSPACE, workspace, bytes);
    arena_deinit(&arena);
    free(q), free(got);
}

/* One head of one query in double precision, out [head_dim]. */
static void reference(const struct world *w, int32_t s, int32_t position, int32_t head, double *out) {
    const struct attention_case *c = w->c;
    int32_t kv_head = head * c->n_kv_heads / c->n_heads, d = c->head_dim;
    int32_t first = c->window && position >= c->window ? position - c->window + 1 : 0;
    double *score = zeros(position + 1, sizeof *score), largest = c->sinks ? (double)w->sinks[head] : -INFINITY;
    const float *q = w->q[s] + ((int64_t)position * c->n_heads + head) * d;
    for (int32_t t = first; t <= position; t++) {
        const float *k = w->k[s] + ((int64_t)t * c->n_kv_heads + kv_head) * d;
        for (int32_t i = 0; i < d; i++) score[t] += (double)q[i] * kv_value(c, k[i]);
        score[t] /= sqrt((double)d);
        if (c->soft_cap > 0.0f) score[t] = (double)c->soft_cap * tanh(score[t] / (double)c->soft_cap);
        largest = fmax(largest, score[t]);
    }
    double sum = c->sinks ? exp((double)w->sinks[head] - largest) : 0.0;
    memset(out, 0, (size_t)d * sizeof *out);
    for (int32_t t = first; t <= position; t++) {
        const float *v = w->v[s] + ((int64_t)t * c->n_kv_heads + kv_head) * d;
        double weight = exp(score[t] - largest);
        sum += weight;
        for (int32_t i = 0; i < d; i++) out[i] += weight * kv_value(c, v[i]);
    }
    for (int32_t i = 0; i < d; i++) out[i] /= sum;
    free(score);
}

static void outs_init(const struct world *w, float **out) {
    for (int32_t s = 0; s < w->c->seqs; s++)
        out[s] = zeros((int64_t)w->c->len[s] * w->c->n_heads * w->c->head_dim, sizeof **out);
}

static void outs_deinit(const struct world *w, float **out) {
    for (int32_t s = 0; s < w->c->seqs; s++) free(out[s]);
}

static void expect_reference(const struct world *w, float **out, int32_t step) {
    const struct attention_case *c = w->c;
    double *want = zeros(c->head_dim, sizeof *want);
    for (int32_t s = 0; s < c->seqs; s++) {
        for (int32_t t = 0; t < c->len[s]; t += t + step < c->len[s] || t == c->len[s] - 1 ? step : c->len[s] - 1 - t) {
            for (int32_t h = 0; h < c->n_heads; h++) {
                reference(w, s, t, h, want);
                for (int32_t i = 0; i < c->head_dim; i++)
                    expect_close("attention", t, out[s][((int64_t)t * c->n_heads + h) * c->head_dim + i], want[i],
                                 2e-5);
            }
        }
    }
    free(want);
}

static void expect_same(const struct world *w, float **a, float **b, const int32_t *first, const int32_t *end,
                        const char *what) {
    const int64_t width = (int64_t)w->c->n_heads * w->c->head_dim;
    for (int32_t s = 0; s < w->c->seqs; s++)
        for (int32_t t = first[s]; t < end[s]; t++)
            if (memcmp(a[s] + t * width, b[s] + t * width, (size_t)width * sizeof **a) != 0)
                fail_msg("%s: sequence %d, position %d differs", what, s, t);
}

/* All in one batch; each alone; in chunks of several sizes; the last tokens alone as decode does; pages elsewhere. */
static void case_run(const struct attention_case *c, struct backend *backend) {
    struct world w;
    float *all[SEQS_MAX], *some[SEQS_MAX];
    int32_t first[SEQS_MAX] = {0}, end[SEQS_MAX] = {0};
    world_init(&w, c, backend);
    outs_init(&w, all);
    outs_init(&w, some);
    world_run(&w, backend, 2, first, c->len, all);
    expect_reference(&w, all, 37);
    const int32_t chunks[] = {1, 7, 64, 100};
    for (size_t i = 0; i < COUNT(chunks); i++) {
        for (int32_t s = 0; s < c->seqs; s++) {
            int32_t from = chunks[i] == 1 && c->len[s] > 40 ? c->len[s] - 40 : 0;
            for (int32_t t = from; t < c->len[s]; t += chunks[i]) {
                memset(first, 0, sizeof first), memset(end, 0, sizeof end);
                first[s] = t;
                end[s] = t + chunks[i] < c->len[s] ? t + chunks[i] : c->len[s];
                world_run(&w, backend, i % 2 ? 64 : 1, first, end, some);
                expect_same(&w, all, some, first, end, "alone");
            }
        }
    }
    for (int32_t s = 0; s < c->seqs; s++) first[s] = c->len[s] - 1 - s % 3, end[s] = c->len[s];
    for (int32_t s = 0; s < c->seqs; s++) first[s] = first[s] < 0 ? 0 : first[s];
    world_place(&w, 99);
    world_run(&w, backend, 5, first, end, some);
    expect_same(&w, all, some, first, end, "mixed batch, other pages");
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
};

static void cases_all(struct backend *backend) {
    for (size_t i = 0; i < COUNT(cases); i++) case_run(&cases[i], backend);
}

static void test_cases(void **state) {
    for_each_isa(cases_all);
}

static void test_threads(void **state) {
    for (int isa = 0; isa < CPU_ISA_COUNT; isa++) {
        float *one[SEQS_MAX], *more[SEQS_MAX];
        struct world w;
        int32_t first[SEQS_MAX] = {0, 0, 60};
        struct backend *backend = backend_for((enum cpu_isa)isa, 1);
        if (!backend) continue;
        first[0] = cases[0].len[0] - 2;
        world_init(&w, &cases[0], backend);
        outs_init(&w, one);
        outs_init(&w, more);
        world_run(&w, backend, 1, first, cases[0].len, one);
        for (int32_t threads = 2; threads <= 3; threads++) {
            struct backend *other = backend_for((enum cpu_isa)isa, threads);
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

/* NaN of one sequence stays with it; in that sequence it shows. */
static void nan_all(struct backend *backend) {
    struct world w;
    float *clean[SEQS_MAX], *got[SEQS_MAX];
    const struct attention_case *c = &cases[0];
    int32_t first[SEQS_MAX] = {0}, end[SEQS_MAX] = {0};
    world_init(&w, c, backend);
    outs_init(&w, clean);
    outs_init(&w, got);
    world_run(&w, backend, 2, first, c->len, clean);
    for (int i = 0; i < c->head_dim; i++) w.k[2][30 * c->n_kv_heads * c->head_dim + i] = NAN;
    world_place(&w, 1);
    world_run(&w, backend, 2, first, c->len, got);
    memcpy(end, c->len, sizeof end);
    end[2] = 0;
    expect_same(&w, clean, got, first, end, "neighbours of NaN");
    const int64_t width = (int64_t)c->n_heads * c->head_dim;
    for (int32_t t = 30; t < c->len[2]; t++) assert_true(isnan(got[2][t * width]));
    outs_deinit(&w, clean);
    outs_deinit(&w, got);
    world_deinit(&w);
}

static void test_nan(void **state) {
    for_each_isa(nan_all);
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
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plan),
        cmocka_unit_test(test_cases),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_nan),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
