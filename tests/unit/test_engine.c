/* The engine's thread as a client sees it: the same tokens with a step ahead as without, whatever ends a request and
 * however few pages there are; one last event for each sample; nothing held afterwards. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>
#include <pthread.h>
#include <time.h>

#include "engine/base/clock.h"
#include "engine/engine.h"
#include "engine/text/text.h"
#include "tests/unit/model_run.h"
#include "tests/unit/tiny_model.h"

enum { VOCAB = 300, REQUESTS = 40, SAMPLES = 3, TOKENS_MAX = 64 };

struct sample {
    int32_t ids[TOKENS_MAX], count, finish, lasts;
};

struct client {
    pthread_mutex_t mutex; /* guards the rest */
    pthread_cond_t moved;
    struct sample samples[REQUESTS + 1][SAMPLES]; /* by request id */
    int32_t ends;
};

static void on_event(struct client *c, const struct event *e) {
    struct sample *s = &c->samples[e->request_id][e->sample];
    const int32_t *ids = record_at(e, e->ids);
    for (uint32_t i = 0; i < e->ids.count && s->count < TOKENS_MAX; i++) s->ids[s->count++] = ids[i];
    if (e->finish == FINISH_NONE) return;
    s->finish = e->finish;
    s->lasts++;
    c->ends++;
}

static void on_events(void *user, const void *records, size_t bytes) {
    struct client *c = user;
    const char *at = records, *end = at + bytes;
    pthread_mutex_lock(&c->mutex);
    for (; at < end; at += ((const struct event *)(const void *)at)->bytes)
        on_event(c, (const struct event *)(const void *)at);
    pthread_cond_signal(&c->moved);
    pthread_mutex_unlock(&c->mutex);
}

static void wait_ends(struct client *c, int32_t ends) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 60;
    pthread_mutex_lock(&c->mutex);
    int rc = 0;
    while (c->ends < ends && rc == 0) rc = pthread_cond_timedwait(&c->moved, &c->mutex, &until);
    int32_t got = c->ends;
    pthread_mutex_unlock(&c->mutex);
    if (got < ends) fail_msg("%d of %d samples ended within a minute", got, ends);
}

/* Request `id`: its kind decides samples, length, what ends it. */
static void submit(struct engine *engine, uint64_t id) {
    struct err err = {0};
    struct request *request;
    int32_t prompt[80], count = 1 + (int32_t)(id * 7 % 79), stops[8];
    for (int32_t i = 0; i < count; i++) prompt[i] = (int32_t)((id % 5 * 31 + (uint64_t)i * 13) % VOCAB);
    for (int32_t i = 0; i < 8; i++) stops[i] = (int32_t)((id * 37 + (uint64_t)i * 11) % VOCAB);
    struct request_parts parts = {.head = {.id = id,
                                           .n = id % 6 == 0 ? SAMPLES : 1,
                                           .max_tokens = 1 + (int32_t)(id * 23 % 64),
                                           .logprobs = id % 7 == 0 ? 2 : -1,
                                           .sampling = {.temperature = id % 4 == 0 ? 1 : 0,
                                                        .top_p = 1,
                                                        .typical_p = 1,
                                                        .repetition_penalty = id % 5 == 0 ? 1.2f : 1,
                                                        .seed = id}},
                                  .prompt = prompt,
                                  .prompt_count = count,
                                  .stop_ids = stops,
                                  .stop_id_count = id % 3 == 0 ? 8 : 0};
    if (request_build(&parts, &request, &err) || engine_submit(engine, request, &err)) fail_msg("%s", err.text);
    mem_free(request);
}

struct variant {
    bool ahead, eager;
    int32_t pages; /* 0: planned */
};

