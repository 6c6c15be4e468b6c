#include "kernels/cpu/team.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "engine/base/check.h"
#include "engine/base/clock.h"
#include "engine/base/mem.h"

/* How long a thread spins before it sleeps. The gap between two ops of a forward pass is 1 to 10 us of serial work, and
 * a tile takes 10 to 30 us: who waits longer waits for a thread that has lost its processor, and sleeping lets the
 * kernel use this one (decode beside a busy process: 0.48 of its lone speed with 60 us, 0.57 with 20; Zen 3, 2
 * threads). */
#define TEAM_SPIN_NS ((int64_t)20000)

/* A worker gives way to whoever else wants its processor between two tiles, so often that the kernel seldom has to take
 * it away in the middle of one, for which everybody would wait until the worker's next turn (a slice of 3 ms). Alone on
 * its processor that is a system call of 0.3 us each 700. Beside a busy process: 0.65 of the lone speed, 0.57 without.
 */
#define TEAM_TURN_NS ((int64_t)700000)

/* Reading the clock costs 25 ns and a pause 10 to 140 cycles: look at the clock once in so many pauses. */
#define TEAM_SPIN_BURST 32

#define CACHE_LINE 64

struct worker {
    struct team *team;
    pthread_t thread;
    int32_t index;
    int64_t turn_ns; /* when it last gave way */
};

/* Invariants.
 * 1. fn, ctx and done are written by the caller of team_run alone, and only while no tile is claimed and not yet done.
 * 2. A worker reads fn and ctx only between claiming a tile and adding it to done.
 * 3. `state` holds tiles << 32 | next; a tile is claimed by a compare-and-swap that moves next below tiles. A worker
 * late by a whole job can therefore only claim a tile of the job that is current. */
struct team {
    _Alignas(CACHE_LINE) _Atomic uint64_t state;
    team_fn *fn;
    void *ctx;
    _Alignas(CACHE_LINE) _Atomic uint32_t done; /* tiles of the job that are finished; the caller's futex */
    _Atomic uint32_t caller_sleeps;
    _Alignas(CACHE_LINE) _Atomic uint32_t jobs; /* count of jobs published; the workers' futex */
    _Atomic uint32_t sleepers;
    _Atomic bool stop;
    int32_t threads, started;
    struct worker *workers; /* [threads - 1] */
};

