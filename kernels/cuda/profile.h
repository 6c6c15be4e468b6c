/* profile.h: how long an op takes on the device's own clock, by a pair of events. Rank thread only.
 *
 * The device would be waiting when an op comes, and the pair would measure how the host issues it, some 3 us a launch.
 * So a kernel holds the stream until all is issued, and what a pair around nothing reads is taken off. */
#ifndef QUIRE_KERNELS_CUDA_PROFILE_H
#define QUIRE_KERNELS_CUDA_PROFILE_H

#include "kernels/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

int cuda_profile_begin(struct backend *backend);
uint64_t cuda_profile_end(struct backend *backend); /* waits; 0 where the device fails, which the next call says */
void cuda_profile_close(struct backend *backend);

void cuda_profile_hold(cudaStream_t stream, unsigned ns); /* profile_hold.cu */

#ifdef __cplusplus
}
#endif

#endif
