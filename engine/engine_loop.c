/* engine_loop.c: the engine thread. One turn: take orders → schedule and launch a step → wait for the step before it →
 * take in its tokens → send events. On an asynchronous device a step is therefore launched before the tokens of the one
 * before are known (they feed it on the device), and the device always has the next step when it ends one: a stop is
 * found one step late, and the scheduler drops the token that comes after it. Elsewhere the model computes inside
 * model_launch, nothing would be gained by it, and a step is waited for in the turn that launched it.
 * Several ranks look like one here (ranks.h).
 *
 * Two arenas are enough for both: a step is built in the arena of the step two before it, which is complete by then. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/arith.h"
#include "engine/base/check.h"
#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/mem.h"
#include "engine/engine_private.h"

#define HEARTBEAT_NS (100 * NS_PER_MS)
/* A pause after which the next request is not likely to come within the 10 ms that recording a step takes. */
#define RECORD_IDLE_NS (300 * NS_PER_MS)

#define RATE_DECAY 0.1 /* weight of the newest step in the measured rates */

#define EVENTS_KEEP_BYTES ((size_t)4 * 1024 * 1024) /* a larger buffer of events is given back */

/* ---- admissions ---------------------------------------------------------------------------------------------------
 */

static void admission_link(struct engine *engine, struct admission *a) {
    a->next = engine->admissions;
    if (a->next) a->next->prev = a;
    engine->admissions = a;
}

static void admission_unlink(struct engine *engine, struct admission *a) {
    if (a->prev)
        a->prev->next = a->next;
    else
        engine->admissions = a->next;
    if (a->next) a->next->prev = a->prev;
}

static void admission_forget(struct engine *engine, struct admission *a, enum finish_reason reason) {
    atomic_fetch_sub(&engine->prompt_tokens_left, a->prompt_tokens);
    atomic_fetch_sub(&engine->output_tokens_left, (int64_t)a->n * a->max_tokens);
    engine->stats.finished[reason]++;
    admission_unlink(engine, a);
    admission_close(a);
}

/* The scheduler would not have it after all: its samples end with the error. */
static void admission_refuse(struct engine *engine, struct admission *a, struct output **outputs,
                             const struct err *why) {
    for (int32_t i = 0; i < a->n; i++) {
        struct event head = {.finish = FINISH_ERROR, .error_code = why->code};
        buf_append_str(&outputs[i]->text, why->text);
        output_emit(outputs[i], &head, &engine->events);
        output_close(outputs[i]);
    }
    admission_forget(engine, a, FINISH_ERROR);
}

static void submit_take(struct engine *engine, struct request *request, int64_t now_ns) {
    struct output *outputs[REQUEST_SAMPLES_MAX];
    void *owners[REQUEST_SAMPLES_MAX];
    struct err err = {0};
    struct admission *a = admission_open(request);
    admission_link(engine, a);
    for (int32_t i = 0; i < a->n; i++) owners[i] = outputs[i] = output_open(a, i);
    if (sched_submit(engine->sched, request, owners, now_ns, &err) == 0) return;
    mem_free(request);
    admission_refuse(engine, a, outputs, &err);
}

/* ---- orders -------------------------------------------------------------------------------------------------------
 */

static void message_answer(struct engine *engine, struct message *message, int result) {
    pthread_mutex_lock(&engine->mutex);
    message->result = result;
    message->done = true;
    pthread_cond_broadcast(&engine->answered);
    pthread_mutex_unlock(&engine->mutex);
}

static void drain_begin(struct engine *engine, int64_t deadline_ns) {
    engine->drain_deadline_ns = deadline_ns > 0 ? deadline_ns : 1;
}

static void queued_publish(struct engine *engine) {
    struct sched_stats stats;
    sched_stats(engine->sched, &stats);
    atomic_store(&engine->queued, stats.queued);
}

static void message_handle(struct engine *engine, struct message *message, int64_t now_ns) {
    switch (message->kind) {
    case MESSAGE_SUBMIT:
        submit_take(engine, message->request, now_ns);
        queued_publish(engine);
        atomic_fetch_sub(&engine->inbox_requests, 1);
        break;
    case MESSAGE_CANCEL:
        sched_cancel(engine->sched, message->request_id, FINISH_ABORT);
        break;
    case MESSAGE_DRAIN:
        drain_begin(engine, message->deadline_ns);
        break;
    case MESSAGE_RESET_PREFIX:
        sched_reset_prefix_cache(engine->sched);
        break;
    case MESSAGE_AUDIT:
        message_answer(engine, message, sched_audit(engine->sched, true, message->err));
        return; /* its sender frees it */
    case MESSAGE_TEXT:
        message_answer(engine, message, engine_take_text(engine, message->text, message->err));
        return;
    case MESSAGE_CLOSE:
        engine->closing = true;
        drain_begin(engine, 1);
        break;
    }
    mem_free(message);
}

