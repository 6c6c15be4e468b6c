/* memory.h: the memory of the CUDA device by kind: reserved blocks that allocations are carved from, and copies that
 * wait. Rank thread only, before "ready" and at the end; a step allocates nothing. */
#ifndef QUIRE_KERNELS_CUDA_MEMORY_H
#define QUIRE_KERNELS_CUDA_MEMORY_H

#include "kernels/cuda/cuda.h"

void cuda_memory_open(struct backend *backend);
void cuda_memory_close(struct backend *backend); /* gives the reserved blocks back */

void *cuda_memory_alloc(struct backend *backend, enum memory_kind kind, size_t bytes);
void cuda_memory_free(struct backend *backend, enum memory_kind kind, void *p, size_t bytes);
int cuda_memory_reserve(struct backend *backend, enum memory_kind kind, size_t bytes, struct err *err);
int cuda_upload(struct backend *backend, void *device, const void *host, size_t bytes, struct err *err);
int cuda_download(struct backend *backend, void *host, const void *device, size_t bytes, struct err *err);
int cuda_sync(struct backend *backend, struct err *err);

#endif
