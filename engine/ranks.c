/* ranks.c: rank threads and their jobs. The engine thread posts jobs to each further rank and does rank 0's part
 * itself; a rank does its jobs in the order in which they were posted.
 *
 * Invariants.
 * 1. At most JOBS jobs of a rank are posted and not done. A job is written before `posted` moves past it and read by
 * the rank alone until `done` moves past it.
 * 2. When ranks_launch or ranks_wait returns, every rank has taken in (host side) every batch launched so far, unless
 * an earlier step is still to be waited for: then the jobs behind it are done when that wait returns. So nothing that a
 *    batch points to is changed while a rank still has to read it.
 * 3. The first failure is kept, and ends all waiting between the ranks; every job after it but QUIET and CLOSE is
 *    passed over. Memory that other ranks may read is given back only when all ranks are quiet. */
#include "engine/ranks.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/base/arith.h"
#include "engine/base/check.h"
#include "engine/base/clock.h"
#include "engine/base/futex.h"
#include "engine/base/log.h"
#include "engine/base/mem.h"
#include "engine/batch_hash.h"
#include "engine/fault.h"

/* Launches of two steps and the wait for one of them; a power of two. */
enum { JOBS = 4 };
/* The host's work between two jobs of a rank is 10 to 100 us of a step of milliseconds: who waits longer sleeps, since
 * CPU ranks may be more than the processors. */
#define RANK_SPIN_NS ((int64_t)20000)
/* Who sleeps is woken: this only bounds what a time-out is late. */
#define RANK_NAP_NS (NS_PER_SECOND)
/* Until the weights are there, ranks wait for each other as long as a slow disk may keep one of them busy. */
#define LOAD_TIMEOUT_NS (30 * 60 * NS_PER_SECOND)

/* A count that one thread moves and another waits for. */
struct gate {
    _Alignas(64) _Atomic uint32_t count;
    _Atomic uint32_t sleeps;
};

enum job_kind { JOB_OPEN, JOB_LOAD, JOB_LAUNCH, JOB_WAIT, JOB_WARM, JOB_VOCAB, JOB_RECORD, JOB_QUIET, JOB_CLOSE };

struct job {
    enum job_kind kind;
    const struct batch *batch;           /* LAUNCH, WAIT */
    struct arena *arena;                 /* LAUNCH; NULL: the rank's own */
    struct model_files *files;           /* LOAD */
    const struct model_options *options; /* LOAD */
    int32_t vocab;                       /* VOCAB */
    /* What came of it. */
    const struct sample_result *results; /* WAIT */
    uint64_t results_hash;               /* WAIT */
    bool recorded;                       /* RECORD */
};

struct rank {
    struct ranks *ranks;
    int32_t index;
    struct backend *backend;
    struct comm *comm; /* NULL: the only rank */
    struct model *model;
    uint64_t launches;
    pthread_t thread; /* not of rank 0 */
    bool started;
    struct arena arenas[2]; /* used in turn, as the engine's; not of rank 0 */
    struct job jobs[JOBS];
    uint32_t taken; /* jobs; the rank's own */
    struct gate posted, done;
};

struct ranks {
    struct ranks_options options;
    int32_t count, threads; /* threads: CPU, of all ranks */
    struct comm_group *group;
    struct fault fault;
    struct backend_info info;
    uint64_t launched, waited; /* steps; engine thread */
    pthread_mutex_t mutex;     /* guards failure */
    atomic_bool failed;
    struct err failure; /* the first */
    struct rank rank[]; /* [count] */
};

/* ---- gates --------------------------------------------------------------------------------------------------------
 */

static void gate_move(struct gate *gate) {
    atomic_fetch_add(&gate->count, 1);
    if (atomic_load(&gate->sleeps)) futex_wake_all(&gate->count);
}

/* Until the count reaches `wanted`; false: not within timeout_ns. One waiting thread. */
static bool gate_await(struct gate *gate, uint32_t wanted, int64_t timeout_ns) {
    const int64_t begin_ns = clock_now_ns();
    for (;;) {
        uint32_t seen = atomic_load(&gate->count);
        if ((int32_t)(seen - wanted) >= 0) return true;
        int64_t waited_ns = clock_now_ns() - begin_ns;
        if (waited_ns < RANK_SPIN_NS) continue;
        if (waited_ns >= timeout_ns) return false;
        atomic_store(&gate->sleeps, 1);
        if (atomic_load(&gate->count) == seen)
            futex_wait(&gate->count, seen, i64_min(RANK_NAP_NS, timeout_ns - waited_ns));
        atomic_store(&gate->sleeps, 0);
    }
}

