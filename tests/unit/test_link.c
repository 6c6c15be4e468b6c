/* The link between a front and an engine: bytes both ways at once, through rings that are often full, between threads
 * that sleep on eventfds; state as one consistent copy; and an other side that writes nonsense. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/base/clock.h"
#include "engine/base/mem.h"
#include "engine/link.h"

#define RECORDS 3000

struct pair {
    struct link *front, *engine;
};

static struct pair pair_open(void) {
    struct pair pair;
    struct err err;
    assert_int_equal(link_create(&pair.front, &err), 0);
    assert_int_equal(link_attach_local(pair.front, &pair.engine, &err), 0);
    return pair;
}

static void pair_close(struct pair *pair) {
    link_close(pair->engine);
    link_close(pair->front);
}

/* Record i: its length, its number, then bytes that follow from both. Some are longer than a ring. */
static size_t record_bytes(uint32_t i) {
    uint32_t random = (i + 1) * 2654435761u;
    return i % 500 == 7 ? (5u << 20) + 8 : 8 + (random >> 8) % (i % 10 ? 3000 : 200000) / 8 * 8;
}

static void record_fill(char *out, uint32_t i) {
    size_t bytes = record_bytes(i);
    memcpy(out, &(uint32_t){(uint32_t)bytes}, 4);
    memcpy(out + 4, &i, 4);
    for (size_t k = 8; k < bytes; k += 64) out[k] = (char)(i + k);
}

static bool record_good(const char *at, uint32_t i) {
    uint32_t head[2];
    memcpy(head, at, sizeof head);
    if (head[0] != record_bytes(i) || head[1] != i) return false;
    for (size_t k = 8; k < head[0]; k += 64)
        if (at[k] != (char)(i + k)) return false;
    return true;
}

/* One side: writes its records, reads the other's, sleeps when neither goes on. */
struct side {
    struct link *link;
    uint32_t written, read;
    bool bad;
};

static void side_read(struct side *side, struct buf *in) {
    size_t at = 0;
    if (!link_read(side->link, in)) side->bad = true;
    while (in->bytes - at >= 8) {
        uint32_t bytes;
        memcpy(&bytes, in->data + at, 4);
        if (bytes > in->bytes - at) break;
        if (!record_good(in->data + at, side->read++)) side->bad = true;
        at += bytes;
    }
    memmove(in->data, in->data + at, in->bytes - at);
    in->bytes -= at;
}

static void *side_run(void *argument) {
    struct side *side = argument;
    struct buf in = {0};
    char *record = mem_zalloc(6u << 20, 1);
    struct pollfd fd = {.fd = link_wake_fd(side->link), .events = POLLIN};
    int64_t until_ns = clock_now_ns() + 100 * NS_PER_SECOND;
    while (!side->bad && (side->written < RECORDS || side->read < RECORDS || link_flush(side->link))) {
        bool crowded = link_flush(side->link);
        for (int k = 0; k < 20 && side->written < RECORDS && !crowded; k++) {
            record_fill(record, side->written);
            link_write(side->link, record, record_bytes(side->written++));
            crowded = link_flush(side->link);
        }
        side_read(side, &in);
        bool ended = side->written == RECORDS && side->read == RECORDS && !crowded;
        bool idle = (crowded || side->written == RECORDS) && !ended;
        if (idle && link_sleep(side->link) && poll(&fd, 1, 5000) == 0) side->bad = true; /* nobody woke us */
        link_woken(side->link);
        if (clock_now_ns() > until_ns) side->bad = true;
    }
    mem_free(record);
    buf_deinit(&in);
    return NULL;
}

static void test_both_ways(void **state) {
    struct pair pair = pair_open();
    struct side front = {.link = pair.front}, engine = {.link = pair.engine};
    pthread_t threads[2];
    assert_int_equal(pthread_create(&threads[0], NULL, side_run, &front), 0);
    assert_int_equal(pthread_create(&threads[1], NULL, side_run, &engine), 0);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    assert_false(front.bad || engine.bad);
    assert_int_equal(front.read, RECORDS);
    assert_int_equal(engine.read, RECORDS);
    pair_close(&pair);
}

