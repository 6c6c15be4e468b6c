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

/* What CUDA takes beside our three pieces, set aside for it: the context, the kernels' code (some of it only at a
 * kernel's first launch) and scratch of the products, about 0.5 GiB; and recorded steps, which come while the engine
 * runs: at most MODEL_GRAPHS_MAX of some 300 nodes each, about 2 MiB apiece. */
#define CUDA_GRAPHS_BYTES   ((size_t)MODEL_GRAPHS_MAX * ((size_t)2 << 20))
#define CUDA_OVERHEAD_BYTES (((size_t)896 << 20) + CUDA_GRAPHS_BYTES)

#define STEP_TIMEOUT_NS (10 * NS_PER_SECOND)

/* CPU: 256 tokens a step keep the worst gap of a stream below 0.4 s at 1,000 prompt tokens a second; more than 64 rows
 * a decode step gain nothing there. CUDA: prompts of an 8B model run at 48,000 tokens a second, so a step of 8192 that
 * nobody waits for takes 170 ms and one of 2048 beside decodes 45 ms. */
static const struct device_defaults {
    int32_t max_num_seqs, max_num_batched_tokens, max_num_mixed_tokens;
    double memory_utilization;
} cpu_defaults = {64, 256, 0, 0.5}, cuda_defaults = {1024, 8192, 2048, 0.92};

static void phase_add(struct engine_info *info, const char *name, int64_t *since_ns) {
    int64_t now = clock_now_ns();
    if (info->phase_count < (int32_t)(sizeof info->phases / sizeof info->phases[0]))
        info->phases[info->phase_count++] = (struct engine_phase){name, (double)(now - *since_ns) * 1e-9};
    *since_ns = now;
}

static bool on_cuda(const struct engine *engine) {
    return engine->info.backend.device == DEVICE_CUDA;
}

/* Fills in what was left to the device. */
static void defaults_settle(struct engine *engine) {
    struct engine_options *o = &engine->options;
    const struct device_defaults *d = on_cuda(engine) ? &cuda_defaults : &cpu_defaults;
    bool seqs_given = o->max_num_seqs > 0;
    if (!o->max_num_seqs) o->max_num_seqs = d->max_num_seqs;
    if (!o->max_num_batched_tokens) o->max_num_batched_tokens = d->max_num_batched_tokens;
    if (!o->max_num_mixed_tokens) o->max_num_mixed_tokens = d->max_num_mixed_tokens;
    if (!(o->memory_utilization > 0)) o->memory_utilization = d->memory_utilization;
    if (!seqs_given && o->max_num_seqs > o->max_num_batched_tokens) o->max_num_seqs = o->max_num_batched_tokens;
    if (o->kv_dtype == DTYPE_COUNT) o->kv_dtype = engine->info.backend.kv_dtype_default;
}

/* What the device cannot do is refused by name. */
static int device_refuse(const struct engine *engine, struct err *err) {
    const struct engine_options *o = &engine->options;
    const struct backend_info *info = &engine->info.backend;
    const char *device = on_cuda(engine) ? "CUDA" : "the CPU";
    if (o->dtype != DTYPE_COUNT && o->dtype != info->activation_dtype)
        return err_set_field(err, ERR_UNSUPPORTED, "--dtype", "--dtype on %s takes auto or %s, not %s", device,
                             info->activation_dtype == DTYPE_BF16 ? "bfloat16" : "float32",
                             o->dtype == DTYPE_BF16  ? "bfloat16"
                             : o->dtype == DTYPE_F16 ? "float16"
                                                     : "float32");
    if (o->kv_dtype != DTYPE_COUNT && !(info->kv_dtypes >> o->kv_dtype & 1))
        return err_set_field(err, ERR_UNSUPPORTED, "--kv-cache-dtype", "--kv-cache-dtype on %s takes %s, not %s",
                             device, on_cuda(engine) ? "auto or bf16" : "auto, f16 or f32",
                             dtype_info(o->kv_dtype)->name);
    return 0;
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
    limits->ranks = o->ranks;
    return 0;
}

static int pages_count(const struct model_limits *limits, size_t page_bytes, size_t bytes, int32_t *pages_total,
                       struct err *err) {
    size_t pages = bytes / page_bytes;
    if (pages < 1)
        return err_set_field(err, ERR_INVALID, "kv-cache-memory-bytes",
                             "one page of %d tokens takes %zu bytes, --kv-cache-memory-bytes gives %zu",
                             limits->page_size, page_bytes, bytes);
    if (pages > (size_t)INT32_MAX / 2) pages = (size_t)INT32_MAX / 2;
    *pages_total = (int32_t)pages + 1; /* page 0 is the dummy */
    return 0;
}

/* What the plan takes and may take, in bytes. */
struct memory_sum {
    size_t weights, workspace, overhead, kv;
    size_t share; /* what --gpu-memory-utilization allows; SIZE_MAX where it has no say */
    size_t free;
};

