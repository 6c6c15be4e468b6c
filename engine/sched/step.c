/* step.c: builds the batch of a planned step, and takes in the results of a complete one. */
#include <string.h>

#include "engine/base/check.h"
#include "engine/sched/private.h"

/* ---- building ---------------------------------------------------------------------------------------------------- */

/* The mutable side of a batch while it is filled. */
struct filling {
    int32_t *token_ids, *token_slots, *positions, *slots, *q_start, *kv_len, *logit_rows, *mask_row;
    struct sample_row *sampling;
    struct slot_reset *resets;
    struct page_delta *deltas;
    int32_t tokens, seqs, rows, reset_count, delta_count;
};

static void fill_tokens(struct filling *f, const struct sequence_private *s, int32_t count) {
    const int32_t *prompt = request_prompt(s->group->request);
    int32_t known = s->pub.prompt_count + s->pub.output_count;
    for (int32_t i = 0; i < count; i++) {
        int32_t position = s->launched + i, id = -1;
        if (position < s->pub.prompt_count)
            id = prompt[position];
        else if (position < known)
            id = s->output[position - s->pub.prompt_count];
        f->token_ids[f->tokens + i] = id;
        f->token_slots[f->tokens + i] = s->slot;
        f->positions[f->tokens + i] = position;
    }
    f->tokens += count;
}

static void fill_row(struct filling *f, const struct sequence_private *s, int32_t kv_end) {
    const struct group *group = s->group;
    const struct request *r = group->request;
    bool early = kv_end - s->pub.prompt_count < r->min_tokens;
    f->logit_rows[f->rows] = f->tokens - 1;
    f->mask_row[f->rows] = -1;
    f->sampling[f->rows++] = (struct sample_row){
        .params = r->sampling,
        .slot = s->slot,
        .sample_index = s->pub.sample_index,
        .position = kv_end,
        .logprobs = r->logprobs,
        .banned = early ? group->banned : NULL,
        .banned_count = early ? group->banned_count : 0,
        .bias_ids = r->bias_ids.count ? record_at(r, r->bias_ids) : NULL,
        .bias = r->bias_ids.count ? record_at(r, r->bias) : NULL,
        .bias_count = (int32_t)r->bias_ids.count,
    };
}

static void fill_slot(struct filling *f, struct sequence_private *s) {
    if (s->fresh) {
        f->resets[f->reset_count++] = (struct slot_reset){.slot = s->slot,
                                                          .track = s->group->track,
                                                          .prompt = request_prompt(s->group->request),
                                                          .output = s->output,
                                                          .prompt_count = s->pub.prompt_count,
                                                          .output_count = s->pub.output_count};
        s->fresh = false;
    }
    for (int32_t i = s->dirty_from; i < s->table.count; i++)
        f->deltas[f->delta_count++] =
            (struct page_delta){.slot = s->slot, .index = i, .page = kv_table_page(&s->table, 0, i)};
    s->dirty_from = INT32_MAX;
}

static void fill_item(struct sched *sched, struct filling *f, const struct plan_item *item, struct flight *flight) {
    struct sequence_private *s = item->seq;
    int32_t kv_end = s->launched + item->tokens;
    struct flight_item *record = &flight->items[flight->count++];
    *record = (struct flight_item){.seq = s, .kv_start = s->launched, .kv_end = kv_end, .row = -1};
    fill_slot(f, s);
    f->q_start[f->seqs] = f->tokens;
    f->slots[f->seqs] = s->slot;
    f->kv_len[f->seqs++] = kv_end;
    fill_tokens(f, s, item->tokens);
    if (item->samples) {
        record->row = f->rows;
        fill_row(f, s, kv_end);
        s->in_flight++;
        s->pub.state = SEQ_DECODE;
    }
    s->launched = kv_end;
    s->last_step = flight->step;
}

