/* device.c: the fake device, and the checks of every batch that is handed to it. */
#include <string.h>

#include "engine/base/mem.h"
#include "tests/sim/sim.h"

void device_open(struct sim *sim) {
    const struct sched_options *o = &sim->plan.options;
    struct sim_device *d = &sim->device;
    size_t slots = (size_t)o->max_num_seqs, pages = (size_t)o->pages_total;
    d->max_pages = (o->max_model_len + o->page_size - 1) / o->page_size;
    d->rows = mem_alloc(slots * (size_t)d->max_pages * sizeof *d->rows);
    memset(d->rows, 0xff, slots * (size_t)d->max_pages * sizeof *d->rows);
    d->last_token = mem_zalloc(slots, sizeof *d->last_token);
    d->content = mem_zalloc(pages * (size_t)o->page_size, sizeof *d->content);
    d->slot_seq = mem_zalloc(slots, sizeof(struct sim_seq *));
    d->slot_step = mem_zalloc(slots, sizeof *d->slot_step);
    d->page_seq = mem_zalloc(pages, sizeof(struct sim_seq *));
    d->page_step = mem_zalloc(pages, sizeof *d->page_step);
    for (int i = 0; i < SIM_FLIGHTS; i++) {
        sim->flights[i].results = mem_zalloc(slots, sizeof *sim->flights[i].results);
        sim->flights[i].seqs = mem_zalloc(slots, sizeof(struct sim_seq *));
    }
}

void device_close(struct sim *sim) {
    struct sim_device *d = &sim->device;
    mem_free(d->rows);
    mem_free(d->last_token);
    mem_free(d->content);
    mem_free(d->slot_seq);
    mem_free(d->slot_step);
    mem_free(d->page_seq);
    mem_free(d->page_step);
    for (int i = 0; i < SIM_FLIGHTS; i++) {
        mem_free(sim->flights[i].results);
        mem_free(sim->flights[i].seqs);
    }
}

/* ---- launch: is the batch what it should be? ----------------------------------------------------------------------
 */

/* Whose slot is it? The scheduler's own word, which the content of the step then proves. */
static struct sim_seq *slot_owner(struct sim *sim, int32_t slot) {
    for (struct sequence_private *s = sim->sched->running.first; s; s = s->next)
        if (s->slot == slot) return s->pub.owner;
    sim_fault(sim, "slot %d of the batch belongs to nobody", slot);
}

/* Requests that may see each other's pages have equal tags. */
static uint64_t tag_of(const struct sim *sim, const struct sim_request *r) {
    if (!sim->plan.options.prefix_caching || (r->flags & REQUEST_NO_PREFIX_CACHE)) return hash_mix(r->id, 77);
    return hash_mix(r->salt, sim->plan.forgetful && r->n == 1 ? 1000 + sim->index_epoch : 999);
}

static void launch_reset(struct sim *sim, const struct batch *b, const struct slot_reset *reset) {
    struct sim_device *d = &sim->device;
    SIM_CHECK(sim, reset->slot >= 0 && reset->slot < sim->plan.options.max_num_seqs, "reset of slot %d", reset->slot);
    SIM_CHECK(sim, d->slot_step[reset->slot] <= sim->sched->completed,
              "invariant 6: slot %d gets a new owner while step %llu is under way", reset->slot,
              (unsigned long long)d->slot_step[reset->slot]);
    struct sim_seq *ss = slot_owner(sim, reset->slot);
    struct sim_request *r = ss->request;
    SIM_CHECK(sim,
              reset->prompt_count == r->prompt_count && reset->output_count == ss->accepted &&
                  ss->accepted == ss->sampled,
              "reset of slot %d for request %llu: %d + %d tokens, not %d + %d", reset->slot, (unsigned long long)r->id,
              reset->prompt_count, reset->output_count, r->prompt_count, ss->accepted);
    SIM_CHECK(sim, !ss->ended, "request %llu sample %d has ended and runs again", (unsigned long long)r->id,
              ss->sample);
    if (!ss->started)
        for (int32_t i = 0; i < sim->live_count && sim->live[i]->id < r->id; i++)
            SIM_CHECK(sim, sim->live[i]->started, "request %llu starts before the older %llu",
                      (unsigned long long)r->id, (unsigned long long)sim->live[i]->id);
    (void)b;
    d->slot_seq[reset->slot] = ss;
    ss->started = r->started = true;
    ss->poisoned = false;
    ss->kv_end = -1;
    ss->tag = tag_of(sim, r);
}

