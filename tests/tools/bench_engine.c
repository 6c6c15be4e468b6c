/* bench_engine MODEL [--device cpu|cuda] [--load-format auto|dummy] [--decode B,B…] [--prefill L,L…] [--batch-prefill
 * N,N…]
 *                    [--offline N,N…] [--context T] [--steps N] [--input T] [--output T] [--reps N] [--max-model-len T]
 *                    [--tensor-parallel-size N] [--comm auto|p2p|nccl] [--max-num-seqs N] [--enforce-eager 1]
 * [--batch-invariant 1] [--cuda-kernels NAME] [--name NAME]
 *                    [--json FILE]
 *
 * Whole-engine figures through engine.h, without HTTP: scheduler, step loop, model, sampling, detokenizer.
 *   decode         mean of `steps` pure decode steps of B sequences at a mean context of T tokens, from the stamps of
 *                  their tokens; the engine thread's work a step beside it
 *   prefill        a prompt of L tokens, from submit to its first token
 *   batch-prefill  N prompts of 896 tokens at once, prompt tokens a second until the last one's first token
 *   offline        N requests of input/output tokens at once, output tokens a second
 * Medians over the repetitions (offline: one run). Random prompt ids, greedy, no end ids, no prefix cache. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/base/mem.h"
#include "engine/engine.h"
#include "engine/model/file_map.h"
#include "engine/text/text.h"

enum { REQUESTS_MAX = 8192, REPS_MAX = 16, LIST_MAX = 16, WARM_TOKENS = 8, BATCH_PROMPT = 896 };

struct list {
    int32_t items[LIST_MAX], count;
};

struct client {
    int32_t tokens, finish;
    int64_t first_ns, last_ns;
};

/* What the callback fills; the mutex guards it. */
struct bench {
    struct engine *engine;
    struct text *text;
    pthread_mutex_t mutex;
    pthread_cond_t moved;
    struct client clients[REQUESTS_MAX]; /* of this run, by request id - first_id */
    uint64_t first_id, next_id, random;
    int32_t started, finished, newest; /* newest: who started last */
    /* What is waited for: so many ended; or so many started, and so many tokens of the newest. The engine's thread
     * wakes the waiting one for nothing else. */
    int32_t want_finished, want_started, want_tokens;
    struct list decode, prefill, batch_prefill, offline;
    int32_t context, steps, input, output, reps;
    const char *name;
    int32_t ranks;
    FILE *json;
    bool json_any;
};

/* ---- events ---------------------------------------------------------------------------------------------------------
 */

static void on_event(struct bench *b, const struct event *e) {
    if (e->request_id < b->first_id || e->request_id - b->first_id >= REQUESTS_MAX) return;
    struct client *c = &b->clients[e->request_id - b->first_id];
    if (e->ids.count > 0 && c->tokens == 0) {
        c->first_ns = e->first_token_ns;
        b->newest = (int32_t)(e->request_id - b->first_id);
        b->started++;
    }
    c->tokens += (int32_t)e->ids.count;
    c->last_ns = e->last_token_ns;
    if (e->finish == FINISH_NONE) return;
    c->finish = e->finish;
    b->finished++;
}

static bool reached(const struct bench *b) {
    if (b->finished >= b->want_finished) return true;
    return b->started >= b->want_started && b->newest >= 0 && b->clients[b->newest].tokens >= b->want_tokens;
}

/* With the mutex held. */
static void wait_for(struct bench *b, int32_t finished, int32_t started, int32_t tokens) {
    b->want_finished = finished;
    b->want_started = started;
    b->want_tokens = tokens;
    while (!reached(b)) pthread_cond_wait(&b->moved, &b->mutex);
}

static void on_events(void *user, const void *records, size_t bytes) {
    struct bench *b = user;
    const char *at = records, *end = at + bytes;
    pthread_mutex_lock(&b->mutex);
    for (; at < end; at += ((const struct event *)(const void *)at)->bytes)
        on_event(b, (const struct event *)(const void *)at);
    if (reached(b)) pthread_cond_signal(&b->moved);
    pthread_mutex_unlock(&b->mutex);
}

static void fatal(const char *what, const struct err *err) {
    fprintf(stderr, "bench_engine: %s: %s\n", what, err->text);
    exit(1);
}

static uint32_t random_next(struct bench *b) {
    uint64_t z = b->random += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (uint32_t)((z ^ z >> 31) >> 32);
}

static void run_begin(struct bench *b) {
    pthread_mutex_lock(&b->mutex);
    memset(b->clients, 0, sizeof b->clients);
    b->first_id = b->next_id;
    b->started = b->finished = 0;
    b->newest = -1;
    pthread_mutex_unlock(&b->mutex);
}