static void futex_wait(_Atomic uint32_t *word, uint32_t seen) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static void futex_wake_all(_Atomic uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

static inline void spin_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static bool state_has_tiles(uint64_t state) {
    return (uint32_t)state < (uint32_t)(state >> 32);
}

/* Takes the next tile; false when there is none. */
static bool tile_claim(struct team *team, uint32_t *tile, uint32_t *tiles) {
    uint64_t state = atomic_load_explicit(&team->state, memory_order_acquire);
    while (state_has_tiles(state)) {
        if (atomic_compare_exchange_weak_explicit(&team->state, &state, state + 1, memory_order_acq_rel,
                                                  memory_order_acquire)) {
            *tile = (uint32_t)state;
            *tiles = (uint32_t)(state >> 32);
            return true;
        }
    }
    return false;
}

static void tile_do(struct team *team, int32_t worker, uint32_t tile, uint32_t tiles) {
    team->fn(team->ctx, tile, worker);
    uint32_t done = atomic_fetch_add_explicit(&team->done, 1, memory_order_seq_cst) + 1;
    if (done == tiles && worker != 0 && atomic_load_explicit(&team->caller_sleeps, memory_order_seq_cst))
        futex_wake_all(&team->done);
}

/* Does tiles until there are none left, and gives way now and then. The caller of team_run does not: everybody needs
 * it. */
static void tiles_run(struct worker *worker) {
    uint32_t tile, tiles;
    while (tile_claim(worker->team, &tile, &tiles)) {
        tile_do(worker->team, worker->index, tile, tiles);
        if (clock_now_ns() - worker->turn_ns < TEAM_TURN_NS) continue;
        sched_yield();
        worker->turn_ns = clock_now_ns();
    }
}

/* Waits for tiles: spins for TEAM_SPIN_NS, then sleeps. False when the team closes. */
static bool tiles_await(struct team *team) {
    int64_t deadline_ns = 0;
    for (uint32_t spins = 1;; spins++) {
        if (state_has_tiles(atomic_load_explicit(&team->state, memory_order_acquire))) return true;
        if (atomic_load_explicit(&team->stop, memory_order_acquire)) return false;
        spin_pause();
        if (spins % TEAM_SPIN_BURST) continue;
        int64_t now_ns = clock_now_ns();
        if (!deadline_ns) deadline_ns = now_ns + TEAM_SPIN_NS;
        if (now_ns >= deadline_ns) break;
    }
    uint32_t seen = atomic_load_explicit(&team->jobs, memory_order_seq_cst);
    atomic_fetch_add_explicit(&team->sleepers, 1, memory_order_seq_cst);
    if (!state_has_tiles(atomic_load_explicit(&team->state, memory_order_seq_cst)) &&
        !atomic_load_explicit(&team->stop, memory_order_seq_cst))
        futex_wait(&team->jobs, seen);
    atomic_fetch_sub_explicit(&team->sleepers, 1, memory_order_seq_cst);
    return true;
}

static void *worker_main(void *arg) {
    struct worker *worker = arg;
    while (tiles_await(worker->team)) tiles_run(worker);
    return NULL;
}

/* Waits until every tile is done. Sleeping early matters when another process holds the processor of a worker that has
 * a tile: the sleep frees this processor, and the kernel moves the worker over. */
static void done_await(struct team *team, uint32_t tiles) {
    int64_t deadline_ns = 0;
    for (uint32_t spins = 1; atomic_load_explicit(&team->done, memory_order_acquire) != tiles; spins++) {
        spin_pause();
        if (spins % TEAM_SPIN_BURST) continue;
        int64_t now_ns = clock_now_ns();
        if (!deadline_ns) deadline_ns = now_ns + TEAM_SPIN_NS;
        if (now_ns < deadline_ns) continue;
        atomic_store_explicit(&team->caller_sleeps, 1, memory_order_seq_cst);
        uint32_t seen = atomic_load_explicit(&team->done, memory_order_seq_cst);
        if (seen != tiles) futex_wait(&team->done, seen);
        atomic_store_explicit(&team->caller_sleeps, 0, memory_order_seq_cst);
    }
}

void team_run(struct team *team, team_fn *fn, void *ctx, int64_t tiles) {
    if (team->threads == 1 || tiles < 2) {
        for (int64_t tile = 0; tile < tiles; tile++) fn(ctx, tile, 0);
        return;
    }
    CHECK(tiles < (int64_t)1 << 31);
    team->fn = fn;
    team->ctx = ctx;
    atomic_store_explicit(&team->done, 0, memory_order_relaxed);
    atomic_store_explicit(&team->state, (uint64_t)tiles << 32, memory_order_seq_cst);
    atomic_fetch_add_explicit(&team->jobs, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&team->sleepers, memory_order_seq_cst)) futex_wake_all(&team->jobs);
    uint32_t tile, count;
    while (tile_claim(team, &tile, &count)) tile_do(team, 0, tile, count);
    done_await(team, (uint32_t)tiles);
}

int32_t team_threads(const struct team *team) {
    return team->threads;
}

/* Signals go to the threads that asked for them: the team takes none. */
static int worker_start(struct worker *worker) {
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int rc = pthread_create(&worker->thread, NULL, worker_main, worker);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return rc;
}

int team_open(int32_t threads, struct team **out, struct err *err) {
    if (threads < 1 || threads > TEAM_THREADS_MAX)
        return err_set_field(err, ERR_INVALID, "threads", "threads must be 1 to %d, not %d", TEAM_THREADS_MAX, threads);
    struct team *team = aligned_alloc(CACHE_LINE, sizeof *team);
    if (!team) return err_set(err, ERR_NOMEM, "no memory for the team of %d threads", threads);
    memset(team, 0, sizeof *team);
    team->threads = threads;
    team->workers = mem_zalloc((size_t)threads, sizeof *team->workers);
    for (int32_t i = 1; i < threads; i++) {
        struct worker *worker = &team->workers[i - 1];
        worker->team = team;
        worker->index = i;
        int rc = worker_start(worker);
        if (rc) {
            team_close(team);
            return err_set(err, ERR_IO, "cannot start thread %d of %d: %s", i + 1, threads, strerror(rc));
        }
        team->started++;
    }
    *out = team;
    return 0;
}

void team_close(struct team *team) {
    if (!team) return;
    atomic_store_explicit(&team->stop, true, memory_order_seq_cst);
    atomic_fetch_add_explicit(&team->jobs, 1, memory_order_seq_cst);
    futex_wake_all(&team->jobs);
    for (int32_t i = 0; i < team->started; i++) pthread_join(team->workers[i].thread, NULL);
    mem_free(team->workers);
    free(team);
}
