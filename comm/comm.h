/* comm.h: collectives between the ranks of one engine. A rank is one device and one thread; each opens its own end and
 * all make the same calls in the same order. A collective is issued in order with the ops of that rank's backend and
 * may complete later, as they do; on CUDA all of them can be recorded in a graph. Every rank gets the same bits: sums
 * are taken in the order of the ranks. Knows nothing of models, sequences or requests.
 *
 * Behind it: `local` (one rank), `shm` (CPU ranks of one process), `p2p` (own one-shot kernels over peer memory) and
 * `nccl`, where peers cannot be reached, or for large messages between more than two ranks. Every wait of our own is
 * bounded by struct comm_options; a rank that does not come is ERR_FATAL on all the others, and so is comm_abort. What
 * NCCL waits for is bounded by whoever watches the engine's steps.
 */
#ifndef QUIRE_COMM_COMM_H
#define QUIRE_COMM_COMM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/backend.h"

struct comm;       /* opaque: one rank's end */
struct comm_group; /* opaque: what the ranks of one engine share; made before their threads, freed after them */

#define COMM_RANKS_MAX 64

/* How CUDA ranks talk. AUTO: by size. P2P alone and NCCL alone are for tests and benches. */
enum comm_kind { COMM_AUTO, COMM_NCCL, COMM_P2P };

struct comm_options {
    int32_t ranks;
    enum comm_kind kind;
    int64_t timeout_ns; /* of every wait on another rank */
    /* Of the host's waits before comm_group_start, while one rank's disk may be slower than another's; 0: the same. */
    int64_t load_timeout_ns;
};

/* No device is touched. */
int comm_group_open(const struct comm_options *options, struct comm_group **out, struct err *err);
void comm_group_close(struct comm_group *group);
/* The loading is over: from now on every wait ends within timeout_ns. Any thread. */
void comm_group_start(struct comm_group *group);

/* One rank's end, on that rank's thread, after its backend was opened; returns when every rank has come (or one has
 * failed: ERR_FATAL). CUDA: checks peer access between all devices (NCCL alone where it is missing, said in the log).
 * ERR_UNSUPPORTED: ranks of different kinds of device; neither peer access nor NCCL. */
int comm_open(struct comm_group *group, int32_t rank, struct backend *backend, struct comm **out, struct err *err);
/* The engine that has one rank: no group. */
int comm_open_local(struct comm **out, struct err *err);
void comm_close(struct comm *comm);

/* What a rank's end takes on its device at most, for the memory plan: which ways there are is known only later. */
size_t comm_device_bytes(const struct comm_options *options, const struct backend *backend);

int32_t comm_rank(const struct comm *comm);     /* 0 .. ranks - 1 */
int32_t comm_ranks(const struct comm *comm);    /* at least 1 */
const char *comm_name(const struct comm *comm); /* "local", "shm", "nccl", "p2p+nccl": for the log */

/* Makes `base` known to all ranks: every rank's block has the same layout and `bytes`, and pointers into it may then be
 * handed to the collectives below. Collective; once, before the first of those. */
int comm_share(struct comm *comm, void *base, size_t bytes, struct err *err);

/* Runs each kind of collective once for every size class, so that nothing is set up inside a capture or a step.
 * Collective, after comm_share, while nothing lies in the shared block yet. */
int comm_warm(struct comm *comm, struct err *err);

/* The collectives. With one rank there is nothing to do and they are not called.
 *
 * out = the sum of every rank's in; both [count] act in the shared block, the same count on every rank. out may be in;
 * else `in` must not be written before the next collective of this rank has been issued (others may still read it). */
struct comm_all_reduce_args {
    const void *in;
    void *out;
    int64_t count;
};
int comm_all_reduce(struct comm *comm, const struct comm_all_reduce_args *args, struct err *err);

/* A branch of every rank added to the residual stream, and the norm behind it: x += sum(delta), then
 * out = x / sqrt(mean(x^2) + eps) * (weight + weight_offset), as op_rms_norm with delta. `delta` may be overwritten by
 * the call and must not be written by the caller before the next collective of this rank has been issued. */
struct comm_reduce_norm_args {
    void *delta;         /* [rows, dim] act, shared block */
    void *x;             /* [rows, dim] act, shared block */
    const float *weight; /* [dim] f32 device */
    void *out;           /* [rows, dim] act, shared block */
    int64_t rows, dim;
    float eps, weight_offset;
};
int comm_reduce_norm(struct comm *comm, const struct comm_reduce_norm_args *args, struct err *err);

/* Columns of a matrix from every rank: x is [rows, ranks * cols] f32 in the shared block, and columns
 * [rank * cols, (rank + 1) * cols) are there; after it all are. What it writes on another rank was last read there
 * before that rank's latest other collective was issued (logits are sampled before the next step's first sum). */
struct comm_gather_args {
    float *x;
    int64_t rows, cols;
};
int comm_all_gather(struct comm *comm, const struct comm_gather_args *args, struct err *err);

/* Host side, before a step's collectives are issued: every rank comes with the same step (rising) and hash, or
 * ERR_FATAL with both sides in its text on whoever sees it, and all waiting ends. Waits for nobody and touches no
 * device. */
int comm_agree(struct comm *comm, uint64_t step, uint64_t hash, struct err *err);

/* Any thread: every wait of the group, on the host and on the devices, ends with ERR_FATAL; on the host with this as
 * the error's field, since the cause is another rank's to tell. */
#define COMM_ABORTED "aborted"
void comm_abort(struct comm_group *group);

#endif
