/* clients.c: who asks, who leaves, and whether each got what the text alone says. */
#include <string.h>

#include "engine/base/mem.h"
#include "tests/sim/sim.h"

/* ---- truth ------------------------------------------------------------------------------------------------------- */

static bool id_in(const int32_t *ids, int32_t count, int32_t id) {
    for (int32_t i = 0; i < count; i++)
        if (ids[i] == id) return true;
    return false;
}

static bool id_ends(const struct sim_request *r, int32_t id) {
    return (!(r->flags & REQUEST_IGNORE_EOS) && id_in(r->eos, r->eos_count, id)) || id_in(r->stop, r->stop_count, id);
}

void truth_extend(struct sim *sim, struct sim_seq *ss, int32_t count) {
    const struct sim_request *r = ss->request;
    int32_t vocab = sim->plan.options.vocab;
    for (; ss->truth_count < count; ss->truth_count++) {
        int32_t at = r->prompt_count + ss->truth_count;
        int32_t id = (int32_t)(hash_mix(ss->chain[at - 1], (uint64_t)ss->sample) % (uint64_t)vocab);
        if (ss->truth_count < r->min_tokens)
            while (id_ends(r, id)) id = (id + 1) % vocab;
        ss->truth[ss->truth_count] = id;
        ss->chain[at] = hash_mix(ss->chain[at - 1], (uint64_t)id);
    }
}

enum finish_reason truth_end(const struct sim_seq *ss, int32_t count) {
    const struct sim_request *r = ss->request;
    if (count > r->min_tokens && id_ends(r, ss->truth[count - 1])) return FINISH_STOP;
    return count >= r->output_max ? FINISH_LENGTH : FINISH_NONE;
}

/* ---- arrivals ---------------------------------------------------------------------------------------------------- */

/* A prompt of one of a few families, so that prefixes repeat, going its own way from some token on; or an earlier
 * conversation, carried on. */
static void prompt_draw(struct sim *sim, struct sim_request *r) {
    struct sim_random *rnd = &sim->random;
    int32_t vocab = sim->plan.options.vocab, family = random_range(rnd, 1, sim->plan.families), same = r->prompt_count;
    struct sim_request *old = sim->requests;
    if (random_chance(rnd, sim->plan.strays)) same = random_range(rnd, 0, r->prompt_count);
    for (int32_t i = 0; i < r->prompt_count; i++)
        r->prompt[i] = (int32_t)(hash_mix((uint64_t)family, (uint64_t)i) % (uint64_t)vocab);
    if (old && random_chance(rnd, 250)) {
        for (int32_t back = random_range(rnd, 0, 6); back > 0 && old->next; back--) old = old->next;
        const struct sim_seq *ss = &old->seqs[0];
        for (int32_t i = 0; i < r->prompt_count && i < old->prompt_count + ss->accepted; i++)
            r->prompt[i] = i < old->prompt_count ? old->prompt[i] : ss->truth[i - old->prompt_count];
        r->salt = old->salt;
    }
    for (int32_t i = same; i < r->prompt_count; i++) r->prompt[i] = random_range(rnd, 0, vocab - 1);
}

static int32_t stops_draw(struct sim *sim, int32_t *ids) {
    int32_t count = random_chance(&sim->random, sim->plan.stops) ? random_range(&sim->random, 1, SIM_STOPS_MAX) : 0;
    for (int32_t i = 0; i < count; i++) ids[i] = random_range(&sim->random, 0, sim->plan.options.vocab - 1);
    return count;
}

static void seqs_open(struct sim *sim, struct sim_request *r) {
    size_t chain = (size_t)(r->prompt_count + r->output_max);
    r->seqs = mem_zalloc((size_t)r->n, sizeof *r->seqs);
    for (int32_t k = 0; k < r->n; k++) {
        struct sim_seq *ss = &r->seqs[k];
        uint64_t text = 0;
        ss->request = r;
        ss->sample = k;
        ss->truth = mem_alloc((size_t)r->output_max * sizeof *ss->truth);
        ss->chain = mem_alloc(chain * sizeof *ss->chain);
        for (int32_t i = 0; i < r->prompt_count; i++) ss->chain[i] = text = hash_mix(text, (uint64_t)r->prompt[i]);
    }
    (void)sim;
}

