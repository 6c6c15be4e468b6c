/* The engines behind a front, played by remotes that do what a test says: where requests go, what becomes of them when
 * their engine dies, when it is started again and when the server gives up. No process is started, no model read. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/mem.h"
#include "server/replicas_private.h"

#define REPLICAS_MAX 4
#define SENT_MAX     64

/* ---- remotes ---------------------------------------------------------------------------------------------------- */

struct remote {
    int replica, pid, wake, died;
    enum link_phase phase;
    struct engine_info info;
    struct engine_stats stats;
    struct buf news;
    struct err failure, check;
    uint64_t sent[SENT_MAX], cancelled[SENT_MAX];
    int sent_count, cancelled_count, submit_rc;
    bool killed, closed, drained, nonsense;
};

static struct world {
    struct remote *live[REPLICAS_MAX];
    int starts[REPLICAS_MAX], spawn_rc, freed;
    struct buf events; /* what the front heard */
    int32_t refused;   /* by which replica, -1: none */
    struct err why;
    struct route_request last;
    uv_loop_t loop;
    struct options options;
    struct replicas *replicas;
} w;

int replica_spawn(struct replica *r, struct err *err) {
    if (w.spawn_rc) return err_set(err, w.spawn_rc, "no process can be had");
    struct remote *remote = mem_zalloc(1, sizeof *remote);
    w.starts[r->index]++;
    remote->replica = r->index;
    remote->pid = 1000 + r->index;
    remote->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    remote->died = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    remote->info = (struct engine_info){.page_size = 16, .pages_total = 100, .max_num_batched_tokens = 256};
    w.live[r->index] = r->remote = remote;
    return 0;
}

static void raise_fd(int fd) {
    uint64_t one = 1;
    assert_int_equal(write(fd, &one, sizeof one), sizeof one);
}

int remote_pid(const struct remote *r) {
    return r->pid;
}
int remote_pidfd(const struct remote *r) {
    return r->died;
}
int remote_wake_fd(const struct remote *r) {
    return r->wake;
}
enum link_phase remote_phase(const struct remote *r) {
    return r->phase;
}
const struct engine_info *remote_info(const struct remote *r) {
    return &r->info;
}
void remote_failure(const struct remote *r, struct err *out) {
    *out = r->failure;
}
void remote_drain(struct remote *r, int64_t deadline_ns) {
    r->drained = true;
}
void remote_reset_prefix_cache(struct remote *r) {}
bool remote_stats(const struct remote *r, struct engine_stats *out) {
    *out = r->stats;
    return true;
}
int remote_submit(struct remote *r, const struct request *request, struct err *err) {
    if (r->submit_rc) return err_set(err, r->submit_rc, "not taken");
    r->sent[r->sent_count++] = request->id;
    return 0;
}
void remote_cancel(struct remote *r, uint64_t id) {
    r->cancelled[r->cancelled_count++] = id;
}
void remote_close(struct remote *r) {
    r->closed = true;
    raise_fd(r->died);
}
void remote_kill(struct remote *r) {
    if (!r->killed) raise_fd(r->died);
    r->killed = true;
}
int remote_check(struct remote *r, int64_t now_ns, int64_t step_ns, int64_t heartbeat_ns, struct err *err) {
    *err = r->check;
    return r->check.code;
}
bool remote_take(struct remote *r, remote_news_fn *fn, void *user) {
    uint64_t value;
    ssize_t got = read(r->wake, &value, sizeof value);
    struct buf news = r->news;
    (void)got;
    r->news = (struct buf){0};
    for (size_t at = 0; at < news.bytes;) {
        const struct news *one = (const void *)(news.data + at);
        fn(user, one);
        at += one->bytes;
    }
    buf_deinit(&news);
    return !r->nonsense;
}
void remote_free(struct remote *r) {
    if (w.live[r->replica] == r) w.live[r->replica] = NULL;
    w.freed++;
    close(r->wake);
    close(r->died);
    buf_deinit(&r->news);
    mem_free(r);
}

/* ---- a router that takes the first that is up ------------------------------------------------------------------- */

