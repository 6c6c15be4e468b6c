/* bench_sample: how long a step's sampling takes, by kind and number of rows, and how near that is to reading the
 * logits once.
 *
 * usage: bench_sample [--device auto|cpu|cuda] [--kernels NAME] [--vocab N] [--gbs LIMIT] [--rows LIST]
 * On a device with graphs 20 samplings are one graph, timed over --ms milliseconds (default 30) and divided; elsewhere
 * they are called one by one. Logits are normal with deviation 3 ("flat": as random weights give; the nucleus of 0.9
 * holds tens of thousands) and the same with 40 ids lifted by about 14 ("peaked": as a trained model gives). Percent is
 * of --gbs (default 4180, what one H200 copies and reads). */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/clock.h"
#include "kernels/ops.h"

enum { ROWS_MAX = 256, REPEATS = 20 };

struct bench {
    struct backend *backend;
    struct sample_state *state;
    int32_t vocab;
    float *logits;
    void *workspace;
    size_t workspace_bytes;
    struct sample_result *results;
    double gbs;
    int64_t budget_ns;
};

static void check(int rc, const struct err *err) {
    if (!rc) return;
    fprintf(stderr, "bench_sample: %s\n", err->text);
    exit(1);
}

static void *memory(struct bench *b, enum memory_kind kind, size_t bytes) {
    void *p = NULL;
    struct err err = {0};
    check(backend_alloc(b->backend, kind, bytes, &p, &err), &err);
    return p;
}

static double unit(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    return (double)((z ^ (z >> 27)) >> 11) * 0x1p-53;
}

static void logits_fill(struct bench *b, bool peaked) {
    float *x = malloc((size_t)b->vocab * sizeof *x);
    struct err err = {0};
    uint64_t seed = 1;
    for (int32_t r = 0; r < ROWS_MAX; r++) {
        for (int32_t i = 0; i < b->vocab; i++)
            x[i] = (float)(3.0 * sqrt(-2.0 * log(unit(&seed) + 1e-18)) * cos(6.283185307 * unit(&seed)));
        for (int i = 0; peaked && i < 40; i++)
            x[(int64_t)(unit(&seed) * b->vocab)] += 14.0f + 3.0f * (float)unit(&seed);
        check(backend_upload(b->backend, b->logits + (int64_t)r * b->vocab, x, (size_t)b->vocab * sizeof *x, &err),
              &err);
    }
    free(x);
}

struct kind {
    const char *name;
    struct sample_params params;
    int32_t logprobs;
    bool track;
};

static const struct kind kinds[] = {
    {"greedy", {.temperature = 0.0f, .top_p = 1, .typical_p = 1, .repetition_penalty = 1}, -1, false},
    {"temperature", {.temperature = 1.0f, .top_p = 1, .typical_p = 1, .repetition_penalty = 1}, -1, false},
    {"top_k 50", {.temperature = 0.8f, .top_k = 50, .top_p = 1, .typical_p = 1, .repetition_penalty = 1}, -1, false},
    {"top_k 50 top_p .9", {0.8f, 50, 0.9f, 0.0f, 1.0f, 1.0f, 0.0f, 0.0f, 0}, -1, false},
    {"top_p .9", {0.6f, 0, 0.9f, 0.0f, 1.0f, 1.0f, 0.0f, 0.0f, 0}, -1, false},
    {"min_p .05", {1.0f, 0, 1.0f, 0.05f, 1.0f, 1.0f, 0.0f, 0.0f, 0}, -1, false},
    {"typical .9", {1.0f, 0, 1.0f, 0.0f, 0.9f, 1.0f, 0.0f, 0.0f, 0}, -1, false},
    {"greedy penalties", {0.0f, 0, 1.0f, 0.0f, 1.0f, 1.1f, 0.1f, 0.1f, 0}, -1, true},
    {"greedy logprobs 5", {0.0f, 0, 1.0f, 0.0f, 1.0f, 1.0f, 0.0f, 0.0f, 0}, 5, false},
    {"drawn logprobs 20", {1.0f, 0, 1.0f, 0.0f, 1.0f, 1.0f, 0.0f, 0.0f, 0}, 20, false},
};

