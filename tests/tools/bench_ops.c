/* bench_ops: how long each op takes on this machine at the default model's shapes, and how near that is to a limit.
 *
 * usage: bench_ops [--isa portable|avx2|avx512] [--threads N] [--only TEXT] [--ms N] [--gbs LIMIT] [--gflops LIMIT]
 * A case is run again and again for --ms milliseconds (default 60); the median and the fastest are printed, with the
 * bytes and flops the op itself accounts for. Percent is of whichever limit is nearer: --gbs (default 28, what two
 * cores of the reference machine read) or --gflops (default 230, their f32 multiply-adds). Attention goes round 30
 * layers' caches, as a model does; the other cases are what a warm cache gives. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/clock.h"
#include "engine/base/mem.h"
#include "kernels/attention_plan.h"
#include "kernels/ops.h"

enum {
    HIDDEN = 576,
    FFN = 1536,
    HEADS = 9,
    KV_HEADS = 3,
    HEAD_DIM = 64,
    PAGE = 64,
    VOCAB = 49152,
    LAYERS = 30,
    RUNS_MAX = 4096
};

struct bench {
    struct backend *backend;
    const char *only;
    int64_t budget_ns;
    double gbs, gflops;
};

typedef int bench_fn(struct backend *backend, const void *args, struct err *err);

static int double_compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double profile_sum(const uint64_t *values) {
    double sum = 0.0;
    for (int i = 0; i < OP_KIND_COUNT; i++) sum += (double)values[i];
    return sum;
}

static void check(int rc, const struct err *err) {
    if (!rc) return;
    fprintf(stderr, "bench_ops: %s\n", err->text);
    exit(1);
}

static void bench_run(const struct bench *bench, const char *name, bench_fn *fn, const void *args) {
    static double us[RUNS_MAX];
    struct err err = {0};
    struct op_profile before, after;
    if (bench->only && !strstr(name, bench->only)) return;
    backend_profile_read(bench->backend, &before);
    backend_profile(bench->backend, true);
    check(fn(bench->backend, args, &err), &err); /* warms up, and tells bytes and flops */
    backend_profile(bench->backend, false);
    backend_profile_read(bench->backend, &after);
    double bytes = profile_sum(after.bytes) - profile_sum(before.bytes);
    double flops = profile_sum(after.flops) - profile_sum(before.flops);
    int runs = 0;
    for (int64_t end_ns = clock_now_ns() + bench->budget_ns; runs < RUNS_MAX; runs++) {
        int64_t begin_ns = clock_now_ns();
        if (begin_ns >= end_ns && runs >= 3) break;
        check(fn(bench->backend, args, &err), &err);
        us[runs] = (double)(clock_now_ns() - begin_ns) * 1e-3;
    }
    qsort(us, (size_t)runs, sizeof *us, double_compare);
    double median = us[runs / 2], gbs = bytes / median * 1e-3, gflops = flops / median * 1e-3;
    double percent = 100.0 * fmax(gbs / bench->gbs, gflops / bench->gflops);
    printf("%-34s %9.2f %9.2f %8.2f %9.1f %7.1f%%\n", name, median, us[0], gbs, gflops, percent);
    fflush(stdout);
}

static float *values_random(int64_t count, float size) {
    float *x = mem_alloc((size_t)count * sizeof *x);
    uint32_t state = 12345;
    for (int64_t i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        x[i] = ((float)(state >> 8) * 0x1p-24f - 0.5f) * 2.0f * size;
    }
    return x;
}

static const char *label(char *out, size_t bytes, const char *format, int64_t a, int64_t b) {
    snprintf(out, bytes, format, (long long)a, (long long)b);
    return out;
}

#define BENCH_OP(op)                                                                                                   \
    static int run_##op(struct backend *backend, const void *args, struct err *err) {                                  \
        return op(backend, args, err);                                                                                 \
    }
BENCH_OP(op_rms_norm)
BENCH_OP(op_linear)
BENCH_OP(op_gated_act)
BENCH_OP(op_rope)
BENCH_OP(op_kv_write)
BENCH_OP(op_sample)