struct route {
    bool up[REPLICAS_MAX];
    int load[REPLICAS_MAX], count;
};

int route_open(const struct route_options *options, struct route **out) {
    *out = mem_zalloc(1, sizeof **out);
    (*out)->count = options->replicas;
    return 0;
}
void route_close(struct route *route) {
    mem_free(route);
}
void route_set_up(struct route *route, int32_t i, bool up) {
    route->up[i] = up;
    if (!up) route->load[i] = 0;
}
void route_key_added(struct route *route, int32_t i, struct hash128 key) {}
void route_key_removed(struct route *route, int32_t i, struct hash128 key) {}
void route_keys_cleared(struct route *route, int32_t i) {}
int32_t route_choose(struct route *route, const struct route_request *request, int32_t except, int32_t *hits) {
    w.last = *request;
    *hits = 0;
    for (int32_t i = 0; i < route->count; i++)
        if (route->up[i] && i != except) return i;
    return except >= 0 && route->up[except] ? except : -1;
}
void route_took(struct route *route, int32_t i, const struct route_request *request) {
    assert_true(route->up[i]);
    route->load[i]++;
}
void route_done(struct route *route, int32_t i, const struct route_request *request) {
    assert_true(route->up[i] && route->load[i] > 0);
    route->load[i]--;
}
int64_t route_load_tokens(const struct route *route, int32_t i) {
    return 0;
}

/* ---- the world -------------------------------------------------------------------------------------------------- */

static void on_events(void *user, const void *records, size_t bytes) {
    buf_append(&w.events, records, bytes);
}
static void on_state(void *user, int32_t replica, enum replica_state state) {}
static void on_refused(void *user, int32_t replica, const struct err *why) {
    assert_int_equal(w.refused, -1); /* told once */
    w.refused = replica;
    w.why = *why;
}

static void world_open(int32_t count) {
    const struct replicas_callbacks callbacks = {on_events, on_state, on_refused, NULL};
    struct err err;
    memset(&w, 0, sizeof w);
    log_set_level(LOG_LEVEL_ERROR + 1);
    w.refused = -1;
    w.options.data_parallel_size = count;
    w.options.tensor_parallel_size = 1;
    w.options.enable_prefix_caching = true;
    w.options.step_timeout_s = 10;
    uv_loop_init(&w.loop);
    assert_int_equal(replicas_open(&w.loop, &w.options, "model", &callbacks, &w.replicas, &err), 0);
}

static void world_close(void) {
    int started = 0;
    replicas_close(w.replicas);
    uv_run(&w.loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&w.loop), 0);
    for (int i = 0; i < REPLICAS_MAX; i++) started += w.starts[i];
    assert_int_equal(w.freed, started);
    buf_deinit(&w.events);
}

static void run_ms(int64_t ms) {
    int64_t until = clock_now_ns() + ms * NS_PER_MS;
    while (clock_now_ns() < until) {
        uv_run(&w.loop, UV_RUN_NOWAIT);
        usleep(1000);
    }
}

static void phase_set(int replica, enum link_phase phase) {
    w.live[replica]->phase = phase;
    raise_fd(w.live[replica]->wake);
    run_ms(5);
}

static void up(int32_t count) {
    for (int32_t i = 0; i < count; i++) phase_set(i, LINK_READY);
    assert_int_equal(replicas_up(w.replicas), count);
}

/* Its process is gone, as the pidfd and the check tell. */
static void die(int replica) {
    err_set(&w.live[replica]->check, ERR_FATAL, "killed by signal 9");
    raise_fd(w.live[replica]->died);
    run_ms(5);
}

static int submit(uint64_t id, int32_t n) {
    static const int32_t prompt[40];
    struct request_parts parts = {
        .head = {.id = id, .n = n, .max_tokens = 8, .logprobs = -1}, .prompt = prompt, .prompt_count = 40};
    struct request *request;
    struct err err;
    assert_int_equal(request_build(&parts, &request, &err), 0);
    int rc = replicas_submit(w.replicas, request, 0, &err);
    mem_free(request);
    return rc;
}

