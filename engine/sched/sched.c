/* sched.c: the life of requests in the scheduler: submit, cancel, finish, collect.
 *
 * Invariants. sched_audit checks those marked *; the simulator checks all of them after every step.
 *   1 * free + cached + held = total pages.                                                          (kvcache K1)
 *   2 * a page is in exactly one place: free, cached, in limbo, or held.                             (K2)
 *   3 * references of a page = tables that map it.                                                   (K3)
 *   4 * a shared or indexed page is never written: the page a sequence writes next is its own alone.
 *   5 * the index is a forest; parents outlive their children.                                       (K4, K5)
 *   6 * a page, or a slot, goes to somebody else only after the last launched step that touches it.  (K6)
 *   7 * a running sequence holds the pages of its known tokens, or all it can ever need; never more.
 *   8 * a finished or waiting sequence holds no page and no slot; a finished request has no deadline.
 *   9 * a result goes to the sequence that was in that row when the batch was built; late ones are dropped.
 *  10 * running <= max_num_seqs; tokens of a step <= budget; a sequence is in exactly one list, in order of age.
 *  11   when nothing is in flight and anything waits or runs, the next step has work.
 *  12 * the oldest running sequence is never a victim; nobody is preempted more than SCHED_PREEMPTIONS_MAX times.
 *  13   whoever is admitted can finish: prompt + output fit context and pool, checked once, at the door.
 *  14 * received = ended + in the scheduler; queued requests <= max_queued_requests.
 *  15   tokens do not depend on prefix hits, chunks, neighbours or preemption.
 *  16   nothing is shared between different salts, nor with a request that asked for no cache.
 *
 * Why everybody finishes. Age is fixed at arrival. A decode that lacks a page takes it from the youngest running
 * sequence that is younger than itself; so the oldest always goes on, and is a token nearer to its end each step. Who
 * was preempted SCHED_PREEMPTIONS_MAX times comes back only with all pages it can ever need, so it needs nobody's and
 * runs to its end. While a decode lacks a page nobody is admitted, so no newcomer takes what was freed for it. */
#include "engine/sched/sched.h"

#include <string.h>

#include "engine/base/arith.h"
#include "engine/base/check.h"
#include "engine/base/mem.h"
#include "engine/sched/private.h"

/* ---- life -------------------------------------------------------------------------------------------------------- */

#define SCHED_SEQS_MAX   65536
#define SCHED_QUEUE_MAX  (1 << 20)
#define SCHED_TOKENS_MAX (1 << 24)

static int range_check(const char *what, int64_t value, int64_t min, int64_t max, struct err *err) {
    if (value >= min && value <= max) return 0;
    return err_set_field(err, ERR_INVALID, what, "%s must be from %lld to %lld, not %lld", what, (long long)min,
                         (long long)max, (long long)value);
}

static int options_check(const struct sched_options *o, struct err *err) {
    int rc;
    if ((rc = range_check("max_num_seqs", o->max_num_seqs, 1, SCHED_SEQS_MAX, err))) return rc;
    if ((rc = range_check("max_num_batched_tokens", o->max_num_batched_tokens, o->max_num_seqs, SCHED_TOKENS_MAX, err)))
        return rc;
    if ((rc = range_check("max_queued_requests", o->max_queued_requests, 1, SCHED_QUEUE_MAX, err))) return rc;
    if ((rc = range_check("max_model_len", o->max_model_len, 2, SCHED_TOKENS_MAX, err))) return rc;
    if ((rc = range_check("long_prefill_threshold", o->long_prefill_threshold, 0, SCHED_TOKENS_MAX, err))) return rc;
    if ((rc = range_check("lookahead", o->lookahead, 0, SCHED_FLIGHTS_MAX - 1, err))) return rc;
    if ((rc = range_check("max_num_mixed_tokens", o->max_num_mixed_tokens, 0, SCHED_TOKENS_MAX, err))) return rc;
    return range_check("vocab", o->vocab, 1, INT32_MAX, err);
}

static void sched_alloc(struct sched *sched) {
    size_t seqs = (size_t)sched->options.max_num_seqs;
    uint64_t buckets = 64;
    while (buckets < 2 * (uint64_t)(sched->options.max_queued_requests + sched->options.max_num_seqs)) buckets *= 2;
    sched->id_mask = buckets - 1;
    sched->by_id = mem_zalloc(buckets, sizeof *sched->by_id);
    sched->heap_capacity = 64;
    sched->heap = mem_zalloc((size_t)sched->heap_capacity, sizeof *sched->heap);
    sched->output_capacity = sched->options.max_num_seqs;
    sched->outputs = mem_zalloc(seqs, sizeof *sched->outputs);
    sched->plan = mem_zalloc(seqs, sizeof *sched->plan);
    sched->copies = mem_zalloc(seqs, sizeof *sched->copies);
    sched->free_slots = mem_zalloc(seqs, sizeof *sched->free_slots);
    sched->waiting_slots = mem_zalloc(seqs, sizeof *sched->waiting_slots);
    for (int32_t i = 0; i < SCHED_FLIGHTS_MAX; i++)
        sched->flights[i].items = mem_zalloc(seqs, sizeof *sched->flights[i].items);
    for (int32_t slot = sched->options.max_num_seqs - 1; slot >= 0; slot--)
        sched->free_slots[sched->free_slot_count++] = slot;
}