static void bench_dense(const struct bench *bench) {
    char name[64];
    const int64_t rows[] = {1, 32, 512};
    float *x = values_random(512 * 2 * FFN, 1.0f), *y = values_random(512 * 2 * FFN, 1.0f),
          *w = values_random(HIDDEN, 1);
    float *table = mem_alloc(HEAD_DIM * sizeof *table); /* a true rotation, so that values keep their size */
    for (int i = 0; i < HEAD_DIM; i++) table[i] = i < HEAD_DIM / 2 ? cosf(0.3f) : sinf(0.3f);
    int32_t *positions = mem_zalloc(512, sizeof *positions);
    for (int i = 0; i < 3; i++) {
        struct op_rms_norm_args norm = {x, y, w, y + 512 * FFN, rows[i], HIDDEN, HIDDEN, HIDDEN, HIDDEN, 1e-5f, 0.0f};
        memset(y, 0, (size_t)(512 * HIDDEN) * sizeof *y); /* x stays what it is */
        bench_run(bench, label(name, sizeof name, "rms_norm+add %lldx%lld", rows[i], HIDDEN), run_op_rms_norm, &norm);
        struct op_gated_act_args act = {x, y, rows[i], FFN, ACTIVATION_SILU};
        bench_run(bench, label(name, sizeof name, "silu %lldx%lld", rows[i], FFN), run_op_gated_act, &act);
        act.activation = ACTIVATION_GELU_TANH;
        bench_run(bench, label(name, sizeof name, "gelu_tanh %lldx%lld", rows[i], FFN), run_op_gated_act, &act);
        const int64_t stride = (HEADS + 2 * KV_HEADS) * HEAD_DIM;
        struct op_rope_args rope = {
            x,      x + HEADS * HEAD_DIM, positions, table, rows[i], HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM, stride,
            stride, ROPE_NEIGHBOURS};
        bench_run(bench, label(name, sizeof name, "rope neighbours %lld", rows[i], 0), run_op_rope, &rope);
        rope.kind = ROPE_HALVES;
        bench_run(bench, label(name, sizeof name, "rope halves %lld", rows[i], 0), run_op_rope, &rope);
    }
    mem_free(x), mem_free(y), mem_free(w), mem_free(table), mem_free(positions);
}

/* A Q4_1 matrix of small values: d and m are the half 0x2000. */
static struct weight *weight_random(const struct bench *bench, int64_t rows, int64_t cols) {
    size_t bytes = (size_t)(rows * cols / 32 * 20);
    uint8_t *data = mem_alloc(bytes);
    struct weight *weight = NULL;
    struct err err = {0};
    for (size_t i = 0; i < bytes; i++) data[i] = (uint8_t)(i % 20 < 4 ? (i & 1) * 0x20 : i * 167 >> 3);
    struct weight_part part = {.data = data, .dtype = DTYPE_Q4_1, .rows = rows};
    check(weight_prepare(bench->backend, &part, 1, cols, 0, &weight, &err), &err);
    mem_free(data);
    return weight;
}

static void bench_linear(const struct bench *bench) {
    char name[64];
    const int64_t shapes[][2] = {{960, HIDDEN}, {HIDDEN, HIDDEN}, {2 * FFN, HIDDEN}, {HIDDEN, FFN}},
                  rows[] = {1, 32, 512};
    float *x = values_random(512 * FFN, 1.0f), *y = values_random(512 * 2 * FFN, 1.0f);
    for (int s = 0; s < 4; s++) {
        struct weight *weight = weight_random(bench, shapes[s][0], shapes[s][1]);
        for (int i = 0; i < 3; i++) {
            struct op_linear_args args = {x, weight, NULL, y, rows[i], shapes[s][1], shapes[s][0], false, false};
            label(name, sizeof name, "linear q4_1 %lldx%lld", shapes[s][0], shapes[s][1]);
            snprintf(name + strlen(name), sizeof name - strlen(name), " rows %lld", (long long)rows[i]);
            bench_run(bench, name, run_op_linear, &args);
        }
        weight_free(bench->backend, weight);
    }
    mem_free(x), mem_free(y);
}

struct layered {
    struct op_attention_args args;
    size_t layer_bytes;
};

