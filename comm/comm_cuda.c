/* CUDA ranks: who can reach whom, and which way a message goes. */
#include "comm/comm_cuda.h"

#include <string.h>

#include "engine/base/arith.h"
#include "engine/base/check.h"
#include "engine/base/log.h"
#include "engine/base/mem.h"

static struct comm_cuda *cuda_of(struct comm *comm) {
    return (struct comm_cuda *)(void *)comm;
}

/* From how many bytes on NCCL's all-reduce is taken where our own kernels could serve; by the number of ranks, for more
 * than the last as for the last. With two ranks one shot moves as much as any algorithm, and the norm comes with it:
 * ahead from 8 KiB to 64 MiB (SPEED.md). Four and eight are others' figures for one-shot kernels, not measured here. */
static const struct {
    int32_t ranks;
    int64_t nccl_from_bytes;
} ways[] = {{2, INT64_MAX}, {4, (int64_t)1 << 20}, {8, (int64_t)512 << 10}};

static int64_t nccl_from(int32_t ranks) {
    size_t i = 0;
    while (i + 1 < sizeof ways / sizeof *ways && ways[i].ranks < ranks) i++;
    return ways[i].nccl_from_bytes;
}

static bool by_p2p(const struct comm_cuda *c, int64_t count) {
    return c->p2p && (!c->nccl || c->kind == COMM_P2P || count * 2 < nccl_from(c->head.ranks));
}

static void *peer(const struct comm_cuda *c, int32_t rank, const void *p) {
    const size_t at = (size_t)((const unsigned char *)p - c->bases[c->head.rank]);
    CHECK(at < c->bytes);
    return c->bases[rank] + at;
}

/* ---- opening ------------------------------------------------------------------------------------------------------
 */

/* Whether this rank's device reads all others; two ranks on one device are refused. */
static int peers_enable(struct comm_cuda *c, const uint64_t *ordinals, bool *all, struct err *err) {
    const int own = c->backend->cuda->ordinal;
    *all = c->head.ranks <= P2P_RANKS_MAX;
    for (int32_t i = 0; i < c->head.ranks; i++) {
        const int other = (int)ordinals[i];
        int can = 0;
        if (i == c->head.rank) continue;
        if (other == own)
            return err_set_field(err, ERR_UNSUPPORTED, "device", "ranks %d and %d are both on CUDA device %d",
                                 c->head.rank, i, own);
        int rc = CUDA_TRY(c->backend, cudaDeviceCanAccessPeer(&can, own, other), err);
        if (rc) return rc;
        if (!can || !*all) {
            *all = false;
            continue;
        }
        cudaError_t code = cudaDeviceEnablePeerAccess(other, 0);
        if (code == cudaErrorPeerAccessAlreadyEnabled) {
            cudaGetLastError();
            code = cudaSuccess;
        }
        if ((rc = CUDA_TRY(c->backend, code, err))) return rc;
    }
    return 0;
}

/* All ranks go the same ways: peer access counts only where everybody has it. */
static int ways_settle(struct comm_group *group, struct comm_cuda *c, struct err *err) {
    const int32_t rank = c->head.rank, ranks = c->head.ranks;
    uint64_t words[COMM_RANKS_MAX];
    struct err why = {0};
    bool all;
    int rc = group_meet(group, rank, (uint64_t)c->backend->cuda->ordinal, words, err);
    if (rc == 0) rc = peers_enable(c, words, &all, err);
    if (rc == 0) rc = group_meet(group, rank, c->kind != COMM_NCCL && all, words, err);
    if (rc) return rc;
    c->p2p = true;
    for (int32_t i = 0; i < ranks; i++) c->p2p = c->p2p && words[i];
    if (c->kind == COMM_P2P && !c->p2p)
        return err_set(err, ERR_UNSUPPORTED, "not every GPU can reach the memory of the others");
    if (!c->p2p && c->kind == COMM_AUTO && rank == 0)
        log_warning("the GPUs cannot reach each other's memory: NCCL alone, which takes longer", "ranks=%d", ranks);
    if (c->kind == COMM_P2P || (c->p2p && nccl_from(ranks) == INT64_MAX)) return 0;
    nccl_open(group, rank, &c->nccl, &why);
    if ((rc = group_meet(group, rank, c->nccl != NULL, words, err))) return rc;
    bool everywhere = true;
    for (int32_t i = 0; i < ranks; i++) everywhere = everywhere && words[i];
    if (everywhere) return 0;
    nccl_close(c->nccl); /* all go the same ways */
    c->nccl = NULL;
    if (c->p2p) return 0;
    if (!why.code) err_set(&why, ERR_UNSUPPORTED, "another rank has no NCCL");
    return err_set(err, ERR_UNSUPPORTED, "the GPUs cannot reach each other's memory, and %s", why.text);
}

