/* What the ranks of one engine share: a meeting point of threads, the record of what step each is at, and the flag that
 * ends all waiting.
 *
 * Invariants of the meeting: a rank's word of meeting g lies in words[g & 1]; it may be overwritten at meeting g + 2
 * only, which begins when every rank has come to g + 1, and so has read the words of g. */
#include <pthread.h>
#include <stdatomic.h>

#include "comm/comm_private.h"
#include "engine/base/check.h"
#include "engine/base/clock.h"
#include "engine/base/futex.h"
#include "engine/base/log.h"
#include "engine/base/mem.h"

/* Others come within some 10 us when each has a processor of its own; where there are fewer processors than ranks, to
 * sleep is the only way that they come at all. */
#define MEET_SPIN_NS ((int64_t)20000)
/* An abort between the look at the flag and the sleep would be missed: no sleep is longer. */
#define MEET_NAP_NS (20 * NS_PER_MS)
/* Steps whose hashes are kept: a rank is at most two steps ahead of another. */
enum { AGREE_STEPS = 8 };

struct agreed {
    _Atomic uint64_t step, hash;
};

struct comm_group {
    struct comm_options options;
    _Atomic uint32_t generation; /* meetings so far; the sleepers' futex */
    _Atomic uint32_t arrived;
    atomic_bool aborted, started;
    _Atomic uint64_t words[2][COMM_RANKS_MAX];
    struct agreed agreed[COMM_RANKS_MAX][AGREE_STEPS];
    pthread_mutex_t mutex; /* guards ends */
    struct comm *ends[COMM_RANKS_MAX];
};

int comm_group_open(const struct comm_options *options, struct comm_group **out, struct err *err) {
    if (options->ranks < 1 || options->ranks > COMM_RANKS_MAX)
        return err_set(err, ERR_INVALID, "ranks must be 1 to %d, not %d", COMM_RANKS_MAX, options->ranks);
    struct comm_group *group = mem_zalloc(1, sizeof *group);
    group->options = *options;
    pthread_mutex_init(&group->mutex, NULL);
    *out = group;
    return 0;
}

void comm_group_close(struct comm_group *group) {
    if (!group) return;
    pthread_mutex_destroy(&group->mutex);
    mem_free(group);
}

const struct comm_options *group_options(const struct comm_group *group) {
    return &group->options;
}

void comm_group_start(struct comm_group *group) {
    atomic_store(&group->started, true);
}

bool group_aborted(const struct comm_group *group) {
    return atomic_load(&group->aborted);
}

static int aborted_say(struct err *err) {
    return err_set_field(err, ERR_FATAL, COMM_ABORTED, "another rank has failed");
}

static int64_t timeout_of(const struct comm_group *group) {
    const struct comm_options *o = &group->options;
    return o->load_timeout_ns && !atomic_load(&group->started) ? o->load_timeout_ns : o->timeout_ns;
}

/* Until meeting `generation` is over. */
static int meeting_await(struct comm_group *group, int32_t rank, uint32_t generation, struct err *err) {
    const int64_t begin_ns = clock_now_ns();
    while (atomic_load(&group->generation) == generation) {
        int64_t waited_ns = clock_now_ns() - begin_ns;
        if (group_aborted(group)) return aborted_say(err);
        if (waited_ns < MEET_SPIN_NS) continue;
        if (waited_ns > timeout_of(group)) {
            comm_abort(group);
            return err_set(err, ERR_FATAL, "rank %d waited %.1f s for the other ranks: %u of %d came", rank,
                           (double)waited_ns * 1e-9, atomic_load(&group->arrived), group->options.ranks);
        }
        futex_wait(&group->generation, generation, MEET_NAP_NS);
    }
    return 0;
}

int group_meet(struct comm_group *group, int32_t rank, uint64_t word, uint64_t *out, struct err *err) {
    if (group_aborted(group)) return aborted_say(err);
    const uint32_t generation = atomic_load(&group->generation);
    _Atomic uint64_t *words = group->words[generation & 1];
    atomic_store(&words[rank], word);
    if (atomic_fetch_add(&group->arrived, 1) + 1 == (uint32_t)group->options.ranks) {
        atomic_store(&group->arrived, 0);
        atomic_store(&group->generation, generation + 1);
        futex_wake_all(&group->generation);
    } else {
        int rc = meeting_await(group, rank, generation, err);
        if (rc) return rc;
    }
    for (int32_t i = 0; out && i < group->options.ranks; i++) out[i] = atomic_load(&words[i]);
    return 0;
}

/* Nobody waits: whoever comes last sees all the others, and says what it sees. */
int comm_agree(struct comm *comm, uint64_t step, uint64_t hash, struct err *err) {
    struct comm_group *group = comm->group;
    if (comm->ranks == 1) return 0;
    if (group_aborted(group)) return aborted_say(err);
    struct agreed *own = &group->agreed[comm->rank][step % AGREE_STEPS];
    atomic_store(&own->hash, hash);
    atomic_store(&own->step, step);
    for (int32_t i = 0; i < comm->ranks; i++) {
        struct agreed *other = &group->agreed[i][step % AGREE_STEPS];
        const uint64_t at = atomic_load(&other->step);
        if (at < step) continue; /* has not come yet: it will look here */
        const uint64_t theirs = atomic_load(&other->hash);
        if (at == step && theirs == hash) continue;
        comm_abort(group);
        return err_set(err, ERR_FATAL,
                       "ranks disagree: rank %d is at step %llu with batch %016llx, rank %d at step %llu with %016llx",
                       comm->rank, (unsigned long long)step, (unsigned long long)hash, i, (unsigned long long)at,
                       (unsigned long long)theirs);
    }
    return 0;
}

void group_enter(struct comm_group *group, struct comm *comm) {
    pthread_mutex_lock(&group->mutex);
    group->ends[comm->rank] = comm;
    pthread_mutex_unlock(&group->mutex);
}

void group_leave(struct comm_group *group, struct comm *comm) {
    pthread_mutex_lock(&group->mutex);
    group->ends[comm->rank] = NULL;
    pthread_mutex_unlock(&group->mutex);
}

void comm_abort(struct comm_group *group) {
    if (!group || atomic_exchange(&group->aborted, true)) return;
    futex_wake_all(&group->generation);
    pthread_mutex_lock(&group->mutex);
    for (int32_t i = 0; i < group->options.ranks; i++)
        if (group->ends[i] && group->ends[i]->table->abort) group->ends[i]->table->abort(group->ends[i]);
    pthread_mutex_unlock(&group->mutex);
}