/* Sleeps when there is nothing to do, for at most a heartbeat. */
static void inbox_take(struct engine *engine, bool idle) {
    struct queue_node *node;
    if (idle) {
        int64_t until = clock_now_ns() + HEARTBEAT_NS;
        node = queue_wait_all(&engine->inbox, i64_min(until, sched_next_deadline_ns(engine->sched)));
    } else {
        node = queue_take_all(&engine->inbox);
    }
    int64_t now_ns = clock_now_ns();
    while (node) {
        struct queue_node *next = node->next;
        message_handle(engine, (struct message *)(void *)node, now_ns);
        node = next;
    }
    atomic_store(&engine->heartbeat_ns, clock_now_ns());
}

/* ---- outputs ------------------------------------------------------------------------------------------------------
 */

static struct event event_head(const struct sequence *seq, enum finish_reason finish) {
    return (struct event){.finish = (int32_t)finish,
                          .cached_tokens = seq->cached_count,
                          .preemptions = seq->preemptions,
                          .arrival_ns = seq->arrival_ns,
                          .scheduled_ns = seq->scheduled_ns,
                          .first_token_ns = seq->first_token_ns,
                          .last_token_ns = seq->last_token_ns};
}

static void sample_end(struct engine *engine, struct sequence *seq, enum finish_reason reason) {
    struct output *output = seq->owner;
    struct admission *a = output->admission;
    struct event head = event_head(seq, reason);
    if (reason == FINISH_ERROR) {
        head.error_code = ERR_FATAL;
        buf_clear(&output->text);
        buf_clear(&output->text_ends);
        buf_clear(&output->ids);
        buf_clear(&output->logprobs);
        buf_append_str(&output->text, engine->stats.dead ? engine->stats.dead_text
                                                         : "the model gave no usable numbers for this request");
    }
    output_emit(output, &head, &engine->events);
    output_close(output);
    sched_collect(engine->sched, seq);
    if (--a->samples_left == 0) admission_forget(engine, a, reason);
}

static void output_handle(struct engine *engine, const struct sched_output *out) {
    struct sequence *seq = out->seq;
    struct output *output = seq->owner;
    bool matched = false;
    if (out->token && !out->finished && output_plain(output)) {
        struct event head = event_head(seq, FINISH_NONE);
        output_emit_plain(output, engine->options.text, out->token->id, &head, &engine->events);
        return;
    }
    if (out->token) {
        bool ends = out->finished && seq->finish == FINISH_STOP;
        matched = output_push(output, engine->options.text, out->token, ends);
    }
    if (matched) {
        if (!out->finished) sched_finish(engine->sched, seq, FINISH_STOP);
        sample_end(engine, seq, FINISH_STOP);
    } else if (out->finished) {
        output_finish(output);
        sample_end(engine, seq, seq->finish);
    } else if (out->token && !(output->admission->flags & REQUEST_FINAL_ONLY)) {
        struct event head = event_head(seq, FINISH_NONE);
        output_emit(output, &head, &engine->events);
    }
}

/* After a step of milliseconds all this is cold: some five cache lines a token, of the output, of its request, and of
 * the vocabulary, which are asked for ahead, a pointer further at each distance. */
#define AHEAD_OUTPUT  8
#define AHEAD_POINTED 4

static void outputs_prefetch(const struct text *text, const struct sched_output *outputs, int32_t i, int32_t count) {
    if (i + AHEAD_OUTPUT < count) {
        const struct sched_output *out = &outputs[i + AHEAD_OUTPUT];
        output_prefetch(out->seq->owner);
        if (text && out->token) text_prefetch(text, out->token->id);
    }
    if (i + AHEAD_POINTED < count) {
        const struct sched_output *out = &outputs[i + AHEAD_POINTED];
        __builtin_prefetch(((struct output *)out->seq->owner)->admission);
        if (text && out->token) text_prefetch_bytes(text, out->token->id);
    }
}

static void outputs_take(struct engine *engine) {
    const struct sched_output *outputs;
    int32_t count = sched_outputs(engine->sched, &outputs);
    for (int32_t i = 0; i < count; i++) {
        outputs_prefetch(engine->options.text, outputs, i, count);
        output_handle(engine, &outputs[i]);
    }
}

