/* ranks.h: one model over one or more ranks, as the engine thread sees it: it opens, launches and waits as if there
 * were one. Rank 0 is the caller's own thread, each further rank a thread of its own with its device, stream, graphs,
 * arenas and shard; all read the one batch. With one rank there are no threads and no cost.
 *
 * Engine thread only, but for ranks_open and ranks_close (one thread). Knows no requests and no scheduling. */
#ifndef QUIRE_ENGINE_RANKS_H
#define QUIRE_ENGINE_RANKS_H

#include "comm/comm.h"
#include "engine/model/model.h"

struct ranks; /* opaque */

struct ranks_options {
    struct backend_options backend;   /* of rank 0; CPU: `threads` are divided among the ranks */
    int32_t ordinals[COMM_RANKS_MAX]; /* CUDA: the device of each rank; CPU: ignored */
    int32_t count;
    enum comm_kind comm;
    int64_t timeout_ns; /* of a wait on another rank, once the model is loaded */
};

/* Opens the backends, side by side. ERR_UNSUPPORTED: no such device, two ranks on one GPU, GPUs of different kinds. */
int ranks_open(const struct ranks_options *options, struct ranks **out, struct err *err);
void ranks_close(struct ranks *ranks);
int32_t ranks_count(const struct ranks *ranks);
/* Rank 0's, whose info stands for all; memory_free_bytes is the least of all ranks. */
struct backend *ranks_backend(const struct ranks *ranks);
void ranks_backend_info(const struct ranks *ranks, struct backend_info *out);
const char *ranks_comm_name(const struct ranks *ranks); /* after the load: "local", "shm", …, for the log */

/* Loads the model on every rank, side by side, each taking its slice from the file: model_open with the rank's comm.
 * The first error wins; the others are told to give up. */
int ranks_load(struct ranks *ranks, struct model_files *files, const struct model_options *options, struct err *err);
struct model *ranks_model(const struct ranks *ranks, int32_t rank);

/* As the functions of model.h, on every rank. A rank whose step, batch or result differs from rank 0's, or that does
 * not come in time, is ERR_FATAL: the engine is dead then. */
int ranks_launch(struct ranks *ranks, const struct batch *batch, struct arena *arena, struct err *err);
int ranks_wait(struct ranks *ranks, const struct batch *batch, const struct sample_result **results, struct err *err);
int ranks_warm(struct ranks *ranks, struct err *err);
int ranks_set_sample_vocab(struct ranks *ranks, int32_t vocab, struct err *err);
bool ranks_record_next(struct ranks *ranks, int *rc, struct err *err);

#endif
