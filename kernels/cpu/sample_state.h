/* sample_state.h: what the CPU sampler remembers of a slot: the token drawn last, and for the penalties which ids the
 * prompt holds and how often each was drawn. Rank thread, and inside op_sample one worker a slot.
 *
 * Invariant: counts[id] of a slot is non-zero exactly for the ids listed in `seen`, each once. Reset therefore touches
 * what was touched, and the memory of a slot that tracks nothing is never read or written. */
#ifndef QUIRE_KERNELS_CPU_SAMPLE_STATE_H
#define QUIRE_KERNELS_CPU_SAMPLE_STATE_H

#include <stdbool.h>

#include "kernels/backend_internal.h"

#define SAMPLE_IN_PROMPT 0x80000000u /* bit of a count; the others count draws */

struct cpu_sample_slot {
    bool track;
    int32_t seen_count;
};

struct cpu_sample_state {
    struct sample_state base;
    int32_t *last_token;           /* [slots] */
    uint32_t *counts;              /* [slots, vocab] */
    int32_t *seen;                 /* [slots, vocab] ids with a count, in order of appearance */
    struct cpu_sample_slot *slots; /* [slots] */
    size_t bytes;                  /* of the one allocation behind last_token, counts and seen */
};

/* Stores the token just drawn, and counts it where the slot tracks. */
void sample_state_draw(struct cpu_sample_state *state, int32_t slot, int32_t id);

#endif
