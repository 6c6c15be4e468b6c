/* backend.h: a device as the ops see it: memory, the worker team or stream, and what it is.
 *
 * Opened by the engine, one a rank; used by that rank's thread alone. Knows nothing of sequences, requests, models or
 * ranks. The CPU backend's device memory is host memory. After the engine says "ready" backend_alloc is called no more;
 * what still takes device memory then is the driver's own: for a graph at its end, and for a kernel's code at its first
 * launch. The engine's memory plan leaves that free.
 */
#ifndef QUIRE_KERNELS_BACKEND_H
#define QUIRE_KERNELS_BACKEND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/dtype.h"
#include "engine/base/err.h"

#ifdef __cplusplus
extern "C" {
#endif

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
    /* NULL: the best this GPU has; "sm_90a": refused elsewhere; "portable": kernels that any GPU from compute
     * capability 8.0 on runs. */
    const char *cuda_kernels;
    /* CUDA: every result of a row depends on that row alone, whatever else is in the batch. Always so on the CPU. */
    bool batch_invariant;
};

struct backend_info {
    enum device_kind device; /* never DEVICE_AUTO */
    char name[96];           /* processor or GPU name */
    char isa[32];            /* "portable", "avx2", "avx512-vnni"; "cuda-sm_90a", "cuda-portable" */
    int32_t threads;         /* of the team; multiprocessors of a GPU */
    size_t memory_total_bytes, memory_free_bytes; /* at open */
    enum dtype activation_dtype;                  /* dtype of x between ops: f32 on the CPU, bf16 on CUDA */
    enum dtype kv_dtype_default;                  /* f16 on the CPU, bf16 on CUDA */
    unsigned kv_dtypes;                           /* 1 << dtype for each that the KV cache may have */
    bool asynchronous;                            /* ops return before they are done: a step ahead pays */
    bool graphs;                                  /* backend_graph_* work */
    char driver[64];                              /* CUDA: "driver 13.0, runtime 13.0, compute capability 9.0" */
};

/* DEVICE_AUTO takes CUDA if a device opens, else the CPU; cuda_kernels that its GPU lacks are refused all the same.
 * ERR_UNSUPPORTED when the asked device or ISA is not there. */
int backend_open(const struct backend_options *options, struct backend **out, struct err *err);
void backend_close(struct backend *backend);
const struct backend_info *backend_info(const struct backend *backend);

/* What `threads` 0 stands for: the processors that this process may use. */
int32_t backend_processors(void);
/* CUDA devices that this process sees; 0 where there is no driver, no device or no CUDA in the build. A child process
 * looks, so that this one has touched no GPU and can still fork; before it opens one, and while it has one thread. */
int32_t backend_cuda_devices(void);

enum memory_kind { MEMORY_WEIGHTS, MEMORY_WORKSPACE, MEMORY_KV, MEMORY_PINNED, MEMORY_KIND_COUNT };

/* Device memory (host memory the device can write for MEMORY_PINNED), zeroed, 64-byte aligned at least. On the CPU it
 * is touched only on use. ERR_NOMEM says what was asked for and what there is. */
int backend_alloc(struct backend *backend, enum memory_kind kind, size_t bytes, void **out, struct err *err);
void backend_free(struct backend *backend, enum memory_kind kind, void *p, size_t bytes);
size_t backend_allocated_bytes(const struct backend *backend, enum memory_kind kind);

/* Takes `bytes` for this kind at once; backend_alloc of that kind then carves from it until it is used up, and a later
 * alloc beyond it fails. So that a GPU has one allocation for weights, one for workspace, one for KV pages. Optional;
 * once a kind. On the CPU a no-op. backend_close gives it back. */
int backend_reserve(struct backend *backend, enum memory_kind kind, size_t bytes, struct err *err);

/* Host to device, in order with the ops. The source may be reused on return. Waits for the device where it must: not
 * for the path of a step, which goes through step memory. */
int backend_upload(struct backend *backend, void *device, const void *host, size_t bytes, struct err *err);

/* Device to host, after everything issued before; the values are there on return. */
int backend_download(struct backend *backend, void *host, const void *device, size_t bytes, struct err *err);

/* Waits until everything issued is done; reports a device fault as ERR_FATAL. A no-op on the CPU. */
int backend_sync(struct backend *backend, struct err *err);

/* ---- step memory --------------------------------------------------------------------------------------------------
 * What the host writes for one step and the ops read on the device: ids, positions, lengths, plans, sampling rows. One
 * block, sized at start. Arguments of ops that are marked "step" are host addresses inside it; the backend turns them
 * into device addresses. The same sequence of sizes gives the same addresses in every step, so that a captured graph
 * finds the new values where it found the old ones. */

/* What backend_step_open takes of MEMORY_WORKSPACE for a block of `bytes`; false: more than can be counted. */
bool backend_step_device_bytes(const struct backend *backend, size_t bytes, size_t *out);
/* Once, before the first step; MEMORY_PINNED on CUDA (several blocks in turn, so that the host fills one while the copy
 * of the last is still to come) and device blocks of MEMORY_WORKSPACE. */
int backend_step_open(struct backend *backend, size_t bytes, struct err *err);
/* Begins a step's block. Waits (in practice never) until an earlier copy out of it is done. */
int backend_step_begin(struct backend *backend, struct err *err);
/* 64-byte aligned, not zeroed; NULL when the block is full. Between begin and commit. */
void *backend_step_alloc(struct backend *backend, size_t bytes);
/* Issues the copy of what was allocated, in order with the ops. After it the block is the device's: written no more. */
int backend_step_commit(struct backend *backend, struct err *err);

/* ---- graphs and fences --------------------------------------------------------------------------------------------
 */

/* A recorded sequence of ops; opaque. ERR_UNSUPPORTED where backend_info says no graphs. Between begin and end ops are
 * recorded, not run; uploads, downloads and syncs are not allowed there. After a failed end or a failed op in between,
 * backend_graph_end must still be called; it gives no graph then. A graph takes device memory: ERR_NOMEM where that is
 * not there, which harms nothing else. */
struct graph;
int backend_graph_begin(struct backend *backend, struct err *err);
int backend_graph_end(struct backend *backend, struct graph **out, struct err *err);
int backend_graph_launch(struct backend *backend, struct graph *graph, struct err *err);
void backend_graph_free(struct backend *backend, struct graph *graph);

/* Marks the place in the order of ops (`which` is 0 or 1: two may be outstanding), and waits until the device passed
 * it. backend_fence_wait reports a device fault as ERR_FATAL. No-ops on the CPU, whose ops are done on return. */
#define BACKEND_FENCES 2
int backend_fence(struct backend *backend, int which, struct err *err);
int backend_fence_wait(struct backend *backend, int which, struct err *err);

#ifdef __cplusplus
}
#endif

#endif