static void submit(struct bench *b, int32_t prompt_tokens, int32_t max_tokens) {
    struct err err = {0};
    struct request *request;
    int32_t *prompt = mem_alloc((size_t)prompt_tokens * sizeof *prompt);
    uint32_t vocab = (uint32_t)engine_info(b->engine)->vocab;
    for (int32_t i = 0; i < prompt_tokens; i++) prompt[i] = (int32_t)(random_next(b) % vocab);
    struct request_parts parts = {
        .head = {.id = b->next_id++,
                 .flags = REQUEST_IGNORE_EOS | REQUEST_NO_PREFIX_CACHE,
                 .n = 1,
                 .max_tokens = max_tokens,
                 .logprobs = -1,
                 .sampling = {.temperature = 0, .top_p = 1, .typical_p = 1, .repetition_penalty = 1}},
        .prompt = prompt,
        .prompt_count = prompt_tokens};
    if (request_build(&parts, &request, &err) || engine_submit(b->engine, request, &err)) fatal("submit", &err);
    mem_free(request);
    mem_free(prompt);
}

static void wait_finished(struct bench *b, int32_t count) {
    pthread_mutex_lock(&b->mutex);
    wait_for(b, count, REQUESTS_MAX + 1, 0);
    pthread_mutex_unlock(&b->mutex);
    for (int32_t i = 0; i < count; i++)
        if (b->clients[i].finish == FINISH_ERROR) fatal("a request", &(struct err){.text = "ended with an error"});
}

/* ---- figures --------------------------------------------------------------------------------------------------------
 */

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *values, int32_t count) {
    qsort(values, (size_t)count, sizeof *values, by_value);
    return values[count / 2];
}

static void figure(struct bench *b, double value, const char *kind, const char *shape) {
    if (!b->json) return;
    fprintf(b->json, "%s\n \"quire/%s/bf16/tp%d/%s/%s\": %.4f", b->json_any ? "," : "{", b->name, b->ranks, kind, shape,
            value);
    b->json_any = true;
    fflush(b->json);
}

/* The engine thread's work a step, in microseconds. */
struct host {
    double build, launch, finish;
};

/* Mean of pure decode steps: from a few tokens after the last sequence began until it has `steps` more. */
static double decode_once(struct bench *b, int32_t seqs, struct host *host) {
    int32_t prompt = b->context - b->steps / 2 - WARM_TOKENS - seqs / 4;
    struct engine_stats from = {0}, to;
    int64_t from_ns = 0, to_ns;
    if (prompt < 1) prompt = 1;
    run_begin(b);
    for (int32_t i = 0; i < seqs; i++) submit(b, prompt, b->steps + seqs + 64);
    pthread_mutex_lock(&b->mutex);
    wait_for(b, 1, seqs, WARM_TOKENS);
    const struct client *c = &b->clients[b->newest];
    int32_t begin = c->tokens;
    from_ns = c->last_ns;
    engine_stats(b->engine, &from);
    wait_for(b, 1, seqs, begin + b->steps);
    to_ns = c->last_ns;
    int32_t steps = c->tokens - begin;
    pthread_mutex_unlock(&b->mutex);
    engine_stats(b->engine, &to);
    for (int32_t i = 0; i < seqs; i++) engine_cancel(b->engine, b->first_id + (uint64_t)i);
    wait_finished(b, seqs);
    double passed = 1e3 * (double)(to.steps > from.steps ? to.steps - from.steps : 1);
    *host =
        (struct host){(double)(to.build_ns - from.build_ns) / passed, (double)(to.launch_ns - from.launch_ns) / passed,
                      (double)(to.finish_ns - from.finish_ns) / passed};
    return (double)(to_ns - from_ns) / 1e6 / steps;
}

static void decode(struct bench *b, int32_t seqs) {
    double ms[REPS_MAX];
    struct host host = {0};
    char shape[32];
    for (int32_t rep = 0; rep < b->reps; rep++) ms[rep] = decode_once(b, seqs, &host);
    double mid = median(ms, b->reps);
    printf("decode %4d sequences at %d tokens: %8.3f ms a step (%.3f to %.3f), %9.1f tok/s, host %.1f us a step: build "
           "%.1f, launch %.1f, finish %.1f\n",
           seqs, b->context, mid, ms[0], ms[b->reps - 1], seqs / mid * 1e3, host.build + host.launch + host.finish,
           host.build, host.launch, host.finish);
    snprintf(shape, sizeof shape, "b%d_ctx1k", seqs);
    figure(b, mid, "decode_step_ms", shape);
    figure(b, host.build + host.launch + host.finish, "decode_host_us", shape);
}

static double prefill_once(struct bench *b, int32_t tokens) {
    run_begin(b);
    int64_t begin_ns = clock_now_ns();
    submit(b, tokens, 1);
    wait_finished(b, 1);
    return (double)(b->clients[0].first_ns - begin_ns) / 1e6;
}

