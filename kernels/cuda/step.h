/* step.h: step memory and fences of the CUDA device. Rank thread only.
 *
 * The host fills one of three pinned blocks while the copy of the last may still be to come: step n's block is free
 * again when step n's copy is done, and at most two steps are under way. */
#ifndef QUIRE_KERNELS_CUDA_STEP_H
#define QUIRE_KERNELS_CUDA_STEP_H

#include "kernels/cuda/cuda.h"

int cuda_step_open(struct backend *backend, size_t bytes, struct err *err);
int cuda_step_begin(struct backend *backend, struct err *err);
int cuda_step_commit(struct backend *backend, struct err *err);
void cuda_step_close(struct backend *backend);

int cuda_fence(struct backend *backend, int which, struct err *err);
int cuda_fence_wait(struct backend *backend, int which, struct err *err);

#endif
