/* comm_private.h: what the files of comm/ share: a rank's end as a head and a table of what its kind does, and the
 * group with its host-side meeting point. */
#ifndef QUIRE_COMM_COMM_PRIVATE_H
#define QUIRE_COMM_COMM_PRIVATE_H

#include "comm/comm.h"

/* One constant table a kind; arguments are checked and ranks == 1 is answered before these are called. */
struct comm_table {
    void (*close)(struct comm *comm);
    int (*share)(struct comm *comm, void *base, size_t bytes, struct err *err);
    int (*warm)(struct comm *comm, struct err *err); /* or NULL */
    int (*all_reduce)(struct comm *comm, const struct comm_all_reduce_args *args, struct err *err);
    int (*reduce_norm)(struct comm *comm, const struct comm_reduce_norm_args *args,
                       struct err *err); /* or NULL: comm_reduce_then_norm */
    int (*all_gather)(struct comm *comm, const struct comm_gather_args *args, struct err *err);
    void (*abort)(struct comm *comm); /* any thread; or NULL */
};

/* The head of every kind's end. */
struct comm {
    const struct comm_table *table;
    struct comm_group *group; /* NULL: the only rank */
    struct backend *backend;
    const char *name;
    int32_t rank, ranks;
};

/* ---- comm_group.c: host side ----------------------------------------------------------------------------------- */

/* Waits for all ranks, bounded by the group's timeout. Each hands in one word and sees everybody's afterwards
 * (out: [ranks], or NULL). ERR_FATAL: somebody did not come, or the group was aborted. */
int group_meet(struct comm_group *group, int32_t rank, uint64_t word, uint64_t *out, struct err *err);
bool group_aborted(const struct comm_group *group);
const struct comm_options *group_options(const struct comm_group *group);
/* Ends that comm_abort tells: entered at open, taken out at close. */
void group_enter(struct comm_group *group, struct comm *comm);
void group_leave(struct comm_group *group, struct comm *comm);

/* comm.c: all_reduce in place, then op_rms_norm. */
int comm_reduce_then_norm(struct comm *comm, const struct comm_reduce_norm_args *args, struct err *err);

/* ---- the kinds: each fills table, name and its own, and sets *out; comm_open fills the rest of the head ------------
 */
int comm_shm_open(struct comm_group *group, int32_t rank, struct backend *backend, struct comm **out, struct err *err);
int comm_cuda_open(struct comm_group *group, int32_t rank, struct backend *backend, struct comm **out, struct err *err);
size_t comm_cuda_bytes(const struct comm_options *options);

#endif