static double step_us(struct bench *b, const struct kind *kind, int32_t rows) {
    struct err err = {0};
    struct sample_row row[ROWS_MAX];
    struct arena arena;
    struct graph *graph = NULL;
    struct sample_pack_args pack = {b->state, row, rows, rows, 0, b->results};
    struct op_sample_args args = {b->state, b->logits, b->vocab, b->vocab, NULL, b->workspace, b->workspace_bytes};
    for (int32_t r = 0; r < rows; r++) {
        row[r] = (struct sample_row){.params = kind->params, .slot = r, .position = r, .logprobs = kind->logprobs};
        struct op_sample_reset_args reset = {b->state, r, kind->track, NULL, NULL, 0, 0};
        check(op_sample_reset(b->backend, &reset, &err), &err);
    }
    arena_init(&arena);
    check(backend_step_begin(b->backend, &err), &err);
    check(sample_pack(b->backend, &pack, &arena, &args.batch, &err), &err);
    check(backend_step_commit(b->backend, &err), &err);
    bool graphs = backend_info(b->backend)->graphs;
    if (graphs) {
        check(backend_graph_begin(b->backend, &err), &err);
        for (int i = 0; i < REPEATS; i++) check(op_sample(b->backend, &args, &err), &err);
        check(backend_graph_end(b->backend, &graph, &err), &err);
    }
    double best = INFINITY;
    for (int64_t end_ns = clock_now_ns() + b->budget_ns, n = 0; n < 3 || clock_now_ns() < end_ns; n++) {
        int64_t begin_ns = clock_now_ns();
        if (graphs)
            check(backend_graph_launch(b->backend, graph, &err), &err);
        else
            check(op_sample(b->backend, &args, &err), &err);
        check(backend_sync(b->backend, &err), &err);
        best = fmin(best, (double)(clock_now_ns() - begin_ns) * 1e-3 / (graphs ? REPEATS : 1));
    }
    backend_graph_free(b->backend, graph);
    arena_deinit(&arena);
    return best;
}

static void table_print(struct bench *b, const char *shape, const int32_t *rows, int row_counts) {
    printf("%s logits, vocabulary %d: us a step (share of %.0f GB/s)\n%-20s", shape, b->vocab, b->gbs, "rows");
    for (int i = 0; i < row_counts; i++) printf("%18d", rows[i]);
    printf("\n");
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        printf("%-20s", kinds[k].name);
        for (int i = 0; i < row_counts; i++) {
            double us = step_us(b, &kinds[k], rows[i]), bytes = 4.0 * b->vocab * rows[i];
            printf("%10.2f (%4.1f%%)", us, 100.0 * bytes / us * 1e-3 / b->gbs);
            fflush(stdout);
        }
        printf("\n");
    }
}

static int rows_parse(const char *text, int32_t *rows) {
    int n = 0;
    for (char *end; n < 8 && *text; text = *end ? end + 1 : end) {
        long value = strtol(text, &end, 10);
        if (end == text || value < 1 || value > ROWS_MAX) return 0;
        rows[n++] = (int32_t)value;
    }
    return n;
}

int main(int argc, char **argv) {
    struct backend_options options = {.device = DEVICE_AUTO};
    struct bench b = {.vocab = 128256, .gbs = 4180.0, .budget_ns = 30000000};
    int32_t rows[8] = {1, 8, 64, 256};
    int row_counts = 4;
    struct err err = {0};
    for (int i = 1; i < argc; i += 2) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (!strcmp(argv[i], "--device"))
            options.device = !strcmp(value, "cpu") ? DEVICE_CPU : !strcmp(value, "cuda") ? DEVICE_CUDA : DEVICE_AUTO;
        else if (!strcmp(argv[i], "--kernels"))
            options.cuda_kernels = value;
        else if (!strcmp(argv[i], "--vocab") && atoi(value) > 0)
            b.vocab = atoi(value);
        else if (!strcmp(argv[i], "--gbs"))
            b.gbs = atof(value);
        else if (!strcmp(argv[i], "--ms") && atoi(value) > 0)
            b.budget_ns = (int64_t)atoi(value) * 1000000;
        else if (!strcmp(argv[i], "--rows") && rows_parse(value, rows) > 0)
            row_counts = rows_parse(value, rows);
        else
            return fprintf(stderr, "bench_sample: what is %s %s? (see the head of the file)\n", argv[i], value), 2;
    }
    check(backend_open(&options, &b.backend, &err), &err);
    check(backend_step_open(b.backend, 4 << 20, &err), &err);
    check(sample_state_open(b.backend, ROWS_MAX, b.vocab, &b.state, &err), &err);
    b.logits = memory(&b, MEMORY_WORKSPACE, (size_t)ROWS_MAX * (size_t)b.vocab * sizeof *b.logits);
    b.workspace_bytes = sample_workspace_bytes(b.backend, ROWS_MAX, b.vocab);
    b.workspace = memory(&b, MEMORY_WORKSPACE, b.workspace_bytes);
    b.results = memory(&b, MEMORY_PINNED, ROWS_MAX * sizeof *b.results);
    printf("%s, %s\n", backend_info(b.backend)->name, backend_info(b.backend)->isa);
    for (int peaked = 0; peaked < 2; peaked++) {
        logits_fill(&b, peaked);
        table_print(&b, peaked ? "peaked" : "flat", rows, row_counts);
    }
    backend_free(b.backend, MEMORY_PINNED, b.results, ROWS_MAX * sizeof *b.results);
    sample_state_close(b.backend, b.state);
    backend_free(b.backend, MEMORY_WORKSPACE, b.workspace, b.workspace_bytes);
    backend_free(b.backend, MEMORY_WORKSPACE, b.logits, (size_t)ROWS_MAX * (size_t)b.vocab * sizeof *b.logits);
    backend_close(b.backend);
    return 0;
}
