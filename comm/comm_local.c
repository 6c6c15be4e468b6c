/* One rank: every sum is already there. */
#include "comm/comm_private.h"
#include "engine/base/mem.h"

static void local_close(struct comm *comm) {
    mem_free(comm);
}

static const struct comm_table local_table = {.close = local_close};

int comm_open_local(struct comm **out, struct err *err) {
    struct comm *comm = mem_zalloc(1, sizeof *comm);
    *comm = (struct comm){.table = &local_table, .name = "local", .ranks = 1};
    *out = comm;
    return 0;
}
