/* Collectives: every rank gets the same bits, which are the sum in the order of the ranks; a rank that fails, is
 * missing or is elsewhere ends all the others in bounded time. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "comm/comm.h"
#include "engine/base/clock.h"
#include "engine/base/mem.h"

enum { RANKS_MAX = 8, BLOCK_FLOATS = 1 << 16, ROUNDS = 40, DIM = 96 };

struct world;

struct member {
    struct world *world;
    int32_t rank;
    pthread_t thread;
    struct backend *backend;
    struct comm *comm;
    float *block; /* [BLOCK_FLOATS] */
    int rc;
    struct err err;
    int64_t ended_ns;
};

struct world {
    struct comm_group *group;
    int32_t ranks;
    int (*body)(struct member *member, struct err *err);
    struct member members[RANKS_MAX];
};

static void *member_main(void *argument) {
    struct member *m = argument;
    const struct backend_options options = {.device = DEVICE_CPU, .threads = 1};
    m->rc = backend_open(&options, &m->backend, &m->err);
    m->block = mem_zalloc(BLOCK_FLOATS, sizeof *m->block);
    if (!m->rc) m->rc = comm_open(m->world->group, m->rank, m->backend, &m->comm, &m->err);
    if (!m->rc) m->rc = comm_share(m->comm, m->block, BLOCK_FLOATS * sizeof *m->block, &m->err);
    if (!m->rc) m->rc = comm_warm(m->comm, &m->err);
    if (!m->rc) m->rc = m->world->body(m, &m->err);
    m->ended_ns = clock_now_ns();
    return NULL;
}

static void world_run_with(struct world *w, const struct comm_options *options,
                           int (*body)(struct member *, struct err *)) {
    const int32_t ranks = options->ranks;
    struct err err = {0};
    memset(w, 0, sizeof *w);
    w->ranks = ranks;
    w->body = body;
    assert_int_equal(comm_group_open(options, &w->group, &err), 0);
    for (int32_t i = 0; i < ranks; i++) {
        w->members[i] = (struct member){.world = w, .rank = i};
        assert_int_equal(pthread_create(&w->members[i].thread, NULL, member_main, &w->members[i]), 0);
    }
    for (int32_t i = 0; i < ranks; i++) pthread_join(w->members[i].thread, NULL);
}

static void world_run(struct world *w, int32_t ranks, int64_t timeout_ns, int (*body)(struct member *, struct err *)) {
    world_run_with(w, &(struct comm_options){.ranks = ranks, .timeout_ns = timeout_ns}, body);
}

static void world_end(struct world *w) {
    for (int32_t i = 0; i < w->ranks; i++) {
        comm_close(w->members[i].comm);
        backend_close(w->members[i].backend);
        mem_free(w->members[i].block);
    }
    comm_group_close(w->group);
}

/* What rank `rank` brings at place `i` of round `round`: sums of it depend on their order. */
static float value(int32_t rank, int32_t round, int64_t i) {
    uint32_t h = (uint32_t)(rank * 7919 + round * 104729) + (uint32_t)i * 2654435761u;
    h ^= h >> 15;
    h *= 2246822519u;
    return (float)(int32_t)(h >> 8) * 1e-5f + (float)rank * 0.3f;
}

static float sum_of(int32_t ranks, int32_t round, int64_t i) {
    float sum = value(0, round, i);
    for (int32_t r = 1; r < ranks; r++) sum += value(r, round, i);
    return sum;
}

static void nap(int32_t rank, int32_t round) {
    const struct timespec ts = {.tv_nsec = (rank * 31 + round * 17) % 5 * 50000};
    if (ts.tv_nsec) nanosleep(&ts, NULL);
}

#define WANT(condition, ...)                                                                                           \
    do {                                                                                                               \
        if (!(condition)) return err_set(err, ERR_INVALID, __VA_ARGS__);                                               \
    } while (0)

static int reduce_body(struct member *m, struct err *err) {
    static const int64_t counts[] = {1, 15, 16, 17, 100, 4096, 20000};
    float *in = m->block, *out = m->block + BLOCK_FLOATS / 2;
    for (int32_t round = 0; round < ROUNDS; round++) {
        const int64_t count = counts[round % 7];
        float *to = round & 1 ? in : out; /* in place and apart */
        for (int64_t i = 0; i < count; i++) in[i] = value(m->rank, round, i);
        nap(m->rank, round);
        const struct comm_all_reduce_args args = {in, to, count};
        int rc = comm_all_reduce(m->comm, &args, err);
        if (rc) return rc;
        for (int64_t i = 0; i < count; i++)
            WANT(to[i] == sum_of(m->world->ranks, round, i), "round %d, value %lld: %g", round, (long long)i,
                 (double)to[i]);
    }
    return 0;
}

