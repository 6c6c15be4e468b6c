/* Opening the model off the loop, so that health answers meanwhile, and telling what was opened. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/mem.h"
#include "server/options_table.h"
#include "server/serve.h"

#define TEMPLATE_BYTES_MAX ((size_t)1024 * 1024)

static int format_refuse(const struct serve *serve, struct err *err) {
    struct stat info;
    if (serve->options.load_format != LOAD_FORMAT_SAFETENSORS) return 0;
    if (stat(serve->model.path, &info) == 0 && S_ISDIR(info.st_mode)) return 0;
    return err_set_field(err, ERR_INVALID, "--load-format",
                         "--load-format safetensors takes a folder, and %.200s is a file", serve->model.path);
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

static void engine_options_fill(struct serve *serve, struct engine_options *e) {
    static const char *const kernels[] = {NULL, "sm_90a", "portable"};
    const struct options *o = &serve->options;
    *e = (struct engine_options){
        .model_path = serve->model.path,
        .backend = {.device = (enum device_kind)o->device,
                    .ordinal = o->device_ordinal,
                    .cuda_kernels = kernels[o->cuda_kernels],
                    .batch_invariant = o->batch_invariant,
                    .threads = o->threads,
                    .cpu_activations = (enum cpu_activations)o->cpu_activations},
        .on_events = bridge_events,
        .user = &serve->bridge,
        .dtype = dtype_of(o),
        .kv_dtype = kv_dtype_of(o),
        .block_size = o->block_size,
        .max_model_len = o->max_model_len,
        .max_num_seqs = o->max_num_seqs,
        .max_num_batched_tokens = o->max_num_batched_tokens,
        .max_num_mixed_tokens = o->max_num_mixed_tokens,
        .memory_utilization = o->gpu_memory_utilization,
        .max_queued_requests = o->max_num_queued_reqs,
        .long_prefill_threshold = o->long_prefill_token_threshold,
        .kv_cache_bytes = o->kv_cache_memory_bytes,
        .prefix_caching = o->enable_prefix_caching,
        .eager = o->enforce_eager,
        .dummy_weights = o->load_format == LOAD_FORMAT_DUMMY,
        .seed = o->seed,
    };
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

static int text_load(struct serve *serve, struct err *err) {
    struct text_options options = {0};
    char *source = NULL;
    if (serve->options.chat_template && !(source = template_read(serve->options.chat_template, err))) return err->code;
    options.chat_template = source;
    options.stand_in = serve->options.load_format == LOAD_FORMAT_DUMMY;
    int code = text_open(serve->model.path, &options, &serve->load.text, err);
    mem_free(source);
    return code;
}

static void *text_thread(void *argument) {
    struct serve *serve = argument;
    struct serve_load *load = &serve->load;
    int64_t begin_ns = clock_now_ns();
    load->text_code = text_load(serve, &load->text_err);
    load->text_seconds = (double)(clock_now_ns() - begin_ns) * 1e-9;
    return NULL;
}

/* Weights and tokenizer side by side: neither needs the other until the first request. */
static void *load_thread(void *argument) {
    struct serve *serve = argument;
    struct serve_load *load = &serve->load;
    struct engine_options options;
    struct err err = {0};
    pthread_t text;
    int64_t begin_ns = clock_now_ns();
    bool beside = pthread_create(&text, NULL, text_thread, serve) == 0;
    engine_options_fill(serve, &options);
    int code = engine_open(&options, &load->engine, &err);
    load->engine_seconds = (double)(clock_now_ns() - begin_ns) * 1e-9;
    if (beside)
        pthread_join(text, NULL);
    else
        text_thread(serve);
    load->failed_at = code ? "model" : "tokenizer";
    if (code)
        load->err = err;
    else if (load->text_code)
        load->err = load->text_err;
    else if (engine_set_text(load->engine, load->text, &err))
        load->err = err;
    atomic_store(&load->finished, true);
    uv_async_send(&load->done);
    return NULL;
}