int sched_open(const struct sched_options *options, struct sched **out, struct err *err) {
    struct kvcache_options cache = {.page_size = options->page_size,
                                    .group_count = 1,
                                    .pages_total = {options->pages_total},
                                    .prefix_caching = options->prefix_caching,
                                    .hash_key = options->hash_key,
                                    .on_key = options->on_key,
                                    .user = options->user};
    int rc = options_check(options, err);
    if (rc) return rc;
    struct sched *sched = mem_zalloc(1, sizeof *sched);
    sched->options = *options;
    rc = kvcache_open(&cache, &sched->cache, err);
    if (rc) {
        mem_free(sched);
        return rc;
    }
    sched_alloc(sched);
    *out = sched;
    return 0;
}

void sched_close(struct sched *sched) {
    if (!sched) return;
    for (uint64_t b = 0; b <= sched->id_mask; b++)
        for (struct group *group = sched->by_id[b], *next; group; group = next) {
            next = group->id_next;
            group_free(group);
        }
    for (int32_t i = 0; i < SCHED_FLIGHTS_MAX; i++) mem_free(sched->flights[i].items);
    mem_free(sched->waiting_slots);
    mem_free(sched->free_slots);
    mem_free(sched->copies);
    mem_free(sched->plan);
    mem_free(sched->outputs);
    mem_free(sched->heap);
    mem_free(sched->by_id);
    kvcache_close(sched->cache);
    mem_free(sched);
}

/* ---- requests by id ---------------------------------------------------------------------------------------------- */

/* Where the pointer to the group of that id is, or the NULL that ends its chain. */
static struct group **group_at(const struct sched *sched, uint64_t id) {
    struct group **at = &sched->by_id[(id * 0x9e3779b97f4a7c15u >> 20) & sched->id_mask];
    while (*at && (*at)->request->id != id) at = &(*at)->id_next;
    return at;
}

/* ---- submit ------------------------------------------------------------------------------------------------------ */

static int fit_check(const struct sched *sched, const struct request *r, int32_t *output_max, int32_t *pages_max,
                     struct err *err) {
    const struct sched_options *o = &sched->options;
    int32_t prompt = (int32_t)r->prompt.count, usable = o->pages_total - 1;
    if (r->prompt.count >= (uint32_t)o->max_model_len)
        return err_set_field(
            err, ERR_INVALID, "prompt",
            "the prompt has %u tokens; with at least one token of output that is more than the %d of the "
            "context",
            r->prompt.count, o->max_model_len);
    int32_t room = o->max_model_len - prompt;
    *output_max = r->max_tokens < room ? r->max_tokens : room;
    int32_t tokens = prompt + *output_max - 1; /* the last token's KV is never needed */
    *pages_max = i32_ceil_div(tokens, o->page_size);
    if (*pages_max > usable)
        return err_set_field(
            err, ERR_INVALID, "max_tokens",
            "a prompt of %d tokens with up to %d of output needs %d pages of %d tokens, the pool has %d", prompt,
            *output_max, *pages_max, o->page_size, usable);
    return 0;
}

static int door_check(const struct sched *sched, const struct request *r, int32_t *output_max, int32_t *pages_max,
                      struct err *err) {
    int rc;
    if (r->n < 1 || r->n > REQUEST_SAMPLES_MAX || r->max_tokens < 1 || r->prompt.count < 1)
        return err_set(err, ERR_INVALID, "the request record is malformed");
    if ((rc = fit_check(sched, r, output_max, pages_max, err))) return rc;
    if (*group_at(sched, r->id)) return err_set(err, ERR_INVALID, "a request of that id is already here");
    if (sched->queued_groups >= sched->options.max_queued_requests)
        return err_set(err, ERR_EXHAUSTED, "the queue is full: %d requests are waiting", sched->queued_groups);
    return 0;
}

/* Ids that end a sample, end ids unless ignored and stop ids, in one list. */
static void banned_collect(struct group *group) {
    const struct request *r = group->request;
    uint32_t eos = r->flags & REQUEST_IGNORE_EOS ? 0 : r->eos_ids.count, stops = r->stop_ids.count;
    if (r->min_tokens == 0 || eos + stops == 0) return;
    group->banned = mem_alloc((size_t)(eos + stops) * sizeof *group->banned);
    if (eos) memcpy(group->banned, record_at(r, r->eos_ids), eos * sizeof *group->banned);
    if (stops) memcpy(group->banned + eos, record_at(r, r->stop_ids), stops * sizeof *group->banned);
    group->banned_count = (int32_t)(eos + stops);
}