static int gather_body(struct member *m, struct err *err) {
    const int64_t cols = 37, stride = cols * m->world->ranks;
    for (int32_t round = 0; round < ROUNDS; round++) {
        const int64_t rows = round % 5 + 1;
        for (int64_t i = 0; i < rows * cols; i++)
            m->block[i / cols * stride + m->rank * cols + i % cols] = value(m->rank, round, i);
        nap(m->rank, round);
        const struct comm_gather_args args = {m->block, rows, cols};
        int rc = comm_all_gather(m->comm, &args, err);
        if (rc) return rc;
        for (int32_t r = 0; r < m->world->ranks; r++)
            for (int64_t i = 0; i < rows * cols; i++)
                WANT(m->block[i / cols * stride + r * cols + i % cols] == value(r, round, i), "round %d, rank %d",
                     round, r);
        /* Others may write theirs only behind another collective. */
        const struct comm_all_reduce_args sum = {m->block + BLOCK_FLOATS / 2, m->block + BLOCK_FLOATS / 2, 16};
        if ((rc = comm_all_reduce(m->comm, &sum, err))) return rc;
    }
    return 0;
}

/* Against the same done by hand in double precision. */
static int norm_body(struct member *m, struct err *err) {
    float *delta = m->block, *x = m->block + 8192, *out = m->block + 16384, weight[DIM];
    double want_x[DIM], square;
    for (int32_t i = 0; i < DIM; i++) weight[i] = 0.5f + (float)i * 0.01f;
    for (int32_t round = 0; round < 12; round++) {
        const int64_t rows = round % 4 + 1;
        for (int64_t i = 0; i < rows * DIM; i++) {
            delta[i] = value(m->rank, round, i) * 1e-3f;
            x[i] = value(9, round, i) * 1e-3f;
        }
        nap(m->rank, round);
        const struct comm_reduce_norm_args args = {delta, x, weight, out, rows, DIM, 1e-5f, 0.25f};
        int rc = comm_reduce_norm(m->comm, &args, err);
        if (rc) return rc;
        for (int64_t row = 0; row < rows; row++) {
            square = 0;
            for (int32_t i = 0; i < DIM; i++) {
                want_x[i] = value(9, round, row * DIM + i) * 1e-3f;
                for (int32_t r = 0; r < m->world->ranks; r++) want_x[i] += value(r, round, row * DIM + i) * 1e-3f;
                square += want_x[i] * want_x[i];
            }
            double scale = 1 / __builtin_sqrt(square / DIM + 1e-5);
            for (int32_t i = 0; i < DIM; i++) {
                double off_x = want_x[i] - (double)x[row * DIM + i];
                double off = want_x[i] * scale * ((double)weight[i] + 0.25) - (double)out[row * DIM + i];
                WANT(__builtin_fabs(off_x) < 1e-4 && __builtin_fabs(off) < 1e-4, "round %d row %lld: off by %g and %g",
                     round, (long long)row, off_x, off);
            }
        }
    }
    return 0;
}

static void all_pass(struct world *w) {
    for (int32_t i = 0; i < w->ranks; i++)
        if (w->members[i].rc) fail_msg("rank %d of %d: %s", i, w->ranks, w->members[i].err.text);
}

static void for_each_size(int (*body)(struct member *, struct err *)) {
    static const int32_t sizes[] = {2, 3, 4, 8};
    struct world w;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        world_run(&w, sizes[i], 20 * NS_PER_SECOND, body);
        all_pass(&w);
        world_end(&w);
    }
}

static void test_all_reduce(void **state) {
    (void)state;
    for_each_size(reduce_body);
}

static void test_all_gather(void **state) {
    (void)state;
    for_each_size(gather_body);
}

static void test_reduce_norm(void **state) {
    (void)state;
    for_each_size(norm_body);
}

/* ---- faults ---------------------------------------------------------------------------------------------------------
 */

