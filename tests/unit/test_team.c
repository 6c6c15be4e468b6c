/* The team: every tile once, nothing lost between sleeping and waking, no processor used when idle. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdatomic.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#include "engine/base/clock.h"
#include "kernels/cpu/team.h"

enum { TILES_MAX = 512 };

struct marks {
    int32_t count[TILES_MAX]; /* plain: two workers on one tile would be a race that the thread sanitizer sees */
    _Atomic int32_t total;
    int32_t threads;
    int64_t sum; /* written by the caller between jobs, read by every tile */
};

static void tile_mark(void *ctx, int64_t tile, int32_t worker) {
    struct marks *marks = ctx;
    assert_true(worker >= 0 && worker < marks->threads);
    marks->count[tile] += 1 + (int32_t)marks->sum;
    atomic_fetch_add(&marks->total, 1);
}

static void nap_us(long us) {
    struct timespec nap = {.tv_sec = 0, .tv_nsec = us * 1000};
    nanosleep(&nap, NULL);
}

/* Many small jobs of changing size; now and then a pause around the spinning limit, so that workers are caught
 * spinning, going to sleep, and asleep. */
static void stress(int32_t threads, int jobs) {
    struct err err;
    struct team *team;
    struct marks marks;
    assert_int_equal(team_open(threads, &team, &err), 0);
    assert_int_equal(team_threads(team), threads);
    uint32_t random = 12345;
    for (int job = 0; job < jobs; job++) {
        random = random * 1664525u + 1013904223u;
        int32_t tiles = (int32_t)(random >> 16) % (job % 7 == 0 ? TILES_MAX : 9);
        memset(marks.count, 0, sizeof marks.count);
        atomic_store(&marks.total, 0);
        marks.threads = threads;
        marks.sum = job % 3;
        team_run(team, tile_mark, &marks, tiles);
        assert_int_equal(atomic_load(&marks.total), tiles);
        for (int32_t i = 0; i < TILES_MAX; i++) assert_int_equal(marks.count[i], i < tiles ? 1 + job % 3 : 0);
        if (job % 97 == 0) nap_us(50 + job % 40);
    }
    team_close(team);
}

static void test_every_tile_once(void **state) {
    stress(1, 300);
    stress(2, 4000);
    stress(5, 1500);
    stress(16, 300);
}

static void test_open_close(void **state) {
    struct err err;
    struct team *team;
    for (int32_t i = 0; i < 30; i++) {
        assert_int_equal(team_open(1 + i % 6, &team, &err), 0);
        team_close(team);
    }
    assert_int_equal(team_open(0, &team, &err), ERR_INVALID);
    assert_int_equal(team_open(TEAM_THREADS_MAX + 1, &team, &err), ERR_INVALID);
}

static int64_t process_cpu_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * NS_PER_SECOND + t.tv_nsec;
}

static void test_idle_uses_no_processor(void **state) {
    struct err err;
    struct team *team;
    struct marks marks = {.threads = 4};
    assert_int_equal(team_open(4, &team, &err), 0);
    team_run(team, tile_mark, &marks, 100);
    nap_us(20000); /* let the bounded spin end */
    int64_t before_ns = process_cpu_ns();
    nap_us(200000);
    assert_true(process_cpu_ns() - before_ns < 10 * NS_PER_MS);
    team_close(team);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_tile_once),
        cmocka_unit_test(test_open_close),
        cmocka_unit_test(test_idle_uses_no_processor),
    };
    return cmocka_run_group_tests_name("team", tests, NULL, NULL);
}