static struct filling filling_get(const struct sched *sched, struct arena *arena) {
    int32_t tokens = sched->plan_tokens, seqs = sched->plan_count, rows = sched->plan_rows, deltas = 0;
    for (int32_t i = 0; i < seqs; i++) {
        const struct sequence_private *s = sched->plan[i].seq;
        if (s->dirty_from < s->table.count) deltas += s->table.count - s->dirty_from;
    }
    return (struct filling){
        .token_ids = ARENA_ARRAY(arena, int32_t, tokens),
        .token_slots = ARENA_ARRAY(arena, int32_t, tokens),
        .positions = ARENA_ARRAY(arena, int32_t, tokens),
        .slots = ARENA_ARRAY(arena, int32_t, seqs),
        .q_start = ARENA_ARRAY(arena, int32_t, seqs + 1),
        .kv_len = ARENA_ARRAY(arena, int32_t, seqs),
        .logit_rows = ARENA_ARRAY(arena, int32_t, rows),
        .mask_row = ARENA_ARRAY(arena, int32_t, rows),
        .sampling = ARENA_ARRAY(arena, struct sample_row, rows),
        .resets = ARENA_ARRAY(arena, struct slot_reset, seqs),
        .deltas = ARENA_ARRAY(arena, struct page_delta, deltas),
    };
}

static const struct batch *batch_build(struct sched *sched, struct arena *arena) {
    struct batch *batch = ARENA_ARRAY(arena, struct batch, 1);
    struct filling f = filling_get(sched, arena);
    struct page_copy *copies = ARENA_ARRAY(arena, struct page_copy, sched->copy_count);
    uint64_t step = ++sched->built;
    struct flight *flight = &sched->flights[step % SCHED_FLIGHTS_MAX];
    int32_t decode_tokens = 0;
    flight->step = step;
    flight->count = 0;
    for (int32_t i = 0; i < sched->plan_count; i++) {
        decode_tokens += sched->plan[i].prefill ? 0 : 1;
        fill_item(sched, &f, &sched->plan[i], flight);
    }
    f.q_start[f.seqs] = f.tokens;
    memcpy(copies, sched->copies, (size_t)sched->copy_count * sizeof *copies);
    CHECK(f.tokens == sched->plan_tokens && f.rows == sched->plan_rows);
    CHECK(f.tokens <= sched->options.max_num_batched_tokens);
    *batch = (struct batch){
        .step = step,
        .tokens = f.tokens,
        .seqs = f.seqs,
        .rows = f.rows,
        .prefill_tokens = f.tokens - decode_tokens,
        .decode_tokens = decode_tokens,
        .token_ids = f.token_ids,
        .token_slots = f.token_slots,
        .positions = f.positions,
        .slots = f.slots,
        .q_start = f.q_start,
        .kv_len = f.kv_len,
        .logit_rows = f.logit_rows,
        .sampling = f.sampling,
        .mask_row = f.mask_row,
        .resets = f.resets,
        .deltas = f.deltas,
        .copies = copies,
        .reset_count = f.reset_count,
        .delta_count = f.delta_count,
        .copy_count = sched->copy_count,
    };
    return batch;
}

const struct batch *sched_next_batch(struct sched *sched, struct arena *arena, int64_t now_ns) {
    CHECK_MSG(sched->built - sched->completed <= (uint64_t)sched->options.lookahead, "step %llu was not completed",
              (unsigned long long)sched->completed + 1);
    while (sched->heap_count > 0 && sched->heap[0]->request->deadline_ns <= now_ns)
        group_end(sched, sched->heap[0], FINISH_DEADLINE);
    if (sched->running.count == 0 && sched->waiting.count == 0) return NULL;
    plan_step(sched, now_ns);
    if (sched->plan_count > 0) return batch_build(sched, arena);
    CHECK_MSG(sched->built > sched->completed, "invariant 11: %d waiting and %d running, and none of them can go on",
              sched->waiting.count, sched->running.count);
    return NULL;
}

/* ---- completing -------------------------------------------------------------------------------------------------- */

static bool ids_have(const struct request *r, struct span span, int32_t id) {
    const int32_t *ids = record_at(r, span);
    for (uint32_t i = 0; i < span.count; i++)
        if (ids[i] == id) return true;
    return false;
}

