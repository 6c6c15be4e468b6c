/* engine_size.c: from options to an open engine: devices, plan, model, scheduler. */
#include <stdio.h>
#include <string.h>

#include "engine/base/arith.h"
#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/mem.h"
#include "engine/engine_private.h"

#define STEP_TIMEOUT_NS (10 * NS_PER_SECOND)

static void phase_add(struct engine_info *info, const char *name, int64_t *since_ns) {
    int64_t now = clock_now_ns();
    if (info->phase_count < (int32_t)(sizeof info->phases / sizeof info->phases[0])) {
        struct engine_phase *phase = &info->phases[info->phase_count++];
        snprintf(phase->name, sizeof phase->name, "%s", name);
        phase->seconds = (double)(now - *since_ns) * 1e-9;
    }
    *since_ns = now;
}

static void info_fill(struct engine *engine, const struct plan *plan) {
    const struct model_spec *spec = model_files_spec(engine->files);
    const struct model_limits *limits = &plan->limits;
    const struct model_memory *memory = &plan->memory;
    struct engine_info *info = &engine->info;
    info->ranks = ranks_count(engine->ranks);
    snprintf(info->architecture, sizeof info->architecture, "%s", spec->architecture);
    model_files_summary(engine->files, info->weight_types, sizeof info->weight_types, &info->parameters);
    info->vocab = spec->vocab;
    info->max_model_len = limits->max_model_len;
    info->model_context = spec->context;
    info->page_size = limits->page_size;
    info->pages_total = plan->pages_total;
    info->max_num_seqs = limits->max_num_seqs;
    info->max_num_batched_tokens = limits->max_num_batched_tokens;
    const int32_t mixed = engine->options.max_num_mixed_tokens, most = limits->max_num_batched_tokens;
    info->max_num_mixed_tokens = mixed && mixed < most ? mixed : most; /* 0: no limit of its own */
    info->kv_dtype = limits->kv_dtype;
    info->weight_bytes = memory->weight_bytes;
    info->workspace_bytes = memory->workspace_bytes;
    info->kv_bytes = (size_t)plan->pages_total * memory->kv_page_bytes;
    info->kv_bytes_per_token = memory->kv_token_bytes;
}

static void on_key(void *user, struct hash128 key, int change) {
    struct engine *engine = user;
    struct key_change record = {.lo = key.lo, .hi = key.hi, .change = (uint32_t)change};
    buf_append(&engine->keys, &record, sizeof record);
}

static int sched_build(struct engine *engine, const struct plan *plan, struct err *err) {
    const struct model_limits *limits = &plan->limits;
    const struct engine_options *o = &engine->options;
    struct sched_options options = {
        .max_num_seqs = limits->max_num_seqs,
        .max_num_batched_tokens = limits->max_num_batched_tokens,
        .max_num_mixed_tokens = o->max_num_mixed_tokens,
        .max_queued_requests = o->max_queued_requests,
        .max_model_len = limits->max_model_len,
        .page_size = limits->page_size,
        .pages_total = plan->pages_total,
        .long_prefill_threshold = o->long_prefill_threshold,
        .lookahead = engine->ahead ? 1 : 0,
        .vocab = engine->info.vocab,
        .prefix_caching = o->prefix_caching,
        .on_key = o->on_keys ? on_key : NULL,
        .user = engine,
        .hash_key = o->prefix_key.k0 | o->prefix_key.k1 ? o->prefix_key : hash_key_random(),
    };
    return sched_open(&options, &engine->sched, err);
}

struct ranks_options devices_options(const struct engine_options *o) {
    struct ranks_options options = {.backend = o->backend, .comm = o->comm};
    options.count = o->ranks > 0 ? o->ranks : 1;
    options.timeout_ns = o->step_timeout_ns ? o->step_timeout_ns : STEP_TIMEOUT_NS;
    memcpy(options.ordinals, o->ordinals, sizeof options.ordinals);
    if (options.count == 1) options.ordinals[0] = o->backend.ordinal;
    return options;
}

static int devices_open(struct engine *engine, struct err *err) {
    const struct ranks_options options = devices_options(&engine->options);
    engine->options.ranks = options.count;
    int rc = ranks_open(&options, &engine->ranks, err);
    if (rc) return rc;
    ranks_backend_info(engine->ranks, &engine->info.backend);
    engine->ahead = engine->options.ahead || engine->info.backend.asynchronous;
    return 0;
}

int engine_build(struct engine *engine, struct err *err) {
    const struct engine_options *o = &engine->options;
    struct plan plan;
    int64_t since_ns = clock_now_ns();
    int rc = o->dummy_weights ? model_files_open_shapes(o->model_path, &engine->files, err)
                              : model_files_open(o->model_path, &engine->files, err);
    if (rc) return rc;
    phase_add(&engine->info, "files", &since_ns);
    if ((rc = devices_open(engine, err))) return rc;
    if ((rc = options_refuse(o, &engine->info.backend, err))) return rc;
    options_settle(&engine->options, &engine->info.backend);
    phase_add(&engine->info, "device", &since_ns);
    rc = plan_make(o, engine->files, ranks_backend(engine->ranks), &engine->info.backend, &plan, err);
    if (rc) return rc;
    info_fill(engine, &plan);
    phase_add(&engine->info, "plan", &since_ns);
    struct model_options options = {.limits = plan.limits,
                                    .pages_total = plan.pages_total,
                                    .dummy_weights = o->dummy_weights,
                                    .eager = o->eager,
                                    .no_stack = o->backend.batch_invariant || o->ranks > 1,
                                    .seed = o->seed,
                                    .alive_ns = &engine->heartbeat_ns};
    if ((rc = ranks_load(engine->ranks, engine->files, &options, err))) return rc;
    engine->info.decode_stack_rows = model_stack_rows(ranks_model(engine->ranks, 0));
    snprintf(engine->info.comm, sizeof engine->info.comm, "%s", ranks_comm_name(engine->ranks));
    if (o->ranks > 1) log_info("ranks", "count=%d comm=%s", o->ranks, engine->info.comm);
    phase_add(&engine->info, "weights", &since_ns);
    if ((rc = sched_build(engine, &plan, err))) return rc;
    phase_add(&engine->info, "scheduler", &since_ns);
    return 0;
}
