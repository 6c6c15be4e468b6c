/* sim: drives scheduler and page cache through seeded runs (tests/sim/sim.h) and times the scheduler alone.
 *
 *   sim                      quick: some 100,000 steps over many seeds
 *   sim --full               more than 10,000,000 steps over 2,200 seeds
 *   sim --seed N             one seed, e.g. the one that failed
 *   sim --first N --seeds N --steps N    any other selection
 *   sim --bench              host time of a decode step
 *
 * Exit code 0: nothing found; 1: a broken invariant, with the line that replays it; 2: usage. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/clock.h"
#include "tests/sim/sim.c"

struct selection {
    uint64_t first, seeds, steps;
    bool verbose, bench;
};

static void coverage_print(const struct sim_coverage *c, double seconds) {
    printf("sim: %llu steps, %llu seeds, %llu requests, %llu tokens in %.1f s (%.0f steps/s)\n",
           (unsigned long long)c->steps, (unsigned long long)c->seeds, (unsigned long long)c->requests,
           (unsigned long long)c->tokens, seconds, (double)c->steps / (seconds > 0 ? seconds : 1));
    printf("sim: hit_tokens=%llu preemptions=%llu stalls=%llu copies=%llu takeovers=%llu evictions=%llu forgets=%llu\n",
           (unsigned long long)c->hit_tokens, (unsigned long long)c->preemptions, (unsigned long long)c->stalls,
           (unsigned long long)c->copies, (unsigned long long)c->takeovers, (unsigned long long)c->evictions,
           (unsigned long long)c->forgets);
    printf("sim: stops=%llu lengths=%llu cancels=%llu deadlines=%llu faults=%llu shutdowns=%llu ended_by_engine=%llu "
           "refused_size=%llu refused_queue=%llu keys_told=%llu\n",
           (unsigned long long)c->stops, (unsigned long long)c->lengths, (unsigned long long)c->cancels,
           (unsigned long long)c->deadlines, (unsigned long long)c->faults, (unsigned long long)c->shutdowns,
           (unsigned long long)c->ended_by_engine, (unsigned long long)c->refused_size,
           (unsigned long long)c->refused_queue, (unsigned long long)c->keys_told);
}

static void plan_print(uint64_t seed) {
    struct sim sim = {.seed = seed};
    random_seed(&sim.random, seed);
    plan_draw(&sim);
    const struct sim_plan *p = &sim.plan;
    const struct sched_options *o = &p->options;
    printf("seed %llu: seqs=%d budget=%d mixed=%d queue=%d model_len=%d page=%d pages=%d threshold=%d lookahead=%d "
           "caching=%d "
           "arrivals=%d prompt<=%d output<=%d samples<=%d late=%d forgetful=%d\n",
           (unsigned long long)seed, o->max_num_seqs, o->max_num_batched_tokens, o->max_num_mixed_tokens,
           o->max_queued_requests, o->max_model_len, o->page_size, o->pages_total, o->long_prefill_threshold,
           o->lookahead, o->prefix_caching, p->arrivals, p->prompt_max, p->output_max, p->samples_max,
           p->late_execution, p->forgetful);
}

static int run_all(const struct selection *s) {
    struct sim_coverage coverage = {0};
    char text[1024];
    int64_t start = clock_now_ns();
    for (uint64_t seed = s->first; seed < s->first + s->seeds; seed++) {
        if (s->verbose) plan_print(seed);
        if (sim_run(seed, s->steps, &coverage, text, sizeof text)) continue;
        coverage_print(&coverage, (double)(clock_now_ns() - start) / 1e9);
        fprintf(stderr, "%s\n", text);
        return 1;
    }
    coverage_print(&coverage, (double)(clock_now_ns() - start) / 1e9);
    return 0;
}

/* ---- bench ------------------------------------------------------------------------------------------------------- */

#define BENCH_STEPS 2000

static int time_order(const void *a, const void *b) {
    const int64_t *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}

static struct request *bench_request(uint64_t id) {
    int32_t prompt[128];
    struct request_parts parts = {
        .head = {.id = id,
                 .n = 1,
                 .max_tokens = BENCH_STEPS + 500,
                 .logprobs = -1,
                 .sampling = {.temperature = 1, .top_p = 1, .typical_p = 1, .repetition_penalty = 1}},
        .prompt = prompt,
        .prompt_count = 128,
        .eos_ids = (const int32_t[]){2},
        .eos_count = 1};
    struct request *r = NULL;
    struct err err;
    for (int32_t i = 0; i < 128; i++) prompt[i] = (int32_t)(id * 131 + (uint64_t)i) % 30000;
    return request_build(&parts, &r, &err) == 0 ? r : NULL;
}

