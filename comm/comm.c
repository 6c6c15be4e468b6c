/* Which kind serves, and what all kinds check. */
#include "comm/comm.h"

#include "comm/comm_private.h"
#include "engine/base/check.h"

void comm_close(struct comm *comm) {
    if (comm) comm->table->close(comm);
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

int comm_reduce_norm(struct comm *comm, const struct comm_reduce_norm_args *args, struct err *err) {
    CHECK(comm->ranks > 1);
    return args->rows == 0 ? 0 : comm->table->reduce_norm(comm, args, err);
}

int comm_all_gather(struct comm *comm, const struct comm_gather_args *args, struct err *err) {
    CHECK(comm->ranks > 1);
    return args->rows == 0 ? 0 : comm->table->all_gather(comm, args, err);
}
