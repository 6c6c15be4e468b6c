/* bench_model MODEL [--device cpu|cuda] [--load-format auto|dummy] [--threads N] [--activations int8|f32] [--kv
 * f16|f32]
 *             [--isa NAME] [--cuda-kernels NAME] [--batch-invariant 1] [--reps N] [--only NAME]
 *             [--decode B,B…] [--prefill L,L…] [--context T] [--steps N] [--profile 1] [--stack 0] [--graphs 0]
 *
 * The model alone, without scheduler and threads. Without --decode and --prefill the default shapes that peers report
 * for a CPU: prefill of 512 tokens, decode of 128 by one sequence, decode of 64 steps by 8 and by 32 sequences behind
 * 128 tokens each. With them: N decode steps of B sequences at a mean context of T tokens, each step launched before
 * the last one is waited for and fed by its tokens on the device; and prompts of L tokens. Medians over the
 * repetitions; and each op's share of the time, what it moved, and how near that is to the limit of an H200 (4.8 TB/s,
 * 989 TFLOP/s). */
#include <stdio.h>
#include <stdlib.h>

#include "engine/base/clock.h"
#include "tests/unit/model_run.h"

enum { PREFILL = 512, DECODE = 128, BATCH_PROMPT = 128, BATCH_STEPS = 64, REPS_MAX = 32, LIST_MAX = 16, IDS = 8192 };

#define LIMIT_BYTES_NS 4800.0   /* bytes a ns */
#define LIMIT_FLOPS_NS 989000.0 /* dense bf16 flops a ns */

struct list {
    int32_t items[LIST_MAX], count;
};

struct bench {
    struct run run;
    struct arena arenas[2];
    struct feed *feeds; /* [max_num_seqs] */
    int32_t reps, context, steps;
    bool profiling; /* in the timed part only */
    bool with_profile, graphs, stack;
    const char *only;
    struct list decode, prefill;
    int32_t ids[IDS];
    double rate[REPS_MAX];            /* tokens a second of each repetition */
    double host_us[REPS_MAX];         /* building and launching a step */
    struct model_stats before, after; /* around the last decode steps */
};

static void fatal(const struct err *err) {
    fprintf(stderr, "bench_model: %s\n", err->text);
    exit(1);
}

