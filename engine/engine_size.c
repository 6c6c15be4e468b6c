/* engine_size.c: from the model's shape and the machine's memory to limits, pages and an open model. */
#include <stdio.h>
#include <string.h>

#include "engine/base/arith.h"
#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/mem.h"
#include "engine/engine_private.h"

/* On a CPU the memory is shared with everybody else: unless said otherwise the pool takes 4 GiB at most (vLLM's CPU
 * build reserves the same). It is touched only on use. */
#define CPU_KV_BYTES_DEFAULT ((size_t)4 << 30)

static void phase_add(struct engine_info *info, const char *name, int64_t *since_ns) {
    int64_t now = clock_now_ns();
    if (info->phase_count < (int32_t)(sizeof info->phases / sizeof info->phases[0]))
        info->phases[info->phase_count++] = (struct engine_phase){name, (double)(now - *since_ns) * 1e-9};
    *since_ns = now;
}

static int limits_decide(const struct engine_options *o, const struct model_spec *spec, struct model_limits *limits,
                         struct err *err) {
    limits->max_model_len = o->max_model_len ? o->max_model_len : spec->context;
    if (limits->max_model_len > spec->context)
        return err_set_field(err, ERR_INVALID, "max-model-len",
                             "the model was made for %d positions, --max-model-len asks for %d", spec->context,
                             limits->max_model_len);
    limits->max_num_seqs = o->max_num_seqs;
    limits->max_num_batched_tokens = o->max_num_batched_tokens;
    if (limits->max_num_batched_tokens < limits->max_num_seqs)
        return err_set_field(err, ERR_INVALID, "max-num-batched-tokens",
                             "max-num-batched-tokens (%d) must be at least max-num-seqs (%d)",
                             limits->max_num_batched_tokens, limits->max_num_seqs);
    limits->page_size = o->block_size;
    limits->kv_dtype = o->kv_dtype;
    return 0;
}

/* Pages for the pool: what was asked for, else a share of what is left beside weights and workspace. */
static int pages_decide(const struct engine *engine, const struct model_limits *limits,
                        const struct model_memory *memory, int32_t *pages_total, struct err *err) {
    const struct engine_options *o = &engine->options;
    size_t bytes = o->kv_cache_bytes, free_bytes = backend_info(engine->backend)->memory_free_bytes;
    size_t fixed = memory->weight_bytes + memory->workspace_bytes;
    int32_t one_context = i32_ceil_div(limits->max_model_len, limits->page_size);
    if (!bytes) {
        size_t share = (size_t)((double)free_bytes * o->memory_utilization);
        bytes = share > fixed ? share - fixed : 0;
        if (bytes > CPU_KV_BYTES_DEFAULT) bytes = CPU_KV_BYTES_DEFAULT;
        size_t least = (size_t)one_context * memory->kv_page_bytes;
        if (bytes < least && share > fixed && share - fixed >= least) bytes = least;
        if (bytes < least)
            return err_set(
                err, ERR_NOMEM,
                "one context of %d tokens needs %zu MiB of KV beside %zu MiB of weights and workspace, but "
                "%.0f %% of the free memory are %zu MiB; lower --max-model-len or set --kv-cache-memory-bytes",
                limits->max_model_len, least >> 20, fixed >> 20, o->memory_utilization * 100, share >> 20);
    }
    size_t pages = bytes / memory->kv_page_bytes;
    if (pages < 1)
        return err_set_field(err, ERR_INVALID, "kv-cache-memory-bytes",
                             "one page of %d tokens takes %zu bytes, --kv-cache-memory-bytes gives %zu",
                             limits->page_size, memory->kv_page_bytes, bytes);
    if (pages > (size_t)INT32_MAX / 2) pages = (size_t)INT32_MAX / 2;
    *pages_total = (int32_t)pages + 1; /* page 0 is the dummy */
    return 0;
}

