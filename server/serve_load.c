/* Opening the front's text off the loop, so that health answers meanwhile, and telling what the engines opened. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/mem.h"
#include "server/engine_setup.h"
#include "server/serve.h"

static void *load_thread(void *argument) {
    struct serve *serve = argument;
    struct serve_load *load = &serve->load;
    int64_t begin_ns = clock_now_ns();
    const struct engine_setup setup = {&serve->options, serve->model.path, 0};
    struct err err;
    if (engine_setup_text(&setup, &load->text, &err)) load->err = err; /* else it may tell of what was tried */
    load->seconds = (double)(clock_now_ns() - begin_ns) * 1e-9;
    atomic_store(&load->finished, true);
    uv_async_send(&load->done);
    return NULL;
}

int serve_load_start(struct serve *serve, uv_async_cb on_done, struct err *err) {
    struct serve_load *load = &serve->load;
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
    const struct engine_info *i = serve->app.info;
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
    log_info("phase", "name=tokenizer seconds=%.3f beside=model", serve->load.seconds);
    for (int32_t p = 0; p < i->phase_count; p++)
        log_info("phase", "name=%s seconds=%.3f", log_quote(i->phases[p].name).text, i->phases[p].seconds);
}
