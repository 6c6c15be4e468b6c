/* CPU ranks: threads of one process that read each other's memory. A collective is two meetings with work in between:
 * all values are there, everybody does its share, all shares are done. */
#include <string.h>

#include "comm/comm_private.h"
#include "engine/base/check.h"
#include "engine/base/mem.h"

struct shm {
    struct comm head;
    unsigned char *bases[COMM_RANKS_MAX]; /* every rank's shared block */
    size_t bytes;
};

static struct shm *shm_of(struct comm *comm) {
    return (struct shm *)(void *)comm;
}

/* What lies on rank `rank` where p lies here. */
static void *peer(const struct shm *shm, int32_t rank, const void *p) {
    const size_t at = (size_t)((const unsigned char *)p - shm->bases[shm->head.rank]);
    CHECK(at < shm->bytes);
    return shm->bases[rank] + at;
}

static void shm_close(struct comm *comm) {
    mem_free(comm);
}

static int shm_share(struct comm *comm, void *base, size_t bytes, struct err *err) {
    struct shm *shm = shm_of(comm);
    uint64_t words[COMM_RANKS_MAX];
    shm->bytes = bytes;
    int rc = group_meet(comm->group, comm->rank, (uint64_t)(uintptr_t)base, words, err);
    for (int32_t i = 0; rc == 0 && i < comm->ranks; i++) shm->bases[i] = (unsigned char *)(uintptr_t)words[i];
    return rc;
}

/* The values that this rank sums for everybody: [*begin, *end). In whole cache lines, so that no two ranks write one.
 */
static void share_of(const struct comm *comm, int64_t count, int64_t *begin, int64_t *end) {
    const int64_t line = 16, lines = (count + line - 1) / line;
    *begin = lines * comm->rank / comm->ranks * line;
    *end = lines * (comm->rank + 1) / comm->ranks * line;
    if (*begin > count) *begin = count;
    if (*end > count) *end = count;
}

enum { SUM_BLOCK = 256 };

/* Nobody else reads or writes this share between the two meetings, so `out` may be `in`. */
static void share_sum(const struct shm *shm, const struct comm_all_reduce_args *args, int64_t begin, int64_t end) {
    float sum[SUM_BLOCK];
    for (int64_t at = begin; at < end; at += SUM_BLOCK) {
        const int64_t count = end - at < SUM_BLOCK ? end - at : SUM_BLOCK;
        memcpy(sum, (const float *)peer(shm, 0, args->in) + at, (size_t)count * sizeof *sum);
        for (int32_t r = 1; r < shm->head.ranks; r++) {
            const float *theirs = (const float *)peer(shm, r, args->in) + at;
            for (int64_t i = 0; i < count; i++) sum[i] += theirs[i];
        }
        for (int32_t r = 0; r < shm->head.ranks; r++)
            memcpy((float *)peer(shm, r, args->out) + at, sum, (size_t)count * sizeof *sum);
    }
}

static int shm_all_reduce(struct comm *comm, const struct comm_all_reduce_args *args, struct err *err) {
    int64_t begin, end;
    int rc = group_meet(comm->group, comm->rank, (uint64_t)args->count, NULL, err);
    if (rc) return rc;
    share_of(comm, args->count, &begin, &end);
    share_sum(shm_of(comm), args, begin, end);
    return group_meet(comm->group, comm->rank, 0, NULL, err);
}

static int shm_all_gather(struct comm *comm, const struct comm_gather_args *args, struct err *err) {
    const struct shm *shm = shm_of(comm);
    const int64_t stride = args->cols * comm->ranks;
    int rc = group_meet(comm->group, comm->rank, (uint64_t)args->rows, NULL, err);
    if (rc) return rc;
    for (int32_t r = 0; r < comm->ranks; r++) {
        if (r == comm->rank) continue;
        const float *from = (const float *)peer(shm, r, args->x) + r * args->cols;
        float *to = args->x + r * args->cols;
        for (int64_t row = 0; row < args->rows; row++)
            memcpy(to + row * stride, from + row * stride, (size_t)args->cols * sizeof *to);
    }
    return group_meet(comm->group, comm->rank, 0, NULL, err);
}

static const struct comm_table shm_table = {
    .close = shm_close,
    .share = shm_share,
    .all_reduce = shm_all_reduce,
    .all_gather = shm_all_gather,
};

int comm_shm_open(struct comm_group *group, int32_t rank, struct backend *backend, struct comm **out, struct err *err) {
    struct shm *shm = mem_zalloc(1, sizeof *shm);
    shm->head = (struct comm){.table = &shm_table, .name = "shm"};
    *out = &shm->head;
    return 0;
}