static void prefill(struct bench *b, int32_t tokens) {
    double ms[REPS_MAX];
    char shape[32];
    prefill_once(b, tokens);
    for (int32_t rep = 0; rep < b->reps; rep++) ms[rep] = prefill_once(b, tokens);
    double mid = median(ms, b->reps);
    printf("prefill %5d tokens: %8.3f ms (%.3f to %.3f), %8.0f tok/s\n", tokens, mid, ms[0], ms[b->reps - 1],
           tokens / mid * 1e3);
    snprintf(shape, sizeof shape, "b1_%d", tokens);
    figure(b, mid, "prefill_ms", shape);
}

static double batch_prefill_once(struct bench *b, int32_t count) {
    run_begin(b);
    int64_t begin_ns = clock_now_ns(), end_ns = 0;
    for (int32_t i = 0; i < count; i++) submit(b, BATCH_PROMPT, 1);
    wait_finished(b, count);
    for (int32_t i = 0; i < count; i++)
        if (b->clients[i].first_ns > end_ns) end_ns = b->clients[i].first_ns;
    return (double)count * BATCH_PROMPT / ((double)(end_ns - begin_ns) / 1e9);
}

static void batch_prefill(struct bench *b, int32_t count) {
    double rate[REPS_MAX];
    char shape[32];
    for (int32_t rep = 0; rep < b->reps; rep++) rate[rep] = batch_prefill_once(b, count);
    double mid = median(rate, b->reps);
    printf("batch prefill %4d x %d: %8.0f tok/s (%.0f to %.0f)\n", count, BATCH_PROMPT, mid, rate[0],
           rate[b->reps - 1]);
    snprintf(shape, sizeof shape, "b%d_896", count);
    figure(b, mid, "batch_prefill_tok_s", shape);
}

static void offline(struct bench *b, int32_t count) {
    struct engine_stats from, to;
    char shape[48];
    int64_t out = 0;
    engine_stats(b->engine, &from);
    run_begin(b);
    int64_t begin_ns = clock_now_ns();
    for (int32_t i = 0; i < count; i++) submit(b, b->input, b->output);
    wait_finished(b, count);
    double seconds = (double)(clock_now_ns() - begin_ns) / 1e9;
    engine_stats(b->engine, &to);
    for (int32_t i = 0; i < count; i++) out += b->clients[i].tokens;
    printf("offline %d x %d/%d: %.1f s, %.0f out tok/s; %llu steps, host %.1f us a step, %llu preemptions\n", count,
           b->input, b->output, seconds, (double)out / seconds, (unsigned long long)(to.steps - from.steps),
           (double)(to.host_ns - from.host_ns) / 1e3 / (double)(to.steps - from.steps),
           (unsigned long long)(to.preemptions - from.preemptions));
    snprintf(shape, sizeof shape, "r%d_%d_%d", count, b->input, b->output);
    figure(b, (double)out / seconds, "offline_out_tok_s", shape);
}

/* ---- the command line -----------------------------------------------------------------------------------------------
 */

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

static bool option(struct bench *b, struct engine_options *o, const char *name, const char *value) {
    struct {
        const char *name;
        int32_t *number;
    } numbers[] = {{"--context", &b->context},
                   {"--steps", &b->steps},
                   {"--input", &b->input},
                   {"--output", &b->output},
                   {"--reps", &b->reps},
                   {"--max-model-len", &o->max_model_len},
                   {"--max-num-seqs", &o->max_num_seqs},
                   {"--max-num-batched-tokens", &o->max_num_batched_tokens},
                   {"--max-num-mixed-tokens", &o->max_num_mixed_tokens},
                   {"--tensor-parallel-size", &o->ranks}};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (strcmp(name, numbers[i].name) == 0) return (*numbers[i].number = atoi(value)) > 0;
    if (strcmp(name, "--decode") == 0) return list_parse(&b->decode, value);
    if (strcmp(name, "--prefill") == 0) return list_parse(&b->prefill, value);
    if (strcmp(name, "--batch-prefill") == 0) return list_parse(&b->batch_prefill, value);
    if (strcmp(name, "--offline") == 0) return list_parse(&b->offline, value);
    if (strcmp(name, "--device") == 0)
        o->backend.device = strcmp(value, "cuda") == 0 ? DEVICE_CUDA : DEVICE_CPU;
    else if (strcmp(name, "--load-format") == 0)
        o->dummy_weights = strcmp(value, "dummy") == 0;
    else if (strcmp(name, "--enforce-eager") == 0)
        o->eager = atoi(value) != 0;
    else if (strcmp(name, "--batch-invariant") == 0)
        o->backend.batch_invariant = atoi(value) != 0;
    else if (strcmp(name, "--cuda-kernels") == 0)
        o->backend.cuda_kernels = value;
    else if (strcmp(name, "--name") == 0)
        b->name = value;
    else if (strcmp(name, "--comm") == 0)
        o->comm = strcmp(value, "nccl") == 0 ? COMM_NCCL : strcmp(value, "p2p") == 0 ? COMM_P2P : COMM_AUTO;
    else if (strcmp(name, "--json") == 0)
        return (b->json = fopen(value, "w")) != NULL;
    else
        return false;
    return true;
}