/* One step as the engine takes it, less the model: plan and build, complete, read the outputs. */
static int64_t bench_step(struct sched *sched, struct arena *arena, struct sample_result *results, uint64_t turn) {
    const struct sched_output *out;
    int64_t start = clock_now_ns();
    arena_reset(arena);
    const struct batch *b = sched_next_batch(sched, arena, start);
    int64_t built = clock_now_ns();
    if (!b) return 0;
    for (int32_t r = 0; r < b->rows; r++) results[r].id = (int32_t)((turn * 7 + (uint64_t)r) % 30000) + 3;
    int64_t ready = clock_now_ns();
    sched_complete(sched, b, results, ready);
    int32_t count = sched_outputs(sched, &out);
    int64_t spent = (clock_now_ns() - ready) + (built - start);
    return count == b->rows ? spent : 0;
}

static int bench_one(int32_t seqs) {
    struct sched_options o = {.max_num_seqs = seqs,
                              .max_num_batched_tokens = 512 > seqs ? 512 : seqs,
                              .max_queued_requests = seqs,
                              .max_model_len = 8192,
                              .page_size = 64,
                              .pages_total = seqs * 48 + 1,
                              .vocab = 50000,
                              .prefix_caching = true,
                              .hash_key = {1, 2}};
    struct sched *sched = NULL;
    struct err err = {0};
    struct arena arena;
    static int64_t times[BENCH_STEPS];
    struct sample_result *results = mem_zalloc((size_t)seqs, sizeof *results);
    if (sched_open(&o, &sched, &err) != 0) return 1;
    arena_init(&arena);
    for (int32_t i = 0; i < seqs; i++)
        if (sched_submit(sched, bench_request((uint64_t)i + 1), NULL, 0, &err) != 0) return 1;
    for (uint64_t i = 0; i < 200; i++) bench_step(sched, &arena, results, i);
    for (uint64_t i = 0; i < BENCH_STEPS; i++) times[i] = bench_step(sched, &arena, results, i);
    qsort(times, BENCH_STEPS, sizeof times[0], time_order);
    printf("%5d sequences: median %6.2f us a decode step, p99 %6.2f us, worst %6.2f us\n", seqs,
           (double)times[BENCH_STEPS / 2] / 1e3, (double)times[BENCH_STEPS * 99 / 100] / 1e3,
           (double)times[BENCH_STEPS - 1] / 1e3);
    arena_deinit(&arena);
    sched_close(sched);
    mem_free(results);
    return 0;
}

static int bench(void) {
    static const int32_t seqs[] = {1, 8, 32, 64, 128, 256};
    for (size_t i = 0; i < sizeof seqs / sizeof seqs[0]; i++)
        if (bench_one(seqs[i]) != 0) return 1;
    return 0;
}

/* ---- command line ------------------------------------------------------------------------------------------------ */

static bool number_read(const char *text, uint64_t *out) {
    char *end = NULL;
    *out = strtoull(text ? text : "", &end, 10);
    return text && *text && *end == '\0';
}

static bool arguments_read(int argc, char **argv, struct selection *s) {
    for (int i = 1; i < argc; i++) {
        uint64_t *number = NULL;
        if (strcmp(argv[i], "--full") == 0)
            *s = (struct selection){.first = 1, .seeds = 2200, .steps = 5000};
        else if (strcmp(argv[i], "--verbose") == 0)
            s->verbose = true;
        else if (strcmp(argv[i], "--bench") == 0)
            s->bench = true;
        else if (strcmp(argv[i], "--seed") == 0)
            s->seeds = 1, number = &s->first;
        else if (strcmp(argv[i], "--first") == 0)
            number = &s->first;
        else if (strcmp(argv[i], "--seeds") == 0)
            number = &s->seeds;
        else if (strcmp(argv[i], "--steps") == 0)
            number = &s->steps;
        else
            return false;
        if (number && !number_read(argv[++i], number)) return false;
    }
    return true;
}

int main(int argc, char **argv) {
    struct selection selection = {.first = 1, .seeds = 400, .steps = 300};
    if (!arguments_read(argc, argv, &selection)) {
        fprintf(stderr, "usage: sim [--full | --seed N | --first N --seeds N --steps N | --bench] [--verbose]\n");
        return 2;
    }
    return selection.bench ? bench() : run_all(&selection);
}
