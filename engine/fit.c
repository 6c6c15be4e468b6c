#include "engine/fit.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/base/clock.h"
#include "engine/engine_private.h"

/* ---- arithmetic ---------------------------------------------------------------------------------------------------
 */

/* False: the shapes do not divide. */
static bool choice_fill(const struct engine_options *options, const struct model_files *files,
                        const struct backend *backend, const struct backend_info *device, int32_t ranks,
                        struct fit_choice *out) {
    struct engine_options o = *options;
    struct model_limits limits = {0};
    struct model_memory memory = {0};
    o.ranks = ranks;
    if (limits_decide(&o, model_files_spec(files), &limits, NULL) ||
        model_memory_plan(files, backend, &limits, &memory, NULL))
        return false;
    const struct memory_sum sum = memory_add(&o, device, &limits, &memory);
    const size_t left = memory_left(&sum), pool = o.kv_cache_bytes && o.kv_cache_bytes < left ? o.kv_cache_bytes : left;
    *out = (struct fit_choice){.ranks = ranks,
                               .weight_bytes = memory.weight_bytes,
                               .workspace_bytes = memory.workspace_bytes,
                               .kv_tokens = (int64_t)(pool / sum.page) * limits.page_size,
                               .fits = left >= sum.kv};
    return true;
}

void fit_choices(const struct engine_options *options, const struct model_files *files, const struct backend *backend,
                 const struct backend_info *device, struct fit *out) {
    const int32_t most = device->device == DEVICE_CUDA ? COMM_RANKS_MAX : 1; /* more ranks of a CPU share its memory */
    out->device = *device;
    out->choice_count = out->smallest = 0;
    for (int32_t ranks = 1; ranks <= most && out->choice_count < FIT_CHOICES_MAX; ranks++) {
        struct fit_choice *choice = &out->choices[out->choice_count];
        if (!choice_fill(options, files, backend, device, ranks, choice)) continue;
        if (choice->fits && !out->smallest) out->smallest = ranks;
        out->choice_count++;
    }
}

/* Two choices are enough to choose by; more do not fit into a line. */
enum { SENTENCE_CHOICES = 2 };

void fit_sentence(const struct fit *fit, int32_t ranks, char *out, size_t room) {
    int32_t said = 0;
    size_t used = 0;
    if (room) *out = 0;
    for (int32_t i = 0; i < fit->choice_count && said < SENTENCE_CHOICES && used < room; i++) {
        const struct fit_choice *c = &fit->choices[i];
        if (c->ranks < ranks || !c->fits) continue;
        int n = snprintf(out + used, room - used,
                         said ? ", %d (%zu MiB, %lld tokens)"
                              : "--tensor-parallel-size %d fits (%zu MiB of weights a GPU, %lld tokens of KV)",
                         c->ranks, c->weight_bytes >> 20, (long long)c->kv_tokens);
        used += n > 0 ? (size_t)n : 0;
        said++;
    }
}

int fit_choose(const struct fit *fit, int32_t *ranks, struct err *err) {
    char sentence[200];
    if (fit->smallest && fit->smallest <= fit->devices) {
        *ranks = fit->smallest;
        return 0;
    }
    fit_sentence(fit, 1, sentence, sizeof sentence);
    if (fit->smallest)
        return err_set_field(err, ERR_UNSUPPORTED, "tensor-parallel-size",
                             "the model does not fit on %d GPU%s like this (%s, %zu MiB free): %s", fit->devices,
                             fit->devices == 1 ? "" : "s", fit->device.name, fit->device.memory_free_bytes >> 20,
                             sentence);
    return err_set_field(err, ERR_UNSUPPORTED, "tensor-parallel-size",
                         "the model fits on no number of devices like %s with %zu MiB free: take a smaller or "
                         "quantised model, or a smaller --max-model-len",
                         fit->device.name, fit->device.memory_free_bytes >> 20);
}