/* What would help: never less of one piece where another alone is too large. */
static const char *memory_advice(const struct engine *engine, const struct memory_sum *sum) {
    size_t weights = sum->weights + sum->overhead, fixed = weights + sum->workspace;
    bool kv_given = engine->options.kv_cache_bytes > 0;
    if (weights > sum->free) return "the weights alone do not fit: take a smaller or quantised model";
    if (weights > sum->share)
        return "the weights alone are more than --gpu-memory-utilization allows: take a larger share";
    if (fixed > sum->free) return "take a smaller --max-num-batched-tokens or --max-num-seqs";
    if (fixed > sum->share) return "take a larger --gpu-memory-utilization or a smaller --max-num-batched-tokens";
    if (fixed + sum->kv > sum->free)
        return kv_given ? "take a smaller --kv-cache-memory-bytes" : "take a smaller --max-model-len";
    return kv_given ? "take a larger --gpu-memory-utilization or a smaller --kv-cache-memory-bytes"
                    : "take a larger --gpu-memory-utilization or a smaller --max-model-len";
}

/* Does the plan fit? If not, the arithmetic and what to change. */
static int memory_check(const struct engine *engine, const struct model_limits *limits, const struct memory_sum *sum,
                        struct err *err) {
    size_t room = sum->free < sum->share ? sum->free : sum->share;
    size_t fixed = sum->weights + sum->workspace + sum->overhead;
    char overhead[48] = "", share[80] = "";
    if (fixed <= room && sum->kv <= room - fixed) return 0;
    if (on_cuda(engine)) snprintf(overhead, sizeof overhead, " + CUDA itself %zu MiB", sum->overhead >> 20);
    if (sum->share < SIZE_MAX)
        snprintf(share, sizeof share, " and --gpu-memory-utilization %.2f of %s allows %zu MiB",
                 engine->options.memory_utilization, on_cuda(engine) ? "all" : "these", sum->share >> 20);
    return err_set(err, ERR_UNSUPPORTED,
                   "not enough memory: weights %zu MiB + workspace %zu MiB%s + KV %zu MiB (%s %d tokens) = %zu MiB, "
                   "but %zu MiB are free%s; %s%s",
                   sum->weights >> 20, sum->workspace >> 20, overhead, sum->kv >> 20,
                   engine->options.kv_cache_bytes ? "asked for; one context is" : "one context of",
                   limits->max_model_len, (fixed + sum->kv) >> 20, sum->free >> 20, share, memory_advice(engine, sum),
                   on_cuda(engine) && fixed + sum->kv > sum->free ? ", or free the GPU" : "");
}

/* Pages for the pool of a CPU: what was asked for, else a share of what is left beside weights and workspace. All ranks
 * take from the one memory. */
static int cpu_pages_decide(const struct engine *engine, const struct model_limits *limits,
                            const struct model_memory *memory, int32_t *pages_total, struct err *err) {
    const struct engine_options *o = &engine->options;
    const struct backend_info *info = &engine->info.backend;
    size_t free_bytes = info->memory_free_bytes ? info->memory_free_bytes : info->memory_total_bytes;
    size_t ranks = (size_t)o->ranks, page_bytes = memory->kv_page_bytes * ranks;
    size_t least = (size_t)i32_ceil_div(limits->max_model_len, limits->page_size) * page_bytes;
    struct memory_sum sum = {
        .weights = memory->weight_bytes * ranks,
        .workspace = memory->workspace_bytes * ranks,
        .kv = o->kv_cache_bytes ? o->kv_cache_bytes : least,
        .share = o->kv_cache_bytes ? SIZE_MAX : (size_t)((double)free_bytes * o->memory_utilization),
        .free = free_bytes,
    };
    if (memory_check(engine, limits, &sum, err)) return err->code;
    size_t bytes = sum.kv;
    if (!o->kv_cache_bytes) {
        bytes = sum.share - sum.weights - sum.workspace;
        if (bytes > CPU_KV_BYTES_DEFAULT) bytes = CPU_KV_BYTES_DEFAULT;
        if (bytes < least) bytes = least;
    }
    return pages_count(limits, page_bytes, bytes, pages_total, err);
}