/* Why the token that was just appended ends the sequence, FINISH_NONE when it does not. */
static enum finish_reason finish_check(const struct sequence_private *s, int32_t id) {
    const struct request *r = s->group->request;
    if (s->pub.output_count > r->min_tokens) {
        if (!(r->flags & REQUEST_IGNORE_EOS) && ids_have(r, r->eos_ids, id)) return FINISH_STOP;
        if (ids_have(r, r->stop_ids, id)) return FINISH_STOP;
    }
    return s->pub.output_count >= s->group->output_max ? FINISH_LENGTH : FINISH_NONE;
}

/* A finite token came, so what was computed before it is sound: other sequences may share its full pages. */
static void seq_prove(struct sched *sched, struct sequence_private *s) {
    s->proven = true;
    if (group_caches(s->group)) {
        struct kv_source source = seq_source(s);
        int32_t pages = s->computed / sched->options.page_size;
        int32_t changed = kv_publish(sched->cache, &s->table, &source, pages, s->last_step);
        if (changed < s->dirty_from) s->dirty_from = changed;
    }
    if (!s->group->donor) s->group->donor = s;
}

static void token_accept(struct sched *sched, struct sequence_private *s, const struct sample_result *result,
                         int64_t now_ns) {
    s->in_flight--;
    if (result->id < 0 || result->id >= sched->options.vocab) { /* NaN in its row, or a broken sampler */
        seq_finish(sched, s, FINISH_ERROR);
        sched_output_push(sched, s, NULL, true);
        return;
    }
    s->output[s->pub.output_count++] = result->id;
    if (s->pub.output_count == 1) s->pub.first_token_ns = now_ns;
    s->pub.last_token_ns = now_ns;
    sched->output_tokens++;
    if (s->slot >= 0) seq_prove(sched, s);
    enum finish_reason reason = finish_check(s, result->id);
    if (reason != FINISH_NONE) seq_finish(sched, s, reason);
    sched_output_push(sched, s, result, reason != FINISH_NONE);
}

static void count_prompt(struct sched *sched, const struct flight_item *item) {
    int32_t prompt = item->seq->pub.prompt_count;
    int32_t end = item->kv_end < prompt ? item->kv_end : prompt;
    if (end > item->kv_start) sched->prompt_tokens_computed += (uint64_t)(end - item->kv_start);
}

/* What a token's acceptance reads lies in some ten cache lines behind four pointers, cold after a step of milliseconds:
 * they are asked for ahead, a pointer further at each distance. */
#define AHEAD_SEQ   8
#define AHEAD_INNER 4
#define AHEAD_LAST  2

static void flight_prefetch(const struct flight *flight, int32_t i, const struct sample_result *results) {
    if (i + AHEAD_SEQ < flight->count) {
        const char *s = (const char *)flight->items[i + AHEAD_SEQ].seq;
        for (size_t at = 0; at < sizeof(struct sequence_private); at += 64) __builtin_prefetch(s + at, 1);
    }
    if (i + AHEAD_INNER < flight->count) {
        const struct flight_item *item = &flight->items[i + AHEAD_INNER];
        __builtin_prefetch(item->seq->group);
        if (item->row < 0) return;
        __builtin_prefetch(&results[item->row]);
        __builtin_prefetch(item->seq->output + item->seq->pub.output_count, 1);
    }
    if (i + AHEAD_LAST < flight->count) __builtin_prefetch(flight->items[i + AHEAD_LAST].seq->group->request);
}

void sched_complete(struct sched *sched, const struct batch *batch, const struct sample_result *results,
                    int64_t now_ns) {
    struct flight *flight = &sched->flights[batch->step % SCHED_FLIGHTS_MAX];
    CHECK(batch->step == sched->completed + 1 && batch->step <= sched->built && flight->step == batch->step);
    sched->completed = batch->step;
    sched->steps++;
    kv_complete(sched->cache, batch->step);
    slots_complete(sched);
    for (int32_t i = 0; i < flight->count; i++) {
        const struct flight_item *item = &flight->items[i];
        struct sequence_private *s = item->seq;
        flight_prefetch(flight, i, results);
        count_prompt(sched, item);
        if (s->slot >= 0) s->computed = item->kv_end;
        if (item->row >= 0 && s->pub.state != SEQ_FINISHED) token_accept(sched, s, &results[item->row], now_ns);
    }
    flight->count = 0;
    leaving_complete(sched);
}