int serve_load_start(struct serve *serve, uv_async_cb on_done, struct err *err) {
    struct serve_load *load = &serve->load;
    if (format_refuse(serve, err) || device_refuse(&serve->options, err)) return err->code;
    uv_async_init(&serve->loop, &load->done, on_done);
    load->done.data = serve;
    int code = pthread_create(&load->thread, NULL, load_thread, serve);
    if (code) return err_set(err, ERR_IO, "cannot start a thread: %s", strerror(code));
    load->started = true;
    return 0;
}

void serve_load_join(struct serve *serve) {
    if (serve->load.started) pthread_join(serve->load.thread, NULL);
    serve->load.started = false;
}

int serve_exit_code(const struct err *err) {
    switch (err->code) {
    case ERR_INVALID:
    case ERR_NOT_FOUND:
    case ERR_UNSUPPORTED:
        return SERVE_EXIT_USAGE;
    case ERR_FATAL:
        return SERVE_EXIT_ENGINE;
    default:
        return SERVE_EXIT_ENVIRONMENT;
    }
}

static double mib(size_t bytes) {
    return (double)bytes / (1024.0 * 1024.0);
}

void serve_report(const struct serve *serve) {
    const struct engine_info *i = engine_info(serve->load.engine);
    struct log_quoted device = log_quote(i->backend.name), types = log_quote(i->weight_types);
    bool cuda = i->backend.device == DEVICE_CUDA;
    if (cuda)
        log_info("device", "kind=cuda name=%s kernels=%s multiprocessors=%d memory_mib=%.0f free_mib=%.0f is=%s",
                 device.text, i->backend.isa, i->backend.threads, mib(i->backend.memory_total_bytes),
                 mib(i->backend.memory_free_bytes), log_quote(i->backend.driver).text);
    else
        log_info("device", "kind=cpu name=%s isa=%s threads=%d", device.text, i->backend.isa, i->backend.threads);
    log_info("model", "architecture=%s parameters=%lld types=%s vocab=%d context=%d max_model_len=%d", i->architecture,
             (long long)i->parameters, types.text, i->vocab, i->model_context, i->max_model_len);
    log_info("memory weights", "mib=%.1f", mib(i->weight_bytes));
    log_info("memory kv cache", "mib=%.1f pages=%d page_tokens=%d tokens=%lld dtype=%s bytes_per_token=%zu touched=%s",
             mib(i->kv_bytes), i->pages_total, i->page_size, (long long)i->pages_total * i->page_size,
             dtype_info(i->kv_dtype)->name, i->kv_bytes_per_token, cuda ? "at_start" : "on_use");
    log_info("memory workspace", "mib=%.1f", mib(i->workspace_bytes));
    log_info("memory process", "resident_mib=%.1f", mib(mem_resident_bytes()));
    log_info("limits",
             "max_num_seqs=%d max_num_batched_tokens=%d max_num_mixed_tokens=%d max_num_queued_reqs=%d "
             "requests_of_full_length=%.1f",
             i->max_num_seqs, i->max_num_batched_tokens, i->max_num_mixed_tokens, serve->options.max_num_queued_reqs,
             i->max_model_len > 0 ? (double)i->pages_total * i->page_size / i->max_model_len : 0.0);
    const char *unread = text_info(serve->load.text)->chat_template_error;
    if (unread)
        log_warning("the model's chat template cannot be read: chats are refused; --chat-template gives another",
                    "why=%s", log_quote(unread).text);
    const struct buf *changed = &serve->options.changed;
    log_info("configuration", "given=%s", log_quote(changed->bytes ? changed->data : "").text);
    log_info("phase", "name=tokenizer seconds=%.3f beside=model", serve->load.text_seconds);
    for (int32_t p = 0; p < i->phase_count; p++)
        log_info("phase", "name=%s seconds=%.3f", log_quote(i->phases[p].name).text, i->phases[p].seconds);
}