static struct sim_request *request_draw(struct sim *sim) {
    struct sim_random *rnd = &sim->random;
    const struct sim_plan *p = &sim->plan;
    struct sim_request *r = mem_zalloc(1, sizeof *r);
    r->id = ++sim->next_id;
    r->n = random_chance(rnd, p->samples) ? random_range(rnd, 1, p->samples_max) : 1;
    r->prompt_count = random_range(rnd, 1, p->prompt_max);
    r->max_tokens = random_range(rnd, 1, p->output_max);
    r->min_tokens = random_chance(rnd, p->min_tokens) ? random_range(rnd, 1, r->max_tokens) : 0;
    r->salt = (uint64_t)random_range(rnd, 0, p->salts);
    r->prompt = mem_alloc((size_t)r->prompt_count * sizeof *r->prompt);
    prompt_draw(sim, r);
    if (p->forgetful) r->salt = r->salt % 1000 + (r->n > 1 ? 1000 : 0);
    r->eos_count = stops_draw(sim, r->eos);
    r->stop_count = stops_draw(sim, r->stop);
    if (random_chance(rnd, p->ignore_eos)) r->flags |= REQUEST_IGNORE_EOS;
    if (random_chance(rnd, p->no_cache)) r->flags |= REQUEST_NO_PREFIX_CACHE;
    if (random_chance(rnd, p->deadlines)) r->deadline_ns = sim->now_ns + random_range(rnd, 0, 60000);
    int32_t room = p->options.max_model_len - r->prompt_count;
    r->output_max = r->max_tokens < room ? r->max_tokens : room;
    if (r->output_max < 1) r->output_max = 1; /* will be refused */
    seqs_open(sim, r);
    return r;
}

static struct request *record_build(const struct sim_request *r) {
    struct request_parts parts = {
        .head = {.flags = r->flags,
                 .id = r->id,
                 .deadline_ns = r->deadline_ns,
                 .n = r->n,
                 .max_tokens = r->max_tokens,
                 .min_tokens = r->min_tokens,
                 .logprobs = -1,
                 .salt = {r->salt, 0},
                 .sampling = {.temperature = 1, .top_p = 1, .typical_p = 1, .repetition_penalty = 1}},
        .prompt = r->prompt,
        .prompt_count = r->prompt_count,
        .eos_ids = r->eos,
        .eos_count = r->eos_count,
        .stop_ids = r->stop,
        .stop_id_count = r->stop_count};
    struct request *record = NULL;
    struct err err;
    return request_build(&parts, &record, &err) == 0 ? record : NULL;
}

/* What the door should say. */
static int door_expect(const struct sim *sim, const struct sim_request *r) {
    const struct sched_options *o = &sim->plan.options;
    int32_t queued = 0, tokens = r->prompt_count + r->output_max - 1;
    if (r->prompt_count + 1 > o->max_model_len) return ERR_INVALID;
    if ((tokens + o->page_size - 1) / o->page_size > o->pages_total - 1) return ERR_INVALID;
    for (int32_t i = 0; i < sim->live_count; i++) queued += !sim->live[i]->started;
    return queued >= o->max_queued_requests ? ERR_EXHAUSTED : 0;
}

static void live_add(struct sim *sim, struct sim_request *r) {
    if (sim->live_count == sim->live_capacity) {
        sim->live_capacity = sim->live_capacity ? 2 * sim->live_capacity : 64;
        sim->live = mem_realloc(sim->live, (size_t)sim->live_capacity * sizeof(struct sim_request *));
    }
    sim->live[sim->live_count++] = r;
}

static void request_free(struct sim_request *r) {
    for (int32_t k = 0; k < r->n; k++) {
        mem_free(r->seqs[k].truth);
        mem_free(r->seqs[k].chain);
    }
    mem_free(r->seqs);
    mem_free(r->prompt);
    mem_free(r);
}

