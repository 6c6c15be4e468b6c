/* engine_plan.c: from the model's shape and the devices' memory to limits and pages, or to the arithmetic of why not.
 */
#include <stdio.h>
#include <string.h>

#include "engine/base/arith.h"
#include "engine/base/log.h"
#include "engine/engine_private.h"
#include "engine/fit.h"

/* On a CPU the memory is shared with everybody else: unless said otherwise the pool takes 4 GiB at most (vLLM's CPU
 * build reserves the same). It is touched only on use. */
#define CPU_KV_BYTES_DEFAULT ((size_t)4 << 30)

/* What CUDA takes beside our three pieces, set aside for it: the context, the kernels' code (some of it only at a
 * kernel's first launch) and scratch of the products, about 0.5 GiB; and recorded steps, which come while the engine
 * runs: at most MODEL_GRAPHS_MAX of some 300 nodes each, about 2 MiB apiece. */
#define CUDA_GRAPHS_BYTES   ((size_t)MODEL_GRAPHS_MAX * ((size_t)2 << 20))
#define CUDA_OVERHEAD_BYTES (((size_t)896 << 20) + CUDA_GRAPHS_BYTES)

/* Of a GPU's memory, where nothing else is said. */
#define MEMORY_SHARE_USUAL 0.92

/* CPU: 256 tokens a step keep the worst gap of a stream below 0.4 s at 1,000 prompt tokens a second; more than 64 rows
 * a decode step gain nothing there. CUDA: prompts of an 8B model run at 48,000 tokens a second, so a step of 8192 that
 * nobody waits for takes 170 ms and one of 2048 beside decodes 45 ms. */
static const struct device_defaults {
    int32_t max_num_seqs, max_num_batched_tokens, max_num_mixed_tokens;
    double memory_utilization;
} cpu_defaults = {64, 256, 0, 0.5}, cuda_defaults = {1024, 8192, 2048, MEMORY_SHARE_USUAL};

static bool on_cuda(const struct backend_info *device) {
    return device->device == DEVICE_CUDA;
}

void options_settle(struct engine_options *o, const struct backend_info *device) {
    const struct device_defaults *d = on_cuda(device) ? &cuda_defaults : &cpu_defaults;
    bool seqs_given = o->max_num_seqs > 0;
    if (!o->max_num_seqs) o->max_num_seqs = d->max_num_seqs;
    if (!o->max_num_batched_tokens) o->max_num_batched_tokens = d->max_num_batched_tokens;
    if (!o->max_num_mixed_tokens) o->max_num_mixed_tokens = d->max_num_mixed_tokens;
    if (!(o->memory_utilization > 0)) o->memory_utilization = d->memory_utilization;
    if (!seqs_given && o->max_num_seqs > o->max_num_batched_tokens) o->max_num_seqs = o->max_num_batched_tokens;
    if (o->kv_dtype == DTYPE_COUNT) o->kv_dtype = device->kv_dtype_default;
}

int options_refuse(const struct engine_options *o, const struct backend_info *info, struct err *err) {
    const char *device = on_cuda(info) ? "CUDA" : "the CPU";
    if (o->dtype != DTYPE_COUNT && o->dtype != info->activation_dtype)
        return err_set_field(err, ERR_UNSUPPORTED, "--dtype", "--dtype on %s takes auto or %s, not %s", device,
                             info->activation_dtype == DTYPE_BF16 ? "bfloat16" : "float32",
                             o->dtype == DTYPE_BF16  ? "bfloat16"
                             : o->dtype == DTYPE_F16 ? "float16"
                                                     : "float32");
    if (o->kv_dtype != DTYPE_COUNT && !(info->kv_dtypes >> o->kv_dtype & 1))
        return err_set_field(err, ERR_UNSUPPORTED, "--kv-cache-dtype", "--kv-cache-dtype on %s takes %s, not %s",
                             device, on_cuda(info) ? "auto or bf16" : "auto, f16 or f32",
                             dtype_info(o->kv_dtype)->name);
    return 0;
}

