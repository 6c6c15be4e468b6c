/* An engine's process as its front sees it: this program again, playing an engine that lives, ends, dies, hangs, stops
 * or writes nonsense. Each is seen in time, and nothing of it is left: no process, no file. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/base/clock.h"
#include "engine/base/mem.h"
#include "engine/remote.h"

#define HEARTBEAT_NS (2 * NS_PER_SECOND)
#define STEP_NS      (NS_PER_SECOND / 2)
#define LATE_NS      (NS_PER_SECOND / 2) /* a busy machine's */

/* ---- the engine that is played ---------------------------------------------------------------------------------- */

static const char page[65536];

static void news_say(struct link *link, uint64_t id, uint32_t bytes_lie, uint32_t text_bytes) {
    struct buf out = {0};
    struct news head = {0, NEWS_EVENTS};
    struct event_parts parts = {
        .head = {.request_id = id, .finish = FINISH_STOP}, .text = page, .text_bytes = text_bytes};
    buf_append(&out, &head, sizeof head);
    event_append(&out, &parts);
    head.bytes = (uint32_t)out.bytes + bytes_lie;
    memcpy(out.data, &head, sizeof head);
    link_write(link, out.data, out.bytes);
    buf_deinit(&out);
}

/* Answers each request with one event; true: it was told to end. */
static bool orders_answer(struct link *link, struct buf *in) {
    bool close = false;
    size_t at = 0;
    if (!link_read(link, in)) _exit(9);
    while (in->bytes - at >= sizeof(struct order)) {
        const struct order *order = (const void *)(in->data + at);
        if (order->bytes > in->bytes - at) break;
        if (order->kind == ORDER_SUBMIT) news_say(link, order->request_id, 0, 3);
        close |= order->kind == ORDER_CLOSE;
        at += order->bytes;
    }
    memmove(in->data, in->data + at, in->bytes - at);
    in->bytes -= at;
    return close;
}

static void live(struct link *link, const char *how) {
    struct pollfd fd = {.fd = link_wake_fd(link), .events = POLLIN};
    struct engine_info info = {.vocab = 100, .max_model_len = 100, .page_size = 16, .pages_total = 20};
    struct engine_stats stats = {0};
    struct buf in = {0};
    int64_t begin_ns = clock_now_ns();
    link_set_info(link, &info);
    link_set_stats(link, &stats);
    link_beat(link, begin_ns, 0);
    link_set_phase(link, LINK_READY, NULL);
    if (strcmp(how, "nonsense") == 0) news_say(link, 1, 4, 3);
    if (strcmp(how, "flood") == 0)
        for (;;)
            if (!link_flush(link)) news_say(link, 1, 0, sizeof page);
    while (!orders_answer(link, &in)) {
        link_beat(link, clock_now_ns(), strcmp(how, "step") == 0 ? begin_ns : 0);
        if (link_sleep(link)) poll(&fd, 1, 20);
        link_woken(link);
    }
    buf_deinit(&in);
    link_set_phase(link, LINK_ENDED, NULL);
}

static int engine_play(const char *how) {
    struct link *link;
    struct err err = {0};
    int fds[3];
    const char *name = getenv("QUIRE_LINK");
    if (strcmp(how, "exit") == 0) return 7;
    if (!name || sscanf(name, "%d,%d,%d", &fds[0], &fds[1], &fds[2]) != 3 || link_attach(fds, &link, &err)) return 8;
    if (strcmp(how, "refuse") == 0) {
        err_set_field(&err, ERR_UNSUPPORTED, "device", "it does not fit");
        link_set_phase(link, LINK_FAILED, &err);
        return 3;
    }
    if (strcmp(how, "hang") == 0) {
        link_set_phase(link, LINK_LOADING, NULL);
        for (;;) pause();
    }
    live(link, how);
    link_close(link);
    return 0;
}

/* ---- the front -------------------------------------------------------------------------------------------------- */

static struct remote *start(const char *how) {
    static const struct host_options host = {.engine = {.max_queued_requests = 2}};
    char program[] = "/proc/self/exe", word[] = "engine";
    char *argv[] = {program, word, (char *)(uintptr_t)how, NULL};
    struct remote_options options = {.argv = argv, .host = &host};
    struct remote *remote;
    struct err err;
    assert_int_equal(remote_start(&options, &remote, &err), 0);
    return remote;
}

