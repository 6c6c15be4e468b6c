/* An engine behind its link, seen from the front: a whole one on a tiny model, on a thread of this process so that the
 * sanitizers see both sides; and processes that are no engines at all, which end, are killed or say nothing. */
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "engine/base/clock.h"
#include "engine/base/mem.h"
#include "engine/base/prefix_key.h"
#include "engine/remote.h"
#include "tests/unit/model_run.h"
#include "tests/unit/tiny_model.h"

enum { PAGE = 16, PROMPT = 40, OUTPUT = 6, REQUESTS = 24, QUEUE = 8 };

struct world {
    struct tiny_model model;
    struct host_options host;
    struct remote *remote;
    int ended[REQUESTS + 1], tokens[REQUESTS + 1], finish[REQUESTS + 1], error[REQUESTS + 1];
    struct hash128 keys[64];
    int key_count, cleared;
};

static void world_init(struct world *w) {
    *w = (struct world){.model = {.architecture = "LlamaForCausalLM",
                                  .layers = 2,
                                  .hidden = 128,
                                  .ffn = 192,
                                  .n_heads = 4,
                                  .n_kv_heads = 2,
                                  .head_dim = 64,
                                  .vocab = 101,
                                  .dtype = TINY_BF16}};
    tiny_make(&w->model, 5);
    tiny_write_tensors(&w->model, "model.safetensors", 0, 1);
    w->host.keys = true;
    w->host.engine = (struct engine_options){.model_path = w->model.folder,
                                             .backend = run_device(2, CPU_ACTIVATIONS_F32),
                                             .dtype = DTYPE_COUNT,
                                             .kv_dtype = DTYPE_COUNT,
                                             .block_size = PAGE,
                                             .max_model_len = 128,
                                             .max_num_seqs = 16,
                                             .max_num_batched_tokens = 256,
                                             .max_queued_requests = QUEUE,
                                             .kv_cache_bytes = 16 << 20,
                                             .prefix_caching = true,
                                             .prefix_key = {11, 12}};
}

static void events_take(struct world *w, const char *at, const char *end) {
    while (at < end) {
        const struct event *e = (const void *)at;
        assert_in_range(e->request_id, 1, REQUESTS);
        w->tokens[e->request_id] += (int)e->ids.count;
        if (e->finish != FINISH_NONE) {
            w->ended[e->request_id]++;
            w->finish[e->request_id] = e->finish;
            w->error[e->request_id] = e->error_code;
        }
        at += e->bytes;
    }
}

static void keys_take(struct world *w, const struct key_change *keys, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (keys[i].change == 2) w->cleared++;
        if (keys[i].change == 1 && w->key_count < 64)
            w->keys[w->key_count++] = (struct hash128){keys[i].lo, keys[i].hi};
    }
}

static void on_news(void *user, const struct news *news) {
    const char *at = (const char *)(news + 1), *end = (const char *)news + news->bytes;
    if (news->kind == NEWS_EVENTS)
        events_take(user, at, end);
    else
        keys_take(user, (const void *)at, (size_t)(end - at) / sizeof(struct key_change));
}

/* Takes news until `done` says so; false: not within ten seconds (a sanitizer's build is slow). */
static bool take_until(struct world *w, bool (*done)(const struct world *w)) {
    int64_t until_ns = clock_now_ns() + 60 * NS_PER_SECOND;
    struct pollfd fd = {.fd = remote_wake_fd(w->remote), .events = POLLIN};
    while (clock_now_ns() < until_ns) {
        assert_true(remote_take(w->remote, on_news, w));
        if (done(w)) return true;
        poll(&fd, 1, 50);
    }
    return false;
}

static bool is_ready(const struct world *w) {
    return remote_phase(w->remote) == LINK_READY;
}
static bool is_failed(const struct world *w) {
    return remote_phase(w->remote) == LINK_FAILED;
}
static bool is_ended(const struct world *w) {
    return remote_phase(w->remote) == LINK_ENDED;
}
static bool first_ended(const struct world *w) {
    return w->ended[1] > 0;
}
static bool all_ended(const struct world *w) {
    int ended = 0;
    for (int i = 1; i <= REQUESTS; i++) ended += w->ended[i];
    return ended == REQUESTS;
}
static bool is_cleared(const struct world *w) {
    return w->cleared > 0;
}

static void prompt_fill(int32_t *prompt, uint64_t id) {
    for (int i = 0; i < PROMPT; i++) prompt[i] = (int32_t)((id * 7 + (uint64_t)i * 3) % 97);
}

static int submit(struct world *w, uint64_t id, int32_t prompt_count, struct err *err) {
    int32_t prompt[PROMPT];
    struct request *request;
    prompt_fill(prompt, id);
    struct request_parts parts = {.head = {.flags = REQUEST_IGNORE_EOS | REQUEST_NO_TEXT,
                                           .id = id,
                                           .n = 1,
                                           .max_tokens = prompt_count == PROMPT ? OUTPUT : 200,
                                           .logprobs = -1,
                                           .sampling = {.top_p = 1, .typical_p = 1, .repetition_penalty = 1}},
                                  .prompt = prompt,
                                  .prompt_count = prompt_count};
    assert_int_equal(request_build(&parts, &request, err), 0);
    int rc = remote_submit(w->remote, request, err);
    mem_free(request);
    return rc;
}

