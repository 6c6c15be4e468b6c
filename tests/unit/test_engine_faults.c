/* NaN and infinity in the numbers of one request: it ends with an error, its pages are not reused as prefix, and its
 * neighbours go on as if it had never been. A whole engine on a tiny model, some of whose embedding rows are poisoned.
 * QUIRE_TEST_DEVICE=cuda: on a GPU. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <cmocka.h>

#include "engine/engine.h"
#include "tests/unit/model_run.h"
#include "tests/unit/tiny_model.h"

enum { PAGE = 16, VOCAB = 101, PROMPT = 40, OUTPUT = 20, REQUESTS_MAX = 64, NAN_ID = 99, INF_ID = 100 };

/* One request and what came of it. */
struct asked {
    int32_t prompt[PROMPT];
    bool forced; /* every draw is made to give NAN_ID; else the poisoned ids are never drawn */
    int32_t ids[OUTPUT], count, cached, error_code;
    enum finish_reason finish;
    char text[128];
};

struct world {
    struct tiny_model model;
    struct engine *engine;
    pthread_mutex_t mutex;
    pthread_cond_t ended;
    struct asked *asked[REQUESTS_MAX]; /* by request id */
    int32_t count, open;
};

static void event_take(struct world *w, const struct event *e) {
    struct asked *a = w->asked[e->request_id];
    const int32_t *ids = record_at(e, e->ids);
    for (uint32_t i = 0; i < e->ids.count && a->count < OUTPUT; i++) a->ids[a->count++] = ids[i];
    a->cached = e->cached_tokens;
    if (e->finish == FINISH_NONE) return;
    a->finish = (enum finish_reason)e->finish;
    a->error_code = e->error_code;
    snprintf(a->text, sizeof a->text, "%.*s", (int)e->text.count, (const char *)record_at(e, e->text));
    w->open--;
}

static void on_events(void *user, const void *records, size_t bytes) {
    struct world *w = user;
    pthread_mutex_lock(&w->mutex);
    for (size_t at = 0; at < bytes; at += ((const struct event *)((const char *)records + at))->bytes)
        event_take(w, (const struct event *)(const void *)((const char *)records + at));
    pthread_cond_broadcast(&w->ended);
    pthread_mutex_unlock(&w->mutex);
}

static void world_open(struct world *w) {
    struct err err = {0};
    *w = (struct world){.model = {.architecture = "LlamaForCausalLM",
                                  .layers = 3,
                                  .hidden = 128,
                                  .ffn = 192,
                                  .n_heads = 4,
                                  .n_kv_heads = 2,
                                  .head_dim = 64,
                                  .vocab = VOCAB,
                                  .dtype = TINY_BF16}};
    pthread_mutex_init(&w->mutex, NULL);
    pthread_cond_init(&w->ended, NULL);
    tiny_make(&w->model, 5);
    for (int i = 0; i < w->model.hidden; i++) w->model.tensors[0].data[NAN_ID * w->model.hidden + i] = NAN;
    w->model.tensors[0].data[INF_ID * w->model.hidden + 3] = INFINITY;
    tiny_write_tensors(&w->model, "model.safetensors", 0, 1);
    struct engine_options options = {.model_path = w->model.folder,
                                     .backend = run_device(2, CPU_ACTIVATIONS_F32),
                                     .on_events = on_events,
                                     .user = w,
                                     .dtype = DTYPE_COUNT,
                                     .kv_dtype = DTYPE_COUNT,
                                     .block_size = PAGE,
                                     .max_model_len = 128,
                                     .max_num_seqs = 16,
                                     .max_num_batched_tokens = 256,
                                     .max_queued_requests = REQUESTS_MAX,
                                     .kv_cache_bytes = 16 << 20,
                                     .prefix_caching = true};
    options.backend.batch_invariant = true;
    if (engine_open(&options, &w->engine, &err)) fail_msg("%s", err.text);
}

static void world_close(struct world *w) {
    struct err err = {0};
    struct engine_stats stats;
    if (engine_audit(w->engine, &err)) fail_msg("%s", err.text);
    engine_stats(w->engine, &stats);
    assert_int_equal(stats.pages_held, 0);
    assert_false(stats.dead);
    engine_close(w->engine);
    tiny_free(&w->model);
    pthread_cond_destroy(&w->ended);
    pthread_mutex_destroy(&w->mutex);
}

static void ask(struct world *w, struct asked *a) {
    struct err err = {0};
    struct request *request = NULL;
    struct request_parts parts = {.head = {.flags = REQUEST_IGNORE_EOS | REQUEST_NO_TEXT,
                                           .id = (uint64_t)w->count,
                                           .n = 1,
                                           .max_tokens = OUTPUT,
                                           .logprobs = -1,
                                           .sampling = {.top_p = 1, .typical_p = 1, .repetition_penalty = 1}},
                                  .prompt = a->prompt,
                                  .prompt_count = PROMPT,
                                  .bias_ids = (int32_t[]){NAN_ID, INF_ID},
                                  .bias = (float[]){a->forced ? 1000.0f : -1000.0f, -1000.0f},
                                  .bias_count = 2};
    a->count = 0;
    a->finish = FINISH_NONE;
    assert_true(w->count < REQUESTS_MAX);
    pthread_mutex_lock(&w->mutex);
    w->asked[w->count++] = a;
    w->open++;
    pthread_mutex_unlock(&w->mutex);
    if (request_build(&parts, &request, &err) || engine_submit(w->engine, request, &err)) fail_msg("%s", err.text);
    mem_free(request);
}