/* All requests at once in an engine of that kind; with `cancelled` some are cancelled on their way. */
static void engine_run(const struct tiny_model *m, const struct variant *v, bool cancelled, struct client *c,
                       struct engine_stats *stats) {
    struct err err = {0};
    struct text *text;
    struct engine *engine;
    struct engine_options o = {.model_path = m->folder,
                               .backend = run_device(2, CPU_ACTIVATIONS_F32),
                               .on_events = on_events,
                               .user = c,
                               .dtype = DTYPE_COUNT,
                               .kv_dtype = DTYPE_COUNT,
                               .block_size = 16,
                               .max_model_len = 160,
                               .max_num_seqs = 12,
                               .max_num_batched_tokens = 64,
                               .max_num_mixed_tokens = 40,
                               .max_queued_requests = 1000,
                               .kv_cache_bytes = (size_t)v->pages * 16 * 2 * 2 * 2 * (size_t)m->n_kv_heads *
                                                 (size_t)m->head_dim * (size_t)m->layers / 2,
                               .prefix_caching = true,
                               .eager = v->eager,
                               .ahead = v->ahead};
    int32_t ends = 0;
    o.backend.batch_invariant = true;
    *c = (struct client){0};
    pthread_mutex_init(&c->mutex, NULL);
    pthread_cond_init(&c->moved, NULL);
    if (text_open(m->folder, &(struct text_options){.stand_in = true}, &text, &err)) fail_msg("%s", err.text);
    o.text = text;
    if (engine_open(&o, &engine, &err)) fail_msg("%s", err.text);
    for (uint64_t id = 1; id <= REQUESTS; id++) {
        submit(engine, id);
        ends += id % 6 == 0 ? SAMPLES : 1;
        if (cancelled && id % 4 == 1) engine_cancel(engine, id);
        if (cancelled && id % 8 == 7) nanosleep(&(struct timespec){.tv_nsec = 300000}, NULL);
        if (cancelled && id % 9 == 5) engine_cancel(engine, id - 3);
    }
    wait_ends(c, ends);
    for (uint64_t id = 1; id <= REQUESTS; id++)
        for (int32_t s = 0; s < (id % 6 == 0 ? SAMPLES : 1); s++) assert_int_equal(c->samples[id][s].lasts, 1);
    if (engine_audit(engine, &err)) fail_msg("%s", err.text);
    int64_t give_up_ns = clock_now_ns() + 10 * NS_PER_SECOND;
    do { /* the snapshot follows the turn that sent the last event; a step ahead may still be under way */
        engine_stats(engine, stats);
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    } while ((stats->pages_held > 0 || stats->running + stats->waiting > 0) && clock_now_ns() < give_up_ns);
    assert_int_equal(stats->pages_held, 0);
    assert_int_equal(stats->running + stats->waiting, 0);
    assert_int_equal(stats->dead, false);
    engine_close(engine);
    text_close(text);
    pthread_cond_destroy(&c->moved);
    pthread_mutex_destroy(&c->mutex);
}

static struct tiny_model tiny(void) {
    bool cuda = run_on_cuda();
    return (struct tiny_model){.architecture = "LlamaForCausalLM",
                               .extra = "",
                               .layers = 2,
                               .hidden = 64,
                               .ffn = 96,
                               .n_heads = 4,
                               .n_kv_heads = 2,
                               .head_dim = cuda ? 64 : 16,
                               .vocab = VOCAB,
                               .dtype = TINY_BF16};
}

static void expect_same(const struct client *got, const struct client *wanted, const char *what) {
    for (int id = 1; id <= REQUESTS; id++)
        for (int k = 0; k < SAMPLES; k++) {
            const struct sample *g = &got->samples[id][k], *w = &wanted->samples[id][k];
            if (g->count != w->count || g->finish != w->finish)
                fail_msg("%s: request %d sample %d: %d tokens, %s; wanted %d, %s", what, id, k, g->count,
                         finish_reason_name((enum finish_reason)g->finish), w->count,
                         finish_reason_name((enum finish_reason)w->finish));
            for (int i = 0; i < g->count; i++)
                if (g->ids[i] != w->ids[i])
                    fail_msg("%s: request %d sample %d token %d is %d, wanted %d", what, id, k, i, g->ids[i],
                             w->ids[i]);
        }
}

/* Prompts are cut where the budget has room, which on a GPU may change a bit; there the same steps are compared. */
static void test_same_tokens(void **state) {
    static const struct variant variants[] = {{false, false, 0}, {true, false, 0}, {true, true, 0}, {true, false, 12}};
    static struct client wanted, got;
    struct engine_stats stats;
    struct tiny_model m = tiny();
    char what[64];
    tiny_make(&m, 21);
    engine_run(&m, &variants[0], false, &wanted, &stats);
    assert_true(stats.finished[FINISH_STOP] > 0 && stats.finished[FINISH_LENGTH] > 0);
    for (size_t i = 1; i < sizeof variants / sizeof *variants; i++) {
        snprintf(what, sizeof what, "variant %zu", i);
        engine_run(&m, &variants[i], false, &got, &stats);
        print_message("%s: %llu steps, %llu preemptions, %llu recorded, %llu replayed\n", what,
                      (unsigned long long)stats.steps, (unsigned long long)stats.preemptions,
                      (unsigned long long)stats.graph_captures, (unsigned long long)stats.graph_replays);
        if (variants[i].pages) assert_true(stats.preemptions > 0);
        if (!run_on_cuda()) expect_same(&got, &wanted, what);
    }
    tiny_free(&m);
}

static void test_cancels(void **state) {
    static struct client c;
    struct engine_stats stats;
    struct tiny_model m = tiny();
    tiny_make(&m, 22);
    for (int round = 0; round < 6; round++) {
        const struct variant v = {round & 1, false, round & 2 ? 12 : 0};
        engine_run(&m, &v, true, &c, &stats);
        uint64_t ended = 0;
        for (int r = 0; r < FINISH_REASON_COUNT; r++) ended += stats.finished[r];
        assert_int_equal(ended, REQUESTS);
    }
    tiny_free(&m);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_same_tokens), cmocka_unit_test(test_cancels)};
    if (run_skipped()) return 0;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