static void request_submit(struct sim *sim) {
    struct sim_request *r = request_draw(sim);
    struct request *record = record_build(r);
    void *owners[REQUEST_SAMPLES_MAX];
    struct err err = {0};
    for (int32_t k = 0; k < r->n; k++) owners[k] = &r->seqs[k];
    int expect = door_expect(sim, r);
    int rc = sched_submit(sim->sched, record, owners, sim->now_ns, &err);
    sim->coverage->requests++;
    sim->coverage->refused_size += rc == ERR_INVALID;
    sim->coverage->refused_queue += rc == ERR_EXHAUSTED;
    if (rc == 0) {
        r->record = record;
        r->next = sim->requests;
        sim->requests = r;
        live_add(sim, r);
    } else {
        mem_free(record);
        request_free(r);
    }
    SIM_CHECK(sim, rc == expect, "the door said %d (%s), not %d", rc, err.text, expect);
}

void clients_arrive(struct sim *sim) {
    if (!random_chance(&sim->random, sim->plan.arrivals)) return;
    for (int32_t i = random_range(&sim->random, 1, sim->plan.burst_max); i > 0; i--) request_submit(sim);
}

/* ---- disturbances ------------------------------------------------------------------------------------------------ */

void clients_disturb(struct sim *sim) {
    struct sim_random *rnd = &sim->random;
    if (sim->live_count > 0 && random_chance(rnd, sim->plan.cancels)) {
        for (int32_t i = random_chance(rnd, 300) ? random_range(rnd, 2, 4) : 1; i > 0; i--) {
            struct sim_request *r = sim->live[random_range(rnd, 0, sim->live_count - 1)];
            r->cancelled = true;
            sim->coverage->cancels++;
            sched_cancel(sim->sched, r->id, FINISH_ABORT);
        }
    }
    if (random_chance(rnd, 5)) sched_cancel(sim->sched, sim->next_id + 1000, FINISH_ABORT); /* unknown */
    if (random_chance(rnd, sim->plan.forgets)) {
        sim->index_epoch++;
        sim->coverage->forgets++;
        sched_reset_prefix_cache(sim->sched);
    }
    if (random_chance(rnd, sim->plan.shutdowns)) {
        for (int32_t i = 0; i < sim->live_count; i++) sim->live[i]->shut_down = true;
        sim->coverage->shutdowns++;
        sched_cancel_all(sim->sched, FINISH_SHUTDOWN);
    }
}

/* ---- outputs ----------------------------------------------------------------------------------------------------- */

static void uncollected_add(struct sim *sim, struct sim_seq *ss) {
    if (sim->uncollected_count == sim->uncollected_capacity) {
        sim->uncollected_capacity = sim->uncollected_capacity ? 2 * sim->uncollected_capacity : 64;
        sim->uncollected = mem_realloc(sim->uncollected, (size_t)sim->uncollected_capacity * sizeof(struct sim_seq *));
    }
    sim->uncollected[sim->uncollected_count++] = ss;
}

static void seq_end(struct sim *sim, struct sim_seq *ss, struct sequence *seq) {
    SIM_CHECK(sim, seq->state == SEQ_FINISHED && seq->output_count == ss->accepted,
              "ended with %d tokens, %d were reported", seq->output_count, ss->accepted);
    SIM_CHECK(sim,
              ss->accepted == 0 ||
                  memcmp(sched_output_ids(seq), ss->truth, (size_t)ss->accepted * sizeof *ss->truth) == 0,
              "request %llu sample %d: its tokens are not those of its text", (unsigned long long)ss->request->id,
              ss->sample);
    SIM_CHECK(sim, seq->preemptions <= SCHED_PREEMPTIONS_MAX, "invariant 12: preempted %d times", seq->preemptions);
    SIM_CHECK(sim, seq->cached_count < ss->request->prompt_count, "%d cached tokens of a prompt of %d",
              seq->cached_count, ss->request->prompt_count);
    ss->ended = true;
    ss->seq = seq;
    uncollected_add(sim, ss);
}