static void keys_send(struct engine *engine) {
    if (engine->keys.bytes == 0) return;
    engine->options.on_keys(engine->options.user, (const void *)engine->keys.data,
                            engine->keys.bytes / sizeof(struct key_change));
    buf_clear(&engine->keys);
}

/* Keys first: who hears of a request's end knows of its pages. */
static void events_send(struct engine *engine) {
    keys_send(engine);
    if (engine->events.bytes == 0) return;
    engine->options.on_events(engine->options.user, engine->events.data, engine->events.bytes);
    if (engine->events.capacity > EVENTS_KEEP_BYTES)
        buf_deinit(&engine->events); /* whole answers came at once */
    else
        buf_clear(&engine->events);
}

/* ---- figures ------------------------------------------------------------------------------------------------------
 */

static void rate_update(double *rate, int32_t tokens, double seconds) {
    if (tokens <= 0 || seconds <= 0) return;
    double now = (double)tokens / seconds;
    *rate = *rate > 0 ? *rate + RATE_DECAY * (now - *rate) : now;
}

static void step_count(struct engine *engine, const struct step *step, int64_t begin_ns, int64_t end_ns) {
    const struct batch *batch = step->batch;
    struct engine_stats *s = &engine->stats;
    static const int32_t edges[15] = {1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536};
    int bucket = 0;
    while (bucket < 15 && batch->tokens > edges[bucket]) bucket++;
    s->steps++;
    s->step_tokens_bucket[bucket]++;
    s->step_tokens_sum += (uint64_t)batch->tokens;
    s->step_ns += (uint64_t)(end_ns - begin_ns);
    s->build_ns += (uint64_t)step->build_ns;
    s->launch_ns += (uint64_t)step->launch_ns;
    s->finish_ns += (uint64_t)step->finish_ns;
    s->host_ns += (uint64_t)(step->build_ns + step->launch_ns + step->finish_ns);
    s->last_step_ns = end_ns;
    double seconds = (double)(end_ns - begin_ns) * 1e-9;
    double share = (double)batch->prefill_tokens / (double)batch->tokens;
    if (batch->prefill_tokens)
        rate_update(&s->prefill_tokens_per_s, batch->prefill_tokens, seconds * fmax(share, 0.05));
    if (batch->decode_tokens && !batch->prefill_tokens)
        rate_update(&s->decode_tokens_per_s, batch->decode_tokens, seconds);
}

static void model_count(struct engine *engine) {
    struct engine_stats *s = &engine->stats;
    struct model_stats model;
    model_stats(ranks_model(engine->ranks, 0), &model);
    s->decode_steps = model.decode_steps;
    s->graph_replays = model.graph_replays;
    s->graph_captures = model.graph_captures;
    s->graph_capture_ns = model.graph_capture_ns;
    s->stack_steps = model.stack_steps;
}

static void snapshot_publish(struct engine *engine) {
    struct engine_stats *s = &engine->stats;
    struct sched_stats sched;
    sched_stats(engine->sched, &sched);
    s->running = sched.running;
    s->waiting = sched.waiting;
    s->pages_total = sched.pages_total;
    s->pages_free = sched.pages_free;
    s->pages_cached = sched.pages_cached;
    s->pages_held = sched.pages_held;
    s->preemptions = sched.preemptions;
    s->prefix_queried_tokens = sched.prefix_queried_tokens;
    s->prefix_hit_tokens = sched.prefix_hit_tokens;
    s->prompt_tokens = sched.prompt_tokens_computed;
    s->generation_tokens = sched.output_tokens;
    atomic_store(&engine->queued, sched.queued);
    model_count(engine);
    pthread_mutex_lock(&engine->mutex);
    engine->snapshot = *s;
    pthread_mutex_unlock(&engine->mutex);
}

/* ---- the turn -----------------------------------------------------------------------------------------------------
 */

/* A fault: every request ends with an error, nothing more is taken; the front sees it in the stats. */
static void engine_die(struct engine *engine, const struct err *why) {
    log_error("engine ended by a fault", "why=%s", log_quote(why->text).text);
    atomic_store(&engine->closed, true);
    engine->stats.dead = true;
    snprintf(engine->stats.dead_text, sizeof engine->stats.dead_text, "%s", why->text);
    sched_cancel_all(engine->sched, FINISH_ERROR);
    outputs_take(engine);
}

