/* Which kind serves, and what all kinds check. */
#include "comm/comm.h"

#include "comm/comm_private.h"
#include "engine/base/check.h"
#include "kernels/ops.h"

int comm_open(struct comm_group *group, int32_t rank, struct backend *backend, struct comm **out, struct err *err) {
    const struct comm_options *options = group_options(group);
    const enum device_kind device = backend_info(backend)->device;
    uint64_t devices[COMM_RANKS_MAX];
    if (options->ranks == 1) return comm_open_local(out, err);
    int rc = group_meet(group, rank, (uint64_t)device, devices, err);
    if (rc) return rc;
    for (int32_t i = 0; i < options->ranks; i++)
        if (devices[i] != (uint64_t)device)
            return err_set(err, ERR_UNSUPPORTED, "the ranks of one model must be on devices of one kind");
#ifdef QUIRE_CUDA
    if (device == DEVICE_CUDA) rc = comm_cuda_open(group, rank, backend, out, err);
#endif
    if (device == DEVICE_CPU) rc = comm_shm_open(group, rank, backend, out, err);
    if (rc) return rc;
    (*out)->group = group;
    (*out)->backend = backend;
    (*out)->rank = rank;
    (*out)->ranks = options->ranks;
    group_enter(group, *out);
    return 0;
}

size_t comm_device_bytes(const struct comm_options *options, const struct backend *backend) {
#ifdef QUIRE_CUDA
    if (options->ranks > 1 && backend_info(backend)->device == DEVICE_CUDA) return comm_cuda_bytes(options);
#endif
    return 0;
}

void comm_close(struct comm *comm) {
    if (!comm) return;
    if (comm->group) group_leave(comm->group, comm);
    comm->table->close(comm);
}

int32_t comm_rank(const struct comm *comm) {
    return comm->rank;
}

int32_t comm_ranks(const struct comm *comm) {
    return comm->ranks;
}

const char *comm_name(const struct comm *comm) {
    return comm->name;
}

int comm_share(struct comm *comm, void *base, size_t bytes, struct err *err) {
    return comm->ranks == 1 ? 0 : comm->table->share(comm, base, bytes, err);
}

int comm_warm(struct comm *comm, struct err *err) {
    return comm->ranks == 1 || !comm->table->warm ? 0 : comm->table->warm(comm, err);
}

int comm_all_reduce(struct comm *comm, const struct comm_all_reduce_args *args, struct err *err) {
    CHECK(comm->ranks > 1);
    return args->count == 0 ? 0 : comm->table->all_reduce(comm, args, err);
}

int comm_reduce_then_norm(struct comm *comm, const struct comm_reduce_norm_args *args, struct err *err) {
    const struct comm_all_reduce_args sum = {args->delta, args->delta, args->rows * args->dim};
    const struct op_rms_norm_args norm = {.x = args->x,
                                          .delta = args->delta,
                                          .weight = args->weight,
                                          .out = args->out,
                                          .rows = args->rows,
                                          .dim = args->dim,
                                          .x_stride = args->dim,
                                          .delta_stride = args->dim,
                                          .out_stride = args->dim,
                                          .eps = args->eps,
                                          .weight_offset = args->weight_offset};
    int rc = comm->table->all_reduce(comm, &sum, err);
    return rc ? rc : op_rms_norm(comm->backend, &norm, err);
}

int comm_reduce_norm(struct comm *comm, const struct comm_reduce_norm_args *args, struct err *err) {
    CHECK(comm->ranks > 1);
    if (args->rows == 0) return 0;
    return comm->table->reduce_norm ? comm->table->reduce_norm(comm, args, err)
                                    : comm_reduce_then_norm(comm, args, err);
}

int comm_all_gather(struct comm *comm, const struct comm_gather_args *args, struct err *err) {
    CHECK(comm->ranks > 1);
    return args->rows == 0 ? 0 : comm->table->all_gather(comm, args, err);
}
