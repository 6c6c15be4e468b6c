/* comm.h: collectives between the ranks of one engine. A rank is one device and one thread; each opens its own end and
 * all make the same calls in the same order. A collective is issued in order with the ops of that rank's backend and
 * may complete later, as they do. Every rank gets the same bits. Knows nothing of models, sequences or requests. */
#ifndef QUIRE_COMM_COMM_H
#define QUIRE_COMM_COMM_H

#include <stdint.h>

#include "kernels/backend.h"

struct comm; /* opaque: one rank's end */

/* The engine that has one rank. */
int comm_open_local(struct comm **out, struct err *err);
void comm_close(struct comm *comm);

int32_t comm_rank(const struct comm *comm);  /* 0 .. ranks - 1 */
int32_t comm_ranks(const struct comm *comm); /* at least 1 */

/* x = the sum of every rank's x, in place; x: [count] act device, the same count on every rank. ERR_FATAL when a rank
 * is gone or does not come in time: the engine is dead then. */
int comm_all_reduce(struct comm *comm, struct backend *backend, void *x, int64_t count, struct err *err);

#endif