static void drain_check(struct engine *engine, int64_t now_ns) {
    if (engine->drain_deadline_ns && now_ns >= engine->drain_deadline_ns)
        sched_cancel_all(engine->sched, FINISH_SHUTDOWN);
}

/* Builds and launches a step if there is work; step->batch is NULL where there is none. An error ends the engine. */
static int step_launch(struct engine *engine, struct step *step, struct err *err) {
    *step = (struct step){.begin_ns = clock_now_ns()};
    struct arena *arena = &engine->arenas[engine->launched & 1];
    arena_reset(arena);
    drain_check(engine, step->begin_ns);
    step->batch = sched_next_batch(engine->sched, arena, step->begin_ns);
    outputs_take(engine);
    if (!step->batch) return 0;
    int64_t built_ns = clock_now_ns();
    int rc = ranks_launch(engine->ranks, step->batch, arena, err);
    int64_t launched_ns = clock_now_ns();
    engine->launched++;
    engine->audited_idle = false;
    step->build_ns = built_ns - step->begin_ns;
    step->launch_ns = backend_info(ranks_backend(engine->ranks))->asynchronous ? launched_ns - built_ns : 0;
    return rc;
}

/* Waits for a launched step and takes in its tokens. Its time is counted from the end of the step before, or from its
 * own begin when the device was idle then. */
static int step_finish(struct engine *engine, struct step *step, struct err *err) {
    const struct sample_result *results;
    int rc = ranks_wait(engine->ranks, step->batch, &results, err);
    if (rc) return rc;
    int64_t done_ns = clock_now_ns();
    sched_complete(engine->sched, step->batch, results, done_ns);
    outputs_take(engine);
    snapshot_publish(engine); /* its tokens are counted when somebody has them */
    events_send(engine);
    int64_t end_ns = clock_now_ns();
    step->finish_ns = end_ns - done_ns;
    if (engine->ahead)
        step_count(engine, step, i64_max(step->begin_ns, engine->done_ns), done_ns);
    else
        step_count(engine, step, step->begin_ns, end_ns);
    engine->done_ns = done_ns;
    return 0;
}

/* One turn's steps: the new one is under way before the last one is waited for. */
static int steps_run(struct engine *engine, struct err *err) {
    struct step last = engine->in_flight, next;
    engine->in_flight = (struct step){0};
    int rc = step_launch(engine, &next, err);
    if (rc == 0 && last.batch) rc = step_finish(engine, &last, err);
    if (rc == 0 && next.batch && !engine->ahead) return step_finish(engine, &next, err);
    engine->in_flight = next;
    return rc;
}

static void idle_audit(struct engine *engine) {
    struct err err = {0};
    if (engine->audited_idle) return;
    engine->audited_idle = true;
    if (sched_audit(engine->sched, true, &err)) CHECK_MSG(false, "%s", err.text);
}

/* Nothing to do: one kind of step more is recorded, so that traffic finds it. Not before the text is there, which may
 * change the sampler's tables. Returns whether that is all. */
static bool idle_record(struct engine *engine) {
    struct err err = {0};
    int rc;
    if (engine->recorded || !engine->options.text || clock_now_ns() < engine->idle_since_ns + RECORD_IDLE_NS)
        return true;
    engine->recorded = !ranks_record_next(engine->ranks, &rc, &err);
    if (rc) engine_die(engine, &err);
    return engine->recorded || rc;
}

void *engine_thread(void *arg) {
    struct engine *engine = arg;
    struct err err = {0};
    snapshot_publish(engine);
    engine->idle_since_ns = clock_now_ns();
    while (!engine->stats.dead) {
        bool idle = sched_idle(engine->sched);
        if (idle)
            idle_audit(engine);
        else
            engine->idle_since_ns = clock_now_ns();
        inbox_take(engine, idle && idle_record(engine));
        if (steps_run(engine, &err)) engine_die(engine, &err);
        events_send(engine);
        snapshot_publish(engine);
        if (engine->closing && sched_idle(engine->sched)) break;
    }
    while (!engine->closing) { /* dead: answer what still comes until it is closed */
        inbox_take(engine, true);
        sched_cancel_all(engine->sched, FINISH_ERROR);
        outputs_take(engine);
        events_send(engine);
    }
    inbox_take(engine, false);
    sched_cancel_all(engine->sched, FINISH_SHUTDOWN);
    outputs_take(engine);
    events_send(engine);
    snapshot_publish(engine);
    return NULL;
}