struct heard {
    int events, pause_ms;
    uint64_t last;
};

static void on_news(void *user, const struct news *news) {
    struct heard *heard = user;
    heard->events++;
    if (heard->pause_ms) poll(NULL, 0, heard->pause_ms);
    if (news->kind == NEWS_EVENTS) heard->last = ((const struct event *)(const void *)(news + 1))->request_id;
}

/* Turns as the front's loop does until the phase is there, its death is seen, so many events were heard, or it is
 * late. */
static int turn(struct remote *remote, enum link_phase phase, int events, struct heard *heard, struct err *err) {
    int64_t until_ns = clock_now_ns() + 20 * NS_PER_SECOND;
    struct pollfd fds[2] = {{.fd = remote_wake_fd(remote), .events = POLLIN},
                            {.fd = remote_pidfd(remote), .events = POLLIN}};
    for (;;) {
        if (!remote_take(remote, on_news, heard)) return err_set(err, ERR_INVALID, "nonsense");
        if (remote_phase(remote) == phase || (events && heard->events >= events)) return 0;
        int rc = remote_check(remote, clock_now_ns(), STEP_NS, HEARTBEAT_NS, err);
        if (rc) return rc;
        assert_true(clock_now_ns() < until_ns);
        poll(fds, 2, 100);
    }
}

static int files_open(void) {
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    assert_non_null(folder);
    while (readdir(folder)) count++;
    closedir(folder);
    return count;
}

/* Nothing is left: no file, no child. */
static void end(struct remote *remote, int files) {
    remote_kill(remote);
    remote_free(remote);
    assert_int_equal(files_open(), files);
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
}

static struct request *request_make(uint64_t id, int32_t tokens) {
    static const int32_t prompt[] = {1, 2, 3};
    struct request_parts parts = {.head = {.id = id,
                                           .n = 1,
                                           .max_tokens = tokens,
                                           .logprobs = -1,
                                           .sampling = {.top_p = 1, .typical_p = 1, .repetition_penalty = 1}},
                                  .prompt = prompt,
                                  .prompt_count = 3};
    struct request *request;
    struct err err;
    assert_int_equal(request_build(&parts, &request, &err), 0);
    return request;
}

static void test_life(void **state) {
    int files = files_open();
    struct remote *remote = start("live");
    struct heard heard = {0};
    struct err err = {0};
    struct engine_stats stats;
    struct request *request = request_make(5, 10), *large = request_make(6, 98);
    for (int i = 0; i < 2; i++) assert_int_equal(kill(remote_pid(remote), i ? SIGINT : SIGTERM), 0); /* not its own */
    assert_int_equal(turn(remote, LINK_READY, 0, &heard, &err), 0);
    assert_int_equal(remote_info(remote)->vocab, 100);
    assert_true(remote_stats(remote, &stats));
    assert_int_equal(remote_submit(remote, large, &err), ERR_INVALID);
    assert_string_equal(err.field, "max_tokens");
    assert_int_equal(remote_submit(remote, request, &err), 0);
    assert_int_equal(turn(remote, LINK_ENDED, 1, &heard, &err), 0);
    assert_int_equal(heard.last, 5);
    /* It never says that it took any, so all that were sent wait: two, and some that may run by now. */
    int taken = 1;
    while (remote_submit(remote, request, &err) == 0) assert_true(++taken < 1000);
    assert_int_equal(err.code, ERR_EXHAUSTED);
    assert_in_range(taken, 2, 100);
    remote_close(remote);
    assert_int_equal(remote_submit(remote, request, &err), ERR_CLOSED);
    assert_int_equal(turn(remote, LINK_ENDED, 0, &heard, &err), 0);
    mem_free(request);
    mem_free(large);
    end(remote, files);
}