static void comm_cuda_close(struct comm *comm) {
    struct comm_cuda *c = cuda_of(comm);
    nccl_close(c->nccl);
    if (c->flags) backend_free(c->backend, MEMORY_WORKSPACE, c->flags, sizeof *c->flags);
    if (c->staging) backend_free(c->backend, MEMORY_WORKSPACE, c->staging, c->staging_bytes);
    if (c->control) {
        if (c->backend->cuda->comm_error == &c->control->waited_for) c->backend->cuda->comm_error = NULL;
        backend_free(c->backend, MEMORY_PINNED, c->control, sizeof *c->control);
    }
    mem_free(c);
}

static int comm_cuda_share(struct comm *comm, void *base, size_t bytes, struct err *err) {
    struct comm_cuda *c = cuda_of(comm);
    uint64_t words[COMM_RANKS_MAX];
    void *p = NULL;
    int rc = backend_alloc(c->backend, MEMORY_WORKSPACE, sizeof *c->flags, &p, err);
    c->flags = p;
    if (rc == 0) rc = backend_alloc(c->backend, MEMORY_PINNED, sizeof *c->control, &p, err);
    if (rc) return rc;
    c->control = p;
    if (!c->p2p) {
        rc = backend_alloc(c->backend, MEMORY_WORKSPACE, COMM_STAGING_BYTES, &p, err);
        if (rc) return rc;
        c->staging = p;
        c->staging_bytes = COMM_STAGING_BYTES;
    }
    c->backend->cuda->comm_error = &c->control->waited_for;
    c->bytes = bytes;
    c->meet = (struct p2p_meet){.control = c->control,
                                .timeout_ns = (uint64_t)group_options(comm->group)->timeout_ns,
                                .rank = comm->rank,
                                .ranks = comm->ranks};
    /* Flags are zero before anybody can set one. */
    if ((rc = backend_sync(c->backend, err))) return rc;
    if ((rc = group_meet(comm->group, comm->rank, (uint64_t)(uintptr_t)c->flags, words, err))) return rc;
    for (int32_t i = 0; i < comm->ranks && i < P2P_RANKS_MAX; i++)
        c->meet.flags[i] = (struct p2p_flags *)(uintptr_t)words[i];
    rc = group_meet(comm->group, comm->rank, (uint64_t)(uintptr_t)base, words, err);
    for (int32_t i = 0; rc == 0 && i < comm->ranks; i++) c->bases[i] = (unsigned char *)(uintptr_t)words[i];
    return rc;
}

/* The next look of a waiting kernel ends it. A rank that has no device error then has one at its next wait. */
static void comm_cuda_abort(struct comm *comm) {
    struct comm_cuda *c = cuda_of(comm);
    if (c->control) __atomic_store_n(&c->control->stop, 1, __ATOMIC_SEQ_CST);
    nccl_abort(c->nccl);
}

/* ---- collectives --------------------------------------------------------------------------------------------------
 */

static int comm_cuda_all_reduce(struct comm *comm, const struct comm_all_reduce_args *args, struct err *err) {
    struct comm_cuda *c = cuda_of(comm);
    if (!by_p2p(c, args->count))
        return nccl_all_reduce(c->nccl, c->backend->cuda->stream, args->in, args->out, args->count, err);
    struct p2p_reduce reduce = {.meet = c->meet, .out = args->out, .count = args->count};
    for (int32_t i = 0; i < comm->ranks; i++) reduce.in[i] = peer(c, i, args->in);
    return p2p_all_reduce(c->backend, &reduce, err);
}

static int comm_cuda_reduce_norm(struct comm *comm, const struct comm_reduce_norm_args *args, struct err *err) {
    struct comm_cuda *c = cuda_of(comm);
    if (!by_p2p(c, args->rows * args->dim) || !p2p_norm_takes(args->dim)) return comm_reduce_then_norm(comm, args, err);
    struct p2p_norm norm = {.meet = c->meet,
                            .x = args->x,
                            .out = args->out,
                            .weight = args->weight,
                            .rows = args->rows,
                            .dim = args->dim,
                            .eps = args->eps,
                            .weight_offset = args->weight_offset};
    for (int32_t i = 0; i < comm->ranks; i++) norm.delta[i] = peer(c, i, args->delta);
    return p2p_reduce_norm(c->backend, &norm, err);
}