static void info_print(const struct engine_info *info, double seconds) {
    printf("%s, %s; opened in %.2f s:", info->backend.name, info->backend.isa, seconds);
    for (int32_t i = 0; i < info->phase_count; i++) printf(" %s %.3f", info->phases[i].name, info->phases[i].seconds);
    printf("\nweights %.0f MiB, workspace %.0f MiB, KV %.0f MiB in %d pages of %d, %d sequences, %d tokens a step, "
           "%d beside decodes, stack up to %d rows\n",
           (double)info->weight_bytes / 1048576, (double)info->workspace_bytes / 1048576,
           (double)info->kv_bytes / 1048576, info->pages_total, info->page_size, info->max_num_seqs,
           info->max_num_batched_tokens, info->max_num_mixed_tokens, info->decode_stack_rows);
    fflush(stdout);
}

static void bench_open(struct bench *b, struct engine_options *o) {
    struct err err = {0};
    struct text_options text = {.stand_in = o->dummy_weights};
    for (int32_t i = 0; i < COMM_RANKS_MAX; i++) o->ordinals[i] = i;
    b->ranks = o->ranks > 0 ? o->ranks : 1;
    int64_t begin_ns = clock_now_ns();
    if (text_open(o->model_path, &text, &b->text, &err)) fatal(o->model_path, &err);
    o->text = b->text;
    o->on_events = on_events;
    o->user = b;
    if (engine_open(o, &b->engine, &err)) fatal(o->model_path, &err);
    info_print(engine_info(b->engine), (double)(clock_now_ns() - begin_ns) / 1e9);
}

static void bench_close(struct bench *b) {
    struct engine_stats s;
    engine_stats(b->engine, &s);
    printf("%llu steps, %llu decode steps, %llu replayed, %llu recorded in %.1f ms, %llu stacked\n",
           (unsigned long long)s.steps, (unsigned long long)s.decode_steps, (unsigned long long)s.graph_replays,
           (unsigned long long)s.graph_captures, (double)s.graph_capture_ns / 1e6, (unsigned long long)s.stack_steps);
    engine_close(b->engine);
    text_close(b->text);
    if (b->json) {
        fprintf(b->json, b->json_any ? "\n}\n" : "{}\n");
        fclose(b->json);
    }
}

static int usage(void) {
    fprintf(stderr, "usage: bench_engine MODEL [--device cpu|cuda] [--load-format auto|dummy] [--decode B,B] "
                    "[--prefill L,L] [--batch-prefill N,N] [--offline N,N] [--context T] [--steps N] [--input T] "
                    "[--output T] [--reps N] [--max-model-len T] [--max-num-seqs N] [--max-num-batched-tokens T] "
                    "[--max-num-mixed-tokens T] [--enforce-eager 1] [--batch-invariant 1] [--cuda-kernels NAME] "
                    "[--name NAME] [--json FILE]\n");
    return 2;
}

int main(int argc, char **argv) {
    static struct bench b = {.context = 1040, .steps = 256, .input = 1000, .output = 1000, .reps = 3, .next_id = 1};
    struct engine_options options = {.backend = {.device = DEVICE_CPU},
                                     .dtype = DTYPE_COUNT,
                                     .kv_dtype = DTYPE_COUNT,
                                     .block_size = 64,
                                     .max_queued_requests = REQUESTS_MAX};
    if (argc < 2 || argc % 2) return usage();
    options.model_path = argv[1];
    b.name = file_base_name(argv[1]);
    for (int i = 2; i < argc; i += 2)
        if (!option(&b, &options, argv[i], argv[i + 1])) return usage();
    if (b.reps > REPS_MAX) b.reps = REPS_MAX;
    pthread_mutex_init(&b.mutex, NULL);
    pthread_cond_init(&b.moved, NULL);
    bench_open(&b, &options);
    struct {
        const struct list *list;
        void (*run)(struct bench *b, int32_t n);
    } parts[] = {{&b.prefill, prefill}, {&b.decode, decode}, {&b.batch_prefill, batch_prefill}, {&b.offline, offline}};
    for (size_t p = 0; p < sizeof parts / sizeof *parts; p++)
        for (int32_t i = 0; i < parts[p].list->count; i++) {
            parts[p].run(&b, parts[p].list->items[i]);
            fflush(stdout);
        }
    bench_close(&b);
    return 0;
}
