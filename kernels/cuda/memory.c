/* One block a kind where it was reserved, carved from the front; else an allocation of its own. */
#include "kernels/cuda/memory.h"

#include <string.h>

#include "engine/base/arith.h"
#include "engine/base/check.h"
#include "engine/base/log.h"
#include "engine/base/mem.h"

#define CARVE_ALIGN ((size_t)256) /* as cudaMalloc: TMA and bulk copies take any address of ours */

struct block {
    unsigned char *base;
    size_t bytes, used;
};

struct cuda_memory {
    struct block reserved[MEMORY_KIND_COUNT]; /* base NULL: not reserved */
};

/* Zeroed in the order of the stream: at about 3 TB/s, so a whole cache of 100 GB is clear long before its first use. */
static cudaError_t block_open(struct cuda *cuda, enum memory_kind kind, size_t bytes, void **out) {
    cudaError_t code;
    *out = NULL;
    if (kind == MEMORY_PINNED) {
        code = cudaHostAlloc(out, bytes, cudaHostAllocMapped | cudaHostAllocPortable);
        if (code == cudaSuccess) memset(*out, 0, bytes);
        return code;
    }
    code = cudaMalloc(out, bytes);
    if (code == cudaSuccess) code = cudaMemsetAsync(*out, 0, bytes, cuda->stream);
    if (code != cudaSuccess && *out) {
        cudaFree(*out);
        *out = NULL;
    }
    return code;
}

/* What cannot be given back is said, once the device is not dead anyway. */
static void freed(struct backend *backend, cudaError_t code) {
    struct err why = {0};
    const bool dead = backend->cuda->dead;
    if (CUDA_TRY(backend, code, &why) && !dead)
        log_warning("memory of the GPU was not given back", "why=%s", log_quote(why.text).text);
}

/* Waits for what may still use it. */
static void block_close(struct backend *backend, enum memory_kind kind, void *p) {
    freed(backend, cudaStreamSynchronize(backend->cuda->stream));
    freed(backend, kind == MEMORY_PINNED ? cudaFreeHost(p) : cudaFree(p));
}

void cuda_memory_open(struct backend *backend) {
    backend->cuda->memory = mem_zalloc(1, sizeof(struct cuda_memory));
}

void cuda_memory_close(struct backend *backend) {
    struct cuda_memory *memory = backend->cuda->memory;
    if (!memory) return;
    for (int kind = 0; kind < MEMORY_KIND_COUNT; kind++)
        if (memory->reserved[kind].base) block_close(backend, (enum memory_kind)kind, memory->reserved[kind].base);
    mem_free(memory);
    backend->cuda->memory = NULL;
}

static void *block_carve(struct block *block, size_t bytes) {
    size_t rounded;
    if (!size_align(bytes, CARVE_ALIGN, &rounded) || rounded > block->bytes - block->used) return NULL;
    void *p = block->base + block->used;
    block->used += rounded;
    return p;
}

void *cuda_memory_alloc(struct backend *backend, enum memory_kind kind, size_t bytes) {
    struct block *block = &backend->cuda->memory->reserved[kind];
    void *p;
    CHECK(!backend->cuda->capturing);
    if (cuda_thread_enter(backend, NULL)) return NULL;
    if (bytes == 0) bytes = 1;
    if (block->base) return block_carve(block, bytes);
    return CUDA_TRY(backend, block_open(backend->cuda, kind, bytes, &p), NULL) ? NULL : p;
}

/* Of a reserved block only the last piece comes back for another use, cleared again; the rest waits for the close. */
void cuda_memory_free(struct backend *backend, enum memory_kind kind, void *p, size_t bytes) {
    struct block *block = &backend->cuda->memory->reserved[kind];
    unsigned char *at = p;
    size_t rounded;
    struct err why = {0};
    const bool dead = backend->cuda->dead;
    if (cuda_thread_enter(backend, &why) && !dead)
        log_warning("the GPU is not there to give memory back", "why=%s", log_quote(why.text).text);
    if (!block->base || at < block->base || at >= block->base + block->bytes) {
        block_close(backend, kind, p);
        return;
    }
    if (!size_align(bytes ? bytes : 1, CARVE_ALIGN, &rounded) || at + rounded != block->base + block->used) return;
    block->used -= rounded;
    if (kind == MEMORY_PINNED) {
        freed(backend, cudaStreamSynchronize(backend->cuda->stream));
        memset(p, 0, rounded);
    } else {
        freed(backend, cudaMemsetAsync(p, 0, rounded, backend->cuda->stream));
    }
}

int cuda_memory_reserve(struct backend *backend, enum memory_kind kind, size_t bytes, struct err *err) {
    struct block *block = &backend->cuda->memory->reserved[kind];
    void *p;
    CHECK(!block->base);
    if (bytes == 0) return 0;
    int rc = cuda_thread_enter(backend, err);
    if (!rc) rc = CUDA_TRY(backend, block_open(backend->cuda, kind, bytes, &p), err);
    if (rc == ERR_NOMEM) {
        size_t free_bytes = 0, total = 0;
        cudaMemGetInfo(&free_bytes, &total);
        return err_set(err, ERR_NOMEM, "no memory for %zu bytes at once: the GPU has %zu bytes, %zu of them free",
                       bytes, total, free_bytes);
    }
    if (rc == 0) *block = (struct block){.base = p, .bytes = bytes};
    return rc;
}

/* ---- copies that wait ---------------------------------------------------------------------------------------------
 */

int cuda_upload(struct backend *backend, void *device, const void *host, size_t bytes, struct err *err) {
    struct cuda *cuda = backend->cuda;
    CHECK(!cuda->capturing);
    int rc = cuda_thread_enter(backend, err);
    if (!rc) rc = CUDA_TRY(backend, cudaMemcpyAsync(device, host, bytes, cudaMemcpyDefault, cuda->stream), err);
    return rc ? rc : CUDA_TRY(backend, cudaStreamSynchronize(cuda->stream), err);
}

int cuda_download(struct backend *backend, void *host, const void *device, size_t bytes, struct err *err) {
    struct cuda *cuda = backend->cuda;
    CHECK(!cuda->capturing);
    int rc = cuda_thread_enter(backend, err);
    if (!rc) rc = CUDA_TRY(backend, cudaMemcpyAsync(host, device, bytes, cudaMemcpyDefault, cuda->stream), err);
    return rc ? rc : CUDA_TRY(backend, cudaStreamSynchronize(cuda->stream), err);
}

int cuda_sync(struct backend *backend, struct err *err) {
    CHECK(!backend->cuda->capturing);
    int rc = cuda_thread_enter(backend, err);
    return rc ? rc : CUDA_TRY(backend, cudaStreamSynchronize(backend->cuda->stream), err);
}