static bool ids_equal(const int32_t *a, int32_t a_count, const int32_t *b, int32_t b_count) {
    return a_count == b_count && (a_count == 0 || memcmp(a, b, (size_t)a_count * sizeof *a) == 0);
}

static void launch_row(struct sim *sim, const struct batch *b, int32_t row, int32_t i, struct sim_seq *ss) {
    const struct sim_request *r = ss->request;
    const struct sample_row *sampling = &b->sampling[row];
    int32_t banned[2 * SIM_STOPS_MAX], banned_count = 0;
    SIM_CHECK(sim, row < b->rows && b->logit_rows[row] == b->q_start[i + 1] - 1, "row %d samples another token", row);
    SIM_CHECK(sim,
              sampling->slot == b->slots[i] && sampling->sample_index == ss->sample &&
                  sampling->position == b->kv_len[i],
              "row %d: slot %d sample %d position %d", row, sampling->slot, sampling->sample_index, sampling->position);
    if (ss->sampled < r->min_tokens) {
        for (int32_t e = 0; e < r->eos_count && !(r->flags & REQUEST_IGNORE_EOS); e++)
            banned[banned_count++] = r->eos[e];
        for (int32_t e = 0; e < r->stop_count; e++) banned[banned_count++] = r->stop[e];
    }
    SIM_CHECK(sim, ids_equal(sampling->banned, sampling->banned_count, banned, banned_count),
              "row %d bans %d ids, not %d (token %d, min_tokens %d)", row, sampling->banned_count, banned_count,
              ss->sampled, r->min_tokens);
    ss->sampled++;
    SIM_CHECK(sim, ss->sampled <= r->output_max, "invariant 13: token %d of %d is sampled", ss->sampled, r->output_max);
    truth_extend(sim, ss, ss->sampled);
}

static void launch_touch(struct sim *sim, const struct batch *b, struct sim_seq *ss, const struct sequence_private *s,
                         int32_t start, int32_t end) {
    struct sim_device *d = &sim->device;
    int32_t page_size = sim->plan.options.page_size;
    for (int32_t index = 0; index <= (end - 1) / page_size; index++) {
        int32_t page = kv_table_page(&s->table, 0, index);
        bool writes = (index + 1) * page_size > start;
        SIM_CHECK(sim, !writes || d->page_seq[page] == ss || d->page_step[page] <= sim->sched->completed,
                  "invariant 6: page %d is written in step %llu while step %llu of another sequence may use it", page,
                  (unsigned long long)b->step, (unsigned long long)d->page_step[page]);
        d->page_seq[page] = ss;
        d->page_step[page] = b->step;
    }
}