int sched_submit(struct sched *sched, struct request *request, void *const *owners, int64_t now_ns, struct err *err) {
    int32_t output_max = 0, pages_max = 0;
    int rc = door_check(sched, request, &output_max, &pages_max, err);
    if (rc) return rc;
    const struct sample_params *p = &request->sampling;
    struct group *group = mem_zalloc(1, sizeof *group);
    group->request = request;
    group->serial = ++sched->serial;
    group->heap_index = -1;
    group->unfinished = group->uncollected = request->n;
    group->output_max = output_max;
    group->pages_max = pages_max;
    group->track = p->repetition_penalty != 1 || p->presence_penalty != 0 || p->frequency_penalty != 0;
    banned_collect(group);
    group->seqs = mem_zalloc((size_t)request->n, sizeof *group->seqs);
    *group_at(sched, request->id) = group;
    for (int32_t i = 0; i < request->n; i++) {
        struct sequence_private *s = &group->seqs[i];
        s->pub = (struct sequence){.request = request,
                                   .sample_index = i,
                                   .state = SEQ_WAITING,
                                   .prompt_count = (int32_t)request->prompt.count,
                                   .arrival_ns = now_ns,
                                   .owner = owners ? owners[i] : NULL,
                                   .private_state = s};
        s->group = group;
        s->slot = -1;
        s->dirty_from = INT32_MAX;
        waiting_insert(sched, s);
    }
    deadline_add(sched, group);
    sched->queued_groups++;
    sched->group_count++;
    sched->groups_received++;
    return 0;
}

/* ---- ends -------------------------------------------------------------------------------------------------------- */

void group_end(struct sched *sched, struct group *group, enum finish_reason reason) {
    for (int32_t i = 0; i < group->request->n; i++) {
        struct sequence_private *s = &group->seqs[i];
        if (s->pub.state == SEQ_FINISHED) continue;
        seq_finish(sched, s, reason);
        sched_output_push(sched, s, NULL, true);
    }
}

void sched_cancel(struct sched *sched, uint64_t request_id, enum finish_reason reason) {
    struct group *group = *group_at(sched, request_id);
    if (group) group_end(sched, group, reason);
}

void sched_cancel_all(struct sched *sched, enum finish_reason reason) {
    for (uint64_t b = 0; b <= sched->id_mask; b++)
        for (struct group *group = sched->by_id[b]; group; group = group->id_next) group_end(sched, group, reason);
}

void sched_finish(struct sched *sched, struct sequence *seq, enum finish_reason reason) {
    if (seq->state != SEQ_FINISHED) seq_finish(sched, seq->private_state, reason);
}

static void seq_collect(struct sched *sched, struct sequence_private *s) {
    struct group *group = s->group;
    if (--group->uncollected > 0) return;
    struct group **at = group_at(sched, group->request->id);
    CHECK(*at == group);
    *at = group->id_next;
    sched->group_count--;
    group_free(group);
}

void sched_collect(struct sched *sched, struct sequence *seq) {
    struct sequence_private *s = seq->private_state;
    CHECK(seq->state == SEQ_FINISHED && !s->collected);
    s->collected = true;
    if (s->last_step <= sched->completed) {
        seq_collect(sched, s);
        return;
    }
    s->prev = sched->leaving.last; /* a launched step reads its request and its ids */
    if (s->prev)
        s->prev->next = s;
    else
        sched->leaving.first = s;
    sched->leaving.last = s;
    sched->leaving.count++;
}

void leaving_complete(struct sched *sched) {
    for (struct sequence_private *s = sched->leaving.first, *next; s; s = next) {
        next = s->next;
        if (s->last_step > sched->completed) continue;
        seq_list_remove(&sched->leaving, s);
        seq_collect(sched, s);
    }
}

/* ---- what others may know ---------------------------------------------------------------------------------------- */

int32_t sched_outputs(struct sched *sched, const struct sched_output **out) {
    if (sched->outputs_read) sched->output_count = 0;
    sched->outputs_read = true;
    *out = sched->outputs;
    return sched->output_count;
}

const int32_t *sched_output_ids(const struct sequence *seq) {
    return seq->private_state->output;
}

bool sched_idle(const struct sched *sched) {
    return sched->running.count == 0 && sched->waiting.count == 0 && sched->built == sched->completed;
}

int64_t sched_next_deadline_ns(const struct sched *sched) {
    return sched->heap_count > 0 ? sched->heap[0]->request->deadline_ns : INT64_MAX;
}

void sched_stats(const struct sched *sched, struct sched_stats *out) {
    struct kv_stats pages;
    kvcache_stats(sched->cache, 0, &pages);
    *out = (struct sched_stats){
        .running = sched->running.count,
        .waiting = sched->waiting.count,
        .queued = sched->queued_groups,
        .pages_total = pages.pages_total,
        .pages_free = pages.pages_free,
        .pages_cached = pages.pages_cached,
        .pages_held = pages.pages_held,
        .preemptions = sched->preemptions,
        .prefix_queried_tokens = sched->prefix_queried_tokens,
        .prefix_hit_tokens = sched->prefix_hit_tokens,
        .steps = sched->steps,
        .prompt_tokens_computed = sched->prompt_tokens_computed,
        .output_tokens = sched->output_tokens,
    };
}

void sched_reset_prefix_cache(struct sched *sched) {
    kv_forget(sched->cache);
}