static void reason_check(struct sim *sim, const struct sim_seq *ss, enum finish_reason reason, bool with_token) {
    const struct sim_request *r = ss->request;
    bool ok = false;
    if (with_token) {
        ok = reason == truth_end(ss, ss->accepted);
    } else if (reason == FINISH_ERROR) {
        ok = ss->poisoned;
        sim->coverage->faults++;
    } else if (reason == FINISH_DEADLINE) {
        ok = r->deadline_ns > 0 && r->deadline_ns <= sim->now_ns;
        sim->coverage->deadlines++;
    } else {
        ok = (reason == FINISH_ABORT && r->cancelled) || (reason == FINISH_SHUTDOWN && r->shut_down);
    }
    SIM_CHECK(sim, ok, "request %llu sample %d ended with %s after %d tokens", (unsigned long long)r->id, ss->sample,
              finish_reason_name(reason), ss->accepted);
    sim->coverage->stops += reason == FINISH_STOP;
    sim->coverage->lengths += reason == FINISH_LENGTH;
}

static void output_read(struct sim *sim, const struct sched_output *out) {
    struct sim_seq *ss = out->seq->owner;
    const struct sim_request *r = ss->request;
    SIM_CHECK(sim, !ss->ended, "request %llu sample %d: news after its end", (unsigned long long)r->id, ss->sample);
    SIM_CHECK(sim, out->seq->sample_index == ss->sample && out->seq->request->id == r->id, "news for somebody else");
    SIM_CHECK(sim, out->token || out->finished, "news that says nothing");
    if (out->token) {
        SIM_CHECK(sim, ss->accepted < ss->sampled && out->token->id == ss->truth[ss->accepted],
                  "invariant 15: request %llu sample %d: token %d is %d, the text alone says %d",
                  (unsigned long long)r->id, ss->sample, ss->accepted, out->token->id, ss->truth[ss->accepted]);
        ss->accepted++;
        sim->coverage->tokens++;
        SIM_CHECK(sim, out->finished || truth_end(ss, ss->accepted) == FINISH_NONE,
                  "request %llu sample %d goes on after its end", (unsigned long long)r->id, ss->sample);
    }
    SIM_CHECK(sim, out->finished == (out->seq->finish != FINISH_NONE) || out->token, "finish reason");
    if (out->finished) {
        reason_check(sim, ss, out->seq->finish, out->token != NULL);
        seq_end(sim, ss, out->seq);
    } else if (out->seq->state != SEQ_FINISHED && random_chance(&sim->random, sim->plan.stop_strings)) {
        sim->coverage->ended_by_engine++;
        sched_finish(sim->sched, out->seq, FINISH_STOP);
        seq_end(sim, ss, out->seq);
    }
}

static bool request_over(const struct sim_request *r) {
    for (int32_t k = 0; k < r->n; k++)
        if (!r->seqs[k].ended) return false;
    return true;
}

static void live_sweep(struct sim *sim) {
    int32_t kept = 0;
    for (int32_t i = 0; i < sim->live_count; i++) {
        struct sim_request *r = sim->live[i];
        if (request_over(r)) continue;
        SIM_CHECK(sim, !r->cancelled && !r->shut_down, "request %llu was cancelled and lives",
                  (unsigned long long)r->id);
        sim->live[kept++] = r;
    }
    sim->live_count = kept;
}

void clients_read(struct sim *sim) {
    const struct sched_output *out;
    int32_t count = sched_outputs(sim->sched, &out);
    for (int32_t i = 0; i < count; i++) output_read(sim, &out[i]);
    live_sweep(sim);
    int32_t kept = 0;
    for (int32_t i = 0; i < sim->uncollected_count; i++) {
        struct sim_seq *ss = sim->uncollected[i];
        if (random_chance(&sim->random, sim->plan.late_collects)) {
            sim->uncollected[kept++] = ss;
        } else {
            sched_collect(sim->sched, ss->seq);
            ss->seq = NULL;
            ss->collected = true;
        }
    }
    sim->uncollected_count = kept;
}

void clients_free(struct sim *sim) {
    while (sim->requests) {
        struct sim_request *r = sim->requests;
        sim->requests = r->next;
        request_free(r);
    }
    mem_free(sim->live);
    mem_free(sim->uncollected);
}