static void launch_seq(struct sim *sim, struct sim_flight *f, int32_t i, int32_t *row) {
    const struct batch *b = f->batch;
    struct sim_device *d = &sim->device;
    int32_t slot = b->slots[i], count = b->q_start[i + 1] - b->q_start[i], end = b->kv_len[i], start = end - count;
    SIM_CHECK(sim, slot >= 0 && slot < sim->plan.options.max_num_seqs && count > 0, "sequence %d of the batch", i);
    SIM_CHECK(sim, d->slot_step[slot] < b->step, "slot %d is twice in step %llu", slot, (unsigned long long)b->step);
    d->slot_step[slot] = b->step;
    struct sim_seq *ss = f->seqs[i] = d->slot_seq[slot];
    SIM_CHECK(sim, ss && ss == slot_owner(sim, slot), "invariant 9: slot %d was not reset for its owner", slot);
    SIM_CHECK(sim, !ss->ended, "request %llu sample %d has ended and is in the batch",
              (unsigned long long)ss->request->id, ss->sample);
    SIM_CHECK(sim, ss->kv_end < 0 || ss->kv_end == start, "request %llu goes on at token %d, not %d",
              (unsigned long long)ss->request->id, start, ss->kv_end);
    int32_t known = ss->request->prompt_count + ss->sampled;
    SIM_CHECK(sim, start >= 0 && start < known && end <= known, "tokens %d to %d of %d", start, end, known);
    for (int32_t t = 0; t < count; t++) {
        SIM_CHECK(sim, b->positions[b->q_start[i] + t] == start + t, "position %d", b->positions[b->q_start[i] + t]);
        SIM_CHECK(sim, b->token_slots[b->q_start[i] + t] == slot, "token of slot %d",
                  b->token_slots[b->q_start[i] + t]);
    }
    ss->kv_end = end;
    for (struct sequence_private *s = sim->sched->running.first; s; s = s->next)
        if (s->slot == slot) launch_touch(sim, b, ss, s, start, end);
    if (end == known) launch_row(sim, b, (*row)++, i, ss);
}

void device_launch(struct sim *sim, struct sim_flight *f) {
    const struct batch *b = f->batch;
    const struct sched_options *o = &sim->plan.options;
    struct sim_device *d = &sim->device;
    int32_t row = 0;
    SIM_CHECK(sim, b->tokens >= 1 && b->tokens <= o->max_num_batched_tokens,
              "invariant 10: %d tokens, the budget is %d", b->tokens, o->max_num_batched_tokens);
    SIM_CHECK(sim, b->seqs >= 1 && b->seqs <= o->max_num_seqs && b->q_start[0] == 0 && b->q_start[b->seqs] == b->tokens,
              "%d sequences", b->seqs);
    SIM_CHECK(sim, b->prefill_tokens + b->decode_tokens == b->tokens && b->prefill_tokens >= 0, "token counts");
    for (int32_t i = 0; i < b->reset_count; i++) launch_reset(sim, b, &b->resets[i]);
    for (int32_t i = 0; i < b->copy_count; i++) {
        int32_t src = b->copies[i].src, dst = b->copies[i].dst;
        SIM_CHECK(sim, src > 0 && src < o->pages_total && dst > 0 && dst < o->pages_total && src != dst, "copy");
        SIM_CHECK(sim, d->page_step[dst] <= sim->sched->completed, "invariant 6: page %d is overwritten by a copy",
                  dst);
        d->page_step[src] = b->step; /* read, in order with what its owner writes */
        sim->coverage->copies++;
    }
    for (int32_t i = 0; i < b->seqs; i++) launch_seq(sim, f, i, &row);
    SIM_CHECK(sim, row == b->rows, "%d rows are sampled, %d should be", b->rows, row);
}

/* ---- execution --------------------------------------------------------------------------------------------------- */

static void execute_tables(struct sim *sim, const struct batch *b) {
    struct sim_device *d = &sim->device;
    size_t page_size = (size_t)sim->plan.options.page_size;
    for (int32_t i = 0; i < b->reset_count; i++) {
        const struct slot_reset *reset = &b->resets[i];
        struct sim_seq *ss = d->slot_seq[reset->slot];
        memset(d->rows + (int64_t)reset->slot * d->max_pages, 0xff, (size_t)d->max_pages * sizeof *d->rows);
        d->last_token[reset->slot] = -1;
        SIM_CHECK(sim,
                  memcmp(reset->prompt, ss->request->prompt, (size_t)reset->prompt_count * sizeof(int32_t)) == 0 &&
                      ids_equal(reset->output, reset->output_count, ss->truth, reset->output_count),
                  "the reset of slot %d names other tokens", reset->slot);
    }
    for (int32_t i = 0; i < b->delta_count; i++) {
        const struct page_delta *delta = &b->deltas[i];
        SIM_CHECK(sim,
                  delta->slot >= 0 && delta->slot < sim->plan.options.max_num_seqs && delta->index >= 0 &&
                      delta->index < d->max_pages && delta->page > 0 && delta->page < sim->plan.options.pages_total,
                  "table entry %d of slot %d: page %d", delta->index, delta->slot, delta->page);
        int32_t *entry = &d->rows[(int64_t)delta->slot * d->max_pages + delta->index];
        if (*entry >= 0 && *entry != delta->page) sim->coverage->takeovers++;
        *entry = delta->page;
    }
    for (int32_t i = 0; i < b->copy_count; i++)
        memcpy(d->content + (size_t)b->copies[i].dst * page_size, d->content + (size_t)b->copies[i].src * page_size,
               page_size * sizeof *d->content);
}

