/* step.h: step memory and fences of the CUDA device. Rank thread only.
 *
 * The host fills one of three pinned blocks while the copy of the last may still be to come: step n's block is free
 * again when step n's copy is done, and at most two steps are under way. The copy engine brings a block over while the
 * step before still computes, to a place beside the block that the ops read; a kernel between the two steps puts it
 * there. Measured on an H200 as the gap that the device sees between the last kernel of one graph and the first of the
 * next, for 8 to 128 KB: nothing between them 2.7 us; this 5.2; a kernel that reads the pinned block itself 6.7 to 9.1;
 * a copy in the same stream 12 to 20. */
#ifndef QUIRE_KERNELS_CUDA_STEP_H
#define QUIRE_KERNELS_CUDA_STEP_H

#include "kernels/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What cuda_step_open takes of MEMORY_WORKSPACE: the block that the ops read, and the stage of each of the three. */
bool cuda_step_device_bytes(size_t bytes, size_t *out);
int cuda_step_open(struct backend *backend, size_t bytes, struct err *err);
int cuda_step_begin(struct backend *backend, struct err *err);
int cuda_step_commit(struct backend *backend, struct err *err);
void cuda_step_close(struct backend *backend);

/* step_copy.cu: bytes a multiple of 16. */
void cuda_step_copy(cudaStream_t stream, void *to, const void *from, size_t bytes);

int cuda_fence(struct backend *backend, int which, struct err *err);
int cuda_fence_wait(struct backend *backend, int which, struct err *err);

#ifdef __cplusplus
}
#endif

#endif