static int late_body(struct member *m, struct err *err) {
    const struct comm_all_reduce_args args = {m->block, m->block, 64};
    if (m->rank == 1) return err_set(err, ERR_IO, "this rank does not come");
    return comm_all_reduce(m->comm, &args, err);
}

static void test_missing_rank(void **state) {
    (void)state;
    struct world w;
    const int64_t begin_ns = clock_now_ns();
    world_run(&w, 3, NS_PER_SECOND / 5, late_body);
    assert_int_equal(w.members[1].rc, ERR_IO);
    for (int32_t i = 0; i < 3; i += 2) {
        assert_int_equal(w.members[i].rc, ERR_FATAL);
        assert_true(w.members[i].ended_ns - begin_ns > NS_PER_SECOND / 6);
        assert_true(w.members[i].ended_ns - begin_ns < 5 * NS_PER_SECOND);
    }
    world_end(&w);
}

/* While the weights load, others are waited for longer; from comm_group_start on no more. */
static int slow_body(struct member *m, struct err *err) {
    const struct timespec ts = {.tv_nsec = 400000000};
    const struct comm_all_reduce_args args = {m->block, m->block, 64};
    if (m->rank == 1) nanosleep(&ts, NULL);
    int rc = comm_all_reduce(m->comm, &args, err);
    if (rc) return rc;
    comm_group_start(m->world->group);
    if (m->rank == 1) nanosleep(&ts, NULL);
    rc = comm_all_reduce(m->comm, &args, err);
    WANT(rc == ERR_FATAL, "the second wait was too long and gave %d", rc);
    return 0;
}

static void test_load_timeout(void **state) {
    (void)state;
    struct world w;
    const struct comm_options options = {
        .ranks = 3, .timeout_ns = NS_PER_SECOND / 10, .load_timeout_ns = 60 * NS_PER_SECOND};
    world_run_with(&w, &options, slow_body);
    all_pass(&w);
    world_end(&w);
}

static int abort_body(struct member *m, struct err *err) {
    const struct timespec ts = {.tv_nsec = 30000000};
    const struct comm_all_reduce_args args = {m->block, m->block, 64};
    if (m->rank != 0) return comm_all_reduce(m->comm, &args, err);
    nanosleep(&ts, NULL);
    comm_abort(m->world->group);
    return comm_all_reduce(m->comm, &args, err); /* and never again */
}

static void test_abort(void **state) {
    (void)state;
    struct world w;
    const int64_t begin_ns = clock_now_ns();
    world_run(&w, 4, 60 * NS_PER_SECOND, abort_body);
    for (int32_t i = 0; i < 4; i++) {
        assert_int_equal(w.members[i].rc, ERR_FATAL);
        assert_true(w.members[i].ended_ns - begin_ns < 5 * NS_PER_SECOND);
    }
    world_end(&w);
}

static int agree_body(struct member *m, struct err *err) {
    const struct comm_all_reduce_args args = {m->block, m->block, 64};
    for (uint64_t step = 1; step < 200; step++) {
        int rc = comm_agree(m->comm, step, step * 77 + (step == 150 && m->rank == 2), err);
        if (rc == 0) rc = comm_all_reduce(m->comm, &args, err);
        if (rc) return rc;
    }
    return 0;
}

static void test_disagreement(void **state) {
    (void)state;
    struct world w;
    int32_t told = 0;
    world_run(&w, 3, 60 * NS_PER_SECOND, agree_body);
    for (int32_t i = 0; i < 3; i++) {
        assert_int_equal(w.members[i].rc, ERR_FATAL);
        told += strstr(w.members[i].err.text, "ranks disagree") != NULL;
    }
    assert_true(told >= 1);
    world_end(&w);
}

static void test_one_rank(void **state) {
    (void)state;
    struct comm *comm;
    struct err err = {0};
    assert_int_equal(comm_open_local(&comm, &err), 0);
    assert_int_equal(comm_ranks(comm), 1);
    assert_int_equal(comm_rank(comm), 0);
    assert_string_equal(comm_name(comm), "local");
    assert_int_equal(comm_agree(comm, 7, 7, &err), 0);
    comm_close(comm);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_rank),     cmocka_unit_test(test_all_reduce),   cmocka_unit_test(test_all_gather),
        cmocka_unit_test(test_reduce_norm),  cmocka_unit_test(test_missing_rank), cmocka_unit_test(test_abort),
        cmocka_unit_test(test_load_timeout), cmocka_unit_test(test_disagreement),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
