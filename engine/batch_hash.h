/* batch_hash.h: what a step is and what came of it in 64 bits each, for ranks to compare. Not for tables that a client
 * could fill: the hash has no key. Any thread; plain reads. */
#ifndef QUIRE_ENGINE_BATCH_HASH_H
#define QUIRE_ENGINE_BATCH_HASH_H

#include "engine/sched/batch.h"

/* Of everything in a batch that decides the work of a step. */
uint64_t batch_hash(const struct batch *batch);

/* Of what the batch's rows asked for: ids, and log-probabilities where they are wanted. */
uint64_t batch_results_hash(const struct batch *batch, const struct sample_result *results);

#endif
