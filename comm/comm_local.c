/* One rank: every sum is already there. */
#include "comm/comm.h"
#include "engine/base/mem.h"

struct comm {
    int32_t rank, ranks;
};

int comm_open_local(struct comm **out, struct err *err) {
    struct comm *comm = mem_zalloc(1, sizeof *comm);
    comm->ranks = 1;
    *out = comm;
    return 0;
}

void comm_close(struct comm *comm) { mem_free(comm); }
int32_t comm_rank(const struct comm *comm) { return comm->rank; }
int32_t comm_ranks(const struct comm *comm) { return comm->ranks; }

int comm_all_reduce(struct comm *comm, struct backend *backend, void *x, int64_t count, struct err *err) { return 0; }
