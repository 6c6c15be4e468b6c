/* world.c: one run from one seed: the plan, the loop, the invariants, the end. */
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/arith.h"
#include "engine/base/mem.h"
#include "tests/sim/sim.h"

/* The run under way, for the line that is printed when a CHECK ends the process. */
static struct sim *sim_current;

_Noreturn void sim_fault(struct sim *sim, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(sim->fault_text, sizeof sim->fault_text, format, args);
    va_end(args);
    longjmp(sim->fault, 1);
}

static void on_signal(int signal_number) {
    char line[200];
    const struct sim *sim = sim_current;
    if (sim) {
        int n = snprintf(line, sizeof line,
                         "sim: seed %llu step %llu (%llu in all): ended by signal %d\n"
                         "replay: sim --seed %llu --steps %llu --verbose\n",
                         (unsigned long long)sim->seed, (unsigned long long)sim->steps,
                         (unsigned long long)sim->coverage->steps, signal_number, (unsigned long long)sim->seed,
                         (unsigned long long)sim->steps_wanted);
        if (write(STDERR_FILENO, line, (size_t)n) != n) _exit(3);
    }
    signal(signal_number, SIG_DFL);
}

/* ---- plan -------------------------------------------------------------------------------------------------------- */

static int32_t feature(struct sim_random *r, int32_t percent, int32_t per_mille_max) {
    return random_range(r, 0, 99) < percent ? random_range(r, 1, per_mille_max) : 0;
}

static int32_t small_range(struct sim_random *r, int32_t min, int32_t max) {
    int32_t a = random_range(r, min, max), b = random_range(r, min, max);
    return a < b ? a : b;
}

/* Many samples of one request, too few pages, small steps: forks, preemptions and half-computed prompts at once. */
static void theme_crowd(struct sim_random *r, struct sim_plan *p) {
    p->options.page_size = random_range(r, 1, 3); /* room to grow is counted in pages: small ones are soon used up */
    int32_t full = i32_ceil_div(p->options.max_model_len, p->options.page_size);
    p->options.max_num_seqs = random_range(r, 3, 5);
    p->options.max_num_batched_tokens = p->options.max_num_seqs + random_range(r, 0, 3);
    p->options.pages_total = 1 + full + random_range(r, 0, 4);
    p->samples_max = random_range(r, 3, 8);
    p->samples = 900;
    p->prompt_max = 1 + p->options.max_model_len / 2;
    p->output_max = p->options.max_model_len / 2;
    p->cancels = p->deadlines = p->stop_strings = 0;
}

/* Equal prompts, short answers, one step ahead, and many cancels between launch and completion. */
static void theme_storm(struct sim_random *r, struct sim_plan *p) {
    p->options.lookahead = 1;
    p->options.prefix_caching = true;
    p->options.max_num_seqs = random_range(r, 6, 12);
    p->options.max_num_batched_tokens = 100;
    p->arrivals = 900;
    p->families = 1;
    p->strays = random_range(r, 0, 100);
    p->output_max = random_range(r, 1, 3);
    p->cancels = random_range(r, 200, 800);
    p->disturbances = 900;
    p->stops = p->nans = p->salts = p->no_cache = 0;
}

void plan_draw(struct sim *sim) {
    static const int32_t page_sizes[] = {1, 1, 2, 2, 3, 4, 5, 8, 16};
    struct sim_random *r = &sim->random;
    struct sim_plan *p = &sim->plan;
    int32_t page_size = page_sizes[random_range(r, 0, 8)],
            length = random_range(r, 4, random_chance(r, 300) ? 200 : 60);
    int32_t full = i32_ceil_div(length, page_size), seqs = random_range(r, 1, 12);
    p->options = (struct sched_options){
        .max_num_seqs = seqs,
        .max_num_batched_tokens = seqs + small_range(r, 0, 80),
        .max_queued_requests = random_range(r, 1, 40),
        .max_model_len = length,
        .page_size = page_size,
        .pages_total = 1 + random_range(r, full / 2 + 1, random_chance(r, 500) ? full + 4 : 4 * full + 8),
        .max_num_mixed_tokens = random_chance(r, 400) ? small_range(r, 1, 40) : 0,
        .long_prefill_threshold = random_chance(r, 300) ? random_range(r, 1, 12) : 0,
        .lookahead = random_range(r, 0, 1),
        .vocab = random_range(r, 8, 200),
        .prefix_caching = random_chance(r, 850),
        .hash_key = {random_next(r), random_next(r)},
        .on_key = told_change,
        .user = sim,
    };
    p->arrivals = random_range(r, 10, 600);
    p->burst_max = random_chance(r, 300) ? 12 : 2;
    p->prompt_max = small_range(r, 1, length + 2);
    p->output_max = random_chance(r, 250) ? random_range(r, 1, 4) : small_range(r, 1, length);
    p->samples_max = random_chance(r, 500) ? random_range(r, 2, 6) : 1;
    p->families = random_chance(r, 400) ? 1 : random_range(r, 2, 6);
    p->samples = random_chance(r, 400) ? 800 : 200;
    p->strays = random_chance(r, 300) ? 0 : 300;
    p->salts = random_chance(r, 300) ? 3 : 0;
    p->cancels = feature(r, 50, random_chance(r, 300) ? 500 : 100);
    p->deadlines = feature(r, 30, 500);
    p->stops = feature(r, 60, 900);
    p->min_tokens = feature(r, 40, 700);
    p->ignore_eos = feature(r, 30, 500);
    p->no_cache = feature(r, 30, 400);
    p->nans = feature(r, 20, 15);
    p->stop_strings = feature(r, 30, 100);
    p->shutdowns = feature(r, 20, 5);
    p->late_collects = feature(r, 40, 900);
    p->forgetful = p->options.prefix_caching && random_chance(r, 150);
    p->forgets = p->forgetful ? random_range(r, 1, 60) : 0;
    p->late_execution = random_chance(r, 400);
    p->disturbances = random_chance(r, 300) ? 800 : 100;
    int32_t theme = random_range(r, 0, 9);
    if (theme <= 1) theme_crowd(r, p);
    if (theme == 2) theme_storm(r, p);
}