static void say_error(int replica, uint64_t id, int32_t sample, enum finish_reason finish, int32_t error) {
    struct buf *out = &w.live[replica]->news;
    size_t head = out->bytes;
    struct news news = {.kind = NEWS_EVENTS};
    buf_append(out, &news, sizeof news);
    struct event_parts parts = {
        .head = {
            .sample = sample, .request_id = id, .finish = (int32_t)finish, .output_tokens = 1, .error_code = error}};
    event_append(out, &parts);
    ((struct news *)(void *)(out->data + head))->bytes = (uint32_t)(out->bytes - head);
    raise_fd(w.live[replica]->wake);
}

static void say(int replica, uint64_t id, int32_t sample, enum finish_reason finish) {
    say_error(replica, id, sample, finish, 0);
}

/* Events the front heard of a request with this reason; FINISH_NONE: news that goes on. */
static int heard(uint64_t id, enum finish_reason finish) {
    int count = 0;
    for (size_t at = 0; at < w.events.bytes;) {
        const struct event *event = (const void *)(w.events.data + at);
        count += event->request_id == id && event->finish == (int32_t)finish;
        at += event->bytes;
    }
    return count;
}

/* ---- the tests -------------------------------------------------------------------------------------------------- */

static void test_start(void **state) {
    struct replica_report report;
    world_open(2);
    assert_null(replicas_info(w.replicas));
    assert_int_equal(submit(1, 1), ERR_CLOSED);
    phase_set(1, LINK_READY);
    assert_int_equal(replicas_up(w.replicas), 1);
    assert_false(replicas_settled(w.replicas));
    assert_int_equal(submit(2, 1), 0);
    assert_int_equal(w.live[1]->sent_count, 1);
    phase_set(0, LINK_READY);
    assert_true(replicas_settled(w.replicas));
    assert_int_equal(replicas_info(w.replicas)->page_size, 16);
    assert_int_equal(submit(3, 1), 0);
    assert_int_equal(w.live[0]->sent[0], 3);
    assert_int_equal(w.last.key_count, 2); /* 40 tokens in pages of 16 */
    assert_int_equal(w.last.prompt_tokens, 40);
    say(0, 3, 0, FINISH_NONE);
    say(0, 3, 0, FINISH_STOP);
    say(0, 2, 0, FINISH_STOP); /* another's: not believed */
    say(0, 99, 0, FINISH_STOP);
    run_ms(5);
    assert_int_equal(heard(3, FINISH_NONE) + heard(3, FINISH_STOP), 2);
    assert_int_equal(heard(2, FINISH_STOP) + heard(99, FINISH_STOP), 0);
    replicas_report(w.replicas, 0, &report);
    assert_int_equal(report.running, 0);
    assert_int_equal(w.replicas->route->load[0], 0); /* took and done are pairs */
    assert_int_equal(w.replicas->route->load[1], 1);
    replicas_report(w.replicas, 1, &report);
    assert_int_equal(report.running, 1);
    world_close();
}

/* What was shown ends with an error; what was not goes to the other one, once; what was cancelled is over. */
static void test_death(void **state) {
    struct replica_report report;
    world_open(2);
    up(2);
    for (uint64_t id = 1; id <= 4; id++) assert_int_equal(submit(id, id == 4 ? 3 : 1), 0);
    assert_int_equal(w.live[0]->sent_count, 4);
    say(0, 1, 0, FINISH_NONE);
    run_ms(5);
    replicas_cancel(w.replicas, 3);
    assert_int_equal(w.live[0]->cancelled[0], 3);
    die(0);
    assert_int_equal(heard(1, FINISH_ERROR), 1);
    assert_int_equal(heard(2, FINISH_ERROR) + heard(4, FINISH_ERROR), 0);
    assert_int_equal(heard(3, FINISH_ABORT), 1);
    assert_int_equal(w.live[1]->sent_count, 2);
    replicas_report(w.replicas, 0, &report);
    assert_int_equal(report.deaths, 1);
    assert_int_equal(report.requests_retried, 2);
    assert_int_equal(report.requests_failed, 1);
    assert_string_equal(report.last_death, "killed by signal 9");
    assert_int_equal(replicas_state(w.replicas, 0), REPLICA_WAITING);
    assert_int_equal(replicas_state(w.replicas, 1), REPLICA_UP);
    say(1, 2, 0, FINISH_STOP);
    run_ms(5);
    assert_int_equal(heard(2, FINISH_STOP), 1);
    run_ms(250); /* 0.1 s, at a tick of 0.1 s */
    assert_int_equal(w.starts[0], 2);
    phase_set(0, LINK_READY);
    die(1); /* the request of three samples was sent elsewhere once already */
    assert_int_equal(heard(4, FINISH_ERROR), 3);
    world_close();
}