/* One call, each time in the next layer. */
static int run_op_attention(struct backend *backend, const void *args, struct err *err) {
    static int64_t calls;
    const struct layered *layered = args;
    struct op_attention_args layer = layered->args;
    layer.kv.base = (char *)layer.kv.base + (size_t)(calls++ % LAYERS) * layered->layer_bytes;
    return op_attention(backend, &layer, err);
}

/* `seqs` sequences with `kv_len` keys each, the last `queries` of which are the step's. */
static void bench_attention(const struct bench *bench, int32_t seqs, int32_t queries, int32_t kv_len,
                            enum dtype dtype) {
    char name[64];
    struct err err = {0};
    const int64_t tokens = (int64_t)seqs * queries, stride = (HEADS + 2 * KV_HEADS) * HEAD_DIM;
    int32_t max_pages = (kv_len + PAGE - 1) / PAGE, *table = mem_zalloc((size_t)(seqs * max_pages), sizeof *table);
    int32_t *q_start = mem_zalloc((size_t)seqs + 1, sizeof *q_start), *lens = mem_zalloc((size_t)seqs, sizeof *lens);
    int32_t *slots = mem_zalloc((size_t)seqs, sizeof *slots),
            *positions = mem_zalloc((size_t)tokens, sizeof *positions);
    for (int32_t s = 0; s < seqs; s++) {
        q_start[s + 1] = q_start[s] + queries;
        lens[s] = kv_len;
        slots[s] = s;
        for (int32_t p = 0; p < max_pages; p++)
            table[s * max_pages + p] = p * seqs + s; /* as batches grow: scattered */
        for (int32_t t = 0; t < queries; t++) positions[s * queries + t] = kv_len - queries + t;
    }
    struct kv_layer kv = {.dtype = dtype, .page_size = PAGE, .n_kv_heads = KV_HEADS, .head_dim = HEAD_DIM};
    kv.page_stride_bytes = 2 * KV_HEADS * PAGE * HEAD_DIM * (size_t)dtype_info(dtype)->block_bytes;
    size_t pool = (size_t)(seqs * max_pages) * kv.page_stride_bytes;
    size_t space = attention_workspace_bytes(bench->backend, (int32_t)tokens, seqs, kv_len, HEADS, HEAD_DIM);
    void *workspace = NULL;
    check(backend_alloc(bench->backend, MEMORY_KV, LAYERS * pool, &kv.base, &err), &err);
    check(backend_alloc(bench->backend, MEMORY_WORKSPACE, space, &workspace, &err), &err);
    if (dtype == DTYPE_F16)
        for (size_t i = 0; i < LAYERS * pool / 2; i++)
            ((uint16_t *)kv.base)[i] = (uint16_t)(0x2c00 + i * 40503u % 0x800);
    else
        for (size_t i = 0; i < LAYERS * pool / 4; i++) ((float *)kv.base)[i] = (float)(i % 97) * 0.01f;
    float *qkv = values_random(tokens * stride, 1.0f), *out = values_random(tokens * HEADS * HEAD_DIM, 1.0f);
    struct attention_shape shape = {q_start, lens, slots, seqs, (int32_t)tokens};
    struct attention_plan_options options = {
        shape, HEADS, KV_HEADS, HEAD_DIM, PAGE, 0, backend_info(bench->backend)->threads};
    struct arena arena;
    arena_init(&arena);
    int64_t begin_ns = clock_now_ns();
    struct layered layered = {.layer_bytes = pool};
    layered.args = (struct op_attention_args){.q = qkv,
                                              .out = out,
                                              .q_stride = stride,
                                              .out_stride = HEADS * HEAD_DIM,
                                              .n_heads = HEADS,
                                              .shape = shape,
                                              .kv = kv,
                                              .table = {table, max_pages},
                                              .plan = attention_plan_make(bench->backend, &options, &arena),
                                              .workspace = workspace,
                                              .workspace_bytes = space,
                                              .scale = 0.125f};
    double plan_us = (double)(clock_now_ns() - begin_ns) * 1e-3;
    struct op_kv_write_args write = {.k = qkv + HEADS * HEAD_DIM,
                                     .v = qkv + (HEADS + KV_HEADS) * HEAD_DIM,
                                     .kv_stride = stride,
                                     .positions = positions,
                                     .shape = shape,
                                     .kv = kv,
                                     .table = layered.args.table};
    snprintf(name, sizeof name, "kv_write %s %dx%d", dtype_info(dtype)->name, seqs, queries);
    bench_run(bench, name, run_op_kv_write, &write);
    snprintf(name, sizeof name, "attention %s %dx%d of %d", dtype_info(dtype)->name, seqs, queries, kv_len);
    bench_run(bench, name, run_op_attention, &layered);
    if (!bench->only || strstr(name, bench->only))
        printf("  plan: %.1f us cold, %d items, %d pairs\n", plan_us,
               layered.args.plan->item_count * layered.args.plan->head_tiles, layered.args.plan->pair_count);
    backend_free(bench->backend, MEMORY_KV, kv.base, LAYERS * pool);
    backend_free(bench->backend, MEMORY_WORKSPACE, workspace, space);
    arena_deinit(&arena);
    mem_free(table), mem_free(q_start), mem_free(lens), mem_free(slots), mem_free(positions);
    mem_free(qkv), mem_free(out);
}