/* A pool that was asked for and holds less than one context: the context shrinks to it, unless that was asked for. */
static int context_shrink(const struct engine_options *o, struct model_limits *limits, int32_t pages_total,
                          struct err *err) {
    int64_t pool_tokens = (int64_t)(pages_total - 1) * limits->page_size;
    if (limits->max_model_len <= pool_tokens) return 0;
    if (o->max_model_len || pool_tokens < 2)
        return err_set_field(err, ERR_INVALID, "kv-cache-memory-bytes",
                             "a KV pool of %d pages holds %lld tokens, one request of max-model-len %d does not fit",
                             pages_total - 1, (long long)pool_tokens, limits->max_model_len);
    log_warning("the KV pool holds less than one context: max-model-len shrinks to it", "from=%d to=%lld",
                limits->max_model_len, (long long)pool_tokens);
    limits->max_model_len = (int32_t)pool_tokens;
    return 0;
}

static void info_fill(struct engine *engine, const struct model_spec *spec, const struct model_limits *limits,
                      const struct model_memory *memory, int32_t pages_total) {
    struct engine_info *info = &engine->info;
    info->backend = *backend_info(engine->backend);
    snprintf(info->architecture, sizeof info->architecture, "%s", spec->architecture);
    model_files_summary(engine->files, info->weight_types, sizeof info->weight_types, &info->parameters);
    info->vocab = spec->vocab;
    info->max_model_len = limits->max_model_len;
    info->model_context = spec->context;
    info->page_size = limits->page_size;
    info->pages_total = pages_total;
    info->max_num_seqs = limits->max_num_seqs;
    info->max_num_batched_tokens = limits->max_num_batched_tokens;
    info->kv_dtype = limits->kv_dtype;
    info->weight_bytes = memory->weight_bytes;
    info->workspace_bytes = memory->workspace_bytes;
    info->kv_bytes = (size_t)pages_total * memory->kv_page_bytes;
    info->kv_bytes_per_token = memory->kv_token_bytes;
}

static int sched_build(struct engine *engine, const struct model_limits *limits, int32_t pages_total, struct err *err) {
    const struct engine_options *o = &engine->options;
    struct sched_options options = {
        .max_num_seqs = limits->max_num_seqs,
        .max_num_batched_tokens = limits->max_num_batched_tokens,
        .max_queued_requests = o->max_queued_requests,
        .max_model_len = limits->max_model_len,
        .page_size = limits->page_size,
        .pages_total = pages_total,
        .long_prefill_threshold = o->long_prefill_threshold,
        .lookahead = 0,
        .vocab = engine->info.vocab,
        .prefix_caching = o->prefix_caching,
        .hash_key = hash_key_random(),
    };
    return sched_open(&options, &engine->sched, err);
}

int engine_build(struct engine *engine, struct err *err) {
    const struct engine_options *o = &engine->options;
    struct model_limits limits = {0};
    struct model_memory memory = {0};
    int32_t pages_total = 0;
    int64_t since_ns = clock_now_ns();
    int rc = model_files_open(o->model_path, &engine->files, err);
    if (rc) return rc;
    phase_add(&engine->info, "files", &since_ns);
    if ((rc = backend_open(&o->backend, &engine->backend, err))) return rc;
    const struct model_spec *spec = model_files_spec(engine->files);
    if ((rc = limits_decide(o, spec, &limits, err))) return rc;
    if ((rc = model_memory_plan(engine->files, engine->backend, &limits, &memory, err))) return rc;
    if ((rc = pages_decide(engine, &limits, &memory, &pages_total, err))) return rc;
    if ((rc = context_shrink(o, &limits, pages_total, err))) return rc;
    if ((rc = model_memory_plan(engine->files, engine->backend, &limits, &memory, err))) return rc;
    info_fill(engine, spec, &limits, &memory, pages_total);
    phase_add(&engine->info, "plan", &since_ns);
    struct model_options options = {.limits = limits,
                                    .pages_total = pages_total,
                                    .dummy_weights = o->dummy_weights,
                                    .seed = o->seed,
                                    .alive_ns = &engine->heartbeat_ns};
    if ((rc = model_open(engine->files, engine->backend, &options, &engine->model, err))) return rc;
    phase_add(&engine->info, "weights", &since_ns);
    if ((rc = sched_build(engine, &limits, pages_total, err))) return rc;
    phase_add(&engine->info, "scheduler", &since_ns);
    return 0;
}