/* Errors of an engine that dies come before its death does. */
static void test_fault(void **state) {
    world_open(2);
    up(2);
    for (uint64_t id = 1; id <= 2; id++) assert_int_equal(submit(id, 2), 0);
    for (int32_t i = 0; i < 2; i++) say_error(0, 1, i, FINISH_ERROR, ERR_FATAL);
    run_ms(20);
    assert_int_equal(heard(1, FINISH_ERROR), 0);
    err_set(&w.live[0]->failure, ERR_FATAL, "an illegal address");
    phase_set(0, LINK_DEAD);
    assert_int_equal(w.live[1]->sent_count, 2);
    /* One request's own fault: told when its replica lived on. */
    say_error(1, 2, 0, FINISH_ERROR, ERR_INVALID);
    run_ms(5);
    assert_int_equal(heard(2, FINISH_ERROR), 1);
    world_close();
}

static void test_fault_of_one(void **state) {
    world_open(2);
    up(2);
    assert_int_equal(submit(1, 1), 0);
    say_error(0, 1, 0, FINISH_ERROR, ERR_FATAL);
    run_ms(100);
    assert_int_equal(heard(1, FINISH_ERROR), 0);
    run_ms(350);
    assert_int_equal(heard(1, FINISH_ERROR), 1);
    assert_int_equal(replicas_state(w.replicas, 0), REPLICA_UP);
    assert_int_equal(w.live[1]->sent_count, 0);
    world_close();
}

/* One alone: nothing takes its requests, and there is no other wait than for its start. */
static void test_alone(void **state) {
    world_open(1);
    up(1);
    assert_int_equal(submit(1, 1), 0);
    w.live[0]->nonsense = true;
    raise_fd(w.live[0]->wake);
    run_ms(5);
    assert_int_equal(heard(1, FINISH_ERROR), 1);
    assert_int_equal(submit(2, 1), ERR_CLOSED);
    assert_in_range(replicas_retry_after_s(w.replicas), 1, 10);
    run_ms(250);
    phase_set(0, LINK_READY);
    assert_int_equal(submit(3, 1), 0);
    world_close();
}

static void test_full(void **state) {
    world_open(2);
    up(2);
    w.live[0]->submit_rc = ERR_EXHAUSTED;
    assert_int_equal(submit(1, 1), 0);
    assert_int_equal(w.live[1]->sent_count, 1);
    w.live[1]->submit_rc = ERR_EXHAUSTED;
    assert_int_equal(submit(2, 1), ERR_EXHAUSTED);
    w.live[0]->submit_rc = w.live[1]->submit_rc = 0;
    assert_int_equal(submit(4, 2), 0); /* taken, and refused by the engine itself: the other one has room */
    assert_int_equal(w.live[0]->sent[0], 4);
    for (int32_t i = 0; i < 2; i++) say_error(0, 4, i, FINISH_ERROR, ERR_EXHAUSTED);
    run_ms(5);
    assert_int_equal(heard(4, FINISH_ERROR), 0);
    assert_int_equal(w.live[1]->sent[1], 4);
    for (int32_t i = 0; i < 2; i++) say_error(1, 4, i, FINISH_ERROR, ERR_EXHAUSTED);
    run_ms(5);
    assert_int_equal(heard(4, FINISH_ERROR), 2);
    w.live[1]->submit_rc = ERR_INVALID;
    w.live[0]->submit_rc = ERR_INVALID;
    assert_int_equal(submit(3, 1), ERR_INVALID);
    world_close();
}