/* Logits like a language model's: most near zero, a few far above. */
static float *logits_random(int64_t rows) {
    float *logits = values_random(rows * VOCAB, 1.0f);
    for (int64_t i = 0; i < rows * VOCAB; i++) {
        float u = fabsf(logits[i]);
        logits[i] = logits[i] * 4.0f + (u > 0.99f ? (u - 0.99f) * 600.0f : 0.0f);
    }
    return logits;
}

static void bench_sample(const struct bench *bench, int32_t rows) {
    static const struct {
        const char *name;
        struct sample_params params;
        int32_t logprobs;
    } cases[] = {
        {"greedy", {0.0f, 0, 1.0f, 0.0f, 1.0f, 1.0f, 0.0f, 0.0f, 1}, -1},
        {"greedy, 5 logprobs", {0.0f, 0, 1.0f, 0.0f, 1.0f, 1.0f, 0.0f, 0.0f, 1}, 5},
        {"greedy, penalties", {0.0f, 0, 1.0f, 0.0f, 1.0f, 1.1f, 0.1f, 0.1f, 1}, -1},
        {"temperature", {0.8f, 0, 1.0f, 0.0f, 1.0f, 1.0f, 0.0f, 0.0f, 1}, -1},
        {"top_k 40", {0.8f, 40, 1.0f, 0.0f, 1.0f, 1.0f, 0.0f, 0.0f, 1}, -1},
        {"top_p 0.95", {0.8f, 0, 0.95f, 0.0f, 1.0f, 1.0f, 0.0f, 0.0f, 1}, -1},
        {"top_k 40, top_p 0.95", {0.8f, 40, 0.95f, 0.0f, 1.0f, 1.0f, 0.0f, 0.0f, 1}, -1},
        {"min_p 0.05", {0.8f, 0, 1.0f, 0.05f, 1.0f, 1.0f, 0.0f, 0.0f, 1}, -1},
        {"flat top_p 0.95", {100.0f, 0, 0.95f, 0.0f, 1.0f, 1.0f, 0.0f, 0.0f, 1}, -1},
        {"all of it", {0.8f, 40, 0.95f, 0.05f, 0.9f, 1.1f, 0.1f, 0.1f, 1}, 5},
    };
    struct err err = {0};
    struct sample_state *state = NULL;
    float *logits = logits_random(rows);
    struct sample_row *row = mem_zalloc((size_t)rows, sizeof *row);
    struct sample_result *results = mem_zalloc((size_t)rows, sizeof *results);
    size_t space = sample_workspace_bytes(bench->backend, rows, VOCAB);
    void *workspace = NULL;
    check(backend_alloc(bench->backend, MEMORY_WORKSPACE, space, &workspace, &err), &err);
    check(sample_state_open(bench->backend, rows, VOCAB, &state, &err), &err);
    int32_t prompt[1000];
    for (int32_t i = 0; i < 1000; i++) prompt[i] = (i * 7919) % VOCAB;
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        char name[64];
        bool track = cases[c].params.repetition_penalty != 1.0f;
        for (int32_t r = 0; r < rows; r++) {
            row[r] =
                (struct sample_row){.params = cases[c].params, .slot = r, .position = r, .logprobs = cases[c].logprobs};
            struct op_sample_reset_args reset = {state, r, track, prompt, NULL, 1000, 0};
            check(op_sample_reset(bench->backend, &reset, &err), &err);
        }
        struct sample_pack_args pack = {
            .state = state, .row = row, .rows = rows, .rows_padded = rows, .results = results};
        struct op_sample_args args = {state, logits, VOCAB, VOCAB, NULL, workspace, space};
        struct arena arena;
        arena_init(&arena);
        check(sample_pack(bench->backend, &pack, &arena, &args.batch, &err), &err);
        snprintf(name, sizeof name, "sample %dx: %s", rows, cases[c].name);
        bench_run(bench, name, run_op_sample, &args);
        arena_deinit(&arena);
    }
    sample_state_close(bench->backend, state);
    backend_free(bench->backend, MEMORY_WORKSPACE, workspace, space);
    mem_free(logits), mem_free(row), mem_free(results);
}

