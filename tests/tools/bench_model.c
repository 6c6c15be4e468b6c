/* bench_model MODEL [--threads N] [--activations int8|f32] [--kv f16|f32] [--isa NAME] [--reps N] [--only NAME]
 *
 * The default shapes that peers report: prefill of 512 tokens, decode of 128 by one sequence, decode of 64 steps by 8
 * and by 32 sequences behind 128 tokens each. Medians over the repetitions, and each op's share of the time with what
 * it moved. */
#include <stdio.h>
#include <stdlib.h>

#include "engine/base/clock.h"
#include "tests/unit/model_run.h"

enum { PREFILL = 512, DECODE = 128, BATCH_PROMPT = 128, BATCH_STEPS = 64, SEQS_MAX = 32, REPS_MAX = 32 };

struct bench {
    struct run run;
    int32_t reps;
    bool profiling; /* in the timed part only */
    const char *only;
    int32_t ids[1024];
    double rate[REPS_MAX]; /* tokens a second of each repetition */
    double step_ms[REPS_MAX];
};

static void step(struct bench *b, const struct feed *feeds, int32_t count) {
    struct err err = {0};
    if (run_step(&b->run, feeds, count, &err)) return;
    fprintf(stderr, "bench_model: %s\n", err.text);
    exit(1);
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void prefill(struct bench *b, int32_t rep) {
    run_restart(&b->run);
    backend_profile(b->run.backend, b->profiling);
    int64_t begin = clock_now_ns();
    step(b, &(struct feed){0, 0, PREFILL, 1, b->ids}, 1);
    b->rate[rep] = PREFILL / ((double)(clock_now_ns() - begin) / 1e9);
}

static void decode(struct bench *b, int32_t seqs, int32_t prompt, int32_t steps, int32_t rep) {
    struct feed feeds[SEQS_MAX];
    run_restart(&b->run);
    for (int32_t s = 0; s < seqs && prompt > 0; s++) step(b, &(struct feed){s, 0, prompt, 0, b->ids + s}, 1);
    backend_profile(b->run.backend, b->profiling);
    int64_t begin = clock_now_ns();
    for (int32_t i = 0; i < steps; i++) {
        for (int32_t s = 0; s < seqs; s++) feeds[s] = (struct feed){s, prompt + i, 1, 1, b->ids + (s * 7 + i) % 512};
        step(b, feeds, seqs);
    }
    b->rate[rep] = seqs * steps / ((double)(clock_now_ns() - begin) / 1e9);
}

struct shape {
    const char *name;
    int32_t seqs, prompt, steps; /* seqs 0: prefill */
};

static const struct shape shapes[] = {
    {"pp512", 0, 0, 1},
    {"tg128", 1, 0, DECODE},
    {"tg64x8", 8, BATCH_PROMPT, BATCH_STEPS},
    {"tg64x32", 32, BATCH_PROMPT, BATCH_STEPS},
};

static void once(struct bench *b, const struct shape *shape, int32_t rep) {
    if (shape->seqs == 0)
        prefill(b, rep);
    else
        decode(b, shape->seqs, shape->prompt, shape->steps, rep);
}

/* One more repetition under the profiler. */
static void profile(struct bench *b, const struct shape *shape) {
    struct op_profile before, after;
    uint64_t total = 0;
    backend_profile_read(b->run.backend, &before);
    b->profiling = true;
    once(b, shape, 0);
    b->profiling = false;
    backend_profile(b->run.backend, false);
    double wall = 1e9 * (shape->seqs ? shape->seqs * shape->steps : PREFILL) / b->rate[0];
    backend_profile_read(b->run.backend, &after);
    for (int k = 0; k < OP_KIND_COUNT; k++) {
        uint64_t ns = after.ns[k] - before.ns[k], calls = after.calls[k] - before.calls[k];
        total += ns;
        if (calls == 0) continue;
        printf("    %-12s %5.1f %%  %8.1f us/step %8.1f GB/s %8.1f GFLOP/s\n", op_kind_name((enum op_kind)k),
               100 * (double)ns / wall, (double)ns / 1e3 / shape->steps,
               (double)(after.bytes[k] - before.bytes[k]) / (double)(ns ? ns : 1),
               (double)(after.flops[k] - before.flops[k]) / (double)(ns ? ns : 1));
    }
    printf("    %-12s %5.1f %%  %8.1f us/step\n", "host", 100 * (wall - (double)total) / wall,
           (wall - (double)total) / 1e3 / shape->steps);
}

static void bench(struct bench *b, const struct shape *shape) {
    if (b->only && strcmp(b->only, shape->name) != 0) return;
    once(b, shape, 0); /* warm: pages of the pool and the workspace are touched */
    for (int32_t rep = 0; rep < b->reps; rep++) once(b, shape, rep);
    qsort(b->rate, (size_t)b->reps, sizeof *b->rate, by_value);
    printf("%-8s %9.1f tok/s (from %.1f to %.1f)\n", shape->name, b->rate[b->reps / 2], b->rate[0],
           b->rate[b->reps - 1]);
    profile(b, shape);
    fflush(stdout);
}

static int usage(void) {
    fprintf(stderr, "usage: bench_model MODEL [--threads N] [--activations int8|f32] [--kv f16|f32] [--isa NAME] "
                    "[--reps N] [--only pp512|tg128|tg64x8|tg64x32]\n");
    return 2;
}

static bool option(struct bench *b, struct backend_options *backend, struct model_options *model, const char *name,
                   const char *value) {
    if (strcmp(name, "--threads") == 0)
        backend->threads = atoi(value);
    else if (strcmp(name, "--activations") == 0)
        backend->cpu_activations = strcmp(value, "f32") == 0 ? CPU_ACTIVATIONS_F32 : CPU_ACTIVATIONS_INT8;
    else if (strcmp(name, "--kv") == 0)
        model->limits.kv_dtype = strcmp(value, "f32") == 0 ? DTYPE_F32 : DTYPE_F16;
    else if (strcmp(name, "--isa") == 0)
        backend->cpu_isa = value;
    else if (strcmp(name, "--reps") == 0)
        b->reps = atoi(value) < 1 ? 1 : atoi(value) > REPS_MAX ? REPS_MAX : atoi(value);
    else if (strcmp(name, "--only") == 0)
        b->only = value;
    else
        return false;
    return true;
}

int main(int argc, char **argv) {
    static struct bench b = {.reps = 5};
    struct backend_options backend = {.device = DEVICE_CPU, .threads = 2};
    struct model_options model = {.limits = {SEQS_MAX, PREFILL, 1024, 64, DTYPE_F16}, .pages_total = 256};
    struct err err = {0};
    if (argc < 2 || argc % 2) return usage();
    for (int i = 2; i < argc; i += 2)
        if (!option(&b, &backend, &model, argv[i], argv[i + 1])) return usage();
    int64_t begin = clock_now_ns();
    if (run_open(&b.run, argv[1], &backend, &model, &err)) {
        fprintf(stderr, "bench_model: %s\n", err.text);
        return 1;
    }
    const struct backend_info *info = backend_info(b.run.backend);
    printf("%s, %s, %d threads, %s activations, %s cache; opened in %.0f ms, %.1f MB resident\n", info->name, info->isa,
           info->threads, backend.cpu_activations == CPU_ACTIVATIONS_F32 ? "f32" : "int8",
           dtype_info(model.limits.kv_dtype)->name, (double)(clock_now_ns() - begin) / 1e6,
           (double)mem_resident_bytes() / 1e6);
    int32_t vocab = model_files_spec(b.run.files)->vocab;
    for (int32_t i = 0; i < 1024; i++) b.ids[i] = (int32_t)((uint32_t)i * 2654435761u % (uint32_t)vocab);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) bench(&b, &shapes[i]);
    run_close(&b.run);
    return 0;
}