static uint64_t *content_at(struct sim *sim, int32_t slot, int32_t position) {
    struct sim_device *d = &sim->device;
    int32_t page_size = sim->plan.options.page_size;
    int32_t page = d->rows[(int64_t)slot * d->max_pages + position / page_size];
    SIM_CHECK(sim, page > 0, "position %d of slot %d has no page", position, slot);
    return &d->content[(int64_t)page * page_size + position % page_size];
}

/* Reads everything that stands before `start`. True when poison was among it. */
static bool execute_reads(struct sim *sim, const struct sim_seq *ss, int32_t slot, int32_t start) {
    bool poison = false;
    for (int32_t p = 0; p < start; p++) {
        uint64_t have = *content_at(sim, slot, p);
        if (have == (ss->chain[p] ^ ss->tag)) continue;
        SIM_CHECK(sim, have == SIM_POISON, "request %llu sample %d reads the KV of another text at token %d of %d",
                  (unsigned long long)ss->request->id, ss->sample, p, start);
        SIM_CHECK(sim, ss->poisoned, "request %llu sample %d reads NaN that another sequence left",
                  (unsigned long long)ss->request->id, ss->sample);
        poison = true;
    }
    return poison;
}

static int32_t token_draw(const struct sample_row *row, uint64_t text, int32_t vocab) {
    int32_t id = (int32_t)(hash_mix(text, (uint64_t)row->sample_index) % (uint64_t)vocab);
    for (int32_t i = 0; i < row->banned_count; i++)
        if (row->banned[i] == id) {
            id = (id + 1) % vocab;
            i = -1;
        }
    return id;
}

static void execute_seq(struct sim *sim, struct sim_flight *f, int32_t i, int32_t *row) {
    const struct batch *b = f->batch;
    struct sim_seq *ss = f->seqs[i];
    int32_t slot = b->slots[i], end = b->kv_len[i], start = end - (b->q_start[i + 1] - b->q_start[i]), id = -1;
    bool poison = execute_reads(sim, ss, slot, start);
    uint64_t text = start > 0 ? ss->chain[start - 1] : 0;
    if (random_chance(&sim->random, sim->plan.nans)) poison = ss->poisoned = true;
    for (int32_t p = start; p < end; p++) {
        int32_t want =
            p < ss->request->prompt_count ? ss->request->prompt[p] : ss->truth[p - ss->request->prompt_count];
        id = b->token_ids[b->q_start[i] + p - start];
        if (id < 0) id = sim->device.last_token[slot];
        SIM_CHECK(sim, id == want || ss->poisoned, "request %llu sample %d: token %d is %d, not %d",
                  (unsigned long long)ss->request->id, ss->sample, p, id, want);
        text = hash_mix(text, (uint64_t)id);
        *content_at(sim, slot, p) = poison ? SIM_POISON : text ^ ss->tag;
    }
    if (*row >= b->rows || b->logit_rows[*row] != b->q_start[i + 1] - 1) return;
    id = poison ? (random_chance(&sim->random, 500) ? -1 : sim->plan.options.vocab)
                : token_draw(&b->sampling[*row], text, sim->plan.options.vocab);
    sim->device.last_token[slot] = id;
    f->results[(*row)++].id = id;
}

void device_execute(struct sim *sim, struct sim_flight *f) {
    int32_t row = 0;
    execute_tables(sim, f->batch);
    for (int32_t i = 0; i < f->batch->seqs; i++) execute_seq(sim, f, i, &row);
    f->executed = true;
}
