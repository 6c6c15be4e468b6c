#include "server/engine_setup.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "engine/base/clock.h"
#include "engine/base/mem.h"
#include "server/options_table.h"

#define TEMPLATE_BYTES_MAX ((size_t)1024 * 1024)
#define CPU_SHARE          0.5 /* of the free memory, as an engine alone would take */

static int format_refuse(const struct options *o, const char *model_path, struct err *err) {
    struct stat info;
    if (o->load_format != LOAD_FORMAT_SAFETENSORS) return 0;
    if (stat(model_path, &info) == 0 && S_ISDIR(info.st_mode)) return 0;
    return err_set_field(err, ERR_INVALID, "--load-format",
                         "--load-format safetensors takes a folder, and %.200s is a file", model_path);
}

static const char *choice_name(const char *flag, int32_t choice) {
    for (int32_t i = 0; i < option_row_count; i++)
        if (strcmp(option_rows[i].flag, flag) == 0) return option_rows[i].choices[choice];
    return "";
}

/* With a device named, what it cannot do is known before anything is opened; with auto the engine says it. */
static int device_refuse(const struct options *o, struct err *err) {
    bool cpu = o->device == DEVICE_CPU, cuda = o->device == DEVICE_CUDA;
    int32_t kv = o->kv_cache_dtype, dtype = o->dtype;
    if (kv == OPTION_KV_FP8 || (cpu && kv == OPTION_KV_BF16) || (cuda && (kv == OPTION_KV_F16 || kv == OPTION_KV_F32)))
        return err_set_field(err, ERR_UNSUPPORTED, "--kv-cache-dtype",
                             "--kv-cache-dtype takes auto, f16 or f32 on the CPU, and auto or bf16 on CUDA, not %s",
                             choice_name("kv-cache-dtype", kv));
    if (dtype == OPTION_DTYPE_F16 || (cpu && dtype == OPTION_DTYPE_BF16) || (cuda && dtype == OPTION_DTYPE_F32))
        return err_set_field(err, ERR_UNSUPPORTED, "--dtype",
                             "--dtype takes auto or float32 on the CPU, and auto or bfloat16 on CUDA: what the device "
                             "computes in; not %s",
                             choice_name("dtype", dtype));
    return 0;
}

int engine_setup_refuse(const struct options *o, const char *model_path, struct err *err) {
    return format_refuse(o, model_path, err) || device_refuse(o, err) ? err->code : 0;
}

static char *template_read(const char *path, struct err *err) {
    FILE *file = fopen(path, "r");
    if (!file) {
        err_set_field(err, ERR_NOT_FOUND, "--chat-template", "--chat-template: cannot read %.200s: %s", path,
                      strerror(errno));
        return NULL;
    }
    char *source = mem_zalloc(TEMPLATE_BYTES_MAX + 1, 1);
    size_t bytes = fread(source, 1, TEMPLATE_BYTES_MAX, file);
    bool more = fgetc(file) != EOF;
    fclose(file);
    if (!more && strlen(source) == bytes) return source;
    mem_free(source);
    err_set_field(err, ERR_INVALID, "--chat-template", "--chat-template: %.200s is no text file below 1 MiB", path);
    return NULL;
}

int engine_setup_text(const struct engine_setup *setup, struct text **out, struct err *err) {
    const struct options *o = setup->options;
    struct text_options options = {0};
    char *source = NULL;
    if (o->chat_template && !(source = template_read(o->chat_template, err))) return err->code;
    options.chat_template = source;
    options.stand_in = o->load_format == LOAD_FORMAT_DUMMY;
    int code = text_open(setup->model_path, &options, out, err);
    mem_free(source);
    return code;
}

static int text_open_for_host(void *user, struct text **out, struct err *err) {
    return engine_setup_text(user, out, err);
}

static enum dtype kv_dtype_of(const struct options *o) {
    static const enum dtype dtypes[] = {[OPTION_KV_AUTO] = DTYPE_COUNT,
                                        [OPTION_KV_F16] = DTYPE_F16,
                                        [OPTION_KV_F32] = DTYPE_F32,
                                        [OPTION_KV_BF16] = DTYPE_BF16,
                                        [OPTION_KV_FP8] = DTYPE_COUNT}; /* refused before */
    return dtypes[o->kv_cache_dtype];
}

static enum dtype dtype_of(const struct options *o) {
    static const enum dtype dtypes[] = {[OPTION_DTYPE_AUTO] = DTYPE_COUNT,
                                        [OPTION_DTYPE_F32] = DTYPE_F32,
                                        [OPTION_DTYPE_F16] = DTYPE_F16,
                                        [OPTION_DTYPE_BF16] = DTYPE_BF16};
    return dtypes[o->dtype];
}

/* Replica i takes the i-th part of the devices, in their order. */
static void devices_fill(const struct options *o, int32_t replica, struct engine_options *e) {
    e->ranks = o->tensor_parallel_size;
    for (int32_t k = 0; k < e->ranks; k++) {
        int32_t at = replica * e->ranks + k;
        e->ordinals[k] = o->device_count ? o->devices[at] : at;
    }
    e->backend.ordinal = e->ordinals[0];
}

/* On one machine's processors replicas share what one alone would take. */
static void processors_fill(const struct options *o, struct engine_options *e) {
    int32_t replicas = o->data_parallel_size;
    e->backend.threads = o->threads;
    e->memory_utilization = o->gpu_memory_utilization;
    if (replicas == 1 || o->device != DEVICE_CPU) return; /* auto is settled where there are several */
    int32_t threads = (o->threads ? o->threads : backend_processors()) / replicas;
    e->backend.threads = threads > 0 ? threads : 1;
    e->memory_utilization = (e->memory_utilization > 0 ? e->memory_utilization : CPU_SHARE) / replicas;
}

void engine_setup_fill(struct engine_setup *setup, struct host_options *out) {
    static const char *const kernels[] = {NULL, "sm_90a", "portable"};
    const struct options *o = setup->options;
    *out = (struct host_options){.text_open = text_open_for_host, .user = setup};
    out->keys = o->data_parallel_size > 1 && o->routing_policy == OPTION_ROUTING_PREFIX && o->enable_prefix_caching;
    out->engine = (struct engine_options){
        .model_path = setup->model_path,
        .backend = {.device = (enum device_kind)o->device,
                    .cuda_kernels = kernels[o->cuda_kernels],
                    .batch_invariant = o->batch_invariant,
                    .cpu_activations = (enum cpu_activations)o->cpu_activations},
        .step_timeout_ns = (int64_t)(o->step_timeout_s * 1e9),
        .dtype = dtype_of(o),
        .kv_dtype = kv_dtype_of(o),
        .block_size = o->block_size,
        .max_model_len = o->max_model_len,
        .max_num_seqs = o->max_num_seqs,
        .max_num_batched_tokens = o->max_num_batched_tokens,
        .max_num_mixed_tokens = o->max_num_mixed_tokens,
        .max_queued_requests = o->max_num_queued_reqs,
        .long_prefill_threshold = o->long_prefill_token_threshold,
        .kv_cache_bytes = o->kv_cache_memory_bytes,
        .prefix_caching = o->enable_prefix_caching,
        .eager = o->enforce_eager,
        .dummy_weights = o->load_format == LOAD_FORMAT_DUMMY,
        .seed = o->seed,
    };
    devices_fill(o, setup->replica, &out->engine);
    processors_fill(o, &out->engine);
}