static void step(struct bench *b, const struct feed *feeds, int32_t count) {
    struct err err = {0};
    if (!run_step(&b->run, feeds, count, &err)) fatal(&err);
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void prefill(struct bench *b, int32_t tokens, int32_t rep) {
    struct err err = {0};
    const int32_t most = b->run.limits.max_num_batched_tokens;
    run_restart(&b->run);
    backend_profile(b->run.backend, b->profiling);
    int64_t begin = clock_now_ns();
    for (int32_t at = 0; at < tokens; at += most) {
        int32_t take = tokens - at < most ? tokens - at : most;
        arena_reset(&b->arenas[0]);
        const struct batch *batch = run_batch(
            &b->run, &b->arenas[0], &(struct feed){0, at, take, at + take == tokens, b->ids + at % (IDS / 2)}, 1);
        if (model_launch(b->run.model, batch, &b->arenas[0], &err) ||
            model_wait(b->run.model, batch, &b->run.results, &err))
            fatal(&err);
    }
    b->rate[rep] = tokens / ((double)(clock_now_ns() - begin) / 1e9);
}

/* ---- decode steps of a CPU: ids from the host, a step at a time
 * ------------------------------------------------------
 */

static void decode(struct bench *b, int32_t seqs, int32_t prompt, int32_t steps, int32_t rep) {
    run_restart(&b->run);
    for (int32_t s = 0; s < seqs && prompt > 0; s++) step(b, &(struct feed){s, 0, prompt, 0, b->ids + s}, 1);
    backend_profile(b->run.backend, b->profiling);
    int64_t begin = clock_now_ns();
    for (int32_t i = 0; i < steps; i++) {
        for (int32_t s = 0; s < seqs; s++) b->feeds[s] = (struct feed){s, prompt + i, 1, 1, b->ids + (s * 7 + i) % 512};
        step(b, b->feeds, seqs);
    }
    b->rate[rep] = seqs * steps / ((double)(clock_now_ns() - begin) / 1e9);
}

/* ---- decode steps of a GPU: one ahead
 * ---------------------------------------------------------------------------------
 */

static const struct batch *decode_launch(struct bench *b, int32_t seqs, int32_t at, int32_t i) {
    static const int32_t fed_on_device = -1;
    struct arena *arena = &b->arenas[i & 1];
    struct err err = {0};
    arena_reset(arena);
    for (int32_t s = 0; s < seqs; s++)
        b->feeds[s] = (struct feed){s, at + i, 1, 1, i == 0 ? b->ids + s : &fed_on_device};
    const struct batch *batch = run_batch(&b->run, arena, b->feeds, seqs);
    if (model_launch(b->run.model, batch, arena, &err)) fatal(&err);
    return batch;
}

static void decode_wait(struct bench *b, const struct batch *batch) {
    struct err err = {0};
    if (model_wait(b->run.model, batch, &b->run.results, &err)) fatal(&err);
}

/* The context's keys and values are whatever lies in its pages: the time is the same. */
static void contexts_take(struct bench *b, int32_t seqs, int32_t tokens) {
    struct err err = {0};
    for (int32_t s = 0; s < seqs; s++) {
        arena_reset(&b->arenas[0]);
        int32_t pages = tokens / b->run.limits.page_size + 1;
        struct page_delta *deltas = ARENA_ARRAY(&b->arenas[0], struct page_delta, pages);
        for (int32_t i = 0; i < pages; i++) {
            b->run.pages[(size_t)s * (size_t)b->run.max_pages + (size_t)i] = b->run.next_page;
            deltas[i] = (struct page_delta){s, i, b->run.next_page++};
        }
        const struct batch batch = {.step = ++b->run.step, .deltas = deltas, .delta_count = pages};
        if (model_launch(b->run.model, &batch, &b->arenas[0], &err) ||
            model_wait(b->run.model, &batch, &b->run.results, &err))
            fatal(&err);
    }
}

static void decode_ahead(struct bench *b, int32_t seqs, int32_t context, int32_t steps, int32_t rep) {
    const struct batch *last;
    int64_t host_ns = 0;
    run_restart(&b->run);
    contexts_take(b, seqs, context + steps);
    decode_wait(b, decode_launch(b, seqs, context - 1, 0)); /* records the step where it is new */
    backend_profile(b->run.backend, b->profiling);
    int64_t begin = clock_now_ns();
    model_stats(b->run.model, &b->before);
    last = decode_launch(b, seqs, context, 0);
    for (int32_t i = 1; i < steps; i++) {
        int64_t launch = clock_now_ns();
        const struct batch *next = decode_launch(b, seqs, context, i);
        host_ns += clock_now_ns() - launch;
        decode_wait(b, last);
        last = next;
    }
    decode_wait(b, last);
    model_stats(b->run.model, &b->after);
    b->rate[rep] = seqs * steps / ((double)(clock_now_ns() - begin) / 1e9);
    b->host_us[rep] = (double)host_ns / 1e3 / (steps > 1 ? steps - 1 : 1);
}

/* ---- shapes
 * -----------------------------------------------------------------------------------------------------------
 */

struct shape {
    char name[32];
    int32_t seqs, prompt, steps; /* seqs 0: prefill of `prompt` tokens */
    bool ahead;
};

static void once(struct bench *b, const struct shape *shape, int32_t rep) {
    if (shape->seqs == 0)
        prefill(b, shape->prompt, rep);
    else if (shape->ahead)
        decode_ahead(b, shape->seqs, shape->prompt, shape->steps, rep);
    else
        decode(b, shape->seqs, shape->prompt, shape->steps, rep);
}

static int64_t shape_tokens(const struct shape *shape) {
    return shape->seqs ? (int64_t)shape->seqs * shape->steps : shape->prompt;
}

/* One more repetition under the profiler, op by op. */
static void profile(struct bench *b, const struct shape *shape) {
    struct op_profile before, after;
    uint64_t total = 0;
    const bool cuda = backend_info(b->run.backend)->device == DEVICE_CUDA;
    double wall = 1e9 * (double)shape_tokens(shape) / b->rate[b->reps / 2];
    double rate = b->rate[0], host = b->host_us[0];
    struct shape few = *shape;
    if (cuda && few.steps > 16) {
        wall *= 16.0 / few.steps;
        few.steps = 16;
    }
    model_set_modes(b->run.model, false, b->stack);
    once(b, &few, 0); /* what runs op by op may not have run yet */
    backend_profile_read(b->run.backend, &before);
    b->profiling = true;
    once(b, &few, 0);
    b->profiling = false;
    backend_profile(b->run.backend, false);
    model_set_modes(b->run.model, b->graphs, b->stack);
    b->rate[0] = rate;
    b->host_us[0] = host;
    backend_profile_read(b->run.backend, &after);
    for (int k = 0; k < OP_KIND_COUNT; k++) {
        uint64_t ns = after.ns[k] - before.ns[k], calls = after.calls[k] - before.calls[k];
        double bytes = (double)(after.bytes[k] - before.bytes[k]), flops = (double)(after.flops[k] - before.flops[k]);
        double least =
            bytes / LIMIT_BYTES_NS > flops / LIMIT_FLOPS_NS ? bytes / LIMIT_BYTES_NS : flops / LIMIT_FLOPS_NS;
        total += ns;
        if (calls == 0) continue;
        printf("    %-12s %5.1f %%  %8.1f us/step %6.1f calls %8.1f GB/s %9.1f GFLOP/s", op_kind_name((enum op_kind)k),
               100 * (double)ns / wall, (double)ns / 1e3 / few.steps, (double)calls / few.steps,
               bytes / (double)(ns ? ns : 1), flops / (double)(ns ? ns : 1));
        printf(cuda ? "  %5.1f %% of the limit\n" : "\n", 100 * least / (double)(ns ? ns : 1));
    }
    printf("    %-12s %5.1f %%  %8.1f us/step\n", cuda ? "rest" : "host", 100 * (wall - (double)total) / wall,
           (wall - (double)total) / 1e3 / few.steps);
}

static void bench(struct bench *b, const struct shape *shape) {
    if (b->only && strcmp(b->only, shape->name) != 0) return;
    once(b, shape, 0); /* warm: pages of the pool and the workspace are touched */
    for (int32_t rep = 0; rep < b->reps; rep++) once(b, shape, rep);
    qsort(b->rate, (size_t)b->reps, sizeof *b->rate, by_value);
    double mid = b->rate[b->reps / 2];
    printf("%-8s %9.1f tok/s (from %.1f to %.1f), %8.3f ms a step", shape->name, mid, b->rate[0], b->rate[b->reps - 1],
           1e3 * (double)shape_tokens(shape) / mid / shape->steps);
    if (shape->ahead) {
        const struct model_stats *x = &b->before, *y = &b->after;
        const double us = 1e3 * shape->steps;
        printf(", host %.1f us (inputs %.1f, sending %.1f, ahead %.1f, graph %.1f)", b->host_us[0],
               (double)(y->inputs_ns - x->inputs_ns) / us, (double)(y->commit_ns - x->commit_ns) / us,
               (double)(y->ahead_ns - x->ahead_ns) / us, (double)(y->pass_ns - x->pass_ns) / us);
    }
    printf("\n");
    if (b->with_profile) profile(b, shape);
    fflush(stdout);
}

static void bench_all(struct bench *b) {
    static const struct shape peers[] = {{"pp512", 0, PREFILL, 1, false},
                                         {"tg128", 1, 0, DECODE, false},
                                         {"tg64x8", 8, BATCH_PROMPT, BATCH_STEPS, false},
                                         {"tg64x32", 32, BATCH_PROMPT, BATCH_STEPS, false}};
    for (int32_t i = 0; i < b->prefill.count; i++) {
        struct shape shape = {.prompt = b->prefill.items[i], .steps = 1};
        snprintf(shape.name, sizeof shape.name, "pp%d", shape.prompt);
        bench(b, &shape);
    }
    for (int32_t i = 0; i < b->decode.count; i++) {
        struct shape shape = {.seqs = b->decode.items[i], .steps = b->steps, .ahead = true};
        shape.prompt = b->context - b->steps / 2;
        snprintf(shape.name, sizeof shape.name, "b%d", shape.seqs);
        bench(b, &shape);
    }
    if (b->prefill.count + b->decode.count > 0) return;
    for (size_t i = 0; i < sizeof peers / sizeof *peers; i++) bench(b, &peers[i]);
}

/* ---- the command line
 * -------------------------------------------------------------------------------------------------
 */

static int usage(void) {
    fprintf(stderr, "usage: bench_model MODEL [--device cpu|cuda] [--load-format auto|dummy] [--threads N] "
                    "[--activations int8|f32] [--kv f16|f32] [--isa NAME] [--cuda-kernels NAME] [--batch-invariant 1] "
                    "[--reps N] [--only pp512|tg128|tg64x8|tg64x32] [--decode B,B] [--prefill L,L] [--context T] "
                    "[--steps N] [--profile 0|1] [--stack 0|1] [--graphs 0|1]\n");
    return 2;
}

static bool list_parse(struct list *list, const char *text) {
    while (list->count < LIST_MAX) {
        char *end;
        long value = strtol(text, &end, 10);
        if (end == text || value < 1 || value > 1 << 20) return false;
        list->items[list->count++] = (int32_t)value;
        if (!*end) return true;
        if (*end != ',') return false;
        text = end + 1;
    }
    return false;
}

static bool option(struct bench *b, struct backend_options *backend, struct model_options *model, const char *name,
                   const char *value) {
    if (strcmp(name, "--decode") == 0) return list_parse(&b->decode, value);
    if (strcmp(name, "--prefill") == 0) return list_parse(&b->prefill, value);
    if (strcmp(name, "--device") == 0)
        backend->device = strcmp(value, "cuda") == 0 ? DEVICE_CUDA : DEVICE_CPU;
    else if (strcmp(name, "--load-format") == 0)
        model->dummy_weights = strcmp(value, "dummy") == 0;
    else if (strcmp(name, "--threads") == 0)
        backend->threads = atoi(value);
    else if (strcmp(name, "--activations") == 0)
        backend->cpu_activations = strcmp(value, "f32") == 0 ? CPU_ACTIVATIONS_F32 : CPU_ACTIVATIONS_INT8;
    else if (strcmp(name, "--kv") == 0)
        model->limits.kv_dtype = strcmp(value, "f32") == 0 ? DTYPE_F32 : DTYPE_F16;
    else if (strcmp(name, "--isa") == 0)
        backend->cpu_isa = value;
    else if (strcmp(name, "--cuda-kernels") == 0)
        backend->cuda_kernels = value;
    else if (strcmp(name, "--batch-invariant") == 0)
        backend->batch_invariant = model->no_stack = atoi(value) != 0;
    else if (strcmp(name, "--reps") == 0)
        b->reps = atoi(value) < 1 ? 1 : atoi(value) > REPS_MAX ? REPS_MAX : atoi(value);
    else if (strcmp(name, "--context") == 0)
        b->context = atoi(value);
    else if (strcmp(name, "--steps") == 0)
        b->steps = atoi(value) < 1 ? 1 : atoi(value);
    else if (strcmp(name, "--profile") == 0)
        b->with_profile = atoi(value) != 0;
    else if (strcmp(name, "--stack") == 0)
        b->stack = atoi(value) != 0;
    else if (strcmp(name, "--graphs") == 0)
        b->graphs = atoi(value) != 0;
    else if (strcmp(name, "--only") == 0)
        b->only = value;
    else
        return false;
    return true;
}

static int32_t list_max(const struct list *list) {
    int32_t most = 0;
    for (int32_t i = 0; i < list->count; i++)
        if (list->items[i] > most) most = list->items[i];
    return most;
}

/* Limits that the asked shapes need. */
static void limits_fit(struct bench *b, enum device_kind device, struct model_options *model) {
    struct model_limits *l = &model->limits;
    int32_t seqs = list_max(&b->decode), tokens = list_max(&b->prefill);
    if (device == DEVICE_CUDA) l->kv_dtype = DTYPE_BF16;
    if (seqs + tokens == 0) return;
    int32_t length = b->context + b->steps + 2;
    if (length < tokens + 1) length = tokens + 1;
    l->max_num_seqs = seqs > 32 ? seqs : 32;
    l->max_num_batched_tokens = tokens > 8192 ? 8192 : tokens > l->max_num_seqs ? tokens : l->max_num_seqs;
    l->max_model_len = length;
    int64_t decode_pages = (int64_t)seqs * ((b->context + b->steps) / l->page_size + 2);
    int64_t prefill_pages = tokens / l->page_size + 2;
    model->pages_total = (int32_t)(decode_pages > prefill_pages ? decode_pages : prefill_pages) + 8;
}

int main(int argc, char **argv) {
    static struct bench b = {
        .reps = 5, .context = 1040, .steps = 256, .with_profile = true, .graphs = true, .stack = true};
    struct backend_options backend = {.device = DEVICE_CPU, .threads = 2};
    struct model_options model = {.limits = {32, PREFILL, 1024, 64, DTYPE_F16, 0}, .pages_total = 256};
    struct err err = {0};
    if (argc < 2 || argc % 2) return usage();
    for (int i = 2; i < argc; i += 2)
        if (!option(&b, &backend, &model, argv[i], argv[i + 1])) return usage();
    limits_fit(&b, backend.device, &model);
    int64_t begin = clock_now_ns();
    if (run_open(&b.run, argv[1], &backend, &model, &err)) fatal(&err);
    model_set_modes(b.run.model, b.graphs, b.stack);
    b.feeds = mem_zalloc((size_t)model.limits.max_num_seqs, sizeof *b.feeds);
    for (int i = 0; i < 2; i++) arena_init(&b.arenas[i]);
    const struct backend_info *info = backend_info(b.run.backend);
    printf("%s, %s, %d threads, %s cache; opened in %.0f ms, %.1f MB resident; the stack serves %d rows\n", info->name,
           info->isa, info->threads, dtype_info(model.limits.kv_dtype)->name, (double)(clock_now_ns() - begin) / 1e6,
           (double)mem_resident_bytes() / 1e6, model_stack_rows(b.run.model));
    int32_t vocab = model_files_spec(b.run.files)->vocab;
    for (int32_t i = 0; i < IDS; i++) b.ids[i] = (int32_t)((uint32_t)i * 2654435761u % (uint32_t)vocab);
    bench_all(&b);
    for (int i = 0; i < 2; i++) arena_deinit(&b.arenas[i]);
    mem_free(b.feeds);
    run_close(&b.run);
    return 0;
}
