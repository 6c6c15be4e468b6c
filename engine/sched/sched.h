/* sched.h: continuous batching. Decides, step by step, which tokens of which sequences are computed.
 *
 * Owned and called by the engine thread alone. Pure C: takes now_ns as an argument, does no I/O, reads no clock, knows
 * no device and no text; it runs whole in a simulator. It owns the page cache (kvcache.h). The invariants it keeps are
 * numbered at the top of sched.c and checked by sched_audit. */
#ifndef QUIRE_SCHED_SCHED_H
#define QUIRE_SCHED_SCHED_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/arena.h"
#include "engine/base/err.h"
#include "engine/base/hash.h"
#include "engine/record.h"
#include "engine/sched/batch.h"

struct sched; /* opaque */

struct sched_options {
    int32_t max_num_seqs;           /* running at once = slots */
    int32_t max_num_batched_tokens; /* token budget a step, >= max_num_seqs */
    int32_t max_queued_requests;    /* waiting requests beyond which a submit is refused */
    int32_t max_model_len;          /* prompt + output of one sequence */
    int32_t page_size, pages_total; /* the dummy page 0 counted in: pages 1 .. pages_total - 1 hold tokens */
    /* 0: none; else most tokens of a step that also holds decodes, whose streams wait for it. Where the decodes alone
     * take more than half of it, prompts get a half beside them. */
    int32_t max_num_mixed_tokens;
    int32_t long_prefill_threshold; /* 0: none; else at most this many prompt tokens of one request a step */
    int32_t lookahead;              /* 0: a step completes before the next is built; 1: one step ahead */
    int32_t vocab;
    bool prefix_caching;
    struct hash_key hash_key; /* of the prefix index */
    /* Hears of its changes, as kv_key_fn in kvcache.h; NULL: nobody wants to know. */
    void (*on_key)(void *user, struct hash128 key, int change);
    void *user;
};

enum seq_state { SEQ_WAITING, SEQ_PREFILL, SEQ_DECODE, SEQ_PREEMPTED, SEQ_FINISHED };

/* One sample of one request. Engine thread only. The engine reads the public part; what is below the line is the
 * scheduler's own. */
struct sequence {
    const struct request *request; /* owned by the scheduler until its last sequence is finished and collected */
    int32_t sample_index;
    enum seq_state state;
    enum finish_reason finish; /* FINISH_NONE while it runs */
    int32_t prompt_count;
    int32_t output_count; /* tokens accepted so far */
    int32_t cached_count; /* prompt tokens found in the prefix index at first admission */
    int32_t preemptions;
    int64_t arrival_ns, scheduled_ns, first_token_ns, last_token_ns;
    void *owner;                            /* the engine's output state of this sequence; the scheduler never looks */
    struct sequence_private *private_state; /* scheduler only */
};

/* What one completed step, a cancel or a deadline did to a sequence. */
struct sched_output {
    struct sequence *seq;
    const struct sample_result *token; /* NULL: no new token (cancelled, timed out, or no usable number) */
    bool finished; /* seq->finish says why; the engine must call sched_collect on it after use */
};

struct sched_stats {
    int32_t running, waiting; /* sequences with a slot; sequences without */
    int32_t queued;           /* requests none of whose sequences ever had one: what max_queued_requests bounds */
    int32_t pages_total, pages_free, pages_cached, pages_held; /* free + cached + held = total, the dummy not counted */
    uint64_t preemptions, prefix_queried_tokens, prefix_hit_tokens, steps;
    uint64_t prompt_tokens_computed, output_tokens;
};

int sched_open(const struct sched_options *options, struct sched **out, struct err *err);
void sched_close(struct sched *sched);

/* Takes a validated request (a flat record from mem_alloc; ownership moves on success only). `owners[i]` becomes owner
 * of sample i. Refusals: ERR_INVALID when it can never fit (with the arithmetic: tokens, pages needed, pages there
 * are), ERR_EXHAUSTED when the queue is full. All or nothing for n samples. */
int sched_submit(struct sched *sched, struct request *request, void *const *owners, int64_t now_ns, struct err *err);

/* Ends every sequence of that request. Unknown or finished ids are fine: the cancel was late. The outputs come with the
 * next sched_outputs. */
void sched_cancel(struct sched *sched, uint64_t request_id, enum finish_reason reason);
void sched_cancel_all(struct sched *sched, enum finish_reason reason);

/* Ends one sequence at the engine's wish (a stop string matched). No output is reported; the engine collects it.
 * Nothing happens when it is finished already. */
void sched_finish(struct sched *sched, struct sequence *seq, enum finish_reason reason);

/* Builds the next step in `arena`, NULL when nothing can run (with lookahead 1 also when everything waits for the step
 * in flight). Expires deadlines by now_ns. With lookahead 0 the previous batch must be complete, with 1 the one before
 * it. */
const struct batch *sched_next_batch(struct sched *sched, struct arena *arena, int64_t now_ns);

/* Hands in the sampled tokens of `batch`, results[i] for its row i; batches complete in the order they were built. The
 * outputs point into `results`, so it stays until they were read. An id of -1 (NaN in the row) or outside the
 * vocabulary ends that sequence alone with FINISH_ERROR. The batch and what it points at is not needed any more
 * afterwards. */
void sched_complete(struct sched *sched, const struct batch *batch, const struct sample_result *results,
                    int64_t now_ns);

/* Everything that happened to sequences since the last call: completed steps, cancels, deadlines. The array is valid
 * until the next call into the scheduler that is not sched_finish, sched_collect or sched_output_ids. */
int32_t sched_outputs(struct sched *sched, const struct sched_output **out);

/* Frees a finished sequence; the request goes with its last one. */
void sched_collect(struct sched *sched, struct sequence *seq);

const int32_t *sched_output_ids(const struct sequence *seq); /* [output_count] */

bool sched_idle(const struct sched *sched);                /* nothing waiting, nothing running, nothing in flight */
int64_t sched_next_deadline_ns(const struct sched *sched); /* INT64_MAX: none */
void sched_stats(const struct sched *sched, struct sched_stats *out);

/* Forgets the prefix index (pages nobody holds become free). */
void sched_reset_prefix_cache(struct sched *sched);

/* Walks everything and checks the numbered invariants; ERR_FATAL names the broken one. `deep` also walks every page. */
int sched_audit(const struct sched *sched, bool deep, struct err *err);

#endif
