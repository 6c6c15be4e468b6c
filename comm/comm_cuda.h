/* comm_cuda.h: a CUDA rank's end: which of two ways a message goes, and what both need. Shared by comm_cuda.c and
 * comm_nccl.c; rank thread, but for abort. */
#ifndef QUIRE_COMM_COMM_CUDA_H
#define QUIRE_COMM_COMM_CUDA_H

#include "comm/comm_p2p.h"
#include "comm/comm_private.h"

/* Device memory through which logits go where NCCL alone serves: rows of 0.5 MB, some dozens at a time. */
#define COMM_STAGING_BYTES ((size_t)32 << 20)

struct nccl; /* opaque: a communicator */

struct comm_cuda {
    struct comm head;
    enum comm_kind kind;
    bool p2p;          /* all ranks can read all others */
    struct nccl *nccl; /* NULL: not opened */
    struct backend *backend;
    unsigned char *bases[COMM_RANKS_MAX]; /* every rank's shared block */
    size_t bytes;
    struct p2p_meet meet;
    struct p2p_flags *flags;     /* device, our own */
    struct p2p_control *control; /* pinned */
    unsigned char *staging;      /* [staging_bytes] device: columns on their way through NCCL; NULL: not needed */
    size_t staging_bytes;
};

/* comm_nccl.c. Collective. ERR_UNSUPPORTED: libnccl.so.2 is not there, or this build had no nccl.h. */
int nccl_open(struct comm_group *group, int32_t rank, struct nccl **out, struct err *err);
void nccl_close(struct nccl *nccl);
void nccl_abort(struct nccl *nccl); /* any thread */
int nccl_all_reduce(struct nccl *nccl, cudaStream_t stream, const void *in, void *out, int64_t count, struct err *err);
/* out [ranks, count] f32 from everybody's in [count]. */
int nccl_all_gather(struct nccl *nccl, cudaStream_t stream, const float *in, float *out, int64_t count,
                    struct err *err);

#endif