/* ---- failure ------------------------------------------------------------------------------------------------------
 */

/* Of the waiting that another rank's failure has ended. */
static bool is_consequence(const struct err *err) {
    return strcmp(err->field, COMM_ABORTED) == 0;
}

/* Keeps the first failure that is no consequence of another; all waiting of one rank for another ends. */
static void ranks_fail(struct ranks *ranks, int32_t rank, const struct err *why) {
    pthread_mutex_lock(&ranks->mutex);
    if (!atomic_load(&ranks->failed) || (is_consequence(&ranks->failure) && !is_consequence(why))) {
        ranks->failure = *why;
        if (ranks->count > 1 && why->code < ERR_EXHAUSTED && strncmp(why->text, "rank", 4) != 0)
            err_prefix(&ranks->failure, "rank %d", rank); /* a rank's fault, not that of what was asked for */
        atomic_store(&ranks->failed, true);
    }
    pthread_mutex_unlock(&ranks->mutex);
    comm_abort(ranks->group);
}

/* ---- one rank's part ----------------------------------------------------------------------------------------------
 */

static int rank_open(struct rank *rank, struct err *err) {
    struct ranks *ranks = rank->ranks;
    struct backend_options options = ranks->options.backend;
    const int32_t more = ranks->threads % ranks->count;
    if (options.device == DEVICE_AUTO && rank->index > 0) options.device = backend_info(ranks->rank[0].backend)->device;
    options.ordinal = ranks->options.ordinals[rank->index];
    if (ranks->count > 1) options.threads = (int32_t)i64_max(ranks->threads / ranks->count + (rank->index < more), 1);
    return backend_open(&options, &rank->backend, err);
}

static int rank_load(struct rank *rank, const struct job *job, struct err *err) {
    struct model_options options = *job->options;
    int rc = 0;
    options.limits.ranks = rank->ranks->count;
    if (rank->index > 0) options.alive_ns = NULL; /* one is enough: nobody gets far without the others */
    if (rank->ranks->count > 1) rc = comm_open(rank->ranks->group, rank->index, rank->backend, &rank->comm, err);
    options.comm = rank->comm;
    return rc ? rc : model_open(job->files, rank->backend, &options, &rank->model, err);
}

/* Has the fault that was asked for come? */
static bool rank_faulty(const struct rank *rank, enum fault_kind kind, uint64_t step) {
    return fault_comes(&rank->ranks->fault, kind, rank->index, step);
}

static int rank_launch(struct rank *rank, const struct job *job, struct err *err) {
    const uint64_t launch = ++rank->launches;
    struct arena *arena = job->arena;
    int rc = 0;
    if (!arena) {
        arena = &rank->arenas[launch & 1];
        arena_reset(arena);
    }
    if (rank_faulty(rank, FAULT_FAIL, launch))
        return err_set(err, ERR_FATAL, "a device call failed, as QUIRE_FAULT asked");
    if (rank_faulty(rank, FAULT_STALL, launch)) {
        const int64_t ns = rank->ranks->options.timeout_ns + rank->ranks->options.timeout_ns / 2;
        nanosleep(&(struct timespec){ns / NS_PER_SECOND, ns % NS_PER_SECOND}, NULL);
    }
    if (rank->comm) {
        const uint64_t hash = batch_hash(job->batch) ^ rank_faulty(rank, FAULT_BATCH, launch);
        rc = comm_agree(rank->comm, job->batch->step, hash, err);
    }
    return rc ? rc : model_launch(rank->model, job->batch, arena, err);
}

static int rank_wait(struct rank *rank, struct job *job, struct err *err) {
    int rc = model_wait(rank->model, job->batch, &job->results, err);
    if (rc || !rank->comm) return rc;
    job->results_hash = batch_results_hash(job->batch, job->results);
    job->results_hash ^= rank_faulty(rank, FAULT_RESULT, rank->launches);
    return 0;
}

static void rank_close(struct rank *rank) {
    model_close(rank->model);
    comm_close(rank->comm);
    backend_close(rank->backend);
    arena_deinit(&rank->arenas[0]);
    arena_deinit(&rank->arenas[1]);
}

