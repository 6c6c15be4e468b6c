#include "kernels/backend.h"

#include <string.h>

#include "engine/base/check.h"
#include "engine/base/mem.h"
#include "kernels/backend_internal.h"
#include "kernels/cpu/cpu.h"

int backend_open(const struct backend_options *options, struct backend **out, struct err *err) {
    if (options->device == DEVICE_CUDA)
        return err_set_field(err, ERR_UNSUPPORTED, "device",
                             "this build has no CUDA backend: use --device cpu, or build with -DQUIRE_CUDA=ON");
    struct backend *backend = mem_zalloc(1, sizeof *backend);
    int rc = cpu_open(backend, options, err);
    if (rc) {
        mem_free(backend);
        return rc;
    }
    *out = backend;
    return 0;
}

void backend_close(struct backend *backend) {
    if (!backend) return;
    cpu_close(backend);
    mem_free(backend);
}

const struct backend_info *backend_info(const struct backend *backend) {
    return &backend->info;
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
    if (!total || bytes <= total) p = cpu_alloc(backend, kind, bytes);
    if (!p)
        return err_set(err, ERR_NOMEM, "no memory for %zu bytes of %s: the machine has %zu bytes, %zu of them free",
                       bytes, memory_kind_name(kind), total, mem_available_bytes());
    backend->allocated_bytes[kind] += bytes;
    *out = p;
    return 0;
}

void backend_free(struct backend *backend, enum memory_kind kind, void *p, size_t bytes) {
    if (!p) return;
    CHECK(backend->allocated_bytes[kind] >= bytes);
    backend->allocated_bytes[kind] -= bytes;
    cpu_free(backend, kind, p, bytes);
}

size_t backend_allocated_bytes(const struct backend *backend, enum memory_kind kind) {
    return backend->allocated_bytes[kind];
}

int backend_upload(struct backend *backend, void *device, const void *host, size_t bytes, struct err *err) {
    if (bytes) memcpy(device, host, bytes);
    return 0;
}

int backend_sync(struct backend *backend, struct err *err) {
    return 0;
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