/* Ways to die, and what is said of each. */
static void test_deaths(void **state) {
    static const struct {
        const char *how, *text;
        int signal;
        int64_t within_ns;
    } cases[] = {{"exit", "exited with code 7", 0, 0},
                 {"live", "signal 9", SIGKILL, 0},
                 {"live", "signal 10", SIGUSR1, 0} /* no sanitizer takes it */,
                 {"live", "no heartbeat", SIGSTOP, HEARTBEAT_NS},
                 {"step", "a step takes longer than --step-timeout", 0, STEP_NS},
                 {"hang", "no heartbeat", 0, HEARTBEAT_NS}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int files = files_open();
        struct remote *remote = start(cases[i].how);
        struct heard heard = {0};
        struct err err = {0};
        if (strcmp(cases[i].how, "live") == 0) assert_int_equal(turn(remote, LINK_READY, 0, &heard, &err), 0);
        int64_t begin_ns = clock_now_ns();
        if (cases[i].signal) assert_int_equal(kill(remote_pid(remote), cases[i].signal), 0);
        assert_int_equal(turn(remote, LINK_ENDED, 0, &heard, &err), ERR_FATAL);
        assert_non_null(strstr(err.text, cases[i].text));
        assert_true(clock_now_ns() - begin_ns < cases[i].within_ns + LATE_NS);
        end(remote, files);
    }
}

static void test_refusal(void **state) {
    int files = files_open();
    struct remote *remote = start("refuse");
    struct heard heard = {0};
    struct err err = {0};
    assert_int_equal(turn(remote, LINK_FAILED, 0, &heard, &err), 0);
    remote_failure(remote, &err);
    assert_int_equal(err.code, ERR_UNSUPPORTED);
    assert_string_equal(err.text, "it does not fit");
    end(remote, files);
}

static void test_nonsense(void **state) {
    int files = files_open();
    struct remote *remote = start("nonsense");
    struct heard heard = {0};
    struct err err = {0};
    assert_int_equal(turn(remote, LINK_ENDED, 1, &heard, &err), ERR_INVALID);
    assert_int_equal(heard.events, 0);
    end(remote, files);
}

/* One that writes faster than its front takes it does not keep that in one call for ever, and nothing waits unsaid. */
static void test_flood(void **state) {
    int files = files_open();
    struct remote *remote = start("flood");
    struct pollfd fd = {.fd = remote_wake_fd(remote), .events = POLLIN};
    struct heard heard = {.pause_ms = 1};
    for (int i = 0; i < 3; i++) {
        assert_int_equal(poll(&fd, 1, 5000), 1);
        assert_true(remote_take(remote, on_news, &heard)); /* 16 rings of 63 records at most: a second */
    }
    assert_true(heard.events >= 3);
    end(remote, files);
}

/* A front that is killed takes its engine along, one that hangs while it loads too. */
static void test_front_killed(void **state) {
    int pids[2], status;
    pid_t engine;
    assert_int_equal(prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), 0); /* the engine becomes ours to wait for */
    assert_int_equal(pipe(pids), 0);
    pid_t front = fork();
    if (front == 0) {
        struct remote *remote = start("hang");
        struct heard heard = {0};
        struct err err = {0};
        engine = turn(remote, LINK_LOADING, 0, &heard, &err) ? 0 : remote_pid(remote);
        if (write(pids[1], &engine, sizeof engine) != sizeof engine) _exit(1);
        for (;;) pause();
    }
    assert_int_equal(read(pids[0], &engine, sizeof engine), sizeof engine);
    assert_int_equal(kill(front, SIGKILL), 0);
    assert_int_equal(waitpid(front, &status, 0), front);
    int64_t begin_ns = clock_now_ns();
    assert_int_equal(waitpid(engine, &status, 0), engine);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    assert_true(clock_now_ns() - begin_ns < NS_PER_SECOND);
    close(pids[0]);
    close(pids[1]);
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], "engine") == 0) return engine_play(argv[2]);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_life),    cmocka_unit_test(test_deaths),
                                       cmocka_unit_test(test_refusal), cmocka_unit_test(test_nonsense),
                                       cmocka_unit_test(test_flood),   cmocka_unit_test(test_front_killed)};
    return cmocka_run_group_tests_name("remote_process", tests, NULL, NULL);
}