static int job_do(struct rank *rank, struct job *job, struct err *err) {
    int rc = 0;
    if (atomic_load(&rank->ranks->failed) && job->kind < JOB_QUIET) return 0;
    switch (job->kind) {
    case JOB_OPEN:
        return rank_open(rank, err);
    case JOB_LOAD:
        return rank_load(rank, job, err);
    case JOB_LAUNCH:
        return rank_launch(rank, job, err);
    case JOB_WAIT:
        return rank_wait(rank, job, err);
    case JOB_WARM:
        return model_warm(rank->model, err);
    case JOB_VOCAB:
        return model_set_sample_vocab(rank->model, job->vocab, err);
    case JOB_RECORD:
        job->recorded = model_record_next(rank->model, &rc, err);
        return rc;
    case JOB_QUIET:
        if (rank->backend) backend_sync(rank->backend, NULL);
        return 0;
    case JOB_CLOSE:
        rank_close(rank);
        return 0;
    }
    return 0;
}

/* ---- threads ------------------------------------------------------------------------------------------------------
 */

static void job_run(struct rank *rank, struct job *job) {
    struct err err = {0};
    if (job_do(rank, job, &err)) ranks_fail(rank->ranks, rank->index, &err);
}

static void *rank_main(void *argument) {
    struct rank *rank = argument;
    for (bool open = true; open;) {
        while (!gate_await(&rank->posted, rank->taken + 1, RANK_NAP_NS)) continue;
        struct job *job = &rank->jobs[rank->taken++ % JOBS];
        open = job->kind != JOB_CLOSE;
        job_run(rank, job);
        gate_move(&rank->done);
    }
    return NULL;
}

static int rank_start(struct rank *rank, struct err *err) {
    sigset_t all, old;
    sigfillset(&all); /* signals go to the threads that asked for them */
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int rc = pthread_create(&rank->thread, NULL, rank_main, rank);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (rc) return err_set(err, ERR_IO, "cannot start the thread of rank %d: %s", rank->index, strerror(rc));
    rank->started = true;
    return 0;
}

/* The last job that was posted to a rank. */
static struct job *rank_last(struct rank *rank) {
    return &rank->jobs[(atomic_load(&rank->posted.count) - 1) % JOBS];
}

static void jobs_post(struct ranks *ranks, const struct job *job) {
    for (int32_t i = 1; i < ranks->count; i++) {
        struct rank *rank = &ranks->rank[i];
        uint32_t posted = atomic_load(&rank->posted.count);
        if (!rank->started) continue;
        CHECK(posted - atomic_load(&rank->done.count) < JOBS);
        rank->jobs[posted % JOBS] = *job;
        gate_move(&rank->posted);
    }
}

/* Until the other ranks have done all that was posted. False: one has not come in time; that is a failure then. */
static bool jobs_settle(struct ranks *ranks, int64_t timeout_ns) {
    bool settled = true;
    for (int32_t i = 1; i < ranks->count; i++) {
        struct rank *rank = &ranks->rank[i];
        struct err err;
        if (!rank->started || gate_await(&rank->done, atomic_load(&rank->posted.count), timeout_ns)) continue;
        err_set(&err, ERR_FATAL, "no answer within %.1f s", (double)timeout_ns * 1e-9);
        ranks_fail(ranks, i, &err);
        settled = false;
    }
    return settled;
}

/* The same job on every rank, side by side, until all have done it. */
static void jobs_all(struct ranks *ranks, struct job *job, int64_t timeout_ns) {
    jobs_post(ranks, job);
    job_run(&ranks->rank[0], job);
    jobs_settle(ranks, timeout_ns);
}

/* The failure, or 0. Where only a consequence is known, the cause is on its way. */
static int ranks_failure(struct ranks *ranks, struct err *err) {
    if (!atomic_load(&ranks->failed)) return 0;
    pthread_mutex_lock(&ranks->mutex);
    struct err why = ranks->failure;
    pthread_mutex_unlock(&ranks->mutex);
    if (is_consequence(&why)) {
        jobs_settle(ranks, ranks->options.timeout_ns);
        pthread_mutex_lock(&ranks->mutex);
        why = ranks->failure;
        pthread_mutex_unlock(&ranks->mutex);
    }
    if (err) *err = why;
    return why.code;
}

/* The same for a step: whatever it was, the engine has ended. */
static int ranks_fatal(struct ranks *ranks, struct err *err) {
    int rc = ranks_failure(ranks, err);
    if (rc && err) err->code = ERR_FATAL;
    return rc ? ERR_FATAL : 0;
}

/* ---- life ---------------------------------------------------------------------------------------------------------
 */