/* ---- steps ------------------------------------------------------------------------------------------------------- */

static void audit(struct sim *sim) {
    struct err err = {0};
    SIM_CHECK(sim, sched_audit(sim->sched, true, &err) == 0, "%s", err.text);
    told_check(sim);
}

static void complete_oldest(struct sim *sim) {
    struct sim_flight *f = &sim->flights[(sim->sched->completed + 1) % SIM_FLIGHTS];
    if (!f->executed) device_execute(sim, f);
    if (random_chance(&sim->random, sim->plan.disturbances)) clients_disturb(sim);
    sched_complete(sim->sched, f->batch, f->results, sim->now_ns);
    sim->flight_count--;
    audit(sim);
    if (random_chance(&sim->random, sim->plan.disturbances)) clients_disturb(sim);
    clients_read(sim);
    memset(f->results, 0xee, (size_t)sim->plan.options.max_num_seqs * sizeof *f->results);
    f->batch = NULL;
    audit(sim);
}

/* Nobody who could run was left out of the batch. */
static void progress_check(struct sim *sim, const struct batch *b) {
    const struct sched *sched = sim->sched;
    const struct sched_options *o = &sim->plan.options;
    int64_t budget = o->max_num_batched_tokens, mixed = o->max_num_mixed_tokens;
    if (mixed > 0 && b->decode_tokens > 0)
        budget = i64_min(budget, i64_max(mixed, b->decode_tokens + (mixed + 1) / 2));
    SIM_CHECK(sim, b->tokens <= budget, "%d tokens beside %d decodes, the budget is %lld", b->tokens, b->decode_tokens,
              (long long)budget);
    for (const struct sequence_private *s = sched->running.first; s; s = s->next) {
        if (s->last_step == b->step) continue;
        if (s->pub.state == SEQ_PREFILL)
            SIM_CHECK(sim, b->tokens >= budget, "a prefill was left out with budget left");
        else
            SIM_CHECK(sim, sched->stalled || s->pub.output_count + s->in_flight >= s->group->output_max,
                      "a decode was left out of step %llu", (unsigned long long)b->step);
    }
    const struct sequence_private *head = sched->waiting.first;
    if (!head || sched->stalled || sched->free_slot_count == 0 || b->tokens >= budget) return;
    if (head->last_step > sched->completed || (head->group->running > 0 && !head->group->donor)) return;
    int32_t known = head->pub.prompt_count + head->pub.output_count;
    int32_t pages =
        head->pub.preemptions >= SCHED_PREEMPTIONS_MAX ? head->group->pages_max : i32_ceil_div(known, o->page_size);
    SIM_CHECK(sim, kv_available(sched->cache) < pages + sched->running.count,
              "the head of the queue was left waiting with %d pages there and %d needed", kv_available(sched->cache),
              pages);
}

static bool build_one(struct sim *sim) {
    struct arena *arena = &sim->arenas[sim->turn % SIM_FLIGHTS];
    struct sequence_private *oldest = sim->sched->running.first;
    arena_reset(arena);
    const struct batch *b = sched_next_batch(sim->sched, arena, sim->now_ns);
    SIM_CHECK(sim, !oldest || oldest->pub.state != SEQ_PREEMPTED, "invariant 12: the oldest was preempted");
    audit(sim);
    clients_read(sim);
    for (int32_t i = 0; i < sim->live_count; i++)
        SIM_CHECK(sim, sim->live[i]->deadline_ns == 0 || sim->live[i]->deadline_ns > sim->now_ns,
                  "request %llu outlived its deadline", (unsigned long long)sim->live[i]->id);
    if (!b) return false;
    struct sim_flight *f = &sim->flights[b->step % SIM_FLIGHTS];
    SIM_CHECK(sim, !f->batch && b->step == sim->sched->built, "step %llu", (unsigned long long)b->step);
    f->batch = b;
    f->executed = false;
    sim->turn++;
    sim->flight_count++;
    sim->steps++;
    sim->coverage->steps++;
    sim->coverage->stalls += sim->sched->stalled;
    SIM_CHECK(sim, !sim->sched->stalled || b->reset_count == 0, "somebody was admitted while a decode lacked a page");
    device_launch(sim, f);
    progress_check(sim, b);
    if (!sim->plan.late_execution) device_execute(sim, f);
    return true;
}

