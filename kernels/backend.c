#include "kernels/backend.h"

#include <string.h>

#include "engine/base/arith.h"
#include "engine/base/check.h"
#include "engine/base/log.h"
#include "engine/base/mem.h"
#include "kernels/backend_internal.h"
#include "kernels/cpu/cpu.h"
#ifdef QUIRE_CUDA
#include "kernels/cuda/cuda.h"
#endif

static int device_open(struct backend *backend, const struct backend_options *options, struct err *err) {
#ifdef QUIRE_CUDA
    if (options->device == DEVICE_CUDA) return cuda_open(backend, options, err);
    struct err why = {0};
    if (options->device == DEVICE_AUTO) {
        if (cuda_open(backend, options, &why) == 0) return 0;
        if (strcmp(why.field, "cuda_kernels") == 0) { /* there is a GPU, and what was asked of it cannot be had */
            if (err) *err = why;
            return why.code;
        }
        log_info("no CUDA device, the CPU serves", "why=%s", log_quote(why.text).text);
    }
#else
    if (options->device == DEVICE_CUDA)
        return err_set_field(err, ERR_UNSUPPORTED, "device",
                             "this build has no CUDA backend: use --device cpu, or build with -DQUIRE_CUDA=ON");
    if (options->device == DEVICE_AUTO)
        log_info("no CUDA device, the CPU serves", "why=%s", log_quote("this build has no CUDA backend").text);
#endif
    return cpu_open(backend, options, err);
}

int backend_open(const struct backend_options *options, struct backend **out, struct err *err) {
    struct backend *backend = mem_zalloc(1, sizeof *backend);
    int rc = device_open(backend, options, err);
    if (rc) {
        mem_free(backend);
        return rc;
    }
    *out = backend;
    return 0;
}

void backend_close(struct backend *backend) {
    if (!backend) return;
    backend->table->close(backend);
    mem_free(backend);
}

const struct backend_info *backend_info(const struct backend *backend) {
    return &backend->info;
}

int32_t backend_processors(void) {
    return machine_processors();
}

int32_t backend_cuda_devices(void) {
#ifdef QUIRE_CUDA
    return cuda_devices();
#else
    return 0;
#endif
}

static const char *memory_kind_name(enum memory_kind kind) {
    static const char *const names[MEMORY_KIND_COUNT] = {"weights", "workspace", "KV cache", "pinned buffers"};
    return names[kind];
}

/* The system hands out addresses without looking whether there is memory behind them, so what the machine cannot hold
 * is refused here. */
int backend_alloc(struct backend *backend, enum memory_kind kind, size_t bytes, void **out, struct err *err) {
    CHECK((unsigned)kind < MEMORY_KIND_COUNT);
    void *p = NULL;
    size_t total = backend->info.memory_total_bytes;
    if (!total || bytes <= total) p = backend->table->alloc(backend, kind, bytes);
    if (!p)
        return err_set(err, ERR_NOMEM, "no memory for %zu bytes of %s: the %s has %zu bytes, %zu of them free", bytes,
                       memory_kind_name(kind), backend->info.device == DEVICE_CUDA ? "GPU" : "machine", total,
                       backend->info.device == DEVICE_CUDA ? backend->info.memory_free_bytes : mem_available_bytes());
    backend->allocated_bytes[kind] += bytes;
    *out = p;
    return 0;
}

void backend_free(struct backend *backend, enum memory_kind kind, void *p, size_t bytes) {
    if (!p) return;
    CHECK(backend->allocated_bytes[kind] >= bytes);
    backend->allocated_bytes[kind] -= bytes;
    backend->table->free(backend, kind, p, bytes);
}

size_t backend_allocated_bytes(const struct backend *backend, enum memory_kind kind) {
    return backend->allocated_bytes[kind];
}

int backend_reserve(struct backend *backend, enum memory_kind kind, size_t bytes, struct err *err) {
    CHECK((unsigned)kind < MEMORY_KIND_COUNT);
    int rc = backend->table->reserve ? backend->table->reserve(backend, kind, bytes, err) : 0;
    if (rc) err_prefix(err, "%s", memory_kind_name(kind));
    return rc;
}

int backend_upload(struct backend *backend, void *device, const void *host, size_t bytes, struct err *err) {
    return bytes ? backend->table->upload(backend, device, host, bytes, err) : 0;
}

int backend_download(struct backend *backend, void *host, const void *device, size_t bytes, struct err *err) {
    return bytes ? backend->table->download(backend, host, device, bytes, err) : 0;
}

int backend_sync(struct backend *backend, struct err *err) {
    return backend->table->sync(backend, err);
}

/* ---- step memory --------------------------------------------------------------------------------------------------
 */

bool backend_step_device_bytes(const struct backend *backend, size_t bytes, size_t *out) {
    *out = bytes;
    return !backend->table->step_device_bytes || backend->table->step_device_bytes(bytes, out);
}

int backend_step_open(struct backend *backend, size_t bytes, struct err *err) {
    CHECK(!backend->step.host && bytes > 0);
    int rc = backend->table->step_open(backend, bytes, err);
    if (rc == 0) backend->step.bytes = bytes;
    return rc;
}

int backend_step_begin(struct backend *backend, struct err *err) {
    CHECK(backend->step.host && !backend->step.open);
    int rc = backend->table->step_begin(backend, err);
    backend->step.used = 0;
    backend->step.open = rc == 0;
    return rc;
}

void *backend_step_alloc(struct backend *backend, size_t bytes) {
    struct step_memory *step = &backend->step;
    size_t rounded;
    CHECK(step->open);
    if (!size_align(bytes, 64, &rounded) || rounded > step->bytes - step->used) return NULL;
    void *p = step->host + step->used;
    step->used += rounded;
    return p;
}

int backend_step_commit(struct backend *backend, struct err *err) {
    CHECK(backend->step.open);
    backend->step.open = false;
    return backend->table->step_commit(backend, err);
}

/* ---- graphs and fences --------------------------------------------------------------------------------------------
 */

int backend_graph_begin(struct backend *backend, struct err *err) {
    if (!backend->table->graph_begin) return err_set(err, ERR_UNSUPPORTED, "this device records no graphs");
    return backend->table->graph_begin(backend, err);
}

int backend_graph_end(struct backend *backend, struct graph **out, struct err *err) {
    *out = NULL;
    return backend->table->graph_end(backend, out, err);
}

int backend_graph_launch(struct backend *backend, struct graph *graph, struct err *err) {
    return backend->table->graph_launch(backend, graph, err);
}

void backend_graph_free(struct backend *backend, struct graph *graph) {
    if (graph) backend->table->graph_free(backend, graph);
}

int backend_fence(struct backend *backend, int which, struct err *err) {
    CHECK(which >= 0 && which < BACKEND_FENCES);
    return backend->table->fence ? backend->table->fence(backend, which, err) : 0;
}

int backend_fence_wait(struct backend *backend, int which, struct err *err) {
    CHECK(which >= 0 && which < BACKEND_FENCES);
    return backend->table->fence_wait ? backend->table->fence_wait(backend, which, err) : 0;
}

void backend_profile(struct backend *backend, bool on) {
    backend->profiling = on;
}

void backend_profile_read(const struct backend *backend, struct op_profile *out) {
    *out = backend->profile;
}

void backend_profile_add(struct backend *backend, enum op_kind kind, uint64_t bytes, uint64_t flops, uint64_t ns) {
    backend->profile.calls[kind]++;
    backend->profile.bytes[kind] += bytes;
    backend->profile.flops[kind] += flops;
    backend->profile.ns[kind] += ns;
}
