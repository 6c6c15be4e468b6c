/* batch.h: one step's work, from the scheduler to the rank threads. Flat and immutable once built, in the step arena,
 * so one pointer serves every rank and a socket later. Plain data; knows no device. */
#ifndef QUIRE_SCHED_BATCH_H
#define QUIRE_SCHED_BATCH_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/sampling.h"

/* A slot that gets a new owner in this step: its sampling state is reset before anything else. */
struct slot_reset {
    int32_t slot;
    bool track;                     /* penalties are in use */
    const int32_t *prompt, *output; /* the owner's ids, valid until the step completes */
    int32_t prompt_count, output_count;
};

/* One changed entry of the device's page table. */
struct page_delta {
    int32_t slot, index, page;
};

struct page_copy {
    int32_t src, dst;
};

struct batch {
    uint64_t step; /* counts from 1 */
    int32_t tokens, seqs, rows;
    int32_t prefill_tokens, decode_tokens; /* tokens = both */

    const int32_t *token_ids;          /* [tokens]; -1: the last token sampled in that row's slot, read on the device */
    const int32_t *token_slots;        /* [tokens] */
    const int32_t *positions;          /* [tokens] */
    const int32_t *slots;              /* [seqs] */
    const int32_t *q_start;            /* [seqs + 1] */
    const int32_t *kv_len;             /* [seqs], after this step */
    const int32_t *logit_rows;         /* [rows] token rows whose logits are sampled */
    const struct sample_row *sampling; /* [rows] */
    const int32_t *mask_row;           /* [rows] row of the token mask buffer, -1: unconstrained */

    const struct slot_reset *resets; /* [reset_count] applied first */
    const struct page_delta *deltas; /* [delta_count] applied second */
    const struct page_copy *copies;  /* [copy_count] applied third, all layers */
    int32_t reset_count, delta_count, copy_count;
};

#endif