int limits_decide(const struct engine_options *o, const struct model_spec *spec, struct model_limits *limits,
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

struct memory_sum memory_add(const struct engine_options *o, const struct backend_info *device,
                             const struct model_limits *limits, const struct model_memory *memory) {
    const bool cuda = on_cuda(device);
    const size_t ranks = cuda ? 1 : (size_t)limits->ranks; /* of a CPU all take from the one memory */
    const size_t free_bytes = device->memory_free_bytes ? device->memory_free_bytes : device->memory_total_bytes;
    struct memory_sum sum = {
        .weights = memory->weight_bytes * ranks,
        .workspace = memory->workspace_bytes * ranks,
        .overhead = cuda ? CUDA_OVERHEAD_BYTES : 0,
        .page = memory->kv_page_bytes * ranks,
        .share = (size_t)((double)(cuda ? device->memory_total_bytes : free_bytes) * o->memory_utilization),
        .free = free_bytes,
    };
    sum.kv_least = (size_t)i32_ceil_div(limits->max_model_len, limits->page_size) * sum.page;
    if (cuda) sum.kv_least += sum.page; /* the dummy page */
    if (!cuda && o->kv_cache_bytes) sum.share = SIZE_MAX;
    sum.kv = o->kv_cache_bytes ? o->kv_cache_bytes : sum.kv_least;
    return sum;
}

static size_t sum_fixed(const struct memory_sum *sum) {
    return sum->weights + sum->workspace + sum->overhead;
}

size_t memory_left(const struct memory_sum *sum) {
    const size_t room = sum->free < sum->share ? sum->free : sum->share, fixed = sum_fixed(sum);
    return fixed < room ? room - fixed : 0;
}

/* What would help: never less of one piece where another alone is too large. */
static const char *memory_advice(const struct engine_options *o, const struct memory_sum *sum) {
    const size_t weights = sum->weights + sum->overhead, fixed = sum_fixed(sum);
    const bool kv_given = o->kv_cache_bytes > 0;
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

/* The arithmetic of what does not fit and what to change; more GPUs where that helps. */
static int memory_refuse(const struct engine_options *o, const struct model_files *files, const struct backend *backend,
                         const struct backend_info *device, const struct model_limits *limits,
                         const struct memory_sum *sum, struct err *err) {
    const size_t all = sum_fixed(sum) + sum->kv;
    char overhead[48] = "", share[80] = "", where[48] = "", more[200] = "";
    struct fit fit;
    if (on_cuda(device)) snprintf(overhead, sizeof overhead, " + CUDA itself %zu MiB", sum->overhead >> 20);
    if (on_cuda(device) && o->ranks > 1) snprintf(where, sizeof where, " on each of %d GPUs", o->ranks);
    if (!on_cuda(device) && o->ranks > 1) snprintf(where, sizeof where, " for %d ranks", o->ranks);
    if (sum->share < SIZE_MAX)
        snprintf(share, sizeof share, " and --gpu-memory-utilization %.2f of %s allows %zu MiB", o->memory_utilization,
                 on_cuda(device) ? "all" : "these", sum->share >> 20);
    /* A GPU that would hold it, were it not in use or its share so small, needs no other one. */
    const bool alone = (double)all <= MEMORY_SHARE_USUAL * (double)device->memory_total_bytes;
    if (on_cuda(device) && !alone) {
        fit_choices(o, files, backend, device, &fit);
        fit_sentence(&fit, o->ranks + 1, more, sizeof more);
    }
    const char *advice = memory_advice(o, sum), * or = *more ? ", or " : "";
    const size_t weights = sum->weights + sum->overhead;
    if (*more && (weights > sum->free || weights > sum->share)) advice = or = ""; /* more GPUs it is */
    return err_set(err, ERR_UNSUPPORTED,
                   "not enough memory%s: weights %zu MiB + workspace %zu MiB%s + KV %zu MiB (%s %d tokens) = %zu MiB, "
                   "but %zu MiB are free%s; %s%s%s%s",
                   where, sum->weights >> 20, sum->workspace >> 20, overhead, sum->kv >> 20,
                   o->kv_cache_bytes ? "asked for; one context is" : "one context of", limits->max_model_len, all >> 20,
                   sum->free >> 20, share, more, or, advice,
                   on_cuda(device) && all > sum->free && !*more ? ", or free the GPU" : "");
}

/* Bytes for the pool: what was asked for; else of a GPU all that the share leaves, of a CPU up to a fixed sum. */
static size_t pool_bytes(const struct engine_options *o, const struct backend_info *device,
                         const struct memory_sum *sum) {
    size_t left = memory_left(sum);
    if (o->kv_cache_bytes) return o->kv_cache_bytes;
    if (on_cuda(device)) return left - sum->page;
    if (left > CPU_KV_BYTES_DEFAULT) left = CPU_KV_BYTES_DEFAULT;
    return left < sum->kv_least ? sum->kv_least : left;
}

static int pages_decide(const struct engine_options *o, const struct model_files *files, const struct backend *backend,
                        const struct backend_info *device, struct plan *plan, struct err *err) {
    const struct memory_sum sum = memory_add(o, device, &plan->limits, &plan->memory);
    if (sum_fixed(&sum) > SIZE_MAX - sum.kv || memory_left(&sum) < sum.kv)
        return memory_refuse(o, files, backend, device, &plan->limits, &sum, err);
    if (on_cuda(device) && sum.free < sum.share)
        log_warning("less memory is free on the GPU than --gpu-memory-utilization allows",
                    "free_mib=%zu allowed_mib=%zu", sum.free >> 20, sum.share >> 20);
    const size_t bytes = pool_bytes(o, device, &sum), pages = bytes / sum.page;
    if (pages < 1)
        return err_set_field(err, ERR_INVALID, "kv-cache-memory-bytes",
                             "one page of %d tokens takes %zu bytes, --kv-cache-memory-bytes gives %zu",
                             plan->limits.page_size, sum.page, bytes);
    plan->pages_total = (int32_t)(pages < (size_t)INT32_MAX / 2 ? pages : (size_t)INT32_MAX / 2) + 1; /* the dummy */
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

int plan_make(const struct engine_options *o, const struct model_files *files, const struct backend *backend,
              const struct backend_info *device, struct plan *out, struct err *err) {
    *out = (struct plan){0};
    int rc = limits_decide(o, model_files_spec(files), &out->limits, err);
    if (rc == 0) rc = model_memory_plan(files, backend, &out->limits, &out->memory, err);
    if (rc == 0) rc = pages_decide(o, files, backend, device, out, err);
    if (rc == 0) rc = context_shrink(o, &out->limits, out->pages_total, err);
    return rc ? rc : model_memory_plan(files, backend, &out->limits, &out->memory, err);
}