/* Pages for the pool of a GPU: all that the share leaves. */
static int cuda_pages_decide(const struct engine *engine, const struct model_limits *limits,
                             const struct model_memory *memory, int32_t *pages_total, struct err *err) {
    const struct engine_options *o = &engine->options;
    const struct backend_info *info = &engine->info.backend;
    size_t least = (size_t)i32_ceil_div(limits->max_model_len, limits->page_size) * memory->kv_page_bytes;
    struct memory_sum sum = {
        .weights = memory->weight_bytes,
        .workspace = memory->workspace_bytes,
        .overhead = CUDA_OVERHEAD_BYTES,
        .kv = o->kv_cache_bytes ? o->kv_cache_bytes : least + memory->kv_page_bytes,
        .share = (size_t)((double)info->memory_total_bytes * o->memory_utilization),
        .free = info->memory_free_bytes,
    };
    if (memory_check(engine, limits, &sum, err)) return err->code;
    size_t room = sum.free < sum.share ? sum.free : sum.share;
    if (room < sum.share)
        log_warning("less memory is free on the GPU than --gpu-memory-utilization allows",
                    "free_mib=%zu allowed_mib=%zu", sum.free >> 20, sum.share >> 20);
    size_t kv = room - sum.weights - sum.workspace - sum.overhead - memory->kv_page_bytes;
    return pages_count(limits, memory->kv_page_bytes, o->kv_cache_bytes ? sum.kv : kv, pages_total, err);
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
    info->ranks = ranks_count(engine->ranks);
    snprintf(info->architecture, sizeof info->architecture, "%s", spec->architecture);
    model_files_summary(engine->files, info->weight_types, sizeof info->weight_types, &info->parameters);
    info->vocab = spec->vocab;
    info->max_model_len = limits->max_model_len;
    info->model_context = spec->context;
    info->page_size = limits->page_size;
    info->pages_total = pages_total;
    info->max_num_seqs = limits->max_num_seqs;
    info->max_num_batched_tokens = limits->max_num_batched_tokens;
    const int32_t mixed = engine->options.max_num_mixed_tokens, most = limits->max_num_batched_tokens;
    info->max_num_mixed_tokens = mixed && mixed < most ? mixed : most; /* 0: no limit of its own */
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
        .max_num_mixed_tokens = o->max_num_mixed_tokens,
        .max_queued_requests = o->max_queued_requests,
        .max_model_len = limits->max_model_len,
        .page_size = limits->page_size,
        .pages_total = pages_total,
        .long_prefill_threshold = o->long_prefill_threshold,
        .lookahead = engine->ahead ? 1 : 0,
        .vocab = engine->info.vocab,
        .prefix_caching = o->prefix_caching,
        .hash_key = hash_key_random(),
    };
    return sched_open(&options, &engine->sched, err);
}

static int devices_open(struct engine *engine, struct err *err) {
    struct engine_options *o = &engine->options;
    struct ranks_options options = {.backend = o->backend, .comm = o->comm};
    if (!o->ranks) o->ranks = 1;
    if (o->ranks == 1) o->ordinals[0] = o->backend.ordinal;
    options.count = o->ranks;
    options.timeout_ns = o->step_timeout_ns ? o->step_timeout_ns : STEP_TIMEOUT_NS;
    memcpy(options.ordinals, o->ordinals, sizeof options.ordinals);
    int rc = ranks_open(&options, &engine->ranks, err);
    if (rc) return rc;
    ranks_backend_info(engine->ranks, &engine->info.backend);
    engine->ahead = o->ahead || engine->info.backend.asynchronous;
    return 0;
}

int engine_build(struct engine *engine, struct err *err) {
    const struct engine_options *o = &engine->options;
    struct model_limits limits = {0};
    struct model_memory memory = {0};
    int32_t pages_total = 0;
    int64_t since_ns = clock_now_ns();
    int rc = o->dummy_weights ? model_files_open_shapes(o->model_path, &engine->files, err)
                              : model_files_open(o->model_path, &engine->files, err);
    if (rc) return rc;
    phase_add(&engine->info, "files", &since_ns);
    if ((rc = devices_open(engine, err))) return rc;
    const struct model_spec *spec = model_files_spec(engine->files);
    if ((rc = device_refuse(engine, err))) return rc;
    defaults_settle(engine);
    phase_add(&engine->info, "device", &since_ns);
    if ((rc = limits_decide(o, spec, &limits, err))) return rc;
    if ((rc = model_memory_plan(engine->files, ranks_backend(engine->ranks), &limits, &memory, err))) return rc;
    rc = on_cuda(engine) ? cuda_pages_decide(engine, &limits, &memory, &pages_total, err)
                         : cpu_pages_decide(engine, &limits, &memory, &pages_total, err);
    if (rc) return rc;
    if ((rc = context_shrink(o, &limits, pages_total, err))) return rc;
    if ((rc = model_memory_plan(engine->files, ranks_backend(engine->ranks), &limits, &memory, err))) return rc;
    info_fill(engine, spec, &limits, &memory, pages_total);
    phase_add(&engine->info, "plan", &since_ns);
    struct model_options options = {.limits = limits,
                                    .pages_total = pages_total,
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
    if ((rc = sched_build(engine, &limits, pages_total, err))) return rc;
    phase_add(&engine->info, "scheduler", &since_ns);
    return 0;
}
