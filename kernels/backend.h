/* backend.h: a device as the ops see it: memory, the worker team or stream, and what it is.
 *
 * Opened by the engine, one a rank; used by that rank's thread alone. Knows nothing of sequences, requests, models or
 * ranks. The CPU backend's device memory is host memory. After the engine says "ready" nothing more is allocated here.
 */
#ifndef QUIRE_KERNELS_BACKEND_H
#define QUIRE_KERNELS_BACKEND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/dtype.h"
#include "engine/base/err.h"

struct backend; /* opaque */

enum device_kind { DEVICE_AUTO, DEVICE_CPU, DEVICE_CUDA };

/* How the CPU multiplies quantised weights: activations rounded to int8 in blocks of 32 along K, or kept in f32. */
enum cpu_activations { CPU_ACTIVATIONS_INT8, CPU_ACTIVATIONS_F32 };

struct backend_options {
    enum device_kind device;
    int32_t ordinal; /* CUDA device number */
    int32_t threads; /* CPU team, 0: one a core this process may use */
    enum cpu_activations cpu_activations;
    const char *cpu_isa; /* NULL: the best this machine has; else "portable", "avx2", "avx512" (refused if absent) */
};

struct backend_info {
    enum device_kind device; /* never DEVICE_AUTO */
    char name[96];           /* processor or GPU name */
    char isa[32];            /* "portable", "avx2", "avx512-vnni", "sm_90" */
    int32_t threads;
    size_t memory_total_bytes, memory_free_bytes; /* at open */
    enum dtype activation_dtype;                  /* dtype of x between ops: f32 on the CPU */
};

/* DEVICE_AUTO takes CUDA if a device opens, else the CPU. ERR_UNSUPPORTED when the asked device or ISA is not there. */
int backend_open(const struct backend_options *options, struct backend **out, struct err *err);
void backend_close(struct backend *backend);
const struct backend_info *backend_info(const struct backend *backend);

enum memory_kind { MEMORY_WEIGHTS, MEMORY_WORKSPACE, MEMORY_KV, MEMORY_PINNED, MEMORY_KIND_COUNT };

/* Device memory (host memory the device can write for MEMORY_PINNED), zeroed, 64-byte aligned at least. On the CPU it
 * is touched only on use. ERR_NOMEM says what was asked for and what there is. */
int backend_alloc(struct backend *backend, enum memory_kind kind, size_t bytes, void **out, struct err *err);
void backend_free(struct backend *backend, enum memory_kind kind, void *p, size_t bytes);
size_t backend_allocated_bytes(const struct backend *backend, enum memory_kind kind);

/* Host to device, in order with the ops. The source may be reused on return. */
int backend_upload(struct backend *backend, void *device, const void *host, size_t bytes, struct err *err);

/* Waits until everything issued is done; reports a device fault as ERR_FATAL. A no-op on the CPU. */
int backend_sync(struct backend *backend, struct err *err);

#endif