/* The first start tells the truth about flags and files; a later one may fail because the dead one's memory is not
 * back yet. */
static void test_refused(void **state) {
    world_open(2);
    err_set(&w.live[1]->failure, ERR_UNSUPPORTED, "it does not fit");
    phase_set(1, LINK_FAILED);
    assert_int_equal(w.refused, 1);
    assert_string_equal(w.why.text, "it does not fit");
    assert_int_equal(w.why.code, ERR_UNSUPPORTED);
    world_close();
}

static void test_again_and_again(void **state) {
    struct replica_report report;
    world_open(1);
    up(1);
    int64_t begun_ns = clock_now_ns();
    die(0);
    for (int i = 0; i < 3; i++) {
        int starts = w.starts[0];
        for (int k = 0; k < 2000 && w.starts[0] == starts; k++) run_ms(1);
        err_set(&w.live[0]->failure, ERR_NOMEM, "the memory is not back");
        phase_set(0, LINK_FAILED);
    }
    assert_int_equal(w.refused, -1);
    assert_in_range(clock_now_ns() - begun_ns, 700 * NS_PER_MS, 1500 * NS_PER_MS); /* 0.1 + 0.2 + 0.4 s */
    replicas_report(w.replicas, 0, &report);
    assert_int_equal(report.deaths, 4);
    w.replicas->items[0].failed_starts = 9; /* the rest would take half a minute */
    w.replicas->items[0].next_start_ns = 0;
    run_ms(120);
    phase_set(0, LINK_FAILED);
    assert_int_equal(w.refused, 0);
    assert_int_equal(w.why.code, ERR_FATAL);
    assert_non_null(strstr(w.why.text, "10 times in a row"));
    world_close();
}

static void test_restart(void **state) {
    struct err err;
    world_open(2);
    up(2);
    assert_int_equal(submit(1, 1), 0);
    assert_int_equal(replicas_restart(w.replicas, 2, 0, &err), ERR_NOT_FOUND);
    assert_int_equal(replicas_restart(w.replicas, 0, clock_now_ns() + 10 * NS_PER_SECOND, &err), 0);
    assert_int_equal(replicas_restart(w.replicas, 0, 0, &err), ERR_CLOSED);
    assert_int_equal(submit(2, 1), 0);
    assert_int_equal(w.live[1]->sent_count, 1);
    run_ms(150);
    assert_false(w.live[0]->closed); /* one request still runs */
    say(0, 1, 0, FINISH_STOP);
    run_ms(150);
    assert_int_equal(heard(1, FINISH_STOP), 1);
    assert_int_equal(w.starts[0], 2);
    phase_set(0, LINK_READY);
    struct replica_report report;
    replicas_report(w.replicas, 0, &report);
    assert_int_equal(report.deaths, 0);
    assert_int_equal(report.state, REPLICA_UP);
    world_close();
}

static void test_drain(void **state) {
    world_open(2);
    up(2);
    assert_int_equal(submit(1, 1), 0);
    replicas_drain(w.replicas, clock_now_ns() + NS_PER_SECOND);
    assert_true(w.live[0]->drained && w.live[1]->drained);
    assert_int_equal(submit(2, 1), ERR_CLOSED);
    die(0); /* nobody takes its requests now, and it is not started again */
    assert_int_equal(heard(1, FINISH_ERROR), 1);
    run_ms(250);
    assert_int_equal(w.starts[0], 1);
    assert_int_equal(replicas_state(w.replicas, 0), REPLICA_GONE);
    world_close();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_start),           cmocka_unit_test(test_death),   cmocka_unit_test(test_fault),
        cmocka_unit_test(test_fault_of_one),    cmocka_unit_test(test_alone),   cmocka_unit_test(test_full),
        cmocka_unit_test(test_refused),         cmocka_unit_test(test_restart), cmocka_unit_test(test_drain),
        cmocka_unit_test(test_again_and_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
