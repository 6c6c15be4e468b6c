/* profile.h: how long an op takes on the device's own clock, by a pair of events. Rank thread only. */
#ifndef QUIRE_KERNELS_CUDA_PROFILE_H
#define QUIRE_KERNELS_CUDA_PROFILE_H

#include "kernels/cuda/cuda.h"

int cuda_profile_begin(struct backend *backend);
uint64_t cuda_profile_end(struct backend *backend); /* waits; 0 where the device fails, which the next call says */
void cuda_profile_close(struct backend *backend);

#endif
