/* comm_p2p.h: collectives as our own kernels over peer memory, for ranks that are threads of one process. A rank's CTA
 * waits for the CTA of the same number on every other rank, never for a whole grid; counters are on the device, so the
 * kernels run in graphs. Every wait is bounded: it ends by a trap, which is the device's error at the next look.
 * Included by comm_cuda.c and comm_p2p.cu alone. */
#ifndef QUIRE_COMM_COMM_P2P_H
#define QUIRE_COMM_COMM_P2P_H

#include <stdbool.h>
#include <stdint.h>

#include "comm/comm.h"
#include "kernels/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

#define P2P_RANKS_MAX 8
/* CTAs of a collective at most: all of them run at once on any GPU with as many multiprocessors. */
#define P2P_BLOCKS_MAX 264

/* Flags that others set here, [P2P_BLOCKS_MAX, P2P_RANKS_MAX], then counts of meetings, [P2P_BLOCKS_MAX]. Device memory
 * of each rank, zero at first. */
struct p2p_flags {
    uint32_t from[P2P_BLOCKS_MAX][P2P_RANKS_MAX];
    uint32_t meetings[P2P_BLOCKS_MAX];
};

/* Pinned: the host says stop, a kernel says what it waited for. */
struct p2p_control {
    uint32_t stop;
    uint32_t waited_for; /* 1 + rank; 0: nobody in vain */
};

/* What every kernel needs to meet the others. Device addresses. */
struct p2p_meet {
    struct p2p_flags *flags[P2P_RANKS_MAX]; /* of each rank */
    volatile struct p2p_control *control;
    uint64_t timeout_ns;
    int32_t rank, ranks;
};

/* in, out, x: by rank, the same place in every shared block. */
struct p2p_reduce {
    struct p2p_meet meet;
    const void *in[P2P_RANKS_MAX]; /* [count] bf16 */
    void *out;                     /* [count] bf16 */
    int64_t count;
};
struct p2p_norm {
    struct p2p_meet meet;
    const void *delta[P2P_RANKS_MAX]; /* [rows, dim] bf16 */
    void *x, *out;                    /* [rows, dim] bf16 */
    const float *weight;              /* [dim] */
    int64_t rows, dim;
    float eps, weight_offset;
};
struct p2p_gather {
    struct p2p_meet meet;
    float *x[P2P_RANKS_MAX]; /* [rows, ranks * cols] */
    int64_t rows, cols;
};

int p2p_all_reduce(struct backend *backend, const struct p2p_reduce *args, struct err *err);
bool p2p_norm_takes(int64_t dim);
int p2p_reduce_norm(struct backend *backend, const struct p2p_norm *args, struct err *err);
int p2p_all_gather(struct backend *backend, const struct p2p_gather *args, struct err *err);

#ifdef __cplusplus
}
#endif

#endif