/* NCCL gives rank after rank; the columns are put in their places from there, as many rows at a time as fit. */
static int gather_by_nccl(struct comm_cuda *c, const struct comm_gather_args *args, struct err *err) {
    const size_t ranks = (size_t)c->head.ranks, width = (size_t)args->cols * sizeof(float), pitch = width * ranks;
    const int64_t rows_max = (int64_t)(c->staging_bytes / (width * (ranks + 1)));
    cudaStream_t stream = c->backend->cuda->stream;
    if (rows_max < 1) return err_set(err, ERR_FATAL, "a row of logits is more than a message between ranks holds");
    for (int64_t row = 0; row < args->rows; row += rows_max) {
        const size_t rows = (size_t)i64_min(rows_max, args->rows - row);
        float *at = args->x + row * args->cols * c->head.ranks, *all = (float *)(void *)(c->staging + rows * width);
        int rc = CUDA_TRY(c->backend,
                          cudaMemcpy2DAsync(c->staging, width, (unsigned char *)at + width * (size_t)c->head.rank,
                                            pitch, width, rows, cudaMemcpyDeviceToDevice, stream),
                          err);
        if (rc == 0)
            rc = nccl_all_gather(c->nccl, stream, (const float *)(const void *)c->staging, all,
                                 (int64_t)rows * args->cols, err);
        for (size_t r = 0; rc == 0 && r < ranks; r++)
            rc = CUDA_TRY(c->backend,
                          cudaMemcpy2DAsync((unsigned char *)at + width * r, pitch,
                                            (unsigned char *)all + r * rows * width, width, width, rows,
                                            cudaMemcpyDeviceToDevice, stream),
                          err);
        if (rc) return rc;
    }
    return 0;
}

static int comm_cuda_all_gather(struct comm *comm, const struct comm_gather_args *args, struct err *err) {
    struct comm_cuda *c = cuda_of(comm);
    if (!c->p2p) return gather_by_nccl(c, args, err);
    struct p2p_gather gather = {.meet = c->meet, .rows = args->rows, .cols = args->cols};
    for (int32_t i = 0; i < comm->ranks; i++) gather.x[i] = peer(c, i, args->x);
    return p2p_all_gather(c->backend, &gather, err);
}

/* NCCL connects peers at the first call of an algorithm, which a recording does not allow: one call a size class. */
static int comm_cuda_warm(struct comm *comm, struct err *err) {
    struct comm_cuda *c = cuda_of(comm);
    /* A kernel waits on the device for less long than a rank may be late while it loads. */
    int rc = group_meet(comm->group, comm->rank, 0, NULL, err);
    for (size_t bytes = 1024; rc == 0 && c->nccl && bytes <= c->bytes && bytes <= ((size_t)256 << 20); bytes *= 4)
        rc = nccl_all_reduce(c->nccl, c->backend->cuda->stream, c->bases[comm->rank], c->bases[comm->rank],
                             (int64_t)bytes / 2, err);
    const struct comm_all_reduce_args sum = {c->bases[comm->rank], c->bases[comm->rank], 8};
    if (rc == 0) rc = comm_cuda_all_reduce(comm, &sum, err);
    if (rc == 0 && !c->p2p) {
        const struct comm_gather_args gather = {(float *)(void *)c->bases[comm->rank], 1, 64};
        rc = comm_cuda_all_gather(comm, &gather, err);
    }
    if (rc == 0) rc = backend_sync(c->backend, err);
    return rc ? rc : group_meet(comm->group, comm->rank, 0, NULL, err);
}

static const struct comm_table cuda_table_of_comm = {
    .close = comm_cuda_close,
    .share = comm_cuda_share,
    .warm = comm_cuda_warm,
    .all_reduce = comm_cuda_all_reduce,
    .reduce_norm = comm_cuda_reduce_norm,
    .all_gather = comm_cuda_all_gather,
    .abort = comm_cuda_abort,
};

int comm_cuda_open(struct comm_group *group, int32_t rank, struct backend *backend, struct comm **out,
                   struct err *err) {
    struct comm_cuda *c = mem_zalloc(1, sizeof *c);
    c->head = (struct comm){.table = &cuda_table_of_comm, .rank = rank, .ranks = group_options(group)->ranks};
    c->backend = backend;
    c->kind = group_options(group)->kind;
    int rc = cuda_thread_enter(backend, err);
    if (rc == 0) rc = ways_settle(group, c, err);
    if (rc) {
        comm_cuda_close(&c->head);
        return rc;
    }
    c->head.name = !c->p2p ? "nccl" : c->nccl ? "p2p+nccl" : "p2p";
    *out = &c->head;
    return 0;
}

/* NCCL's own buffers: 2 to 4 channels' worth a peer were seen to take 100 to 400 MiB. */
size_t comm_cuda_bytes(const struct comm_options *options) {
    const bool p2p_alone = options->kind != COMM_NCCL && nccl_from(options->ranks) == INT64_MAX;
    return sizeof(struct p2p_flags) + 1024 + COMM_STAGING_BYTES + (p2p_alone ? 0 : (size_t)400 << 20);
}