/* ---- looking at devices -------------------------------------------------------------------------------------------
 */

/* None were named: all there are. */
static void devices_name(struct engine_options *o) {
    int32_t count = o->backend.device == DEVICE_CPU ? 0 : backend_cuda_devices();
    if (o->ranks > 0) return;
    o->ranks = count > COMM_RANKS_MAX ? COMM_RANKS_MAX : count > 1 ? count : 1;
    for (int32_t i = 0; i < o->ranks; i++) o->ordinals[i] = i;
    o->backend.ordinal = 0;
}

/* With the devices open. Where the shapes divide into no number at all, not even one works: says why. */
static int fit_fill(struct engine_options *o, const struct model_files *files, const struct ranks *ranks,
                    struct fit *out, struct err *err) {
    struct backend_info info;
    struct plan plan;
    ranks_backend_info(ranks, &info);
    int rc = options_refuse(o, &info, err);
    if (rc) return rc;
    options_settle(o, &info);
    fit_choices(o, files, ranks_backend(ranks), &info, out);
    out->devices = info.device == DEVICE_CUDA ? o->ranks : 1;
    o->ranks = 1;
    return out->choice_count ? 0 : plan_make(o, files, ranks_backend(ranks), &info, &plan, err);
}

static int fit_look(const struct engine_options *options, struct fit *out, struct err *err) {
    struct engine_options o = *options;
    struct model_files *files = NULL;
    struct ranks *ranks = NULL;
    int rc = o.dummy_weights ? model_files_open_shapes(o.model_path, &files, err)
                             : model_files_open(o.model_path, &files, err);
    if (rc) return rc;
    devices_name(&o);
    o.backend.threads = o.ranks; /* nothing is computed */
    const struct ranks_options devices = devices_options(&o);
    rc = ranks_open(&devices, &ranks, err);
    if (rc == 0) rc = fit_fill(&o, files, ranks, out, err);
    ranks_close(ranks);
    model_files_close(files);
    return rc;
}

struct answer {
    int rc;
    struct err err;
    struct fit fit;
};

static _Noreturn void child_run(const struct engine_options *options, int fd) {
    struct answer answer = {0};
    answer.rc = fit_look(options, &answer.fit, &answer.err);
    const char *at = (const char *)&answer;
    for (size_t sent = 0; sent < sizeof answer;) {
        ssize_t n = write(fd, at + sent, sizeof answer - sent);
        if (n < 0 && errno != EINTR) _exit(1);
        if (n > 0) sent += (size_t)n;
    }
    _exit(0);
}

static bool answer_read(int fd, struct answer *out) {
    char *at = (char *)out;
    for (size_t got = 0; got < sizeof *out;) {
        ssize_t n = read(fd, at + got, sizeof *out - got);
        if (n == 0 || (n < 0 && errno != EINTR)) return false;
        if (n > 0) got += (size_t)n;
    }
    return true;
}

int fit_probe(const struct engine_options *options, struct fit *out, struct err *err) {
    struct answer answer = {0};
    int pipe_fds[2], status = 0;
    if (pipe2(pipe_fds, O_CLOEXEC)) return err_set(err, ERR_IO, "cannot make a pipe: %s", strerror(errno));
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        close(pipe_fds[0]);
        child_run(options, pipe_fds[1]);
    }
    close(pipe_fds[1]);
    const bool whole = child > 0 && answer_read(pipe_fds[0], &answer);
    close(pipe_fds[0]);
    if (child < 0) return err_set(err, ERR_IO, "cannot start a process to look at the devices: %s", strerror(errno));
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
    if (!whole)
        return err_set(err, ERR_IO, "the process that looked at the devices ended with %s %d",
                       WIFSIGNALED(status) ? "signal" : "code", WIFSIGNALED(status) ? WTERMSIG(status) : status >> 8);
    if (answer.rc && err) *err = answer.err;
    if (answer.rc == 0) *out = answer.fit;
    return answer.rc;
}
