/* team.h: the threads of the CPU backend. The calling thread is worker 0; the others wait for it.
 *
 * A job is a count of tiles; whoever is free takes the next one from an atomic counter, so a worker that the kernel has
 * put aside delays the job by the one tile it holds and no more. Between jobs workers spin for a bounded time and then
 * sleep in a futex; an idle team uses no processor. Owned by the backend; team_run is called by the rank thread alone
 * and never from inside a tile. Knows nothing of ops. */
#ifndef QUIRE_KERNELS_CPU_TEAM_H
#define QUIRE_KERNELS_CPU_TEAM_H

#include <stdint.h>

#include "engine/base/err.h"

#define TEAM_THREADS_MAX 256

struct team; /* opaque */

/* Does one tile. `worker` is 0 .. team_threads - 1: the index of per-worker scratch. */
typedef void team_fn(void *ctx, int64_t tile, int32_t worker);

/* 1 <= threads <= TEAM_THREADS_MAX, the caller counted in. */
int team_open(int32_t threads, struct team **out, struct err *err);
void team_close(struct team *team);
int32_t team_threads(const struct team *team);

/* Calls fn for every tile 0 .. tiles - 1 once, on any worker, in rising order of start; returns when all are done, and
 * what they wrote is visible to the caller. Fewer than 2 tiles run on the caller without waking anyone. */
void team_run(struct team *team, team_fn *fn, void *ctx, int64_t tiles);

#endif