static void start(struct world *w) {
    const struct remote_options options = {.host = &w->host};
    struct err err;
    if (remote_start(&options, &w->remote, &err)) fail_msg("%s", err.text);
}

static void test_serves(void **state) {
    struct world w;
    struct err err = {0};
    struct engine_stats stats;
    int32_t prompt[PROMPT];
    world_init(&w);
    start(&w);
    assert_int_equal(submit(&w, 1, PROMPT, &err), ERR_CLOSED); /* it loads */
    assert_true(take_until(&w, is_ready));
    assert_int_equal(remote_info(w.remote)->page_size, PAGE);
    assert_int_equal(submit(&w, 1, 10, &err), ERR_INVALID); /* longer than the context */
    assert_int_equal(submit(&w, 1, PROMPT, &err), 0);
    assert_true(take_until(&w, first_ended));
    assert_int_equal(w.tokens[1], OUTPUT);
    /* The front keys a prompt as the cache does. */
    prompt_fill(prompt, 1);
    struct hash128 key = {0, 0}, none = {0, 0};
    for (int page = 0; page < PROMPT / PAGE; page++) {
        key = prefix_key((struct hash_key){11, 12}, key, none, prompt + page * PAGE, PAGE);
        bool known = false;
        for (int i = 0; i < w.key_count; i++) known |= hash_equal(w.keys[i], key);
        assert_true(known);
    }
    remote_reset_prefix_cache(w.remote);
    assert_true(take_until(&w, is_cleared));
    assert_true(remote_stats(w.remote, &stats));
    assert_false(stats.dead);
    assert_int_equal(remote_check(w.remote, clock_now_ns(), 60 * NS_PER_SECOND, 60 * NS_PER_SECOND, &err), 0);
    remote_close(w.remote);
    assert_true(take_until(&w, is_ended));
    remote_free(w.remote);
    tiny_free(&w.model);
}

/* More than its queue holds at once: each of them ends, those beyond it with the reason. */
static void test_crowd(void **state) {
    struct world w;
    struct err err = {0};
    int lengths = 0, refused = 0;
    world_init(&w);
    start(&w);
    assert_true(take_until(&w, is_ready));
    for (uint64_t id = 1; id <= REQUESTS; id++) assert_int_equal(submit(&w, id, PROMPT, &err), 0);
    remote_cancel(w.remote, 3);
    assert_true(take_until(&w, all_ended));
    for (int id = 1; id <= REQUESTS; id++) {
        assert_int_equal(w.ended[id], 1);
        lengths += w.finish[id] == FINISH_LENGTH && w.tokens[id] == OUTPUT;
        refused += w.finish[id] == FINISH_ERROR && w.error[id] == ERR_EXHAUSTED;
        assert_true(w.finish[id] != FINISH_ERROR || w.error[id] == ERR_EXHAUSTED);
    }
    assert_in_range(lengths, QUEUE - 1, REQUESTS);
    assert_int_equal(lengths + refused + (w.finish[3] == FINISH_ABORT), REQUESTS);
    remote_drain(w.remote, clock_now_ns());
    assert_int_equal(submit(&w, 1, PROMPT, &err), ERR_CLOSED);
    remote_close(w.remote);
    assert_true(take_until(&w, is_ended));
    remote_free(w.remote);
    tiny_free(&w.model);
}

static void test_refuses(void **state) {
    struct world w;
    struct err err;
    world_init(&w);
    w.host.engine.model_path = "/nonexistent";
    start(&w);
    assert_true(take_until(&w, is_failed));
    remote_failure(w.remote, &err);
    assert_int_equal(err.code, ERR_NOT_FOUND);
    assert_non_null(strstr(err.text, "No such file"));
    remote_free(w.remote);
    tiny_free(&w.model);
}

/* What remote_check says of a program; it is killed and reaped whatever it does. */
static void expect(char *const *argv, const char *text) {
    const struct host_options host = {0};
    const struct remote_options options = {.argv = argv, .host = &host};
    struct remote *remote;
    struct err err = {0};
    assert_int_equal(remote_start(&options, &remote, &err), 0);
    assert_true(remote_pid(remote) > 0 && remote_pidfd(remote) >= 0);
    for (int i = 0; i < 1000 && !remote_check(remote, clock_now_ns(), NS_PER_SECOND, NS_PER_SECOND, &err); i++)
        usleep(5000);
    if (!strstr(err.text, text)) fail_msg("wanted %s, got %s", text, err.text);
    remote_kill(remote);
    pid_t pid = remote_pid(remote);
    remote_free(remote);
    char path[32];
    snprintf(path, sizeof path, "/proc/%d", (int)pid);
    assert_int_not_equal(access(path, F_OK), 0);
}

static void test_processes(void **state) {
    expect((char *[]){"/bin/sh", "-c", "exit 7", NULL}, "exited with code 7");
    expect((char *[]){"/bin/sh", "-c", "kill -9 $$", NULL}, "signal 9");
    expect((char *[]){"/bin/sleep", "100", NULL}, "no heartbeat");
    expect((char *[]){"/nonexistent/program", NULL}, "exited with code 127");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_serves),
        cmocka_unit_test(test_crowd),
        cmocka_unit_test(test_refuses),
        cmocka_unit_test(test_processes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