/* What the contract checks and the dispatch cost: an op over nothing. */
static int run_nothing(struct backend *backend, const void *args, struct err *err) {
    int rc = 0;
    for (int i = 0; i < 1000 && !rc; i++) rc = op_rms_norm(backend, args, err);
    return rc;
}

static void bench_checks(const struct bench *bench) {
    float x[8] = {0}, delta[8] = {0}, weight[8] = {0}, out[8];
    struct op_rms_norm_args args = {x, delta, weight, out, 0, 8, 8, 8, 8, 1e-5f, 0.0f};
    bench_run(bench, "1000 contract checks", run_nothing, &args);
}

int main(int argc, char **argv) {
    struct bench bench = {.budget_ns = 60 * NS_PER_MS, .gbs = 28.0, .gflops = 230.0};
    struct backend_options options = {.device = DEVICE_CPU};
    struct err err = {0};
    for (int i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--isa"))
            options.cpu_isa = argv[i + 1];
        else if (!strcmp(argv[i], "--threads"))
            options.threads = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--only"))
            bench.only = argv[i + 1];
        else if (!strcmp(argv[i], "--ms"))
            bench.budget_ns = atoi(argv[i + 1]) * NS_PER_MS;
        else if (!strcmp(argv[i], "--gbs"))
            bench.gbs = atof(argv[i + 1]);
        else if (!strcmp(argv[i], "--gflops"))
            bench.gflops = atof(argv[i + 1]);
        else
            return fprintf(stderr, "bench_ops: unknown option %s\n", argv[i]), 2;
    }
    if (argc % 2 == 0) return fprintf(stderr, "bench_ops: %s needs a value\n", argv[argc - 1]), 2;
    check(backend_open(&options, &bench.backend, &err), &err);
    const struct backend_info *info = backend_info(bench.backend);
    printf("%s, %s, %d threads; limits %.0f GB/s, %.0f GFLOP/s\n", info->name, info->isa, info->threads, bench.gbs,
           bench.gflops);
    printf("%-34s %9s %9s %8s %9s %8s\n", "op", "us", "fastest", "GB/s", "GFLOP/s", "of limit");
    bench_checks(&bench);
    bench_dense(&bench);
    bench_linear(&bench);
    static const int32_t steps[][3] = {{1, 1, 128},  {1, 1, 1000},  {1, 1, 8000},    {32, 1, 200},
                                       {8, 1, 1000}, {1, 512, 512}, {1, 1000, 1000}, {1, 128, 1000}};
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++)
        bench_attention(&bench, steps[i][0], steps[i][1], steps[i][2], DTYPE_F16);
    bench_attention(&bench, 1, 1, 1000, DTYPE_F32);
    bench_attention(&bench, 1, 512, 512, DTYPE_F32);
    bench_sample(&bench, 1);
    bench_sample(&bench, 32);
    backend_close(bench.backend);
    return 0;
}