/* A reader that is not asked to wake is not woken; one that sleeps is, once. */
static void test_sleep(void **state) {
    struct pair pair = pair_open();
    struct pollfd fd = {.fd = link_wake_fd(pair.engine), .events = POLLIN};
    struct buf in = {0};
    assert_true(link_sleep(pair.engine));
    assert_int_equal(poll(&fd, 1, 0), 0);
    link_write(pair.front, "12345678", 8);
    assert_int_equal(poll(&fd, 1, 1000), 1);
    assert_false(link_sleep(pair.engine)); /* there is something */
    link_woken(pair.engine);
    link_write(pair.front, "abcdefgh", 8);
    assert_int_equal(poll(&fd, 1, 0), 0);
    assert_true(link_read(pair.engine, &in));
    assert_int_equal(in.bytes, 16);
    assert_memory_equal(in.data, "12345678abcdefgh", 16);
    assert_true(link_sleep(pair.engine));
    buf_deinit(&in);
    pair_close(&pair);
}

static atomic_bool stats_end;

static void *stats_run(void *argument) {
    struct engine_stats stats = {0};
    for (uint64_t i = 1; !atomic_load(&stats_end); i++) {
        stats.steps = i;
        stats.submitted = 2 * i;
        stats.finished[FINISH_ERROR] = 3 * i;
        memset(stats.dead_text, 'a' + (int)(i % 26), sizeof stats.dead_text);
        link_set_stats(argument, &stats);
        if (i % 4 == 0) nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL); /* no engine writes without end */
    }
    return NULL;
}

static void test_stats(void **state) {
    struct pair pair = pair_open();
    struct engine_stats stats;
    pthread_t thread;
    int seen = 0;
    assert_false(link_stats(pair.front, &stats));
    atomic_store(&stats_end, false);
    assert_int_equal(pthread_create(&thread, NULL, stats_run, pair.engine), 0);
    for (int64_t until_ns = clock_now_ns() + NS_PER_SECOND / 2; clock_now_ns() < until_ns;) {
        if (!link_stats(pair.front, &stats)) continue;
        seen++;
        assert_true(stats.submitted == 2 * stats.steps && stats.finished[FINISH_ERROR] == 3 * stats.steps);
        assert_int_equal(stats.dead_text[0], 'a' + (int)(stats.steps % 26));
        assert_int_equal(stats.dead_text[400], stats.dead_text[0]);
    }
    atomic_store(&stats_end, true);
    pthread_join(thread, NULL);
    assert_true(seen > 10);
    pair_close(&pair);
}

static void test_state(void **state) {
    struct pair pair = pair_open();
    struct err err, why = {0};
    struct engine_info info = {.vocab = 5, .architecture = "llama"};
    int64_t step;
    assert_int_equal(link_phase(pair.front), LINK_STARTING);
    link_set_info(pair.engine, &info);
    link_set_phase(pair.engine, LINK_READY, NULL);
    assert_int_equal(link_phase(pair.front), LINK_READY);
    link_info(pair.front, &info);
    assert_string_equal(info.architecture, "llama");
    err_set_field(&why, ERR_UNSUPPORTED, "device", "there is none");
    link_set_phase(pair.engine, LINK_FAILED, &why);
    link_failure(pair.front, &err);
    assert_int_equal(err.code, ERR_UNSUPPORTED);
    assert_string_equal(err.field, "device");
    link_beat(pair.engine, 12, 7);
    assert_int_equal(link_heartbeat_ns(pair.front, &step), 12);
    assert_int_equal(step, 7);
    pair_close(&pair);
}

/* Whatever the other side writes over the page of state: no crash, and it is told. */
static void test_nonsense(void **state) {
    struct pair pair = pair_open();
    struct stat info;
    struct buf in = {0};
    struct err err;
    struct engine_stats stats;
    int fds[3];
    link_fds(pair.front, fds);
    assert_int_equal(fstat(fds[0], &info), 0);
    size_t bytes = (size_t)info.st_size - (5u << 20); /* all but the rings' data */
    char *shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0);
    assert_ptr_not_equal(shared, MAP_FAILED);
    memset(shared, 0x5a, bytes);
    assert_int_equal(link_phase(pair.front), LINK_DEAD);
    link_failure(pair.front, &err);
    assert_true(err.code < 0 && memchr(err.text, 0, sizeof err.text));
    link_stats(pair.front, &stats);
    memset(shared + bytes / 2, 0xff, bytes / 2);
    memset(shared, 0, 64);
    link_write(pair.front, "12345678", 8);
    link_read(pair.front, &in); /* true or false, but within its ring */
    assert_true(in.bytes <= 4u << 20);
    struct link *again;
    assert_int_equal(link_attach_local(pair.front, &again, &err), ERR_INVALID);
    munmap(shared, bytes);
    buf_deinit(&in);
    pair_close(&pair);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_both_ways), cmocka_unit_test(test_sleep),    cmocka_unit_test(test_stats),
        cmocka_unit_test(test_state),     cmocka_unit_test(test_nonsense),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