static int devices_check(const struct ranks *ranks, struct err *err) {
    const struct backend_info *first = backend_info(ranks->rank[0].backend);
    for (int32_t i = 1; i < ranks->count; i++) {
        const struct backend_info *info = backend_info(ranks->rank[i].backend);
        const int32_t a = ranks->options.ordinals[0], b = ranks->options.ordinals[i];
        if (info->device != first->device)
            return err_set_field(err, ERR_UNSUPPORTED, "device", "rank 0 and rank %d are not on devices of one kind",
                                 i);
        if (info->device == DEVICE_CUDA && (strcmp(info->name, first->name) != 0 || info->threads != first->threads))
            return err_set_field(err, ERR_UNSUPPORTED, "device",
                                 "the GPUs of one model must be alike: device %d is %s with %d multiprocessors, device "
                                 "%d is %s with %d",
                                 a, first->name, first->threads, b, info->name, info->threads);
    }
    return 0;
}

/* What all have: the least memory of each. */
static void info_join(struct ranks *ranks) {
    struct backend_info *all = &ranks->info;
    *all = *backend_info(ranks->rank[0].backend);
    for (int32_t i = 1; i < ranks->count; i++) {
        const struct backend_info *info = backend_info(ranks->rank[i].backend);
        if (info->memory_free_bytes < all->memory_free_bytes) all->memory_free_bytes = info->memory_free_bytes;
        if (info->memory_total_bytes < all->memory_total_bytes) all->memory_total_bytes = info->memory_total_bytes;
        if (all->device == DEVICE_CPU) all->threads += info->threads;
    }
}

static int options_check(const struct ranks_options *options, struct err *err) {
    if (options->count < 1 || options->count > COMM_RANKS_MAX)
        return err_set_field(err, ERR_INVALID, "tensor-parallel-size", "ranks must be 1 to %d, not %d", COMM_RANKS_MAX,
                             options->count);
    for (int32_t i = 0; options->backend.device != DEVICE_CPU && i < options->count; i++)
        for (int32_t k = 0; k < i; k++)
            if (options->ordinals[i] == options->ordinals[k])
                return err_set_field(err, ERR_UNSUPPORTED, "device", "ranks %d and %d are both to be on CUDA device %d",
                                     k, i, options->ordinals[i]);
    return 0;
}

static int group_make(struct ranks *ranks, struct err *err) {
    const struct comm_options options = {.ranks = ranks->count,
                                         .kind = ranks->options.comm,
                                         .timeout_ns = ranks->options.timeout_ns,
                                         .load_timeout_ns = LOAD_TIMEOUT_NS};
    int rc = comm_group_open(&options, &ranks->group, err);
    for (int32_t i = 1; rc == 0 && i < ranks->count; i++) rc = rank_start(&ranks->rank[i], err);
    return rc;
}

int ranks_open(const struct ranks_options *options, struct ranks **out, struct err *err) {
    int rc = options_check(options, err);
    if (rc) return rc;
    struct ranks *ranks = aligned_alloc(64, sizeof *ranks + (size_t)options->count * sizeof *ranks->rank);
    CHECK(ranks); /* some kilobytes */
    memset(ranks, 0, sizeof *ranks + (size_t)options->count * sizeof *ranks->rank);
    ranks->options = *options;
    ranks->count = options->count;
    ranks->threads = options->backend.threads ? options->backend.threads : backend_processors();
    pthread_mutex_init(&ranks->mutex, NULL);
    for (int32_t i = 0; i < ranks->count; i++) {
        ranks->rank[i].ranks = ranks;
        ranks->rank[i].index = i;
        arena_init(&ranks->rank[i].arenas[0]);
        arena_init(&ranks->rank[i].arenas[1]);
    }
    rc = fault_parse(getenv("QUIRE_FAULT"), &ranks->fault, err);
    if (rc == 0 && ranks->fault.kind) log_warning("a fault was asked for by QUIRE_FAULT", "rank=%d", ranks->fault.rank);
    if (rc == 0 && ranks->count > 1) rc = group_make(ranks, err);
    struct job job = {.kind = JOB_OPEN};
    if (rc == 0 && options->backend.device == DEVICE_AUTO) { /* which it is must be known first */
        job_run(&ranks->rank[0], &job);
        jobs_post(ranks, &job);
        jobs_settle(ranks, INT64_MAX);
    } else if (rc == 0) {
        jobs_all(ranks, &job, INT64_MAX);
    }
    if (rc == 0) rc = ranks_failure(ranks, err);
    if (rc == 0) rc = devices_check(ranks, err);
    if (rc) {
        ranks_close(ranks);
        return rc;
    }
    info_join(ranks);
    *out = ranks;
    return 0;
}