/* Until all that were asked have ended. */
static void answers_wait(struct world *w) {
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += 60;
    pthread_mutex_lock(&w->mutex);
    int rc = 0;
    while (w->open && rc == 0) rc = pthread_cond_timedwait(&w->ended, &w->mutex, &end);
    pthread_mutex_unlock(&w->mutex);
    assert_int_equal(rc, 0);
}

static struct asked asked_of(uint64_t seed) {
    struct asked a = {.forced = false};
    struct tiny_model random = {.random = seed};
    for (int i = 0; i < PROMPT; i++)
        a.prompt[i] = (int32_t)((double)(tiny_random(&random) + 1) * 0.5 * NAN_ID) % NAN_ID;
    return a;
}

static void expect_whole(const struct asked *a) {
    assert_int_equal(a->finish, FINISH_LENGTH);
    assert_int_equal(a->count, OUTPUT);
}

static void expect_error(const struct asked *a) {
    assert_int_equal(a->finish, FINISH_ERROR);
    assert_int_equal(a->error_code, ERR_FATAL);
    assert_string_equal(a->text, "the model gave no usable numbers for this request");
    assert_int_equal(a->cached, 0);
}

static void expect_same(const struct asked *a, const struct asked *b) {
    expect_whole(a);
    expect_whole(b);
    assert_memory_equal(a->ids, b->ids, sizeof a->ids);
}

/* Poison in a prompt, at several places, among neighbours that decode at the same time. */
static void test_poisoned_prompts(void **state) {
    enum { HEALTHY = 6, POISONED = 4 };
    static const struct {
        int at, id;
    } poison[POISONED] = {{0, NAN_ID}, {20, INF_ID}, {33, NAN_ID}, {PROMPT - 1, INF_ID}};
    struct world w;
    struct asked alone[HEALTHY], among[HEALTHY], poisoned[POISONED], twin = asked_of(200 + 2), after;
    if (run_skipped()) skip();
    world_open(&w);
    for (int i = 0; i < HEALTHY; i++) { /* each by itself, nothing cached */
        alone[i] = among[i] = asked_of(100 + (uint64_t)i);
        ask(&w, &alone[i]);
        answers_wait(&w);
        engine_reset_prefix_cache(w.engine);
    }
    for (int round = 0; round < 2; round++) { /* the second time the healthy ones hit the cache, the others never */
        for (int i = 0; i < HEALTHY || i < POISONED; i++) {
            if (i < POISONED) {
                poisoned[i] = asked_of(200 + (uint64_t)i);
                poisoned[i].prompt[poison[i].at] = poison[i].id;
                ask(&w, &poisoned[i]);
            }
            if (i < HEALTHY) ask(&w, &among[i]);
        }
        answers_wait(&w);
        for (int i = 0; i < POISONED; i++) {
            expect_error(&poisoned[i]);
            assert_int_equal(poisoned[i].count, 0);
        }
        for (int i = 0; i < HEALTHY; i++) {
            expect_same(&alone[i], &among[i]);
            assert_int_equal(among[i].cached, round ? PROMPT / PAGE * PAGE : 0);
        }
    }
    /* The third poisoned prompt begins with two pages that hold no poison; they were not published either. */
    ask(&w, &twin);
    answers_wait(&w);
    assert_int_equal(twin.cached, 0);
    after = asked_of(200 + 2);
    ask(&w, &after);
    answers_wait(&w);
    assert_int_equal(after.cached, PROMPT / PAGE * PAGE);
    expect_same(&twin, &after);
    world_close(&w);
}

/* Poison that is drawn: the step after it gives NaN, the request ends there with what it had. */
static void test_poisoned_draw(void **state) {
    struct world w;
    struct asked alone = asked_of(1), among = alone, forced = asked_of(2), clean = asked_of(2), again = forced;
    if (run_skipped()) skip();
    world_open(&w);
    ask(&w, &alone);
    ask(&w, &clean);
    answers_wait(&w);
    engine_reset_prefix_cache(w.engine);
    forced.forced = again.forced = true;
    ask(&w, &forced);
    ask(&w, &among);
    answers_wait(&w);
    assert_int_equal(forced.finish, FINISH_ERROR);
    assert_true(forced.count <= 1);
    expect_same(&alone, &among);
    ask(&w, &again); /* the prompt's own pages were whole: they may be reused, and the end is the same */
    answers_wait(&w);
    assert_int_equal(again.finish, FINISH_ERROR);
    again = asked_of(2);
    ask(&w, &again);
    answers_wait(&w);
    expect_same(&clean, &again);
    world_close(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_poisoned_prompts), cmocka_unit_test(test_poisoned_draw)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