static void turn(struct sim *sim) {
    sim->now_ns += random_range(&sim->random, 0, 2000);
    bool built = build_one(sim);
    SIM_CHECK(sim, built || sim->flight_count > 0 || sched_idle(sim->sched), "invariant 11: nothing runs");
    if (sim->flight_count > sim->plan.options.lookahead || (!built && sim->flight_count > 0) ||
        (sim->flight_count > 0 && random_chance(&sim->random, 150)))
        complete_oldest(sim);
}

/* ---- a run ------------------------------------------------------------------------------------------------------- */

/* No step computes nothing, and nobody is computed more often than preemption allows: so many steps suffice. */
static int64_t steps_bound(const struct sim *sim) {
    int64_t tokens = 16;
    for (int32_t i = 0; i < sim->live_count; i++) {
        const struct sim_request *r = sim->live[i];
        tokens += (int64_t)r->n * (SCHED_PREEMPTIONS_MAX + 1) * (r->prompt_count + r->output_max);
    }
    return tokens;
}

static void run_out(struct sim *sim) {
    int64_t left = 2 * steps_bound(sim); /* a turn that only completes counts too */
    sim->plan.nans = 0;
    while (!sched_idle(sim->sched)) {
        SIM_CHECK(sim, left-- > 0, "liveness: %d requests do not end", sim->live_count);
        turn(sim);
    }
    sim->plan.late_collects = 0;
    clients_read(sim);
    audit(sim);
    struct sched_stats s;
    sched_stats(sim->sched, &s);
    SIM_CHECK(sim, sim->live_count == 0, "%d requests never ended", sim->live_count);
    SIM_CHECK(sim, s.pages_held == 0 && s.pages_free + s.pages_cached == s.pages_total, "%d pages are held at the end",
              s.pages_held);
    SIM_CHECK(sim, s.running == 0 && s.waiting == 0 && sim->sched->group_count == 0, "%d requests stayed",
              sim->sched->group_count);
    SIM_CHECK(sim, sched_next_deadline_ns(sim->sched) == INT64_MAX, "a deadline stayed");
    struct kv_stats pages;
    kvcache_stats(sim->sched->cache, 0, &pages);
    sim->coverage->evictions += pages.evictions;
    sim->coverage->hit_tokens += s.prefix_hit_tokens;
    sim->coverage->preemptions += s.preemptions;
}

static void run(struct sim *sim, uint64_t steps) {
    struct err err = {0};
    SIM_CHECK(sim, sched_open(&sim->plan.options, &sim->sched, &err) == 0, "%s", err.text);
    device_open(sim);
    told_open(sim);
    for (uint64_t turns = 0; sim->steps < steps && turns < 4 * steps + 100; turns++) {
        clients_arrive(sim);
        clients_disturb(sim);
        turn(sim);
    }
    run_out(sim);
}

bool sim_run(uint64_t seed, uint64_t steps, struct sim_coverage *coverage, char *text, size_t text_bytes) {
    struct sim *sim = mem_zalloc(1, sizeof *sim);
    bool sound = true;
    sim->seed = seed;
    sim->steps_wanted = steps;
    sim->coverage = coverage;
    random_seed(&sim->random, seed);
    plan_draw(sim);
    for (size_t i = 0; i < sizeof sim->arenas / sizeof sim->arenas[0]; i++) arena_init(&sim->arenas[i]);
    sim_current = sim;
    signal(SIGABRT, on_signal);
#ifndef __SANITIZE_ADDRESS__ /* which says more about it */
    signal(SIGSEGV, on_signal);
#endif
    if (setjmp(sim->fault) == 0) {
        run(sim, steps);
    } else {
        sound = false;
        snprintf(text, text_bytes,
                 "sim: seed %llu step %llu (%llu in all): %s\nreplay: sim --seed %llu --steps %llu --verbose",
                 (unsigned long long)seed, (unsigned long long)sim->steps, (unsigned long long)coverage->steps,
                 sim->fault_text, (unsigned long long)seed, (unsigned long long)steps);
    }
    coverage->seeds++;
    sim_current = NULL;
    sched_close(sim->sched);
    device_close(sim);
    told_close(sim);
    clients_free(sim);
    for (size_t i = 0; i < sizeof sim->arenas / sizeof sim->arenas[0]; i++) arena_deinit(&sim->arenas[i]);
    mem_free(sim);
    return sound;
}