/* A rank that does not come to its end holds memory that others use: it is left behind, for the process's end. */
void ranks_close(struct ranks *ranks) {
    if (!ranks) return;
    struct job quiet = {.kind = JOB_QUIET}, end = {.kind = JOB_CLOSE};
    const int64_t timeout_ns = 2 * ranks->options.timeout_ns + NS_PER_SECOND;
    if (jobs_settle(ranks, timeout_ns)) jobs_all(ranks, &quiet, timeout_ns);
    if (!jobs_settle(ranks, timeout_ns)) {
        log_error("a rank does not end and is left behind", "ranks=%d", ranks->count);
        return;
    }
    jobs_all(ranks, &end, INT64_MAX);
    for (int32_t i = 1; i < ranks->count; i++)
        if (ranks->rank[i].started) pthread_join(ranks->rank[i].thread, NULL);
    comm_group_close(ranks->group);
    pthread_mutex_destroy(&ranks->mutex);
    free(ranks);
}

int ranks_load(struct ranks *ranks, struct model_files *files, const struct model_options *options, struct err *err) {
    struct job job = {.kind = JOB_LOAD, .files = files, .options = options};
    jobs_all(ranks, &job, INT64_MAX);
    if (ranks->group) comm_group_start(ranks->group);
    return ranks_failure(ranks, err);
}

int32_t ranks_count(const struct ranks *ranks) {
    return ranks->count;
}

struct backend *ranks_backend(const struct ranks *ranks) {
    return ranks->rank[0].backend;
}

void ranks_backend_info(const struct ranks *ranks, struct backend_info *out) {
    *out = ranks->info;
}

struct model *ranks_model(const struct ranks *ranks, int32_t rank) {
    return ranks->rank[rank].model;
}

const char *ranks_comm_name(const struct ranks *ranks) {
    return ranks->rank[0].comm ? comm_name(ranks->rank[0].comm) : "local";
}

/* ---- steps --------------------------------------------------------------------------------------------------------
 */

int ranks_launch(struct ranks *ranks, const struct batch *batch, struct arena *arena, struct err *err) {
    struct job job = {.kind = JOB_LAUNCH, .batch = batch};
    jobs_post(ranks, &job);
    job.arena = arena;
    job_run(&ranks->rank[0], &job);
    if (ranks->launched++ == ranks->waited) jobs_settle(ranks, ranks->options.timeout_ns);
    return ranks_fatal(ranks, err);
}

/* Rank 0's tokens are what counts; the others' must be the same. */
static void results_compare(struct ranks *ranks, const struct job *own) {
    for (int32_t i = 1; i < ranks->count && !atomic_load(&ranks->failed); i++) {
        const struct job *theirs = rank_last(&ranks->rank[i]);
        struct err err;
        if (theirs->results_hash == own->results_hash) continue;
        err_set(&err, ERR_FATAL, "step %llu drew other tokens than on rank 0: %016llx instead of %016llx",
                (unsigned long long)own->batch->step, (unsigned long long)theirs->results_hash,
                (unsigned long long)own->results_hash);
        ranks_fail(ranks, i, &err);
    }
}

int ranks_wait(struct ranks *ranks, const struct batch *batch, const struct sample_result **results, struct err *err) {
    struct job job = {.kind = JOB_WAIT, .batch = batch};
    jobs_all(ranks, &job, ranks->options.timeout_ns);
    ranks->waited++;
    results_compare(ranks, &job);
    *results = job.results;
    return ranks_fatal(ranks, err);
}

int ranks_warm(struct ranks *ranks, struct err *err) {
    struct job job = {.kind = JOB_WARM};
    jobs_all(ranks, &job, INT64_MAX);
    return ranks_failure(ranks, err);
}

int ranks_set_sample_vocab(struct ranks *ranks, int32_t vocab, struct err *err) {
    struct job job = {.kind = JOB_VOCAB, .vocab = vocab};
    jobs_all(ranks, &job, ranks->options.timeout_ns);
    return ranks_failure(ranks, err);
}

bool ranks_record_next(struct ranks *ranks, int *rc, struct err *err) {
    struct job job = {.kind = JOB_RECORD};
    jobs_all(ranks, &job, ranks->options.timeout_ns);
    *rc = ranks_fatal(ranks, err);
    return job.recorded;
}
